"""The disk: files replaced whole or not at all, and what to say when it is full."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unirl.errors import UniRLError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside this one, of the same suffix, to write to: renamed into place when the block
    ends well, so that readers see the old file or the new one.
    """
    aside = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        yield aside
        os.replace(aside, path)
    except OSError as error:
        if error.filename in (None, str(aside)):
            error.filename = str(path)
        raise
    finally:
        aside.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Replace the file with this text, whole or not at all."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8")


def sync_folder(folder: Path) -> None:
    """Return when the folder's entries are on the disk: files created, renamed, deleted."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete_folder(folder: Path) -> None:
    """Delete it so that a kill in between leaves nothing half under its name."""
    trash = folder.with_name(f"{TRASH}{folder.name}-{os.getpid()}")
    os.rename(folder, trash)
    shutil.rmtree(trash, ignore_errors=True)


def is_full(error: OSError) -> bool:
    """Whether the disk, a quota or the file size limit refused more."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def who_refused(error: OSError) -> str:
    """Which of them it was, in the system's words too."""
    limit = "the file size limit" if error.errno == errno.EFBIG else "the quota or the disk"
    return f"{limit} refused more ({error.strerror})"


def entries(folder: Path, most: int) -> str:
    """What is in a folder, the first few names."""
    names = sorted(child.name for child in folder.iterdir())
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def free_bytes(folder: Path) -> int:
    """Bytes free where `folder` is, or would be."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


TRASH = ".trash-"
"""How names begin of what `delete_folder` is deleting, or was when it was killed."""
_CLOSED = frozenset(
    {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}
    | {errno.EEXIST, errno.ENOTDIR, errno.EISDIR}
)
"""Files that are not to be had as they are."""


@contextmanager
def explained(path: Path, remedy: str, what: str = "") -> Iterator[None]:
    """In this block, an OSError of a full disk, or of a file that may not be touched, becomes a
    UniRLError. Most errors do not know their file: it is at or under `path`, or `what`. remedy: of
    a full disk.
    """
    try:
        yield
    except OSError as error:
        name = error.filename or what or path
        if is_full(error):
            raise UniRLError(
                f"disk full: {name} could not be written",
                f"{free_bytes(path):,} bytes are free; {who_refused(error)}",
                remedy,
            ) from error
        if error.errno in _CLOSED:
            shown = str(name)
            if len(shown) > 120:
                shown = f"{shown[:60]}...{shown[-57:]}"
            raise UniRLError(
                f"{shown} cannot be read or written",
                f"the system says: {error.strerror}",
                "choose another path or name, or change its permissions",
            ) from error
        raise
