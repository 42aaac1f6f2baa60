"""What every sandbox is: a box that runs programs and keeps files, and what makes such boxes.

Errors are of two kinds, and never mixed. What the program did is a `Ran`, whatever that was: it
crashed, took too long, filled its memory. What the sandbox could not do is `SandboxFailed`, which
says nothing about the program: it is tried again with a fresh box, and never scored.

    async with sandboxes.boxed() as box:                     # its files stay between its programs
        await box.put("data.csv", data)
        ran = await box.exec(["python", "-c", code], seconds=5)
    ran = await sandboxes.run(code, seconds=5)               # a box of its own for one program
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from unirl.errors import Restartable
from unirl.llm.sandbox.config import SandboxConfig

Killed = Literal["", "time", "output", "memory", "crash"]
"""Why a program was killed. "": it ended by itself. crash: it took its sandbox down with it."""
MiB = 1 << 20


class SandboxFailed(Restartable):
    """A sandbox could not be made, or died of something that its program cannot have caused."""


class FileRefused(ValueError):
    """A file of a box cannot be read or written: it is missing, too large, a link, no file."""


class Ran(NamedTuple):
    """How a program ended."""

    rc: int
    """Its exit code; below 0: the signal that ended it."""
    output: bytes
    """Standard output and error, as they came; at most max_output bytes."""
    killed: Killed = ""
    us: int = 0
    """Microseconds that it took."""

    @property
    def text(self) -> str:
        return self.output.decode("utf-8", "replace")


@dataclass(frozen=True)
class BoxSpec:
    """A box to open; None: as the sandboxes' config says."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Put into its workspace before it is handed out."""
    memory_mb: int | None = None
    disk_mb: int | None = None
    pids: int | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Of all its programs, besides what `exec` adds."""
    image: str = ""
    """Of containers: the box is this image, its programs are its root user's, and may change all of
    its files, of which disk_mb is no bound. Paths are then those below its root.
    """


@dataclass(frozen=True)
class Level:
    """What is really in force around a program."""

    name: str
    holds: Mapping[str, str]
    """By what it is about (files, network, memory, ...): what stands in its way."""
    why: tuple[str, ...] = ()
    """What the levels above lack on this machine, a sentence each."""

    def as_info(self) -> dict[str, Any]:
        """As it is written into a trajectory."""
        return {"level": self.name, "holds": dict(self.holds), "why": list(self.why)}


class Box(Protocol):
    """A workspace, and programs that run in it one at a time. Paths are relative to it."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
        max_output: int | None = None,
    ) -> Ran:
        """Run a program; when this returns, all that it started is gone. None: as the config says.
        Raises SandboxFailed.
        """

    async def run(
        self,
        code: str,
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
        max_output: int | None = None,
    ) -> Ran:
        """Run Python code, as `exec` runs programs."""

    async def put(self, path: str, data: bytes) -> None:
        """Write a file. Raises FileRefused and SandboxFailed."""

    async def get(self, path: str, max_bytes: int = MiB) -> bytes:
        """Read a file, never through a link. Raises FileRefused and SandboxFailed."""

    async def close(self) -> None:
        """End it with all that is in it; idempotent."""


@dataclass
class SandboxCounts:
    """Since the process began, of all sandboxes that were given it."""

    starts: int = 0
    """Sandboxes that were started, those in place of others included."""
    refusals: int = 0
    """Times that none could be had: it did not start, did not open, or all were in use."""
    seconds: float = 0.0
    """That programs ran."""


class Sandboxes(Protocol):
    """Makes boxes of one kind; belongs to one event loop."""

    @property
    def level(self) -> Level: ...

    async def open(self, spec: BoxSpec = BoxSpec()) -> Box:
        """A box; waits while as many are open as there may be. Raises SandboxFailed."""

    async def close(self) -> None:
        """Close all boxes, end all processes; idempotent."""


@contextlib.asynccontextmanager
async def boxed(sandboxes: Sandboxes, spec: BoxSpec | None = None) -> AsyncIterator[Box]:
    """A box for one block."""
    box = await sandboxes.open(spec or BoxSpec())
    try:
        yield box
    finally:
        await box.close()


async def run_once(sandboxes: Sandboxes, code: str, **settings: Any) -> Ran:
    """Run Python code in a box of its own. settings: as of `Box.run`."""
    async with boxed(sandboxes) as box:
        return await box.run(code, **settings)


def limits_of(config: SandboxConfig, spec: BoxSpec) -> dict[str, int]:
    """Bytes of memory and disk and the number of processes that a box may have."""

    def chosen(name: str) -> int:
        value: int | None = getattr(spec, name)
        return int(getattr(config, name)) if value is None else value

    return {
        "memory": chosen("memory_mb") * MiB,
        "disk": chosen("disk_mb") * MiB,
        "pids": chosen("pids"),
    }


class PathRefused(FileRefused):
    """A path that leads out of the workspace."""


def checked_path(path: str) -> str:
    """A path of a workspace, relative and without dots. Raises PathRefused."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or not parts or "\0" in path:
        raise PathRefused(f"{path!r} is no path within the workspace")
    return "/".join(parts)
