"""Actors whose `produce` is a coroutine: all free places are filled at once, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from unirl.core.actor import AsyncActor
from unirl.core.queue import SampleQueue
from unirl.core.sample import Slot
from unirl.core.slot_queue import SlotQueue
from unirl.errors import DeadlineExceeded, DiscardSlot, QueueClosed, ReissueSlot

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
_END_SECONDS = 4.0
"""For all that an actor does at its end: less than the crew waits before it kills the process."""
T = TypeVar("T")


async def fill(actor: AsyncActor, queue: SampleQueue, slot: Slot) -> None:
    """Produce one sample: committed, discarded or issued again. Other errors leave the slot
    running.
    """
    started = time.monotonic()
    try:
        await actor.produce(slot)
    except DiscardSlot as discard:
        queue.discard(slot, discard.reason)
        return
    except ReissueSlot:
        queue.reissue(slot)
        return
    slot.work_seconds = time.monotonic() - started
    queue.commit(slot)


async def serve(actor: AsyncActor, index: int, queue: SlotQueue) -> None:
    """Fill every place that comes free until the queue closes; what an actor process does.

    It counts as many workers as places were ever filled at once: each waits from the end of its
    sample to the place of its next one, so that waiting adds up as `work_seconds` does.
    """
    tasks: set[asyncio.Task[None]] = set()
    idle_since = deque([time.monotonic()])
    # A thread of its own: other work handed to threads must not keep the bell from being heard.
    listener = ThreadPoolExecutor(1, "bell")
    try:
        while True:
            while (slot := queue.try_acquire(index)) is not None:
                if idle_since:
                    slot.wait_seconds = time.monotonic() - idle_since.popleft()
                tasks.add(asyncio.create_task(fill(actor, queue, slot)))
            bell = asyncio.get_running_loop().run_in_executor(
                listener, queue.wait_as_actor, index, _LOOK_SECONDS
            )
            while not bell.done():
                done, _ = await asyncio.wait({bell, *tasks}, return_when=asyncio.FIRST_COMPLETED)
                for task in done & tasks:
                    tasks.discard(task)
                    idle_since.append(time.monotonic())
                    task.result()
    except QueueClosed:
        pass
    finally:
        listener.shutdown(wait=False)
        end = time.monotonic() + _END_SECONDS
        try:
            # Half of the time at most: closing matters more than what is thrown away.
            await _cancel(tasks, _END_SECONDS / 2)
        finally:
            try:
                await asyncio.wait_for(actor.close(), end - time.monotonic())
            except Exception:
                log.exception("actor %d could not be closed", index)


async def fill_round(
    actor: AsyncActor,
    queue: SlotQueue,
    slots: Sequence[Slot],
    *,
    enough: int | None,
    timeout: float,
) -> None:
    """Fill these slots, turn by turn with a learner.

    enough: as soon as so many samples are ready, those under way are interrupted; None: never.
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
                    queue.waited_for(),
                    "look at the engine's log, or raise queue.timeout_seconds",
                )
            if any(task.exception() is not None for task in done):
                break
            if enough is not None and not interrupted and queue.counts()["ready"] >= enough:
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
        """The coroutine's result; tasks that other coroutines left go on meanwhile."""
        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.get_loop().run_until_complete(work)

    def close(self) -> None:
        """End what is left on it; idempotent."""
        if self._runner is not None:
            with contextlib.suppress(RuntimeError):
                self._runner.close()
            self._runner = None
