"""The vector actor: unrolls a policy over vectorised environments, straight into the slot (IMPALA,
arXiv 1802.01561, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from numpy.typing import NDArray

from unirl.actors.memory import check_memory
from unirl.core.actor import ActorContext
from unirl.core.errors import UniRLError
from unirl.core.sample import Field, SampleSpec, Slot
from unirl.core.seeding import derive_seed
from unirl.core.tree import tree_map
from unirl.core.weights import WeightStore
from unirl.envs.config import EnvConfig
from unirl.envs.guard import check_finite
from unirl.envs.make import make_vec
from unirl.envs.spaces import action_field, obs_fields, write_obs
from unirl.envs.vector import VectorEnv
from unirl.policy import Policy, PolicyConfig, zero_state


@dataclass(frozen=True)
class ActorConfig:
    """How many environments there are and how long one unroll is."""

    num_actors: int = 1
    """Actors, each with environments and a policy copy of its own. More than cores only helps where
    environments wait.
    """
    num_envs: int = 32
    """Environments per actor: the batch of one forward pass. More: cheaper steps, larger slots."""
    unroll_length: int = 20
    """Steps per environment in one slot. More: longer credit assignment, fewer updates."""

    def __post_init__(self) -> None:
        for name in ("num_actors", "num_envs", "unroll_length"):
            if getattr(self, name) < 1:
                raise UniRLError(
                    f"actor.{name} is {getattr(self, name)}",
                    f"actor.{name} >= 1 must hold",
                    "set it to 1 or more",
                )


def unroll_spec(
    observation_space: Space[Any],
    action_space: Space[Any],
    config: ActorConfig,
    state: Mapping[str, torch.Tensor],
) -> SampleSpec:
    """What one unroll holds: T rows of B environments (obs: T + 1). state: the policy's initial
    state, [.., size].
    """
    length, num_envs = config.unroll_length, config.num_envs
    fields: dict[str, Field] = {}

    def declare(prefix: str, tree: Any) -> None:
        if isinstance(tree, dict):
            for key, child in tree.items():
                declare(f"{prefix}/{key}", child)
        else:
            shape, dtype = tree
            fields[prefix] = Field((length + 1, *shape), dtype)

    declare("obs", obs_fields(observation_space, num_envs))
    shape, dtype = action_field(action_space, num_envs)
    fields["action"] = Field((length, *shape), dtype)
    for name, kind in (
        ("logp", torch.float32),
        ("reward", torch.float32),
        ("terminated", torch.bool),
        ("truncated", torch.bool),
        ("mask", torch.bool),
        ("episode_return", torch.float32),
        ("episode_length", torch.int32),
    ):
        fields[name] = Field((length, num_envs), kind)
    fields["carry"] = Field((num_envs,), torch.float32, batch_axis=0)
    for name, value in state.items():
        fields[f"state/{name}"] = Field((num_envs, *value.shape[1:]), value.dtype, batch_axis=0)
    return SampleSpec(fields)


class VectorActor:
    """Steps its environments with its policy copy; one slot is one unroll of all of them.

    gamma is only used for `carry`, the running discounted return that reward scaling needs. Raises
    UniRLError for a recurrent policy on a same-step engine.
    """

    def __init__(
        self,
        env: VectorEnv,
        policy: Policy,
        weights: WeightStore,
        *,
        unroll_length: int,
        gamma: float,
        seed: int,
        env_id: str = "",
    ) -> None:
        check_memory(env, policy.config, env_id)
        self._env, self._policy, self._weights = env, policy, weights
        self._length, self._gamma, self._env_id = unroll_length, gamma, env_id
        self._version = -1
        self._rows: dict[int, _Rows] = {}
        self._generator = torch.Generator()
        self.restart(seed)

    def restart(self, seed: int) -> None:
        """Begin anew: reset environments, recurrent state, random numbers and running totals."""
        num_envs = self._env.num_envs
        self._generator.manual_seed(derive_seed(seed, "actions"))
        self._obs = self._env.reset(derive_seed(seed, "environments") % 2**32)
        self._acting_obs = None
        self._state = self._policy.initial_state(num_envs)
        self._returns = np.zeros(num_envs, np.float32)
        self._lengths = np.zeros(num_envs, np.int32)
        self._carry = np.zeros(num_envs, np.float32)

    def produce(self, slot: Slot) -> None:
        """See Actor. The last row's observation is kept: it is the first of the next unroll."""
        self._version = self._weights.pull(self._policy, self._version)
        slot.first_version = slot.last_version = self._version
        rows = self._rows.get(slot.index)
        if rows is None or rows.data is not slot.data:
            rows = self._rows[slot.index] = _Rows(slot.data, self._length)
        write_obs(rows.obs[0], self._obs)
        rows.carry[:] = self._carry
        for name, value in self._state.items():
            slot.data["state"][name].copy_(value)
        for t in range(self._length):
            self._step(rows, t)
        check_finite(slot.data["obs"], slot.data["reward"], self._env_id)

    def _step(self, rows: _Rows, t: int) -> None:
        # The policy reads the slot's own memory; only a same-step engine wants it to act on
        # something else.
        obs = rows.obs[t] if self._acting_obs is None else self._acting_obs
        action, logp, self._state = self._policy.act(obs, self._state, generator=self._generator)
        rows.action[t].copy_(action)
        rows.logp[t].copy_(logp)
        step = self._env.step(rows.action_array[t])
        write_obs(rows.obs[t + 1], step.obs)
        self._obs = step.obs
        self._acting_obs = (
            None if step.acting_obs is step.obs else tree_map(torch.as_tensor, step.acting_obs)
        )
        self._account(step.reward, step.terminated, step.truncated, step.mask)
        rows.reward[t], rows.terminated[t], rows.truncated[t] = (
            step.reward,
            step.terminated,
            step.truncated,
        )
        rows.mask[t], rows.episode_return[t], rows.episode_length[t] = (
            step.mask,
            self._returns,
            self._lengths,
        )

    def _account(
        self,
        reward: NDArray[np.float32],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        mask: NDArray[np.bool_],
    ) -> None:
        """Running totals of each episode, and the recurrent state of those that begin with the next
        row.
        """
        self._returns += reward
        self._lengths += 1
        self._carry *= self._gamma
        self._carry += reward
        ended = terminated | truncated
        if ended.any():  # fillers keep this 0: they have no reward
            self._carry[ended] = 0.0
        if not mask.all():
            filler = ~mask
            self._returns[filler] = 0.0
            self._lengths[filler] = 0
            if self._state:
                self._state = zero_state(self._state, torch.from_numpy(filler))

    def close(self) -> None:
        """Close the environments."""
        self._env.close()


