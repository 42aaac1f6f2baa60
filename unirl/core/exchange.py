"""Where environment workers and the actors that decide for them meet, as a runner sees it.

An environment worker holds no policy: it steps environments and writes what they give into the
slots of an actor, which computes the actions (Sample Factory, arXiv 2006.11751).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from unirl.core.queue import SlotQueue


class Exchange(Protocol):
    """Where environment workers and the actors that decide for them meet, as a runner sees it.

    A runner calls `worker_died` and `actor_died` when the process is gone for good, before it
    starts another in its place.
    """

    def workers_of(self, actor: int) -> Sequence[int]:
        """The workers that an actor decides for: without it they cannot go on."""

    def actors_of(self, worker: int) -> Sequence[int]:
        """The actors that decide for a worker."""

    def worker_died(self, worker: int, reason: str) -> None:
        """Have its unfinished samples discarded for this reason, by the actors that hold them."""

    def actor_died(self, actor: int) -> None:
        """Forget its unfinished samples; its workers are dead too."""

    def late_workers(self, seconds: float) -> Sequence[int]:
        """Workers that have owed an answer for longer than this."""

    def late_actors(self, seconds: float) -> Sequence[int]:
        """Actors that have shown no sign of life for longer than this."""


@dataclass(frozen=True)
class WorkerContext:
    """What a runner tells an environment worker."""

    index: int
    seed: int
    exchange: Exchange
    queues: Sequence[SlotQueue]
    """One per policy."""


@dataclass(frozen=True)
class EnvWorkers:
    """Processes that step environments and write into the slots of actors that decide for them."""

    num_workers: int
    make_exchange: Callable[[], Exchange]
    serve: Callable[[WorkerContext], None]
    """The main function of a worker: picklable; raises QueueClosed when the run is over."""
    step_timeout: float
    """Seconds after which a worker that owes a step is killed and replaced."""
