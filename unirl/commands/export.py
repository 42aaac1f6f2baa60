"""`unirl export`: the newest checkpoint of a language model, in Hugging Face's layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unirl import config as configs
from unirl.commands import run_folder
from unirl.commands.arguments import missing_run, parse
from unirl.commands.command import NoOptions
from unirl.errors import UniRLError
from unirl.storage import disk


def export(arguments: Sequence[str]) -> int:
    positional, _ = parse(arguments, NoOptions)
    if not positional:
        raise missing_run("export")
    if len(positional) != 2:
        raise UniRLError(
            f"unirl export was given {' '.join(positional)}",
            "it takes a run, or one of its checkpoints, and the folder to write to",
            f"unirl export {positional[0]} models/trained",
        )
    where, folder = run_folder.find(positional[0]), Path(positional[1]).expanduser()
    config = language_config(run_folder.folder_of(where))
    from unirl.llm.models.tiny import check_new_folder

    check_new_folder(folder)
    with disk.explained(folder, "free some space, or name another folder", "the model"):
        step = _write(config, where, folder)
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    print(f"{folder}  checkpoint of step {step:,} of {config.model.path}; {size / 1e6:.0f} MB")
    print(f"unirl train grpo --model.path {folder}")
    return 0


def language_config(run_dir: Path) -> Any:
    module, table = run_folder.read_config(run_dir)
    config = configs.from_mapping(module.Config, table)
    from unirl.llm.models.model import ModelConfig

    if not isinstance(getattr(config, "model", None), ModelConfig):
        raise UniRLError(
            f"{run_dir} trained no language model",
            f"its recipe is {module.__name__.rpartition('.')[2]}",
            "its checkpoints are safetensors that any reader opens: see checkpoints/latest",
        )
    return config


def _write(config: Any, where: Path, folder: Path) -> int:
    """Model and tokenizer into the folder; the step of the checkpoint."""
    from unirl.llm.assembly import weights_of
    from unirl.llm.models.model import load_flat_weights, load_model, load_tokenizer
    from unirl.storage.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(where)
    # As in training: what an engine had is what is written, adapters added, in the same dtype.
    weights = weights_of(checkpoint.model, config=config)
    model = load_model(config.model)
    load_flat_weights(model, weights)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    load_tokenizer(config.model).save_pretrained(folder)
    return checkpoint.step
