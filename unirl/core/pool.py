"""Who produces samples: pools of like actors, and the processes that help them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from unirl.core.actor import ActorContext, AnyActor
from unirl.core.queue import Event, SlotBuffers
from unirl.core.transport import Transport
from unirl.errors import UniRLError


class HelperLayout(Protocol):
    """Which helper works for which actors. Actors are numbered through, learner by learner."""

    def workers_of(self, actor: int) -> list[int]:
        """The helpers of an actor."""

    def actors_of(self, worker: int) -> list[int]:
        """The actors of a helper, learner by learner."""


class HelperHandshake(Protocol):
    """Where actors and their helpers meet, as a runner sees it."""

    @property
    def layout(self) -> HelperLayout:
        """Who works for whom."""

    @property
    def actor_events(self) -> Sequence[Event]:
        """One for each actor."""

    def worker_died(self, worker: int, reason: str) -> None:
        """Have its unfinished samples discarded for this reason, by the actors that hold them."""

    def actor_died(self, actor: int) -> None:
        """Forget its unfinished samples; its helpers are dead too."""

    def late_workers(self, seconds: float) -> list[int]:
        """Helpers that have owed an answer for longer than this."""


@dataclass(frozen=True)
class HelperContext:
    """What a runner passes to a helper."""

    index: int
    seed: int
    handshake: Any
    slots: Sequence[SlotBuffers]
    """One for each learner that the pool feeds."""


@dataclass(frozen=True)
class Helpers:
    """Processes that fill some fields of their actors' slots, such as environment workers (Sample
    Factory, arXiv 2006.11751).
    """

    count: int
    make_handshake: Callable[[Transport], HelperHandshake]
    serve: Callable[[HelperContext], None]
    """The main function of a helper: picklable; raises QueueClosed when the run is over."""
    step_timeout: float
    """Seconds after which a helper that owes an answer is killed and replaced."""
    role: str = "environment worker"
    """What messages and logs call one."""
    cpus: float = 1.0
    """That one needs, on the machine of its actors: see Resources."""


@dataclass(frozen=True)
class Resources:
    """What one member of a pool needs, for runners that place members on machines. The inline and
    the processes runner have one machine and no choice.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    memory_gib: float = 0.0
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that the machine must have."""
    beside_learner: bool = False
    """On the machine of the learner's process."""


@dataclass(frozen=True)
class Pool:
    """Like actors that feed one learner, or each of several learners that play together.

    Pool(make_actor, count=4). The factory is a module-level function or class, or a
    functools.partial of one.
    """

    make_actor: Callable[[ActorContext], AnyActor]
    name: str = "actor"
    """What messages call a member: "actor 3"."""
    count: int | tuple[int, int] = 1
    """Members for each learner. A pair: at least, and at most; it begins with the least."""
    share: float = 1.0
    """Of what its learner learns, in proportion to the other pools' shares."""
    learners: tuple[str, ...] = ()
    """Names of the learners that it feeds; empty: the plan's first."""
    helpers: Helpers | None = None
    """Only where each process has a role of its own; the inline runner has none."""
    resources: Resources = field(default_factory=Resources)
    preload: tuple[str, ...] = ()
    """Modules of others that actors import late and that take long: loaded once for all members and
    their restarts. Importing them must start no thread.
    """

    keeps: bool = False
    """Whether the factory takes `folder`, where its members may leave files of the run."""

    def __post_init__(self) -> None:
        low, high = self.bounds
        if not 1 <= low <= high:
            raise UniRLError(
                f"pool {self.name!r} has {self.count} members",
                "1 <= least <= most must hold",
                "set its count to 1, say",
            )
        if self.share <= 0:
            raise UniRLError(
                f"pool {self.name!r} has share {self.share}",
                "a share must be > 0",
                "leave the pool out, or set its share to 1",
            )
        if self.helpers is not None and low != high:
            raise UniRLError(
                f"pool {self.name!r} has helpers and between {low} and {high} members",
                "helpers are assigned to a fixed number of members",
                f"set its count to {high}",
            )

    @property
    def bounds(self) -> tuple[int, int]:
        """Fewest and most members for each learner."""
        return (self.count, self.count) if isinstance(self.count, int) else self.count
