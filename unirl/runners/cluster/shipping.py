"""What nodes lack of the user's own code: packed by the learner's process, and unpacked by an agent
on a machine that does not have the same files.

Sent by Ray's own means, among processes that trust each other.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import site
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from unirl.errors import UniRLError
from unirl.supervision.temp_folders import claim, sweep

log = logging.getLogger(__name__)

_MOST_BYTES = 64 * 2**20
_LEFT_OUT = ("__pycache__", "node_modules", "runs", "venv")


@dataclass(frozen=True)
class Parcel:
    """Files of the user's, and where they are on the machine of the learner."""

    content: bytes
    """A zip."""
    files: tuple[tuple[str, int, int], ...]
    """Path, size and time of change of each: a machine that has the same needs no parcel."""
    is_working_dir: bool = False

    def is_here(self) -> bool:
        """Whether this machine has all of them, by a shared disk say."""
        try:
            return all(
                (found.st_size, found.st_mtime_ns) == (size, changed)
                for path, size, changed in self.files
                for found in (os.stat(path),)
            )
        except OSError:
            return False

    def unpack(self) -> Path:
        """Into a new folder, which is importable from now on."""
        folder = Path(tempfile.mkdtemp(prefix="unirl-parcel-"))
        with zipfile.ZipFile(io.BytesIO(self.content)) as packed:
            packed.extractall(folder)
        sys.path.insert(0, str(folder))
        return folder


def arrive(search_path: Sequence[str], folder: str, parcel: Parcel | None) -> Path | None:
    """On a node: find what the learner's process finds, and work in its folder, or in the parcel's.
    Returns where the parcel was unpacked, if it had to be: a folder to be deleted at the end.
    """
    sys.path += [path for path in search_path if path not in sys.path and os.path.isdir(path)]
    unpacked = None
    if parcel is not None and not parcel.is_here():
        sweep()
        unpacked = parcel.unpack()
        claim(unpacked)
        folder = str(unpacked) if parcel.is_working_dir else folder
    with contextlib.suppress(OSError):
        os.chdir(folder)
    return unpacked


def pack(working_dir: str) -> Parcel | None:
    """A folder; or, where none is named, the modules that this process has imported and that were
    not installed. None where there is nothing to send. UniRLError where it is too much.
    """
    if working_dir:
        root = Path(working_dir)
        if not root.is_dir():
            raise UniRLError(
                f"ray.working_dir is {working_dir!r}",
                "it is the folder that nodes are to have, and there is none of this name",
                "name a folder, or leave it out",
            )
        named = [(path, path.relative_to(root)) for path in _files_of(root)]
    else:
        named = sorted(set(_own_modules()))
    num_bytes = sum(path.stat().st_size for path, _ in named)
    if num_bytes > _MOST_BYTES:
        largest = max(named, key=lambda one: one[0].stat().st_size)[0]
        error = UniRLError(
            f"what nodes may need of the user's code has {num_bytes / 2**20:,.0f} MiB",
            f"{_MOST_BYTES >> 20} MiB are sent at most; the largest file is {largest}",
            "install it on the nodes, or name a small folder with the code as ray.working_dir",
        )
        if working_dir:
            raise error
        log.warning("%s Nothing is sent.", error)
        return None
    if not named:
        return None
    buffer, files = io.BytesIO(), []
    # Files of reproducible builds are dated 1970, which a zip cannot say.
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as packed:
        for path, name in named:
            packed.write(path, name)
            found = path.stat()
            files.append((str(path.resolve()), found.st_size, found.st_mtime_ns))
    return Parcel(buffer.getvalue(), tuple(files), bool(working_dir))


def _files_of(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            each for each in folders if each not in _LEFT_OUT and not each.startswith(".")
        )
        # No sockets and the like.
        yield from (path for name in sorted(names) if (path := Path(folder, name)).is_file())


def _own_modules() -> Iterator[tuple[Path, Path]]:
    """Files and their names among importable ones: the whole package of each module."""
    paths = sysconfig.get_paths()
    installed = [paths[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed += [*site.getsitepackages(), site.getusersitepackages()]
    homes = [Path(each).resolve() for each in installed] + [Path(__file__).resolve().parents[2]]
    for name, module in [*sys.modules.items()]:
        path, top = getattr(module, "__file__", None), name.partition(".")[0]
        if path is None or top in ("__main__", "__mp_main__", "unirl"):
            continue
        if name != top and getattr(sys.modules.get(top), "__file__", None) is not None:
            continue  # a part of a package that is found by its name
        where = Path(path).resolve()
        if where.suffix != ".py" or any(home in where.parents for home in homes):
            continue
        if where.name == "__init__.py" and name == top:
            files = _files_of(where.parent)
            yield from ((file, file.relative_to(where.parent.parent)) for file in files)
        else:
            yield where, Path(*name.split(".")).with_suffix(".py")
