"""Who produces samples. An actor owns environments (or an inference engine) and a copy of the
policy, and never knows who learns.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from typing_extensions import TypeIs

from unirl.core.exchange import Exchange
from unirl.core.sample import Slot
from unirl.core.slot_queue import SlotQueue
from unirl.core.weights import WeightStore
from unirl.errors import UniRLError


class Actor(Protocol):
    """Fills slots one after the other.

    One that also has `restart(seed)`, which puts environments, recurrent state and random numbers
    where a new actor of this seed has them, is not made anew at the checkpoints of the inline
    runner.
    """

    def produce(self, slot: Slot) -> None:
        """Pull the newest weights, write a sample into `slot.data`, set the slot's versions."""

    def close(self) -> None:
        """Let go of environments and engines; idempotent."""


class AsyncActor(Protocol):
    """Fills many slots at once, all on one event loop: groups of completions, tools, agents."""

    async def produce(self, slot: Slot) -> None:
        """As Actor.produce, while other slots of the same actor are under way.

        Raises DiscardSlot, or ReissueSlot where the slot's ticket must be done again.
        """

    async def interrupt(self) -> None:
        """Make every `produce` under way end soon with ReissueSlot, keeping what it has; called
        where enough samples are ready and nothing can go on beside the learner.
        """

    async def close(self) -> None:
        """Let go of environments and engines; idempotent."""


@runtime_checkable
class StreamingActor(Protocol):
    """Fills many slots at a time and asks for them itself; it has a process of its own."""

    def serve(self, queue: SlotQueue) -> None:
        """Acquire, fill, commit or discard until the queue raises QueueClosed."""

    def close(self) -> None:
        """Let go of what it holds; idempotent."""


AnyActor: TypeAlias = Actor | AsyncActor | StreamingActor


def is_async(actor: AnyActor) -> TypeIs[AsyncActor]:
    """Whether its `produce` is a coroutine."""
    return inspect.iscoroutinefunction(getattr(actor, "produce", None))


def require_one_by_one(actor: AnyActor) -> Actor | AsyncActor:
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
    """What a runner tells an actor when it makes one."""

    index: int
    num_actors: int
    seed: int
    """Derived from the run's seed, the actor's index and how often it was restarted: no two actors
    share one.
    """
    weights: WeightStore
    exchange: Exchange | None = None
    """Where environment workers and actors meet; None: the actor owns its environments."""
    policy: int = 0
    """Which policy it acts with, where several play in the same environments; `index` counts the
    actors of this one.
    """
