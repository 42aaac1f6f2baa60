"""Actors whose `produce` is a coroutine: all free slots are filled at once, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from unirl.core.actor import AsyncActor
from unirl.core.queue import QueueClient, QueueServer
from unirl.core.sample import Slot
from unirl.errors import DeadlineExceeded, DiscardSlot, LeaseExpired, QueueClosed, ReissueSlot
from unirl.supervision.pauses import Pauses

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
_END_SECONDS = 4.0
"""For all that an actor does at its end: less than the supervisor waits before it kills the
process.
"""
T = TypeVar("T")


async def fill(actor: AsyncActor, queue: QueueClient, slot: Slot) -> None:
    """Produce one sample: committed, discarded or reissued. Other errors leave the slot running."""
    started = time.monotonic()
    try:
        await actor.produce(slot)
    except DiscardSlot as discard:
        slot.progress()
        queue.discard(slot, discard.reason)
        return
    except ReissueSlot:
        queue.reissue(slot)
        return
    slot.work_seconds = time.monotonic() - started
    queue.commit(slot)


async def serve(actor: AsyncActor, queue: QueueClient, hang_seconds: float) -> None:
    """Fill every slot that comes free until the queue closes or this member is retired; what an
    actor process does. A slot that makes no progress for `hang_seconds`, while others do, is
    discarded as a timeout.
    """
    with contextlib.suppress(QueueClosed):
        await _Filler(actor, queue, hang_seconds).run()


class _Filler:
    """The slots in flight of one asynchronous actor.

    It counts as many workers as slots were ever filled at once: each waits from the end of its
    sample to the slot of its next one, so that waiting adds up as `work_seconds` does.
    """

    def __init__(self, actor: AsyncActor, queue: QueueClient, hang_seconds: float) -> None:
        self._actor, self._queue, self._hang_seconds = actor, queue, hang_seconds
        self._slots: dict[asyncio.Task[None], Slot] = {}
        self._seen: dict[int, float] = {}
        """By lease, when a slot in flight made progress."""
        self._alive_at = time.monotonic()
        """When any slot did, or was finished."""
        self._pauses = Pauses()
        self._idle_since = deque([time.monotonic()])

    async def run(self) -> None:
        """Until QueueClosed, or until all is finished after this member was retired."""
        loop, free = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._queue.fileno(), free.set)
        retired = False
        try:
            while self._slots or not retired:
                retired = retired or self._begin_all()
                waker: asyncio.Task[Any] = asyncio.create_task(free.wait())
                await asyncio.wait(
                    {waker, *self._slots},
                    timeout=_LOOK_SECONDS,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                waker.cancel()
                if free.is_set():
                    free.clear()
                    self._queue.wait(0.0)  # forget the notification: what it says is looked at now
                elif self._queue.closed:
                    raise QueueClosed
                for task in [task for task in self._slots if task.done()]:
                    self._finish(task)
                self._discard_stuck()
        finally:
            loop.remove_reader(self._queue.fileno())
            end = time.monotonic() + _END_SECONDS
            try:
                # Half of the time at most: closing matters more than what is thrown away.
                await _cancel(set(self._slots), _END_SECONDS / 2)
            finally:
                try:
                    await asyncio.wait_for(self._actor.close(), end - time.monotonic())
                except Exception:
                    log.exception("the actor could not be closed")

    def _begin_all(self) -> bool:
        """Start to fill all free slots; whether this member was retired."""
        try:
            while (slot := self._queue.try_acquire(is_fair=True)) is not None:
                self._begin(slot)
        except LeaseExpired as expired:
            log.info("%s", expired)
            return True
        return False

    def _begin(self, slot: Slot) -> None:
        now, lease = time.monotonic(), slot.lease
        if self._idle_since:
            slot.wait_seconds = now - self._idle_since.popleft()
        self._seen[lease] = now

        def progress() -> None:
            self._seen[lease] = self._alive_at = time.monotonic()
            self._queue.progress()

        slot.on_progress = progress
        self._slots[asyncio.create_task(fill(self._actor, self._queue, slot))] = slot

    def _finish(self, task: asyncio.Task[None]) -> None:
        slot, now = self._slots.pop(task), time.monotonic()
        del self._seen[slot.lease]
        self._idle_since.append(now)
        if task.cancelled():
            self._queue.discard(slot, "timeout")
            return
        self._alive_at = now
        try:
            task.result()
        except LeaseExpired as expired:
            log.warning("%s", expired)

    def _discard_stuck(self) -> None:
        """Where the actor as a whole is stuck, its supervisor kills it."""
        self._pauses.look()
        limit = self._hang_seconds + self._pauses.within(self._hang_seconds)
        now = time.monotonic()
        if now - self._alive_at > limit:
            return
        for task, slot in self._slots.items():
            held = now - self._seen[slot.lease]
            if held > limit and not task.cancelling():
                log.warning(
                    "ticket %d has made no progress for %.0f s and others have: discarded",
                    slot.ticket,
                    held,
                )
                task.cancel()


async def fill_round(
    actor: AsyncActor,
    queue: QueueClient,
    server: QueueServer,
    slots: Sequence[Slot],
    *,
    enough: int | None,
    timeout: float,
) -> None:
    """Fill these slots, turn by turn with a learner.

    enough: as soon as so many samples are ready, those in flight are interrupted; None: never.
    Raises the first error in the order of tickets; slots of failed and cancelled tasks are still
    running then. DeadlineExceeded when no slot is finished for `timeout` seconds.
    """
    tasks = [asyncio.create_task(fill(actor, queue, slot)) for slot in slots]
    waiting, interrupted = set(tasks), False
    try:
        while waiting:
            done, waiting = await asyncio.wait(
                waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise DeadlineExceeded(
                    f"no sample was finished for {timeout:g} s",
                    server.describe(),
                    "look at the engine's log, or raise queue.timeout_seconds",
                )
            if any(task.exception() is not None for task in done):
                break
            if enough is not None and not interrupted and server.stats().states["ready"] >= enough:
                interrupted = True
                await actor.interrupt()
    finally:
        await _cancel(waiting, _END_SECONDS)
    # All are asked, so that none is reported as never looked at.
    errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    for error in errors:
        if error is not None:
            raise error


async def _cancel(tasks: set[asyncio.Task[None]], seconds: float) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=seconds)


class EventLoop:
    """An event loop that lives as long as an inline run; made at the first use."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; tasks that other coroutines left run meanwhile."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.get_loop().run_until_complete(work)

    def close(self) -> None:
        """End what is left on it; idempotent."""
        if self._runner is not None:
            with contextlib.suppress(RuntimeError):
                self._runner.close()
            self._runner = None
