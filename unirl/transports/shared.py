"""Slots and weights in anonymous shared memory between processes of one machine.

The memory is a file without a name (memfd), so nothing can stay behind in /dev/shm however a run
ends. The table's lock is a POSIX record lock: the kernel frees it when its holder dies. Sleepers
wait at eventfds. Every object here is picklable while a child process is being started, and only
then: what travels are file descriptors.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import platform
import select
import struct
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from multiprocessing.reduction import DupFd
from typing import Any

import torch

from unirl.core.exchange import Exchange, Layout, exchange_words
from unirl.core.queue import QueueConfig
from unirl.core.sample import SampleSpec
from unirl.core.slot_queue import SlotQueue
from unirl.core.slot_table import REASONS, table_words
from unirl.core.tree import unflatten
from unirl.core.weights import Loadable, Weights
from unirl.errors import DeadlineExceeded, LockHeld, UniRLError

_ALIGN = 64  # a cache line; enough for every dtype and for aligned vector loads
_LOCK_SECONDS = 30.0
_LOCK_TRIES = 20
"""Before the first sleep."""
# Not every system has it.
_give_way = getattr(os, "sched_yield", lambda: time.sleep(0))
_STORES_IN_ORDER = sys.maxsize > 2**32 and platform.machine().lower() in ("x86_64", "amd64")
"""Whether other processes see a process's stores in their order, and a thread lock is a fence."""
_ONE = (1).to_bytes(8, sys.byteorder)


