"""Folders that bear their owner's name: what a killed process left is removed by the next one that
makes a folder of the same kind in the same parent.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import tempfile
import zlib
from pathlib import Path

from unirl.llm.weights.process import is_running, start_time


class OwnFolder:
    """A folder of this process alone, made when it is first asked for.

    parent: a folder that all its readers can read; "": the temporary files of this machine, where
    no other user can read it.
    """

    def __init__(self, kind: str, parent: str = "") -> None:
        self._kind, self._parent = kind, parent
        self._path: Path | None = None

    def path(self) -> Path:
        if self._path is None:
            parent = Path(self._parent or tempfile.gettempdir()).expanduser()
            remove_ownerless(self._kind, parent)
            path = parent / f"unirl-{self._kind}-{_owner()}-{secrets.token_hex(4)}"
            path.mkdir(mode=0o777 if self._parent else 0o700, parents=True)
            self._path = path
        return self._path

    def keep_only(self, path: Path) -> None:
        for other in self.path().iterdir():
            if other != path:
                shutil.rmtree(other) if other.is_dir() else other.unlink()

    def remove(self) -> None:
        """With all that is in it; idempotent."""
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._path = None


def remove_ownerless(kind: str, parent: Path) -> None:
    """Remove folders of this kind whose processes are gone. Those of other users stay, and those of
    processes that cannot be seen from here: of other machines, containers and boots.
    """
    pattern = re.compile(rf"unirl-{re.escape(kind)}-{_space()}-(\d+)-(\d+)-[0-9a-f]+")
    with contextlib.suppress(OSError):  # nothing is there yet, or it cannot be listed
        for path in list(parent.iterdir()):
            found = pattern.fullmatch(path.name)
            if found is None or is_running(int(found[1]), found[2]):
                continue
            if path.is_dir() and not path.is_symlink() and path.stat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)


def _owner() -> str:
    return f"{_space()}-{os.getpid()}-{start_time(os.getpid())}"


def _space() -> str:
    """Within what numbers of processes are to be understood: this boot, this PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
        return f"{zlib.crc32(f'{boot} {space}'.encode()):08x}"
    except OSError:
        return f"{os.getpid():x}x"  # matched by no other process
