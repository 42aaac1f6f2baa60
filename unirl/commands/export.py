"""`unirl export`: what a run learned, as a folder of files that are used without UniRL."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from unirl.commands import run_folder
from unirl.commands.arguments import parse, run_and_target
from unirl.errors import UniRLError
from unirl.export.formats import OF_LANGUAGE, OF_POLICIES, Format, check_formats
from unirl.imports import large_imports
from unirl.storage import disk
from unirl.trained.language import find_language_config, trained_model


@dataclass(frozen=True)
class ExportOptions:
    """Flags of `unirl export`."""

    format: tuple[Format, ...] = ()
    """hf is for language models; onnx, torchscript and safetensors are for policies. Several:
    onnx,safetensors. None: all that fit.
    """
    policy: int = 0
    """Which one, of policies that learned against each other."""


def export(arguments: Sequence[str]) -> int:
    positional, options = parse(arguments, ExportOptions)
    run, target = run_and_target(positional, "export", "the folder", "models/trained")
    where, folder = run_folder.find(run), Path(target).expanduser()
    _check_new(folder)
    with _aside(folder) as aside:
        step, usage = write(where, aside, options)
        name = run_folder.folder_of(where).resolve().name
        text = f"# {name}\n\nTrained with UniRL, checkpoint of step {step:,}.\n\n{usage}\n"
        (aside / "README.md").write_text(text, encoding="utf-8")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}  checkpoint of step {step:,}; {size / 1e6:.1f} MB: {disk.entries(folder, 8)}")
    return 0


def write(where: Path, folder: Path, options: ExportOptions) -> tuple[int, str]:
    """Write a run, or the checkpoint that `where` is, into an empty folder; the step, and how to
    use the files, in Markdown.
    """
    run_dir = run_folder.folder_of(where)
    language = find_language_config(run_dir)
    with large_imports():
        from unirl.export.write import write_language, write_policy
        from unirl.storage.checkpoint import load_checkpoint
    formats = options.format or (OF_POLICIES if language is None else OF_LANGUAGE)
    check_formats(formats, is_language=language is not None)
    if language is not None:
        checkpoint = load_checkpoint(where)
        return checkpoint.step, write_language(
            language, trained_model(language, checkpoint), folder
        )
    plan, checkpoint = run_folder.load(where)
    if options.policy:
        checkpoint = load_checkpoint(_of_policy(where, options.policy, len(plan.learners)))
    usage = write_policy(plan, checkpoint.model, folder, formats, options.policy)
    return checkpoint.step, usage


@contextlib.contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """An empty folder that becomes this one where the block ends well, and else is deleted."""
    aside = folder.with_name(f".{folder.name}-{os.getpid()}")
    with disk.explained(folder, "free some space, or name another folder", "the model"):
        aside.mkdir(parents=True)
        try:
            yield aside
            if folder.is_dir():
                folder.rmdir()  # empty, as was checked
            aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _of_policy(where: Path, index: int, num_policies: int) -> Path:
    """The same checkpoint of a further policy."""
    if not 0 <= index < num_policies:
        raise UniRLError(
            f"--policy is {index}",
            f"0 <= --policy < {num_policies}, the number of the run's policies, must hold",
            "leave it out for the first one",
        )
    run_dir = run_folder.folder_of(where)
    folder = run_dir / "policies" / str(index)
    return folder if where == run_dir else folder / "checkpoints" / where.name


def _check_new(folder: Path) -> None:
    """Raise UniRLError where something could be overwritten."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UniRLError(
            f"{folder} is there already",
            "an export is written to a new or an empty folder, never over something else",
            "name another folder, or remove this one",
        )
