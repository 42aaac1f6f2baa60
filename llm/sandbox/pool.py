"""Boxes of this machine: slots kept warm, lent to one box at a time.

A slot is lent again when nothing is left of the box before; one that died, or may hold something,
is killed and replaced. Everything ends with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from unirl.llm.sandbox.box import (
    BoxSpec,
    Level,
    MiB,
    Ran,
    SandboxCounts,
    SandboxFailed,
    checked_path,
    limits_of,
)  # fmt: skip
from unirl.llm.sandbox.cgroups import Cgroups, is_dead
from unirl.llm.sandbox.config import LevelName, SandboxConfig
from unirl.llm.sandbox.emptying import empty
from unirl.llm.sandbox.idle import Idle
from unirl.llm.sandbox.interpreter import interpreter
from unirl.llm.sandbox.recorded import Recorder
from unirl.llm.sandbox.slot import FOLDER_PREFIX, Slot, SlotDied

log = logging.getLogger(__name__)
_WAIT_SECONDS = 5.0


class LocalSandboxes:
    """Sandboxes of this machine at one level (`levels.make_sandboxes` finds the best)."""

    def __init__(
        self, name: LevelName, level: Level, config: SandboxConfig, counts: SandboxCounts
    ) -> None:
        self.counts = counts
        self._name, self._level, self._config = name, level, config
        self._interpreter = interpreter(config.python)
        self._cgroups = Cgroups() if name == "zygote+cgroup" else None
        if name == "none":
            # Promised is nothing, but a fork bomb had better not take the machine down.
            with contextlib.suppress(OSError):
                self._cgroups = Cgroups()
        self.recorder = Recorder(config) if config.network != "none" else None
        self._free = asyncio.Semaphore(config.slots)
        self._idle: list[Slot] = []
        self._all: set[Slot] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._reaping = ThreadPoolExecutor(4, "reap-sandboxes")
        self._is_closed = False
        self.num_replaced = 0
        """Slots that died, or were killed, and had others started in their place."""
        sweep(self._cgroups)

    @property
    def level(self) -> Level:
        return self._level

    @property
    def config(self) -> SandboxConfig:
        return self._config

    @property
    def pids(self) -> list[int]:
        """Processes of its slots."""
        return sorted(slot.pid for slot in self._all)

    async def warm(self) -> None:
        """Start what is missing, so that nothing waits for it later. Raises SandboxFailed."""
        missing = self._config.slots - len(self._all)
        for slot in await asyncio.gather(*(self._start() for _ in range(missing))):
            self._idle.append(slot)

    async def open(self, spec: BoxSpec | None = None) -> LocalBox:
        spec = spec or BoxSpec()
        if spec.image:
            raise SandboxFailed(
                f'a box of the image "{spec.image}" is asked for',
                f"sandboxes of level {self._name} have no images",
                'set sandbox.kind to "container"',
            )
        with self._counting_refusals():
            slot = await self._take()
            box = LocalBox(self, slot, spec, self._config)
            try:
                await box.start()
            except BaseException:
                await box.close()
                raise
        return box

    @contextlib.contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except SandboxFailed:
            self.counts.refusals += 1
            raise

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """While a program runs."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.counts.seconds += time.monotonic() - started

    async def run(
        self,
        code: str,
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
        max_output: int | None = None,
        fds: Sequence[int] = (),
        has_errors: bool = True,
    ) -> Ran:
        """Run Python code in a box of its own: one message, where `open`, `run` and `close` are
        three. fds: descriptors that it gets as 3, 4, ...; has_errors: standard error is a part of
        the output.
        """
        async with self.lent() as run:
            return await run(
                code,
                input=input,
                env=env,
                seconds=seconds,
                max_output=max_output,
                fds=fds,
                has_errors=has_errors,
            )

    @contextlib.asynccontextmanager
    async def lent(self) -> AsyncIterator[Callable[..., Awaitable[Ran]]]:
        """A box ahead of the program that it is for: what runs it there, as `run` does."""
        config = self._config
        with self._counting_refusals():
            slot = await self._take()
        is_clean = True

        async def run(
            code: str,
            *,
            input: bytes = b"",
            env: Mapping[str, str] | None = None,
            seconds: float | None = None,
            max_output: int | None = None,
            fds: Sequence[int] = (),
            has_errors: bool = True,
        ) -> Ran:
            nonlocal is_clean
            is_clean = False
            with self.timed():
                ran = await slot.run(
                    {"code": code, "env": dict(env or {}), "has_errors": has_errors},
                    input=input,
                    seconds=seconds or config.seconds,
                    max_output=max_output or config.max_output,
                    limits=limits_of(config, BoxSpec()),
                    fresh=True,
                    fds=fds,
                )
            is_clean = True
            return ran

        try:
            yield run
        finally:
            self.give_back(slot, is_clean=is_clean)

    async def _take(self) -> Slot:
        """A slot that has nothing to do."""
        await self._free.acquire()
        try:
            while self._idle:
                slot = self._idle.pop()
                if slot.is_alive():
                    if slot.door is not None:
                        slot.door.renew()
                    return slot
                self._drop(slot)
            return await self._start()
        except BaseException:
            self._free.release()
            raise

    async def _start(self) -> Slot:
        if self._is_closed:
            raise SandboxFailed("the sandboxes are closed", "", "open others")
        slot = Slot(self._name, self._config, self._interpreter, self._cgroups, self.recorder)
        self._all.add(slot)
        try:
            await slot.start()
        except BaseException:
            self._drop(slot)
            raise
        self.counts.starts += 1
        if self._is_closed:
            self._drop(slot)
            raise SandboxFailed("the sandboxes are closed", "", "open others")
        return slot

    def give_back(self, slot: Slot, *, is_clean: bool) -> None:
        """Take a slot back from a box, that is, or replace it."""
        if is_clean and slot.is_alive() and not self._is_closed:
            self._idle.append(slot)
            self._free.release()
            return
        try:
            self._drop(slot)
            if not self._is_closed:
                self.num_replaced += 1
                task = asyncio.get_running_loop().create_task(self._replace())
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)
        finally:
            self._free.release()

    async def _replace(self) -> None:
        if len(self._all) >= self._config.slots:
            return
        try:
            self._idle.append(await self._start())
        except SandboxFailed as error:
            log.debug("no slot ahead: %s", error)  # the next one to need it will say so

    def _drop(self, slot: Slot) -> None:
        self._all.discard(slot)
        slot.kill()
        try:
            self._reaping.submit(_reap, slot)  # it blocks, the event loop must not
        except RuntimeError:  # these are closed
            _reap(slot)

    async def close(self) -> None:
        self._end_slots()
        if self.recorder is not None:
            await self.recorder.close()
        await asyncio.to_thread(self._reaping.shutdown)

    def end(self) -> None:
        """Close, also where no event loop runs any more."""
        self._end_slots()
        self._reaping.shutdown()

    def _end_slots(self) -> None:
        self._is_closed = True
        for task in list(self._starting):
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                task.cancel()
        for slot in list(self._all):
            self._drop(slot)
        self._idle.clear()


