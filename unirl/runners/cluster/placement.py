"""Which member runs on which node: spread, as far as what each asks for allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from unirl.core.pool import Resources
from unirl.errors import UniRLError


@dataclass
class Node:
    """One machine of a cluster, and what of it is not taken."""

    id: str
    name: str
    """What messages call it: its address."""
    cpus: float
    gpus: float = 0.0
    memory_gib: float = 0.0
    labels: dict[str, str] = field(default_factory=dict)
    is_drained: bool = False
    """It is about to go: nothing new is placed there."""
    total: Resources | None = None
    """All that it has, taken or not; None where that is not known."""

    def fits(self, wanted: Resources) -> bool:
        """Whether it has what is asked for."""
        return (
            not self.is_drained
            and wanted.cpus <= self.cpus + 1e-9
            and wanted.gpus <= self.gpus + 1e-9
            and wanted.memory_gib <= self.memory_gib + 1e-9
            and all(self.labels.get(key) == value for key, value in wanted.labels.items())
        )

    def reserve(self, held: Sequence[Resources]) -> None:
        """No more is left than these leave of all that it has. The cluster's own account comes
        late: an agent that was started just now is not in it.
        """
        if self.total is not None:
            all_of_it = self.total
            self.cpus = min(self.cpus, all_of_it.cpus - sum(one.cpus for one in held))
            self.gpus = min(self.gpus, all_of_it.gpus - sum(one.gpus for one in held))
            memory = all_of_it.memory_gib - sum(one.memory_gib for one in held)
            self.memory_gib = min(self.memory_gib, memory)

    def take(self, wanted: Resources) -> None:
        """It is taken from now on."""
        self.cpus -= wanted.cpus
        self.gpus -= wanted.gpus
        self.memory_gib -= wanted.memory_gib

    def give(self, back: Resources) -> None:
        """It is not taken any more."""
        self.cpus += back.cpus
        self.gpus += back.gpus
        self.memory_gib += back.memory_gib

    def describe(self) -> str:
        """What it has left, for people."""
        parts = [f"{self.cpus:g} CPUs"]
        if self.gpus:
            parts.append(f"{self.gpus:g} GPUs")
        parts.append(f"{self.memory_gib:.1f} GiB")
        parts += [f"{key}={value}" for key, value in self.labels.items() if "ray.io" not in key]
        return f"{self.name} has {', '.join(parts)}{', and is drained' * self.is_drained}"


@dataclass(frozen=True)
class Ask:
    """What is to be placed on one node: a member, or members that share helpers."""

    pool: int
    name: str
    numbers: tuple[int, ...]
    resources: Resources

    def describe(self) -> str:
        """What it asks for, for people."""
        wanted = self.resources
        parts = [f"{wanted.cpus:g} CPUs"]
        if wanted.gpus:
            parts.append(f"{wanted.gpus:g} GPUs")
        if wanted.memory_gib:
            parts.append(f"{wanted.memory_gib:g} GiB")
        parts += [f"{key}={value}" for key, value in wanted.labels.items()]
        return f"{self.name} {', '.join(map(str, self.numbers))} asks for {', '.join(parts)}"


class CannotPlace(UniRLError):
    """No node has what something asks for."""


def total(asks: Sequence[Ask]) -> Resources:
    """What several ask for together."""
    return Resources(
        sum(ask.resources.cpus for ask in asks),
        sum(ask.resources.gpus for ask in asks),
        sum(ask.resources.memory_gib for ask in asks),
    )


def place_together(asks: Sequence[Ask], nodes: Sequence[Node]) -> dict[str, list[Ask]]:
    """All on the first node that has what they ask for; empty where none has."""
    for node in nodes:
        if node.fits(total(asks)) and all(node.fits(ask.resources) for ask in asks):
            return {node.id: list(asks)}
    return {}


def place(asks: Sequence[Ask], nodes: Sequence[Node]) -> dict[str, list[Ask]]:
    """By a node's id, what it is to run; the nodes' resources are taken. Raises CannotPlace."""
    placed: dict[str, list[Ask]] = {node.id: [] for node in nodes}
    missing: list[Ask] = []
    # The greedy come first: what asks for little finds a place last, too.
    for ask in sorted(asks, key=lambda ask: (-ask.resources.gpus, -ask.resources.cpus)):
        fitting = [node for node in nodes if node.fits(ask.resources)]
        if not fitting:
            missing.append(ask)
            continue
        node = min(fitting, key=lambda node: (len(placed[node.id]), -node.cpus))
        node.take(ask.resources)
        placed[node.id].append(ask)
    if missing:
        shown = "; ".join(ask.describe() for ask in missing[:4])
        shown += f"; and {len(missing) - 4} more" if len(missing) > 4 else ""
        left = "; ".join(node.describe() for node in nodes[:8]) or "there is no node"
        raise CannotPlace(
            f"{len(missing)} of {len(asks)} members find no place: {shown}",
            f"beside what is placed already, {left}",
            "start nodes that have it, use fewer members, or ask for less",
        )
    return {node: found for node, found in placed.items() if found}


def fits(asks: Sequence[Ask], nodes: Sequence[Node]) -> bool:
    """Whether there is a place for all; takes nothing."""
    try:
        place(asks, [replace(node) for node in nodes])
    except CannotPlace:
        return False
    return True


def place_again(
    asks: Sequence[Ask], nodes: Sequence[Node], has_failed: Callable[[str], bool]
) -> dict[str, list[Ask]]:
    """What a lost node had: together, or in parts where no node has room for all. A node that
    failed of late may be gone, and the cluster not know of it yet: it comes last. CannotPlace.
    """
    good = [node for node in nodes if not has_failed(node.id)]
    chosen = good if fits(asks, good) else nodes
    return place_together(asks, chosen) or place(asks, chosen)
