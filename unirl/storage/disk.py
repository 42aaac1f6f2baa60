"""The disk: files replaced whole or not at all, and what to say when it is full."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unirl.errors import UniRLError


def replace_text(path: Path, text: str) -> None:
    """Write a file aside and rename it into place: readers see the old one or the new one."""
    aside = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        aside.unlink(missing_ok=True)


def is_full(error: OSError) -> bool:
    """Whether the disk, a quota or the file size limit refused more."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def who_refused(error: OSError) -> str:
    """Which of them it was, in the system's words too."""
    limit = "the file size limit" if error.errno == errno.EFBIG else "the quota or the disk"
    return f"{limit} refused more ({error.strerror})"


def free_bytes(folder: Path) -> int:
    """Bytes free where `folder` is, or would be."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


_CLOSED = frozenset(
    {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}
    | {errno.EEXIST, errno.ENOTDIR, errno.EISDIR}
)
"""Files that are not to be had as they are, whoever asks."""


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
            raise UniRLError(
                f"{_shortened(str(name))} cannot be read or written",
                f"the system says: {error.strerror}",
                "choose another place or name, or mend its permissions",
            ) from error
        raise


def _shortened(name: str) -> str:
    return name if len(name) <= 120 else f"{name[:60]}...{name[-57:]}"