class LocalBox:
    """A slot lent to one box."""

    def __init__(
        self, owner: LocalSandboxes, slot: Slot, spec: BoxSpec, config: SandboxConfig
    ) -> None:
        self._owner, self._slot, self._spec, self._config = owner, slot, spec, config
        self._limits = limits_of(config, spec)
        self._one = asyncio.Lock()
        self._is_closed = False
        self._idle: Idle | None = None

    async def start(self) -> None:
        with self._infrastructure():
            answer = await self._slot.request(_WAIT_SECONDS, op="open", disk=self._limits["disk"])
        if "error" in answer:
            self._slot.kill()
            raise SandboxFailed("a box cannot be opened", answer["error"], "open another")
        for path, data in self._spec.files.items():
            await self.put(path, data)
        self._idle = Idle(self._config.idle_seconds, self._one.locked, self._expire)

    async def exec(self, argv: Sequence[str], **settings: Any) -> Ran:
        if not argv or any("\0" in each for each in argv):
            raise ValueError(
                f"{list(argv)!r} is no command: a program and its arguments are wanted"
            )
        return await self._run({"argv": list(argv)}, **settings)

    async def run(self, code: str, **settings: Any) -> Ran:
        return await self._run({"code": code}, **settings)

    async def _run(
        self,
        given: Mapping[str, Any],
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
        max_output: int | None = None,
        fds: Sequence[int] = (),
    ) -> Ran:
        async with self._one:
            self._require_open()
            with self._owner.timed():
                ran = await self._slot.run(
                    {**given, "env": {**self._spec.env, **(env or {})}},
                    input=input,
                    seconds=seconds or self._config.seconds,
                    max_output=max_output or self._config.max_output,
                    limits=self._limits,
                    fds=fds,
                )
            if self._idle:
                self._idle.touch()
            return ran

    async def put(self, path: str, data: bytes) -> None:
        async with self._one:
            self._require_open()
            with self._infrastructure():
                await self._slot.put(checked_path(path), data)

    async def get(self, path: str, max_bytes: int = MiB) -> bytes:
        async with self._one:
            self._require_open()
            with self._infrastructure():
                return await self._slot.get(checked_path(path), max_bytes)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._idle:
            self._idle.stop()
        is_clean = False
        try:
            if not self._slot.is_dead and not self._one.locked():
                with contextlib.suppress(SlotDied):
                    answer = await self._slot.request(_WAIT_SECONDS, op="close")
                    is_clean = not answer
        finally:
            self._owner.give_back(self._slot, is_clean=is_clean)

    def _require_open(self) -> None:
        if self._idle:
            self._idle.require_not_expired()
        if self._is_closed or self._slot.is_dead:
            raise SandboxFailed("a box is closed, or died", "nothing runs in it", "open another")

    def _expire(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._owner.give_back(self._slot, is_clean=False)

    @contextlib.contextmanager
    def _infrastructure(self) -> Any:
        try:
            yield
        except SlotDied as error:
            raise SandboxFailed("a box died", str(error), "open another") from error


def _reap(slot: Slot) -> None:
    try:
        slot.reap()
    except Exception:
        log.warning("a sandbox is not gone altogether", exc_info=True)


def sweep(cgroups: Cgroups | None) -> int:
    """Remove what boxes of dead processes left on this machine; how much that was."""
    count = cgroups.sweep() if cgroups else 0
    for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        if is_dead("-".join(folder.name.removeprefix(FOLDER_PREFIX).split("-")[:3])):
            with contextlib.suppress(OSError):
                empty(str(folder))
                folder.rmdir()
            count += 1
    return count
