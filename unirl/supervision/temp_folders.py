"""Temporary folders of runs that were killed are removed by the next run of the same user.

Python's fork server, torchrun and benchmarks remove their own as they end, unless they are killed.
Each folder bears its owner's number, in a file that is locked as long as the owner lives: a folder
whose lock is free and whose owner is gone is nobody's. Folders without such a file stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger(__name__)

_OWNER = "unirl-owner"
_KINDS = ("pymp-*", "torchelastic_*", "unirl-*")


def claim(folder: Path, pid: int | None = None) -> None:
    """Say that a folder is this process's, or another one's for whom this one works."""
    path = folder / _OWNER
    with contextlib.suppress(OSError):
        if not path.exists():
            # Never closed: the lock ends with this process. Others that work for the same owner
            # hold it as well.
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            os.write(descriptor, str(pid or os.getpid()).encode())


def claim_torchrun(environ: Mapping[str, str] = os.environ) -> None:
    """The same for the folder of the torchrun that started this process, if one did."""
    for folder in Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).parents:
        if folder.name.startswith("torchelastic_"):
            claim(folder, os.getppid())


def disclaim(folder: Path) -> None:
    """Let a folder stay, whatever becomes of its owner."""
    (folder / _OWNER).unlink(missing_ok=True)


def sweep() -> None:
    """Remove what killed processes of this user have left."""
    folders = Path(tempfile.gettempdir())
    for kind in _KINDS:
        for folder in folders.glob(kind):
            with contextlib.suppress(OSError, ValueError):
                if _is_left(folder):
                    shutil.rmtree(folder, ignore_errors=True)
                    log.info("removed %s, which a killed process left", folder)


def _is_left(folder: Path) -> bool:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return False
    descriptor = os.open(folder / _OWNER, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The lock knows of processes in other containers, the number of owners without a lock.
        return not _lives(int(os.read(descriptor, 20)))
    finally:
        os.close(descriptor)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
