"""Run folders by path or name: claimed for a new run, found again, read."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from unirl import config as configs
from unirl import registry
from unirl.errors import UniRLError
from unirl.storage import disk, run_lock

if TYPE_CHECKING:
    from unirl.runners.plan import Plan
    from unirl.storage.checkpoint import Checkpoint

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


def find(word: str) -> Path:
    """A run folder by its path or by its name under runs/; also one checkpoint of a run."""
    for path in (Path(word), Path("runs") / word):
        if (folder_of(path) / "config.toml").is_file():
            return path
    for path in (Path(word), Path("runs") / word):
        if path.is_dir():
            raise UniRLError(
                f'"{path}" is not a run folder',
                f"a run folder has a config.toml; it has {disk.entries(path, 5) or 'nothing'}",
                "check the path: unirl train writes to runs/NAME",
            )
    parent = Path(word).parent if "/" in word else Path("runs")
    names = [child.name for child in parent.iterdir() if child.is_dir()] if parent.is_dir() else []
    near = configs.suggestion(Path(word).name, names)
    raise UniRLError(
        f'run "{word}" does not exist',
        f"{parent}/ has {', '.join(sorted(names)[:8]) or 'no runs'}",
        near or "check the path, or start it with unirl train",
    )


def folder_of(path: Path) -> Path:
    """The run folder of a path that may be one of its checkpoints."""
    return path.parent.parent if path.parent.name == "checkpoints" else path


def read_config(
    run_dir: Path, find_recipe: Callable[[str], ModuleType] = registry.recipe
) -> tuple[ModuleType, dict[str, Any]]:
    """The recipe of a run and the tables of its config.toml, keys checked."""
    table = configs.load_toml(run_dir / "config.toml")
    name = table.pop("recipe", None)
    if not isinstance(name, str):
        raise UniRLError(
            f'"{run_dir / "config.toml"}" does not name its recipe',
            'a run\'s config.toml begins with recipe = "..."',
            "add the line with the recipe it was trained with",
        )
    table.pop("name", None)
    module = find_recipe(name)
    configs.check_keys(module.Config, table, f"in {run_dir / 'config.toml'}")
    return module, table


def load(where: Path, changes: Mapping[str, Any] | None = None) -> tuple[Plan, Checkpoint]:
    """The plan of a run and its newest checkpoint, or the one that `where` is.

    changes: flags of the recipe, which change the run's config.
    """
    from unirl.envs.answers import answers_kept
    from unirl.storage.checkpoint import load_checkpoint

    module, table = read_config(folder_of(where))
    table = configs.merge(table, configs.nest(module.Config, changes or {}))
    with answers_kept({}):
        plan: Plan = module.plan(configs.from_mapping(module.Config, table))
    return plan, load_checkpoint(where)
