"""Environment workers: processes that step environments and hold no policy (Sample Factory, arXiv
2006.11751). What a plan says of them, and what a runner tells them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unirl.core.exchange import Exchange
from unirl.core.slot_queue import SlotQueue


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