class _Rows:
    """A slot's memory cut into rows once, so that a step writes without looking anything up."""

    def __init__(self, data: Mapping[str, Any], length: int) -> None:
        self.data = data
        self.obs = [tree_map(lambda leaf, t=t: leaf[t], data["obs"]) for t in range(length + 1)]
        self.action, self.logp = data["action"].unbind(0), data["logp"].unbind(0)
        self.action_array = data["action"].numpy()
        self.reward, self.mask = data["reward"].numpy(), data["mask"].numpy()
        self.terminated, self.truncated = data["terminated"].numpy(), data["truncated"].numpy()
        self.episode_return, self.episode_length = (
            data["episode_return"].numpy(),
            data["episode_length"].numpy(),
        )
        self.carry = data["carry"].numpy()


def make_vector_actor(
    context: ActorContext, *, env: EnvConfig, policy: PolicyConfig, actor: ActorConfig, gamma: float
) -> VectorActor:
    """The factory of a plan: bind all but `context` with functools.partial."""
    vector_env = make_vec(env, actor.num_envs)
    try:
        module = Policy(
            vector_env.observation_space, vector_env.action_space, policy, seed=context.seed % 2**31
        )
        return VectorActor(
            vector_env,
            module.eval(),
            context.weights,
            unroll_length=actor.unroll_length,
            gamma=gamma,
            seed=context.seed,
            env_id=env.id,
        )
    except BaseException:  # an environment that fails at its first reset: leave no process behind
        vector_env.close()
        raise
