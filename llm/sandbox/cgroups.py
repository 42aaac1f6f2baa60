"""Bounds on all processes of a slot together: control groups, of both versions.

A group bears the name of its owner, a process, its namespace and the tick of its start: what a dead
owner left is found, and removed, by whatever makes sandboxes next. Whether groups can be made is
tried by making one. Of version 2 a subtree is wanted that this user may write (systemd:
Delegate=yes).

Sources: cgroups(7); the kernel's admin-guide/cgroup-v1/memory, admin-guide/cgroup-v2.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

_PREFIX = "unirl-box-"
_REMOVE_SECONDS = 2.0
_OWN_PIDS = 4
"""Processes that a slot needs itself."""
_numbers = itertools.count()


def owner() -> str:
    """This process, by a name that no other one has, in whatever namespace of processes."""
    return f"{_namespace()}-{os.getpid()}-{_start_tick(os.getpid())}"


def is_dead(name: str) -> bool:
    """Whether the owner of that name is known to run no more: of other namespaces nothing is."""
    namespace, *numbers = name.split("-")
    if namespace != _namespace() or len(numbers) != 2 or not all(map(str.isdigit, numbers)):
        return False
    return _start_tick(int(numbers[0])) != int(numbers[1])


def _namespace() -> str:
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "0"


def _start_tick(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return -1


class Cgroups:
    """Where groups are made on this machine. Raises OSError where they cannot be."""

    def __init__(
        self, mounts: str = "/proc/self/mountinfo", own: str = "/proc/self/cgroup"
    ) -> None:
        self._memory, self._pids = _parents(Path(mounts).read_text(), Path(own).read_text())
        self.version = 2 if self._memory == self._pids else 1
        group = self.make()
        try:
            group.limit(64 << 20, 16)
        finally:
            group.remove()

    def make(self) -> Cgroup:
        name = f"{_PREFIX}{owner()}-{next(_numbers)}"
        folders = [self._memory / name]
        if self.version == 1:
            folders.append(self._pids / name)
        made: list[Path] = []
        try:
            for folder in folders:
                folder.mkdir()
                made.append(folder)
            if self.version == 2:
                _require_controllers(self._memory, folders[0])
        except OSError:
            for folder in made:
                folder.rmdir()
            raise
        return Cgroup(folders[0], folders[-1], self.version)

    def sweep(self) -> int:
        """Remove the groups of dead owners, and end what is in them; how many there were."""
        count = 0
        for parent in {self._memory, self._pids}:
            for folder in parent.glob(f"{_PREFIX}*"):
                name = folder.name.removeprefix(_PREFIX).rpartition("-")[0]
                if is_dead(name):
                    _remove(folder)
                    count += 1
        return count


class Cgroup:
    """The group of one slot."""

    def __init__(self, memory: Path, pids: Path, version: int) -> None:
        self._memory, self._pids, self._version = memory, pids, version
        self._limits: tuple[int, int] | None = None

    @property
    def files(self) -> list[str]:
        """Where a process enters it, by writing 0."""
        return [str(each / "cgroup.procs") for each in dict.fromkeys((self._memory, self._pids))]

    def limit(self, memory: int, pids: int) -> None:
        """Bytes and processes of its jobs."""
        if self._limits == (memory, pids):
            return
        self._limits = (memory, pids)
        (self._pids / "pids.max").write_text(str(pids + _OWN_PIDS))
        if self._version == 2:
            (self._memory / "memory.max").write_text(str(memory))
            with contextlib.suppress(OSError):  # a kernel without swap accounting
                (self._memory / "memory.swap.max").write_text("0")
            return
        limit, swap = "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
        # The limit with swap is never the lower one of the two, so their order depends.
        for name in (limit, swap, limit):
            with contextlib.suppress(FileNotFoundError):
                try:
                    (self._memory / name).write_text(str(memory))
                except OSError:
                    if name is not limit:
                        raise

    def num_killed(self) -> int:
        """How often its memory was not enough."""
        name = "memory.events" if self._version == 2 else "memory.oom_control"
        try:
            rows = (line.split() for line in (self._memory / name).read_text().splitlines())
            return next((int(row[1]) for row in rows if row[0] == "oom_kill"), 0)
        except OSError:
            return 0

    def remove(self) -> None:
        """With all that is in it; idempotent."""
        for folder in {self._memory, self._pids}:
            _remove(folder)


def _parents(mounts: str, own: str) -> tuple[Path, Path]:
    """Where a group for memory and one for processes can be made: the same folder for version 2."""
    folders: dict[str, tuple[Path, str]] = {}
    for line in mounts.splitlines():
        head, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            root, mounted = head.split()[3:5]
            kinds = ["2"] if kind == "cgroup2" else options.split(",")
            folders.update({name: (Path(mounted), root) for name in kinds})
    mine: dict[str, str] = {}
    for line in own.splitlines():
        number, names, path = line.split(":", 2)
        mine.update(dict.fromkeys(names.split(",") if number != "0" else ["2"], path))
    found: dict[str, Path] = {}
    for name, (folder, root) in folders.items():
        if name in mine:
            below = os.path.relpath(mine[name], root)
            # Of a container: its own root is what is mounted, whatever its path is outside.
            found[name] = folder if below.startswith("..") else folder / below
    if "memory" in found and "pids" in found:
        return found["memory"], found["pids"]
    if "2" not in found:
        raise OSError("no cgroups are mounted")
    at = found["2"]
    # A group that has processes lends no controllers to groups below it, its parent may.
    for parent in (at, at.parent):
        if _lends(parent):
            return parent, parent
    raise OSError("the cgroups of version 2 here lend no memory and pids controllers")


def _lends(parent: Path) -> bool:
    wanted = {"memory", "pids"}
    try:
        if not wanted <= set((parent / "cgroup.controllers").read_text().split()):
            return False
        control = parent / "cgroup.subtree_control"
        if not wanted <= set(control.read_text().split()):
            control.write_text("+memory +pids")
        return os.access(parent, os.W_OK)
    except OSError:
        return False


def _require_controllers(parent: Path, folder: Path) -> None:
    if not (folder / "memory.max").exists() or not (folder / "pids.max").exists():
        raise OSError(f"{parent} lends its groups no memory and pids controllers")


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + _REMOVE_SECONDS
    while True:
        with contextlib.suppress(OSError):
            # 0: a process of another namespace, and to `kill` all of this one's group.
            pids = [int(line) for line in (folder / "cgroup.procs").read_text().split()]
            for pid in filter(None, pids):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            if time.monotonic() > deadline:
                return
        time.sleep(0.002)
