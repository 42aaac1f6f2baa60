"""`unirl export`: the newest checkpoint of a language model, in Hugging Face's layout."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unirl.commands import run_folder
from unirl.commands.arguments import missing_run, parse
from unirl.commands.command import NoOptions
from unirl.errors import UniRLError
from unirl.storage import disk
from unirl.trained.language import language_config, trained_model


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


def _write(config: Any, where: Path, folder: Path) -> int:
    """Model and tokenizer into the folder; the step of the checkpoint."""
    from unirl.llm.models.model import load_tokenizer
    from unirl.storage.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(where)
    folder.mkdir(parents=True, exist_ok=True)
    trained_model(config, checkpoint).save_pretrained(folder)
    load_tokenizer(config.model).save_pretrained(folder)
    return checkpoint.step