class SharedBlock:
    """Anonymous zeroed memory that child processes can map."""

    def __init__(self, num_bytes: int, name: str) -> None:
        self.fd = _anonymous_file(name)
        try:
            os.ftruncate(self.fd, num_bytes)
            # Reserved now: memory that does not exist must fail here, not as a bus error in the
            # middle of training.
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(self.fd, 0, num_bytes)
        except OSError as error:
            os.close(self.fd)
            raise UniRLError(
                f"cannot reserve {num_bytes / 2**20:.0f} MiB of shared memory for {name}",
                error.strerror or str(error),
                "use fewer slots (queue.batch_size, queue.max_staleness) or shorter unrolls",
            ) from error
        self._attach(num_bytes)

    def _attach(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.buffer = mmap.mmap(self.fd, num_bytes)
        weakref.finalize(self, os.close, self.fd)

    def __getstate__(self) -> dict[str, Any]:
        return {"fd": DupFd(self.fd), "num_bytes": self.num_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fd = state["fd"].detach()
        self._attach(state["num_bytes"])

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that lies in the block at `offset` bytes."""
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self.buffer, dtype=dtype, count=count, offset=offset).view(
            tuple(shape)
        )


class Bell:
    """Wakes one sleeper in any process: a ring stays until it is heard."""

    def __init__(self) -> None:
        # An eventfd is one descriptor instead of two; a pipe is there on every system.
        if hasattr(os, "eventfd"):
            self._reader = self._writer = os.eventfd(0, os.EFD_CLOEXEC)
        else:
            self._reader, self._writer = os.pipe()
        self._prepare()

    def _prepare(self) -> None:
        for fd in {self._reader, self._writer}:
            weakref.finalize(self, os.close, fd)
            os.set_blocking(fd, False)
        self._poll = select.poll()
        self._poll.register(self._reader, select.POLLIN)

    def __getstate__(self) -> dict[str, Any]:
        if self._reader == self._writer:
            return {"both": DupFd(self._reader)}
        return {"reader": DupFd(self._reader), "writer": DupFd(self._writer)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "both" in state:
            self._reader = self._writer = state["both"].detach()
        else:
            self._reader, self._writer = state["reader"].detach(), state["writer"].detach()
        self._prepare()

    def ring(self) -> None:
        """Wake the sleeper, now or when it next waits."""
        # A full pipe or counter holds unheard rings: the sleeper will wake.
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, _ONE)

    def wait(self, seconds: float) -> None:
        """Sleep until a ring, at most `seconds`."""
        if self._poll.poll(seconds * 1000):
            # Another thread may have heard it first.
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 4096)  # all rings at once, of an eventfd too


class SharedGuard(AbstractContextManager[object]):
    """The table's lock and bells between processes."""

    watches = True
    end_holder: Callable[[LockHeld], bool] | None = None
    """How this process ends another that has held the lock for too long; whether it did. The kernel
    frees the lock then."""

    def __init__(self, num_bells: int) -> None:
        self._block = SharedBlock(8, "unirl-lock")  # for its descriptor; nobody reads the bytes
        self._bells = [Bell() for _ in range(num_bells)]
        self._prepare()

    def _prepare(self) -> None:
        # Record locks exclude processes, not threads of one process. Whoever waits for the record
        # lock holds this one, so it is free after 2 * _LOCK_SECONDS at the latest.
        self._threads = threading.Lock()
        self.own: AbstractContextManager[object] = self._threads if _STORES_IN_ORDER else self

    def __getstate__(self) -> dict[str, Any]:
        return {"block": self._block, "bells": self._bells}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._block, self._bells = state["block"], state["bells"]
        self._prepare()

    def __enter__(self) -> object:
        if not self._threads.acquire(timeout=3 * _LOCK_SECONDS):
            raise DeadlineExceeded(
                f"a thread of process {os.getpid()} has held the queue lock {3 * _LOCK_SECONDS:g} s"
            )
        try:
            fcntl.lockf(self._block.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            try:
                self._lock_with_deadline()
            except BaseException:
                self._threads.release()
                raise
        return self

    def _lock_with_deadline(self) -> None:
        deadline, ended_holder = time.monotonic() + _LOCK_SECONDS, False
        for num_tries in itertools.count():
            # The lock is held for microseconds, and even the shortest sleep takes several times as
            # long: only a holder that does not run is worth it.
            if num_tries < _LOCK_TRIES:
                _give_way()
            else:
                time.sleep(20e-6)
            try:
                fcntl.lockf(self._block.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if time.monotonic() < deadline:
                    continue
                pid = self._holder()
                held = LockHeld(
                    pid,
                    f"process {pid or '?'} has held the queue lock {_LOCK_SECONDS:g} s",
                    "it is held for microseconds by a process that runs",
                    "the process is stopped or hung: kill it",
                )
                if ended_holder or self.end_holder is None or not self.end_holder(held):
                    raise held from error
                deadline, ended_holder = time.monotonic() + _LOCK_SECONDS, True

    def _holder(self) -> int:
        """The id of the process that holds the lock; 0 where the system has no known way to ask."""
        if sys.platform != "linux" or sys.maxsize < 2**32:
            return 0
        # struct flock: type, whence, start, length, process
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(
            "hhqqi4x", fcntl.fcntl(self._block.fd, fcntl.F_GETLK, lock)
        )
        return 0 if kind == fcntl.F_UNLCK else int(pid)

    def __exit__(self, *error: object) -> None:
        fcntl.lockf(self._block.fd, fcntl.LOCK_UN)
        self._threads.release()

    def ring(self, bell: int) -> None:
        """See unirl.core.guard.Guard."""
        self._bells[bell].ring()

    def wait(self, bell: int, seconds: float) -> None:
        """See unirl.core.guard.Guard."""
        self._bells[bell].wait(seconds)


class SharedQueue(SlotQueue):
    """The queue between processes: actors write slots in place, the learner reads them in place."""

    def __init__(
        self,
        spec: SampleSpec,
        config: QueueConfig,
        *,
        num_actors: int = 1,
        reasons: tuple[str, ...] = REASONS,
    ) -> None:
        offsets, slot_bytes = _layout({name: item.num_bytes for name, item in spec.fields.items()})
        self._parts: dict[str, Any] = {
            "spec": spec,
            "config": config,
            "offsets": offsets,
            "slot_bytes": slot_bytes,
            "table": SharedBlock(
                8 * table_words(config.num_slots, num_actors, len(reasons)), "unirl-table"
            ),
            "slots": SharedBlock(max(1, slot_bytes * config.num_slots), "unirl-slots"),
            "guard": SharedGuard(num_actors + 1),
            "num_actors": num_actors,
            "reasons": reasons,
        }
        self._assemble()

    def _assemble(self) -> None:
        parts = self._parts
        spec, block, slot_bytes = parts["spec"], parts["slots"], parts["slot_bytes"]
        slots = [
            unflatten(
                {
                    name: block.tensor(
                        index * slot_bytes + parts["offsets"][name], item.shape, item.dtype
                    )
                    for name, item in spec.fields.items()
                }
            )
            for index in range(parts["config"].num_slots)
        ]
        words = memoryview(parts["table"].buffer).cast("q")
        super().__init__(
            parts["config"],
            words,
            slots,
            parts["guard"],
            num_actors=parts["num_actors"],
            reasons=parts["reasons"],
        )

    def end_holders_by(self, end: Callable[[LockHeld], bool]) -> None:
        """Let this process end others that hold the lock for too long; `end` says whether it did.

        Otherwise such a holder is a LockHeld error.
        """
        self._parts["guard"].end_holder = end

    def __getstate__(self) -> dict[str, Any]:
        return self._parts

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._parts = state
        self._assemble()


class SharedExchange(Exchange):
    """The exchange between processes."""

    def __init__(self, layout: Layout) -> None:
        self._block = SharedBlock(8 * exchange_words(layout), "unirl-exchange")
        self._assemble(layout, [Bell() for _ in range(layout.num_workers)])
        self.open()

    def _assemble(self, layout: Layout, bells: Sequence[Bell]) -> None:
        super().__init__(layout, memoryview(self._block.buffer).cast("q"), bells)

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout, "block": self._block, "bells": self._bells}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._block = state["block"]
        self._assemble(state["layout"], state["bells"])


class SharedWeightStore:
    """The weight store between processes: two buffers, each with a sequence number that is odd
    while it is written.

    A reader copies the active buffer and looks at its sequence number again: unchanged means whole,
    else it copies anew. The writer always writes the other buffer, so a reader is disturbed only if
    two versions are published during its copy.
    """

    _VERSION, _ACTIVE, _SEQUENCE, _VERSIONS, _WORDS = 0, 1, 2, 4, 6

    def __init__(self, example: Weights) -> None:
        self._shapes = {name: (tuple(value.shape), value.dtype) for name, value in example.items()}
        sizes = {
            name: dtype.itemsize * torch.Size(shape).numel()
            for name, (shape, dtype) in self._shapes.items()
        }
        self._offsets, self._buffer_bytes = _layout(sizes)
        self._block = SharedBlock(_ALIGN + 2 * self._buffer_bytes, "unirl-weights")
        self._attach()
        self._words[self._VERSION] = -1

    def _attach(self) -> None:
        self._words = memoryview(self._block.buffer)[: 8 * self._WORDS].cast("q")
        self._buffers: list[dict[str, torch.Tensor]] = [
            {
                name: self._block.tensor(
                    _ALIGN + i * self._buffer_bytes + self._offsets[name], shape, dtype
                )
                for name, (shape, dtype) in self._shapes.items()
            }
            for i in range(2)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {
            "_shapes": self._shapes,
            "_offsets": self._offsets,
            "_buffer_bytes": self._buffer_bytes,
            "_block": self._block,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._attach()

    @property
    def version(self) -> int:
        """See unirl.core.weights.WeightStore."""
        return int(self._words[self._VERSION])

    def publish(self, weights: Weights, version: int) -> None:
        """See unirl.core.weights.WeightStore. One process publishes."""
        words, index = self._words, 1 - self._words[self._ACTIVE]
        buffer = self._buffers[index]
        words[self._SEQUENCE + index] += 1
        with torch.no_grad():
            torch._foreach_copy_(list(buffer.values()), [weights[name] for name in buffer])
        words[self._VERSIONS + index] = version
        words[self._SEQUENCE + index] += 1
        words[self._ACTIVE] = index
        words[self._VERSION] = version

    def pull(self, into: Loadable, have: int) -> int:
        """See unirl.core.weights.WeightStore. Raises DeadlineExceeded when no whole version can be
        read for 30 s.
        """
        words, deadline = self._words, time.monotonic() + _LOCK_SECONDS
        if words[self._VERSION] == have:
            return have
        while True:
            index = words[self._ACTIVE]
            before = words[self._SEQUENCE + index]
            version = int(words[self._VERSIONS + index])
            if before % 2 == 0:
                into.load_weights(self._buffers[index])
                if words[self._SEQUENCE + index] == before:
                    return version
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"no whole version of the weights could be read for {_LOCK_SECONDS:g} s",
                    "a copy must be faster than two publications",
                    "publish less often",
                )


def _layout(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Aligned offsets for items of these sizes, and the aligned total."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // _ALIGN) * _ALIGN
    return offsets, end


def _anonymous_file(name: str) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix=name)
    os.unlink(path)
    return fd
