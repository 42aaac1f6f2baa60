"""A group in flight, saved in its slot as far as it is: should its engine be lost, the ticket is
issued again, and another engine continues with the tokens, versions and log-probabilities there.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from unirl.core.sample import Slot
from unirl.errors import LeaseExpired, QueueClosed
from unirl.llm.engine import Completion, Engine, Request
from unirl.llm.group import completions_of, read_group, write_group
from unirl.llm.outcome import Score

_SHARE = 0.02
"""Of an engine's time that saving may take: long completions are saved less often."""
_NOTHING = Completion((), (), (), "aborted")


class GroupSaver:
    """Saves every `seconds` (0: never) from `start` to `close`. num_groups: of this engine, in
    flight.
    """

    def __init__(
        self,
        engine: Engine,
        slot: Slot,
        prompt: tuple[int, ...],
        seconds: float,
        num_groups: Callable[[], int],
    ) -> None:
        self._engine, self._slot, self._prompt, self._seconds = engine, slot, prompt, seconds
        self._num_groups = num_groups
        self._requests: Sequence[Request] = ()
        self._ended: dict[str, Completion] = {}
        self._num_saved = 0
        self._task: asyncio.Task[None] | None = None

    def saved(self) -> list[Completion | None] | None:
        """What another engine has left in the slot; None for what was not begun."""
        if not self._slot.is_saved:
            return None
        group = read_group(self._slot.data)
        if tuple(group.prompt.tolist()) != self._prompt:
            return None
        return [one if one.tokens else None for one in completions_of(group)]

    def start(self, requests: Sequence[Request]) -> None:
        """These are the group's."""
        self._requests = requests
        if self._seconds > 0:
            self._task = asyncio.create_task(self._run())

    def end(self, request: Request, completion: Completion) -> None:
        """The engine has ended this one."""
        self._ended[request.id] = completion

    def close(self) -> None:
        """Nothing more is saved; what was stays. Idempotent."""
        if self._task is not None:
            self._task.cancel()

    def forget(self) -> None:
        """The slot is written to next: what was saved is not valid any more."""
        if self._slot.is_saved:
            with contextlib.suppress(LeaseExpired, QueueClosed):  # its commit will say so
                self._slot.save(None)

    async def _run(self) -> None:
        with contextlib.suppress(LeaseExpired, QueueClosed):
            took = 0.0
            while True:
                await asyncio.sleep(max(self._seconds, took * self._num_groups() / _SHARE))
                started = time.monotonic()
                found = [self._so_far(request) for request in self._requests]
                if (number := sum(len(one.tokens) for one in found)) > self._num_saved:
                    self._num_saved = number
                    self._slot.save(lambda found=found: self._write(found))  # type: ignore[misc]
                took = time.monotonic() - started

    def _so_far(self, request: Request) -> Completion:
        found = self._ended.get(request.id) or self._engine.so_far(request.id)
        return found or request.partial or _NOTHING

    def _write(self, found: Sequence[Completion]) -> int:
        data = self._slot.data
        none = [[Score()] * data["reward"].shape[-1]] * len(found)
        return write_group(data, self._prompt, found, none)
