"""Little memory and a small disk, for what must survive them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def small_cgroup(num_bytes: int) -> Iterator[Path | None]:
    """A cgroup whose processes have so much memory; None where none can be made."""
    top = Path("/sys/fs/cgroup")
    version_1 = (top / "memory").is_dir()
    folder = (top / "memory" if version_1 else top) / f"unirl-faults-{os.getpid()}"
    try:
        folder.mkdir()
        name = "memory.limit_in_bytes" if version_1 else "memory.max"
        (folder / name).write_text(str(num_bytes))
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        deadline = time.monotonic() + 10.0
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        folder.rmdir()


@contextlib.contextmanager
def folder_with_a_small_disk(num_bytes: int) -> Iterator[tuple[Path, bool]]:
    """A folder whose subfolder `disk` is a disk of its own, in memory; and whether it is: where
    mounting is not allowed it is an ordinary folder.
    """
    with tempfile.TemporaryDirectory(prefix="unirl-faults-") as name:
        disk = Path(name) / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(disk)]
        is_small = subprocess.run(mount, capture_output=True).returncode == 0
        try:
            yield Path(name), is_small
        finally:
            if is_small:
                subprocess.run(["umount", "-l", str(disk)], check=False)
