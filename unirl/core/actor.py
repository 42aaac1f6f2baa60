"""What produces samples. An actor owns environments (or an inference engine) and a copy of the
policy, and never knows who learns.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from typing_extensions import TypeIs

from unirl.core.queue import QueueClient
from unirl.core.sample import Slot
from unirl.core.weights import WeightStore
from unirl.errors import UniRLError


class Actor(Protocol):
    """Fills slots one after the other.

    One that also has `restart(seed)`, which puts environments, recurrent state and random numbers
    where a new actor of this seed has them, is not replaced at the checkpoints of the inline
    runner.
    """

    def produce(self, slot: Slot) -> None:
        """Pull the newest weights, write a sample into `slot.data`, set the slot's versions."""

    def close(self) -> None:
        """Let go of environments and engines; idempotent."""


class AsyncActor(Protocol):
    """Fills many slots at once, all on one event loop: groups of completions, tools, agents."""

    async def produce(self, slot: Slot) -> None:
        """As Actor.produce, while other slots of the same actor are in flight.

        Raises DiscardSlot, or ReissueSlot where the slot's ticket must be done again.
        """

    async def interrupt(self) -> None:
        """Make every `produce` in flight end soon with ReissueSlot, keeping what it has; called
        where enough samples are committed and nothing can run beside the learner.
        """

    async def close(self) -> None:
        """Let go of environments and engines; idempotent."""


@runtime_checkable
class StreamingActor(Protocol):
    """Fills many slots at a time and asks for them itself; it has a process of its own."""

    def serve(self, queue: QueueClient) -> None:
        """Acquire, fill, commit or discard until the queue raises QueueClosed."""

    def close(self) -> None:
        """Let go of what it holds; idempotent."""


@runtime_checkable
class JointActor(Protocol):
    """Fills one slot of each learner at once: players of one game that learn apart."""

    def produce_all(self, slots: Sequence[Slot]) -> None:
        """As Actor.produce, for one slot of each learner that its pool feeds, in their order."""

    def close(self) -> None:
        """Let go of environments and engines; idempotent."""


AnyActor: TypeAlias = Actor | AsyncActor | StreamingActor | JointActor


def is_async(actor: AnyActor) -> TypeIs[AsyncActor]:
    """Whether its `produce` is a coroutine."""
    return inspect.iscoroutinefunction(getattr(actor, "produce", None))


def require_one_by_one(actor: AnyActor) -> Actor | AsyncActor | JointActor:
    """The actor itself; UniRLError for one that asks for slots itself."""
    if isinstance(actor, StreamingActor):
        raise UniRLError(
            f"{type(actor).__name__} fills many slots at a time",
            "the inline runner hands them out itself",
            "set runner.kind to processes",
        )
    return actor


@dataclass(frozen=True)
class ActorContext:
    """What a runner passes to an actor's factory."""

    index: int
    """Its number within the pool, among those that feed the same learner."""
    seed: int
    """Derived from the run's seed, the actor's number and how often it was restarted: no two actors
    share one.
    """
    weights: WeightStore
    """Of the learner that it acts for."""
    learner: int = 0
    """Which of the learners that its pool feeds: 0 is the first."""
    all_weights: Sequence[WeightStore] = ()
    """Of all learners that its pool feeds: what a JointActor pulls."""
    handshake: Any = None
    """Where it meets its pool's helpers; None: it has none, and owns its environments."""
