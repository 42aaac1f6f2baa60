"""Several policies in the same environments, in one process: each has rows of its own, and a slot
of its own learner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from unirl.actors.env_worker import require_next_step
from unirl.actors.stepping import Select, SteppedEnvs, UnrollRows, no_actions, put
from unirl.core.sample import Slot
from unirl.core.seeding import derive_seed
from unirl.core.tree import copy_tree
from unirl.core.weights import WeightStore
from unirl.envs.config import EnvConfig
from unirl.envs.vector import VectorEnv
from unirl.metrics.timers import Timers
from unirl.policy import Policy, zero_state
from unirl.policy.recurrent import State


@dataclass
class Player:
    """One policy, its learner's weights, and the rows that it decides for."""

    policy: Policy
    weights: WeightStore
    env_rows: Select
    num_rows: int
    version: int = -1
    generator: torch.Generator = field(default_factory=torch.Generator)
    state: State = field(default_factory=dict)


class JointVectorActor:
    """See JointActor: one unroll of all environments, written to one slot for each player."""

    def __init__(
        self,
        env: VectorEnv,
        players: Sequence[Player],
        env_config: EnvConfig,
        *,
        unroll_length: int,
        gamma: float,
    ) -> None:
        require_next_step(env, env_config)
        self._envs = SteppedEnvs(env, gamma=gamma, env_id=env_config.id)
        self._players, self._length = players, unroll_length
        self.timers = Timers()
        self._action = no_actions(env)

    def restart(self, seed: int) -> None:
        """Begin again: environments, recurrent states, random numbers and running totals."""
        self._envs.restart(seed)
        for player in self._players:
            player.generator.manual_seed(derive_seed(seed, "actions"))
            player.state = player.policy.initial_state(player.num_rows)

    def produce_all(self, slots: Sequence[Slot]) -> None:
        self.timers.start()
        rows = [UnrollRows(slot.data, self._length) for slot in slots]
        for player, slot, unroll in zip(self._players, slots, rows, strict=True):
            player.version = player.weights.pull(player.policy, player.version)
            self.timers.lap("weights")
            slot.first_version = slot.last_version = player.version
            self._envs.write_first(unroll, player.env_rows)
            for name, value in player.state.items():
                slot.data["state"][name].copy_(value)
        for t in range(self._length):
            self._step(rows, t)
            slots[0].progress()

    def _step(self, rows: Sequence[UnrollRows], t: int) -> None:
        for player, unroll in zip(self._players, rows, strict=True):
            action, logp, player.state = player.policy.act(
                unroll.obs[t], player.state, generator=player.generator
            )
            copy_tree(action, unroll.action[t])
            unroll.logp[t].copy_(logp)
            put(self._action, player.env_rows, unroll.action_array[t])
        self.timers.lap("inference")
        splits = [
            (unroll, t, player.env_rows) for player, unroll in zip(self._players, rows, strict=True)
        ]
        self._envs.step_splits(self._action, splits)
        self.timers.lap("env")
        for player, unroll in zip(self._players, rows, strict=True):
            if player.state and not unroll.mask[t].all():
                player.state = zero_state(player.state, torch.from_numpy(~unroll.mask[t]))

    def close(self) -> None:
        """Close the environments."""
        self._envs.close()
