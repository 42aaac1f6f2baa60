"""The environments' half of an unroll: steps them and writes what they give into a slot's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unirl.core.seeding import derive_seed
from unirl.core.tree import tree_map
from unirl.envs.guard import failed
from unirl.envs.obs_check import check_finite
from unirl.envs.spaces import action_fields, write_obs
from unirl.envs.vector import EnvStep, VectorEnv

Select = slice | NDArray[np.intp]
"""Which environments: all, or these."""
ALL = slice(None)


class UnrollRows:
    """A slot's memory cut into rows once, so that a step writes without looking anything up."""

    def __init__(self, data: Mapping[str, Any], length: int) -> None:
        self.data, self.length = data, length
        self.obs = [tree_map(lambda leaf, t=t: leaf[t], data["obs"]) for t in range(length + 1)]
        self.action = [tree_map(lambda leaf, t=t: leaf[t], data["action"]) for t in range(length)]
        self.action_array = [tree_map(lambda leaf: leaf.numpy(), row) for row in self.action]
        self.logp = data["logp"].unbind(0)
        self.reward, self.mask = data["reward"].numpy(), data["mask"].numpy()
        self.terminated, self.truncated = data["terminated"].numpy(), data["truncated"].numpy()
        self.episode_return, self.episode_length = (
            data["episode_return"].numpy(),
            data["episode_length"].numpy(),
        )
        self.carry = data["carry"].numpy()


class SteppedEnvs:
    """B environments, their running totals, and the observation they stand at.

    gamma is only used for `carry`, the running discounted return that reward scaling needs.
    """

    def __init__(self, env: VectorEnv, *, gamma: float, env_id: str = "") -> None:
        self.env, self._gamma, self._env_id = env, gamma, env_id
        self.obs: Any = None
        """The newest observation of each environment: the next row's."""
        self.acting_obs: Any = None
        """What to act on where that differs (same-step engines), else None."""
        self.fillers: NDArray[np.bool_] | None = None
        """Rows of the last step that were fillers, whose next row begins an episode; None: none."""

    def restart(self, seed: int) -> None:
        num_envs = self.env.num_envs
        self.obs = self.env.reset(derive_seed(seed, "environments") % 2**32)
        self.acting_obs = self.fillers = None
        self._returns = np.zeros(num_envs, np.float32)
        self._lengths = np.zeros(num_envs, np.int32)
        self._carry = np.zeros(num_envs, np.float32)

    def write_first(self, rows: UnrollRows, env_rows: Select = ALL) -> None:
        """Put the observation that the environments stand at into row 0."""
        write_obs(rows.obs[0], _select(self.obs, env_rows))

    def step(self, rows: UnrollRows, t: int) -> None:
        """Take the actions of row t and write all that follows from them, the observation of row
        t + 1 included.
        """
        self.step_splits(rows.action_array[t], [(rows, t, ALL)])

    def step_splits(self, action: Any, splits: Sequence[tuple[UnrollRows, int, Select]]) -> None:
        """The same with the environments' rows spread over several slots: each split is a slot,
        its row t, and which environments it holds.
        """
        for rows, t, env_rows in splits:
            if t == 0:
                rows.carry[:] = self._carry[env_rows]
        try:
            step = self.env.step(action)
        except SystemExit as error:
            raise failed(self._env_id, error, "in a step") from error
        self._account(step)
        for rows, t, env_rows in splits:
            self._write(rows, t, env_rows, step)

    def _account(self, step: EnvStep) -> None:
        self.obs = step.obs
        self.acting_obs = None if step.acting_obs is step.obs else step.acting_obs
        self._returns += step.reward
        self._lengths += 1
        self._carry *= self._gamma
        self._carry += step.reward
        ended = step.terminated | step.truncated
        if ended.any():  # fillers keep this 0: they have no reward
            self._carry[ended] = 0.0
        self.fillers = None
        if not step.mask.all():
            self.fillers = ~step.mask
            self._returns[self.fillers] = 0.0
            self._lengths[self.fillers] = 0

    def _write(self, rows: UnrollRows, t: int, env_rows: Select, step: EnvStep) -> None:
        write_obs(rows.obs[t + 1], _select(step.obs, env_rows))
        rows.reward[t], rows.terminated[t], rows.truncated[t] = (
            step.reward[env_rows],
            step.terminated[env_rows],
            step.truncated[env_rows],
        )
        rows.mask[t], rows.episode_return[t], rows.episode_length[t] = (
            step.mask[env_rows],
            self._returns[env_rows],
            self._lengths[env_rows],
        )
        if t == rows.length - 1:
            check_finite(rows.data["obs"], rows.data["reward"], self._env_id)

    def close(self) -> None:
        self.env.close()


def no_actions(env: VectorEnv) -> Any:
    """A tree of arrays for one row of actions of all environments, to be written to."""
    fields = action_fields(env.action_space, env.num_envs)
    return tree_map(lambda leaf: torch.empty(leaf[0], dtype=leaf[1]).numpy(), fields)


def put(actions: Any, env_rows: Select, some: Any) -> None:
    """Write the actions of these environments into those of all."""
    if isinstance(actions, Mapping):
        for name, part in actions.items():
            put(part, env_rows, some[name])
    else:
        actions[env_rows] = some


def _select(tree: Any, env_rows: Select) -> Any:
    if env_rows is ALL:
        return tree
    if isinstance(tree, Mapping):
        return {key: _select(child, env_rows) for key, child in tree.items()}
    return tree[env_rows]
