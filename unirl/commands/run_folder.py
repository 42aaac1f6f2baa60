"""Run folders by path or name: claimed for a new run; found again and read by unirl.trained."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from unirl import config as configs
from unirl.errors import UniRLError
from unirl.storage import disk, run_lock
from unirl.trained.folder import find as find
from unirl.trained.folder import folder_of as folder_of
from unirl.trained.folder import load as load
from unirl.trained.folder import read_config as read_config

_FAILED = "failed.txt"


@contextlib.contextmanager
def held(run_dir: Path) -> Iterator[None]:
    """In this block the folder is locked for one run. Raises UniRLError when another has it."""
    with contextlib.ExitStack() as stack:
        with disk.explained(run_dir, "free some space, then start it again"):
            try:
                stack.enter_context(run_lock.locked(run_dir))
            except OSError as error:
                if disk.is_full(error):
                    raise
                raise UniRLError(
                    f'run folder "{run_dir}" cannot be written',
                    f"{error.filename}: {error.strerror}",
                    "choose another --runs-dir, or change its permissions",
                ) from error
        yield


def in_runs_dir(runs_dir: Path, name: str) -> Path:
    """The folder of a run of this name. Raises UniRLError when it would be elsewhere, or in another
    run's.
    """
    parts = Path(name).parts
    if not parts or not name.isprintable() or ".." in parts or Path(name).is_absolute():
        raise UniRLError(
            f"the name of the run is {configs.shown(name)}",
            f'a name is that of a folder under "{runs_dir}": not empty, not absolute, without ".."',
            "choose another --name, or say with --runs-dir where run folders are",
        )
    run_dir = runs_dir / name
    for parent in (runs_dir.joinpath(*parts[:end]) for end in range(1, len(parts))):
        if _is_run(parent):
            raise UniRLError(
                f'"{run_dir}" is in the run folder "{parent}"',
                "a run has a folder of its own, and none in another run's",
                f"choose another --name, such as {name.replace('/', '-')}",
            )
    return run_dir


def _is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file() or (folder / "command.txt").is_file()


def make_room(run_dir: Path, overwrite: bool) -> None:
    """Empty a locked folder for a new run, but for the lock. Raises UniRLError rather than delete
    what was not asked for.
    """
    found = [path for path in run_dir.iterdir() if path.name != run_lock.NAME]
    if not found:
        return
    # After a failed start one fixes the command and calls it again: that must not need a flag.
    if not overwrite and not (run_dir / _FAILED).is_file():
        raise UniRLError(
            f'run folder "{run_dir}" exists',
            "a new run needs a folder of its own",
            f"unirl resume {run_dir}, or another --name, or --overwrite to delete it",
        )
    if not _is_run(run_dir):
        raise UniRLError(
            f'"{run_dir}" is not a run folder, so --overwrite does not delete it',
            "a run folder has a config.toml or a command.txt",
            "choose another --name, or delete it yourself",
        )
    # Last what says that it is a run folder: a kill in between must not make it another's.
    for path in sorted(found, key=lambda path: path.name in ("config.toml", "command.txt")):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def mark_failed(run_dir: Path, error: Exception) -> None:
    """A run that failed before it learned anything holds nothing worth keeping but its log."""
    # A row of metrics is written after an update, long before the first checkpoint.
    metrics = run_dir / "metrics.jsonl"
    if metrics.is_file() and metrics.stat().st_size:
        return
    steps = (path.name.rpartition("_")[2] for path in (run_dir / "checkpoints").glob("*step_*"))
    if not any(step.isdecimal() and int(step) > 0 for step in steps):
        # On a full disk this fails too, and must not replace the error that is being reported.
        with contextlib.suppress(OSError):
            (run_dir / _FAILED).write_text(f"{type(error).__name__}: {error}\n")
