"""Which runs there are: run folders, and folders that hold some, as a sweep's does.

A run is known to the page by an id that is made from its path. Nothing that a client sends ever
becomes a part of a path.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

from unirl.errors import UniRLError
from unirl.report.plots import labels
from unirl.view.files import is_inside

_MARKS = ("config.toml", "metrics.jsonl", "command.txt")
"""What makes a folder a run's."""
_MAX_DEPTH, MAX_RUNS = 6, 5000
_SECONDS = 2.0
"""Between two looks for new folders."""


@dataclass(frozen=True)
class Run:
    id: str
    name: str
    """As it is shown."""
    path: Path
    part_of: str | None = None
    """The run whose policy this is, where several learn against each other."""
    parts: tuple[str, ...] = ()
    """Ids of the other policies of this one."""


class Folders:
    """The runs below some folders, looked for again now and then."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = tuple(roots)
        self._runs: dict[str, Run] = {}
        self._looked = float("-inf")

    def runs(self) -> dict[str, Run]:
        """All of them by id, in the order of their names."""
        if time.monotonic() - self._looked >= _SECONDS:
            self._looked = time.monotonic()
            known = {run.path for run in self._runs.values()}
            names = labels(self.roots) if len(self.roots) > 1 else [""]
            found = [
                run
                for root, name in zip(self.roots, names, strict=True)
                for run in _below(root, name, known)
            ]
            self._runs = {run.id: run for run in sorted(found, key=lambda run: run.name)}
        return self._runs

    def run(self, id: str) -> Run:
        """One of them; UniRLError where it is not there."""
        found = self.runs().get(id)
        if found is None:
            raise NotThere(
                f"there is no run with the id {id[:40]!r}",
                "ids are those of GET /api/runs",
                "load the list again: the folder may have been moved or deleted",
            )
        return found


class NotThere(UniRLError):
    """What was asked for is not there, or not any more."""


def find_roots(words: Sequence[str]) -> list[Path]:
    """The folders that a user named, or `runs`. Raises UniRLError where one is not there, or all
    together hold no run.
    """
    roots = []
    for word in words or ("runs",):
        path = next((each for each in (Path(word), Path("runs") / word) if each.is_dir()), None)
        if path is None:
            raise UniRLError(
                f'there is no folder "{word}"',
                "unirl view takes run folders, or folders that hold some (without one: runs)",
                "check the path, or train something: unirl train @cartpole",
            )
        if path.parent.name == "checkpoints":
            path = path.parent.parent
        roots.append(path.resolve())
    return list(dict.fromkeys(roots))


def _below(root: Path, label: str, known: Set[Path]) -> Iterator[Run]:
    """label: of the root, where there are several. known: runs that were found before."""
    for number, path in enumerate(_run_folders(root, 0, known)):
        if number == MAX_RUNS:
            return
        name = path.relative_to(root).as_posix()
        if name == ".":
            name = label or root.name
        elif label:
            name = f"{label}/{name}"
        # Names need not be text at all.
        name = name.encode("utf-8", "replace").decode()
        run = Run(_id(path), name, path)
        parts = list(_policies(run))
        yield replace(run, parts=tuple(part.id for part in parts))
        yield from parts


def _run_folders(folder: Path, depth: int, known: Set[Path]) -> Iterator[Path]:
    if folder in known:
        yield folder
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    if any(entry.name in _MARKS for entry in entries):
        yield folder
        return
    for entry in entries if depth < _MAX_DEPTH else ():
        # A link within is another name of what is found anyway; one that leads out is not followed.
        if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
            yield from _run_folders(Path(entry.path), depth + 1, known)


def _policies(run: Run) -> Iterator[Run]:
    folder = run.path / "policies"
    if not folder.is_dir() or not is_inside(folder, run.path):
        return
    for path in sorted(folder.iterdir())[:100]:
        if path.is_dir() and not path.is_symlink() and path.name.isdecimal():
            yield Run(_id(path), f"{run.name}, policy {path.name}", path, part_of=run.id)


def _id(path: Path) -> str:
    return hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()
