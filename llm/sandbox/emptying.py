"""Emptying a folder that a program wrote, however deep and whatever its modes. Standard library
alone.
"""

from __future__ import annotations

import os

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def empty(folder: str) -> None:
    """Remove all that is in a folder, through no link. Raises OSError."""
    top = _opened(None, folder)
    try:
        moved = f".emptied-{os.urandom(8).hex()}"
        left = _sift(top, top, f"{moved}-0")
        count = 0
        while left:
            # What is deep comes up before it is removed: no path grows, and nothing recurses.
            at = _opened(top, name := left.pop())
            try:
                left += _sift(at, top, f"{moved}-{(count := count + 1)}")
            finally:
                os.close(at)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def _sift(at: int, top: int, prefix: str) -> list[str]:
    """Remove files, move folders to the top; their names there."""
    folders: list[str] = []
    for name in os.listdir(at):
        try:
            os.unlink(name, dir_fd=at)
        except (IsADirectoryError, PermissionError):
            os.close(_opened(at, name))
            moved = f"{prefix}-{len(folders)}"
            os.rename(name, moved, src_dir_fd=at, dst_dir_fd=top)
            folders.append(moved)
    return folders


def _opened(at: int | None, name: str) -> int:
    try:
        fd = os.open(name, _FOLDER, dir_fd=at)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=at)
        fd = os.open(name, _FOLDER, dir_fd=at)
    os.fchmod(fd, 0o700)  # only so can it be emptied, and moved
    return fd
