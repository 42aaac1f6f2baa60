"""How large a simulated cluster is, and how long things take in it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from unirl.config.rules import check_positive, check_setting
from unirl.core.queue import QueueConfig
from unirl.errors import UniRLError
from unirl.transports.slot_table import MAX_MEMBERS


@dataclass(frozen=True)
class ClusterShape:
    """How large the cluster is, and how long things take in it."""

    members: int = 64
    """Actors in all."""
    members_per_node: int = 16
    """A node is one member of the queue: its agent holds the leases of its actors."""
    batch_size: int = 0
    """Slots per update. 0: so many that all actors can work while the learner does."""
    max_staleness: int = 2
    """How many updates old a sample may be."""
    window: int | None = None
    """How far a finished slot may overtake slower ones; none: whichever is finished first."""
    unroll_seconds: float = 1.0
    """How long an actor needs for one slot, on average."""
    unroll_spread: float = 0.2
    """Standard deviation of that, as a share of it."""
    lease_seconds: float = 0.001
    """From an agent's request for a slot to its answer, beside what the server works for it."""
    slot_kb: float = 564.0
    """Bytes of a slot: 564 KB are 20 steps of 84 x 84 x 4 pixels."""
    connection_kb_per_ms: float = 1128.0
    """What one connection carries. 564 KB in 0.5 ms was measured on one machine."""
    receive_ms_per_mb: float = 0.9
    """Core time of the learner's process for what it receives: 0.5 ms for 564 KB."""
    receive_cores: int = 4
    """Cores that the learner's process has for that."""
    network_gbit: float = 25.0
    """Of the learner's node, for each direction."""
    weights_mb: float = 7.0
    """Bytes of one version of the weights."""
    learner_seconds: float = 0.01
    """One update, whatever its batch."""
    learner_ms_per_slot: float = 0.1
    """What each slot of the batch adds to it."""
    silent_nodes: int = 0
    """Nodes that fall silent, spread over the updates: they are replaced, and what they were doing
    comes too late.
    """
    updates: int = 20
    """How many updates are counted."""
    warm_updates: int = 0
    """How many come before. 0: a third of these. All actors are through their first unroll, and
    weights have begun to limit, after max_staleness of them.
    """
    seed: int = 1
    """Everything random is derived from it."""

    def __post_init__(self) -> None:
        for name, minimum in (
            ("members", 1), ("members_per_node", 1), ("batch_size", 0), ("receive_cores", 1),
            ("updates", 1), ("warm_updates", 0), ("silent_nodes", 0), ("unroll_spread", 0),
        ):  # fmt: skip
            flag, value = f"--{name.replace('_', '-')}", getattr(self, name)
            rule, remedy = f"must be >= {minimum}", f"set it to {minimum} or more"
            check_setting(value >= minimum, flag, value, rule, remedy)
        for name in ("unroll_seconds", "connection_kb_per_ms", "network_gbit"):
            remedy = "leave it out for what was measured"
            check_positive(f"--{name.replace('_', '-')}", getattr(self, name), remedy)
        if self.num_nodes > MAX_MEMBERS:
            raise UniRLError(
                f"{self.members} actors are on {self.num_nodes} nodes",
                f"the queue has room for {MAX_MEMBERS} members, and each node's agent is one",
                f"use --members-per-node {math.ceil(self.members / MAX_MEMBERS)}",
            )

    @property
    def num_nodes(self) -> int:
        return math.ceil(self.members / self.members_per_node)

    @property
    def queue(self) -> QueueConfig:
        """While a batch is learned its slots are held; the others are one for each actor."""
        batch_size = self.batch_size or math.ceil(self.members / max(1, self.max_staleness))
        return QueueConfig(batch_size, self.max_staleness, self.window, timeout_seconds=1e9)
