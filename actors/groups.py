"""The groups of environments of policy workers in one process, one after the other: what the inline
runner runs for debugging. Samples are those of the workers, bit for bit, where these decide for
each group on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unirl.actors.env_worker import group_seed
from unirl.actors.joint import JointVectorActor, Player
from unirl.actors.sampler import SamplerConfig
from unirl.actors.vector import VectorActor
from unirl.core.actor import ActorContext
from unirl.core.sample import Slot
from unirl.core.seeding import derive_seed
from unirl.envs.config import EnvConfig
from unirl.envs.make import make_vec, spaces
from unirl.envs.vector import VectorEnv
from unirl.metrics.timers import Timers
from unirl.policy import Policy, PolicyConfig


class GroupsActor:
    """See Actor and JointActor: each sample is the next group's unroll."""

    def __init__(
        self, groups: Sequence[VectorActor | JointVectorActor], workers: Sequence[int]
    ) -> None:
        self._groups, self._workers, self._num_produced = groups, workers, 0
        self.timers = Timers()
        for group in groups:
            group.timers = self.timers

    def restart(self, seed: int) -> None:
        num_groups = len(self._groups) // len(self._workers)
        seeds = _group_seeds(seed, self._workers, num_groups)
        for group, new_seed in zip(self._groups, seeds, strict=True):
            group.restart(new_seed)
        self._num_produced = 0

    def produce(self, slot: Slot) -> None:
        self.produce_all([slot])

    def produce_all(self, slots: Sequence[Slot]) -> None:
        group = self._groups[self._num_produced % len(self._groups)]
        self._num_produced += 1
        if isinstance(group, VectorActor):
            group.produce(slots[0])
        else:
            group.produce_all(slots)

    def close(self) -> None:
        """Close all environments."""
        for group in self._groups:
            group.close()


def make_groups(
    context: ActorContext,
    *,
    env: EnvConfig,
    policy: PolicyConfig,
    sampler: SamplerConfig,
    gamma: float,
) -> GroupsActor:
    """The actor with all groups of its workers."""
    workers = sampler.layout().workers_of(context.index)
    modules = [
        Policy(*spaces(env), policy, seed=context.seed % 2**31).eval()
        for _ in range(sampler.num_policies)
    ]

    def make_group(vector_env: VectorEnv, seed: int) -> VectorActor | JointVectorActor:
        length = sampler.unroll_length
        if len(modules) == 1:
            return VectorActor(
                vector_env,
                modules[0],
                context.weights,
                unroll_length=length,
                gamma=gamma,
                seed=seed,
                env_id=env.id,
            )
        players = []
        for i, (module, weights) in enumerate(zip(modules, context.all_weights, strict=True)):
            env_rows = sampler.rows_of(i)
            players.append(Player(module, weights, np.array(env_rows), len(env_rows)))
        group = JointVectorActor(vector_env, players, env, unroll_length=length, gamma=gamma)
        group.restart(seed)
        return group

    seeds = _group_seeds(context.seed, workers, sampler.num_groups)
    groups = _make_all(env, sampler.num_envs, seeds, make_group)
    return GroupsActor(groups, workers)


def _make_all(
    env: EnvConfig, num_envs: int, seeds: Sequence[int], make: Callable[[VectorEnv, int], Any]
) -> list[Any]:
    """One group for each seed; none is left open where one fails."""
    groups: list[Any] = []
    try:
        for seed in seeds:
            vector_env = make_vec(env, num_envs)
            try:
                groups.append(make(vector_env, seed))
            except BaseException:
                vector_env.close()
                raise
    except BaseException:
        for group in groups:
            group.close()
        raise
    return groups


def _group_seeds(actor_seed: int, workers: Sequence[int], num_groups: int) -> list[int]:
    """A seed for each group of these workers, as the processes runner's workers have them."""
    return [
        group_seed(derive_seed(actor_seed, "worker", worker), group)
        for worker in workers
        for group in range(num_groups)
    ]
