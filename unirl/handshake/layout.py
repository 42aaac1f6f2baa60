"""Which environment worker steps which groups of environments, and which actors decide for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HandshakeLayout:
    """Which groups of environments there are, and which actor decides for which split of them.

    Group g of worker w is number w * num_groups + g. Each group has a split for each policy:
    the rows (environments, or agents of them) that this policy decides for, in a slot of its queue.
    Split = group * num_policies + policy. Actors are numbered through: policy * num_actors + i, and
    the i-th of each policy decides for the workers i, i + num_actors, ...
    """

    num_workers: int
    num_groups: int
    num_actors: int = 1
    """Of each policy."""
    num_policies: int = 1

    @property
    def num_splits(self) -> int:
        """Splits of all groups of all workers."""
        return self.num_workers * self.num_groups * self.num_policies

    def groups_of(self, worker: int) -> list[int]:
        """Numbers of a worker's groups."""
        return [worker * self.num_groups + g for g in range(self.num_groups)]

    def splits_of_group(self, group: int) -> list[int]:
        """A group's splits, policy by policy."""
        return [group * self.num_policies + p for p in range(self.num_policies)]

    def splits_of_worker(self, worker: int) -> list[int]:
        """All splits that a worker steps."""
        return [split for group in self.groups_of(worker) for split in self.splits_of_group(group)]

    def splits_of_actor(self, actor: int) -> list[int]:
        """All splits that an actor decides for."""
        policy = actor // self.num_actors
        return [
            group * self.num_policies + policy
            for worker in self.workers_of(actor)
            for group in self.groups_of(worker)
        ]

    def workers_of(self, actor: int) -> list[int]:
        """Workers that an actor decides for."""
        return list(range(actor % self.num_actors, self.num_workers, self.num_actors))

    def actors_of(self, worker: int) -> list[int]:
        """The actors that decide for a worker, policy by policy."""
        return [p * self.num_actors + worker % self.num_actors for p in range(self.num_policies)]

    def worker_of(self, split: int) -> int:
        """The worker that steps a split."""
        return split // self.num_policies // self.num_groups

    def actor_of(self, split: int) -> int:
        """The actor that decides for a split."""
        policy = split % self.num_policies
        return policy * self.num_actors + self.worker_of(split) % self.num_actors
