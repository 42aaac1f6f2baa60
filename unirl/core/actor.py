"""Who produces samples. An actor owns environments (or an inference engine) and a copy of the
policy, and never knows who learns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from unirl.core.sample import Slot
from unirl.core.weights import WeightStore


class Actor(Protocol):
    """Fills slots one after the other."""

    def produce(self, slot: Slot) -> None:
        """Pull the newest weights, write a sample into `slot.data`, set the slot's versions."""

    def close(self) -> None:
        """Let go of environments and engines; idempotent."""


class Restartable(Protocol):
    """An actor that can begin anew from a seed: what an exact resume of the inline runner needs."""

    def restart(self, seed: int) -> None:
        """Reset environments, recurrent state and random numbers to what a new actor of this seed
        has.
        """


class AsyncActor(Protocol):
    """Fills many slots at once: groups of completions, tools, agents."""

    async def produce(self, slot: Slot) -> None:
        """As Actor.produce, while other slots of the same actor are under way."""

    async def close(self) -> None:
        """Let go of environments and engines; idempotent."""


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
