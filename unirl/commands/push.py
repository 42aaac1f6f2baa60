"""`unirl push`: what a run learned, its card and its config, to the Hugging Face hub."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from unirl.commands import run_folder
from unirl.commands.arguments import parse, run_and_target
from unirl.commands.export import ExportOptions, write


@dataclass(frozen=True)
class PushOptions(ExportOptions):
    """Flags of `unirl push`."""

    private: bool = False
    """Nobody else sees the repository, where it is made by this."""


def push(arguments: Sequence[str]) -> int:
    positional, options = parse(arguments, PushOptions)
    run, repo_id = run_and_target(positional, "push", "the repository", "USER/NAME")
    where = run_folder.find(run)
    run_dir = run_folder.folder_of(where).resolve()
    from unirl.export.huggingface_hub import check_access, push_folder
    from unirl.export.model_card import front_matter
    from unirl.report.card import best_evaluation, card_text, read_run_config

    check_access(repo_id)
    with tempfile.TemporaryDirectory(prefix="unirl-push-") as name:
        folder = Path(name)
        step, usage = write(where, folder, options)
        shutil.copy(run_dir / "config.toml", folder / "config.toml")
        head = front_matter(run_dir.name, read_run_config(run_dir), best_evaluation(run_dir))
        card = head + "\n" + card_text(run_dir, usage=usage)
        (folder / "README.md").write_text(card, encoding="utf-8")
        message = f"{run_dir.name}, checkpoint of step {step:,}"
        url = push_folder(folder, repo_id, private=options.private, message=message)
    print(f"{url}  {message}")
    return 0
