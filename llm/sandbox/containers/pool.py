"""Containers as sandboxes: each box is one of its own, made ahead, removed with all in it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from unirl.llm.sandbox.box import (
    BoxSpec,
    Level,
    MiB,
    Ran,
    SandboxCounts,
    SandboxFailed,
    boxed,
    checked_path,
    limits_of,
)  # fmt: skip
from unirl.llm.sandbox.cgroups import is_dead, owner
from unirl.llm.sandbox.config import SandboxConfig
from unirl.llm.sandbox.containers.container import PYTHON, Container, asking, connect
from unirl.llm.sandbox.containers.images import Image, build, find
from unirl.llm.sandbox.idle import Idle

log = logging.getLogger(__name__)
_OWNER = "unirl.owner"
_numbers = itertools.count()
T = TypeVar("T")


class ContainerSandboxes:
    """Containers of one daemon and image; belongs to one event loop."""

    def __init__(self, level: Level, config: SandboxConfig, counts: SandboxCounts) -> None:
        self.level, self.config, self.counts = level, config, counts
        self._free = asyncio.Semaphore(config.slots)
        self._ahead: list[Container] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[ContainerBox] = set()
        # A call blocks its thread: of a program, of what ends it, and of a container made ahead.
        self._threads = ThreadPoolExecutor(3 * config.slots + 1, "containers")
        self._is_closed = False

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """In a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def sweep(self) -> None:
        """Remove what boxes of dead processes left with this daemon. Raises SandboxFailed."""
        await self.call(_sweep, self.config)

    async def kernel(self) -> str:
        """The release of the kernel that the daemon's machine has. Raises SandboxFailed."""
        return await self.call(_kernel, self.config)

    async def image_of(self, folder: Path) -> Image:
        """Built from its Dockerfile, once. Raises SandboxFailed."""
        return await self.find_image(await self.call(build, self.config, folder))

    async def find_image(self, name: str) -> Image:
        """Raises SandboxFailed where the daemon does not have it."""
        return await self.call(find, self.config, name)

    async def open(self, spec: BoxSpec | None = None) -> ContainerBox:
        spec = spec or BoxSpec()
        await self._free.acquire()
        box: ContainerBox | None = None
        try:
            container = await self._take(spec)
            box = ContainerBox(self, container, spec)
            self._open.add(box)
            for path, data in spec.files.items():
                await box.put(path, data)
            return box
        except BaseException as error:
            if isinstance(error, SandboxFailed):
                self.counts.refusals += 1
            if box is not None:
                await box.close()
            else:
                self._free.release()
            raise

    async def run(self, code: str, **settings: Any) -> Ran:
        """Run Python code in a box of its own. settings: as of `Box.run`."""
        async with boxed(self) as box:
            return await box.run(code, **settings)

    async def _take(self, spec: BoxSpec) -> Container:
        is_plain = limits_of(self.config, spec) == limits_of(self.config, BoxSpec())
        if self._ahead and is_plain and not spec.env and not spec.image:
            return self._ahead.pop()
        return await self._start(spec)

    async def _start(self, spec: BoxSpec) -> Container:
        if self._is_closed:
            raise SandboxFailed("the sandboxes are closed", "", "open others")
        labels = {_OWNER: owner(), "unirl.box": str(next(_numbers))}
        container = await self.call(Container, self.config, labels, spec.image)
        try:
            await self.call(container.start, limits_of(self.config, spec), spec.env)
        except BaseException:
            self.do(self.call(container.end))
            raise
        self.counts.starts += 1
        return container

    def give_back(self, box: ContainerBox, container: Container) -> None:
        """Remove a box's container, and make another one ahead."""
        self._open.discard(box)
        self.do(self._replace(container))

    async def _replace(self, container: Container) -> None:
        await self.call(container.end)
        self._free.release()
        if self._is_closed or len(self._ahead) + len(self._open) >= self.config.slots:
            return
        try:
            another = await self._start(BoxSpec())
        except SandboxFailed as error:
            log.debug("no container ahead: %s", error)  # the next one to need it will say so
            return
        self._ahead.append(another)
        if self._is_closed:
            await self.call(another.end)

    def do(self, work: Awaitable[None]) -> None:
        """Beside everything else, and before the sandboxes are closed."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """While a program runs."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.counts.seconds += time.monotonic() - started

    async def close(self) -> None:
        self._is_closed = True
        for box in [*self._open]:
            await box.close()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        ahead, self._ahead = self._ahead, []
        await asyncio.gather(*(self.call(each.end) for each in ahead))
        self._threads.shutdown(wait=False)


class ContainerBox:
    """A container with a workspace of its own, in memory."""

    def __init__(self, owner: ContainerSandboxes, container: Container, spec: BoxSpec) -> None:
        self._owner, self._container, self._spec = owner, container, spec
        self._config = owner.config
        self._one = asyncio.Lock()
        self._is_closed = False
        self._idle = Idle(self._config.idle_seconds, self._one.locked, self._expire)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
        max_output: int | None = None,
    ) -> Ran:
        if not argv or any("\0" in each for each in argv):
            raise ValueError(
                f"{list(argv)!r} is no command: a program and its arguments are wanted"
            )
        async with self._used():
            return await self._run(argv, input, env, seconds, max_output)

    async def run(
        self,
        code: str,
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
        max_output: int | None = None,
    ) -> Ran:
        text = code.encode("utf-8", "replace")
        argv = [self._config.python or "python3", "-u", "-c", PYTHON, str(len(text))]
        async with self._used():
            return await self._run(argv, text + input, env, seconds, max_output)

    async def _run(
        self,
        argv: Sequence[str],
        input: bytes,
        env: Mapping[str, str] | None,
        seconds: float | None,
        max_output: int | None,
    ) -> Ran:
        config = self._config
        with self._owner.timed():
            return await self._ask(
                self._container.run,
                argv,
                input,
                {**self._spec.env, **(env or {})},
                seconds or config.seconds,
                max_output or config.max_output,
            )

    async def put(self, path: str, data: bytes) -> None:
        async with self._used():
            await self._ask(self._container.put, checked_path(path), data)

    async def get(self, path: str, max_bytes: int = MiB) -> bytes:
        async with self._used():
            return await self._ask(self._container.get, checked_path(path), max_bytes)

    async def _ask(self, function: Callable[..., T], *args: Any) -> T:
        """Who gives up leaves a program behind: the container is ended with it."""
        try:
            return await self._owner.call(function, *args)
        except asyncio.CancelledError:
            self._close()
            raise

    @contextlib.asynccontextmanager
    async def _used(self) -> AsyncIterator[None]:
        async with self._one:
            self._idle.require_not_expired()
            if self._is_closed or self._container.is_dead:
                raise SandboxFailed(
                    "a box is closed, or died", "nothing runs in it", "open another"
                )
            yield
            self._idle.touch()

    async def close(self) -> None:
        self._close()

    def _expire(self) -> None:
        self._close()

    def _close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._idle.stop()
            self._owner.give_back(self, self._container)


def _sweep(config: SandboxConfig) -> None:
    api = connect(config)
    with asking("containers of dead processes cannot be removed", config):
        for each in api.containers(all=True, filters={"label": _OWNER}):
            if is_dead(each["Labels"][_OWNER]):
                with contextlib.suppress(Exception):  # another one sweeps, too
                    api.remove_container(each["Id"], force=True, v=True)
    api.close()


def _kernel(config: SandboxConfig) -> str:
    with contextlib.closing(connect(config)) as api, asking("the daemon does not answer", config):
        return str(api.version().get("KernelVersion", ""))
