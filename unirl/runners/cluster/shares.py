"""What one node agent runs, and those who start agents."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from unirl.core.pool import Resources
from unirl.runners.cluster.agent import AgentSetup
from unirl.runners.cluster.placement import Ask, Node, total
from unirl.runners.plan import Plan
from unirl.supervision.restarts import Restarts

Members = tuple[tuple[int, ...], ...]
"""The numbers of members, by pool."""


class Handle(Protocol):
    """An agent that was started."""

    def poll(self) -> Exception | None: ...
    def kill(self) -> None: ...


class Cluster(Protocol):
    """What starts agents."""

    def nodes(self) -> list[Node]: ...
    def check(self) -> None: ...
    def want(self, asks: Sequence[Resources]) -> None: ...
    def start_agent(self, node: str, wanted: Resources, setup: AgentSetup) -> Handle: ...
    def close(self) -> None: ...


@dataclass(eq=False)
class Share:
    """What one agent runs, wherever it is."""

    asks: list[Ask]
    restarts: Restarts
    node: str = ""
    agent: int = -1
    handle: Handle | None = None
    started_at: float = 0.0
    is_connected: bool = False
    """Whether its agent has connected."""
    lost_at: float = 0.0
    """Since when it has been without a node."""
    left_at: float = 0.0
    """Since when its agent is to end, when its members have finished what they hold."""
    num_agents: int = 0
    """That its members have had so far."""
    reserved: Resources = field(default_factory=lambda: Resources(0.0))
    """What its agent holds of its node."""
    assigned: Members = ()
    """The members that its agent knows of."""

    def members(self, num_pools: int) -> Members:
        """The numbers of its members."""
        return tuple(
            tuple(number for ask in self.asks if ask.pool == index for number in ask.numbers)
            for index in range(num_pools)
        )

    def lose(self) -> None:
        """It has no agent from now on."""
        self.agent, self.handle, self.lost_at = -1, None, time.monotonic()
        self.node, self.reserved = "", Resources(0.0)


def asks_of(plan: Plan) -> list[Ask]:
    """What is to be placed: each member; those that share helpers together, and with them."""
    asks = []
    for index, pool in enumerate(plan.pools):
        size, num_learners = pool.bounds[0], len(plan.learners_of(pool))
        everyone = range(size * num_learners)
        groups: list[tuple[int, ...]] = [(number,) for number in everyone]
        if pool.helpers is not None:
            groups = [tuple(everyone[first::size]) for first in range(size)]
        for group in groups:
            one, times, cpus = pool.resources, len(group), 0.0
            if pool.helpers is not None:  # every size-th one from the group's first number on
                cpus = pool.helpers.cpus * len(range(group[0], pool.helpers.count, size))
            wanted = Resources(
                one.cpus * times + cpus, one.gpus * times, one.memory_gib * times, one.labels
            )
            asks.append(Ask(index, pool.name, group, wanted))
    return asks


def most_wanted(plan: Plan) -> Resources:
    """What its members ask for when there are as many as the run may be given: one for a slot."""
    asks = asks_of(plan)
    for index, pool in enumerate(plan.pools):
        slots = plan.learners[plan.learners_of(pool)[0]].queue.num_slots
        if pool.helpers is None:
            more = range(slots - pool.bounds[0])
            asks += [Ask(index, pool.name, (number,), pool.resources) for number in more]
    return total(asks)


def names_of(asks: Sequence[Ask]) -> str:
    """ "actor 0, 2" """
    pools: dict[str, list[int]] = {}
    for ask in asks:
        pools.setdefault(ask.name, []).extend(ask.numbers)
    return "; ".join(f"{name} {', '.join(map(str, found))}" for name, found in pools.items())
