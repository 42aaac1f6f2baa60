"""Processes for functions that may hang or crash: each call has a deadline, and a process that
misses it is killed and replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from typing import Any

from unirl.llm.rewards.limits import within
from unirl.llm.rewards.worker import worker_main
from unirl.supervision.fork_server import process_context

log = logging.getLogger(__name__)

START_SECONDS = 120.0
"""How long a process may take to start and to import its functions."""
_REAP_SECONDS = 5.0
_ATTEMPTS = 2
_MOST_BYTES = 1 << 20


class WorkerDied(RuntimeError):
    """A process ended while it judged, or did not start."""


class WorkerPool:
    """Calls functions `module:attribute` in processes of their own, on one event loop.

    modules: what the functions import late; done before the first deadline begins.
    Processes start when they are first needed, and none outlives this one; those that hang or die
    are replaced.
    """

    def __init__(
        self, num_workers: int, functions: Sequence[str], modules: Sequence[str] = ()
    ) -> None:
        self._functions, self._modules = tuple(functions), tuple(modules)
        self._num_workers = num_workers
        self._free = asyncio.Semaphore(num_workers)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Its processes; 0 for one that starts."""
        return sorted(worker.pid for worker in self._all)

    async def call(self, function: str, arguments: Mapping[str, Any], seconds: float) -> Any:
        """What the function returns, a number as float.

        Raises TimeoutError when it takes longer (its process is killed), WorkerDied when the
        process ends under it twice, and RuntimeError with what the function raised.
        """
        line = json.dumps({"function": function, "arguments": arguments}, default=str)
        async with self._free:
            for attempt in range(_ATTEMPTS):
                try:
                    worker = await self._take()
                    answer = await self._ask(worker, line.encode() + b"\n", seconds)
                    break
                except WorkerDied:
                    if attempt == _ATTEMPTS - 1:
                        raise
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer.get("value")

    def close(self) -> None:
        self._closed = True
        workers = list(self._all)
        for worker in workers:
            self._drop(worker)
        for worker in workers:
            worker.join()

    async def _take(self) -> _Worker:
        """A worker that has nothing to do; one is started when there is none."""
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive():
                return worker
            self._replace(worker)
        if self._closed:
            raise WorkerDied("the rewards are closed")
        return await self._start()

    async def _ask(self, worker: _Worker, line: bytes, seconds: float) -> dict[str, Any]:
        """One answer. Whatever else happens, a worker in an unknown state is not used again."""
        try:
            answer = await within(worker.ask(line), seconds)
        except BaseException:
            self._replace(worker)
            raise
        self._idle.append(worker)
        return answer

    async def _start(self) -> _Worker:
        worker = _Worker(self._functions, self._modules, self._num_workers)
        self._all.add(worker)
        try:
            await within(worker.start(), START_SECONDS)
        except TimeoutError:
            self._drop(worker)
            raise WorkerDied(f"its process did not start in {START_SECONDS:g} s") from None
        except BaseException:
            self._drop(worker)
            raise
        if self._closed:
            self._drop(worker)
            raise WorkerDied("the rewards are closed")
        return worker

    def _replace(self, worker: _Worker) -> None:
        self._drop(worker)
        log.info("process %d, which judged completions, hung or died: it is replaced", worker.pid)

    def _drop(self, worker: _Worker) -> None:
        worker.kill()
        self._all.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)


class _Worker:
    """One process and the line to it."""

    def __init__(self, functions: Sequence[str], modules: Sequence[str], num_workers: int) -> None:
        self._functions, self._modules, self._num_workers = functions, modules, num_workers
        self._process: BaseProcess | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._killed = self._signalled = False

    @property
    def pid(self) -> int:
        return (self._process.pid or 0) if self._process is not None else 0

    async def start(self) -> None:
        """Returns when all functions are imported. Raises WorkerDied when they cannot be."""
        ours, theirs = socket.socketpair()
        try:
            # In a thread: the fork server may have to load torch first.
            self._process = await asyncio.to_thread(self._launch, theirs)
            self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=_MOST_BYTES)
        except BaseException:
            ours.close()  # what has started all the same ends with this
            raise
        if self._killed:
            self.kill()
        answer = await self._read()
        if "error" in answer:
            raise WorkerDied(f"its process cannot import it: {answer['error']}")

    def _launch(self, theirs: socket.socket) -> BaseProcess:
        with theirs:
            context = process_context(self._num_workers, ["unirl.llm.rewards.worker"])
            process = context.Process(
                target=worker_main,
                args=(theirs, self._functions, self._modules, dict(os.environ)),
                name="reward-worker",
                daemon=True,
            )
            process.start()
        return process

    async def ask(self, line: bytes) -> dict[str, Any]:
        assert self._writer is not None
        self._writer.write(line)
        return await self._read()

    async def _read(self) -> dict[str, Any]:
        assert self._reader is not None
        try:
            line = await self._reader.readline()
        except (OSError, ValueError) as error:  # ValueError: an answer beyond all measure
            raise WorkerDied(f"its process cannot be read: {error}") from None
        if not line.endswith(b"\n"):
            raise WorkerDied("its process died" + self._ending())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ending(self) -> str:
        if self._process is None:
            return ""
        self._process.join(0.2)  # its end of the line closes a moment before it is gone
        code = self._process.exitcode
        if code is None:
            return ""
        if code < 0:
            with contextlib.suppress(ValueError):
                return f" of {signal.Signals(-code).name}"
        return f" with exit code {code}"

    def is_alive(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def kill(self) -> None:
        """End the process and all it has started; idempotent."""
        self._killed = True
        if self._writer is not None:
            with contextlib.suppress(RuntimeError):  # the event loop may be closed already
                self._writer.transport.abort()
        if self._signalled or not self.pid:
            return
        self._signalled = True
        for send in (os.killpg, os.kill):
            # Its group outlives it where only itself has died; it has none yet at its very start.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(self.pid, signal.SIGKILL)

    def join(self) -> None:
        if self._process is not None:
            self._process.join(_REAP_SECONDS)
