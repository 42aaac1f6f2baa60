"""The vector actor: unrolls a policy over vectorised environments, straight into the slot (IMPALA,
arXiv 1802.01561, section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from gymnasium import Space

from unirl.actors.stepping import SteppedEnvs, UnrollRows
from unirl.config.rules import check_at_least
from unirl.core.actor import ActorContext
from unirl.core.sample import Field, SampleSpec, Slot
from unirl.core.seeding import derive_seed
from unirl.core.tree import copy_tree, tree_map
from unirl.core.weights import WeightStore
from unirl.envs.config import EnvConfig
from unirl.envs.make import make_vec
from unirl.envs.spaces import action_fields, obs_fields
from unirl.envs.vector import VectorEnv
from unirl.errors import UniRLError
from unirl.metrics.timers import Timers
from unirl.policy import Policy, PolicyConfig, zero_state
from unirl.policy.precision import warn_if_emulated


@dataclass(frozen=True)
class ActorConfig:
    """How many environments there are and how long one unroll is."""

    num_actors: int = field(default=1, metadata={"common": True})
    """Actors, each with environments and a policy copy of its own. More than cores only helps where
    environments wait.
    """
    num_envs: int = field(default=32, metadata={"common": True})
    """Environments per actor: the batch of one forward pass. More: cheaper steps, larger slots."""
    unroll_length: int = field(default=20, metadata={"common": True})
    """Steps per environment in one slot. More: longer credit assignment, fewer updates."""
    max_actors: int = 0
    """While the learner waits for them there are more than num_actors, up to so many, and fewer
    again when they wait for it; needs runner processes or ray. 0: there are always num_actors.
    """

    def __post_init__(self) -> None:
        check_at_least(1, "actor", self, "num_actors", "num_envs", "unroll_length")
        if self.max_actors and self.max_actors < self.num_actors:
            raise UniRLError(
                f"actor.max_actors is {self.max_actors}, actor.num_actors {self.num_actors}",
                "num_actors <= max_actors must hold, or max_actors be 0",
                f"set actor.max_actors to {2 * self.num_actors}, say, or leave it out",
            )

    @property
    def count(self) -> int | tuple[int, int]:
        """See Pool."""
        is_elastic = self.max_actors > self.num_actors
        return (self.num_actors, self.max_actors) if is_elastic else self.num_actors


def unroll_spec(
    observation_space: Space[Any],
    action_space: Space[Any],
    shape: ActorConfig,
    state: Mapping[str, torch.Tensor],
    *,
    judged: bool = False,
) -> SampleSpec:
    """What one unroll holds: T rows of B environments (obs: T + 1). state: the policy's initial
    state, [.., size]. judged: with the values of obs by the policy that acted.
    """
    length, num_envs = shape.unroll_length, shape.num_envs
    fields: dict[str, Field] = {}

    def declare(prefix: str, tree: Any, num_rows: int) -> None:
        if isinstance(tree, dict):
            for key, child in tree.items():
                declare(f"{prefix}/{key}", child, num_rows)
        else:
            shape, dtype = tree
            fields[prefix] = Field((num_rows, *shape), dtype)

    declare("obs", obs_fields(observation_space, num_envs), length + 1)
    declare("action", action_fields(action_space, num_envs), length)
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
    if judged:
        fields["value"] = Field((length + 1, num_envs), torch.float32)
    fields["carry"] = Field((num_envs,), torch.float32, batch_axis=0)
    for name, value in state.items():
        fields[f"state/{name}"] = Field((num_envs, *value.shape[1:]), value.dtype, batch_axis=0)
    return SampleSpec(fields)


class VectorActor:
    """Steps its environments with its policy copy; one slot is one unroll of all of them.

    gamma: see SteppedEnvs. Raises UniRLError for a recurrent policy on a same-step engine.
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
        self.timers = Timers()
        self._envs = SteppedEnvs(env, gamma=gamma, env_id=env_id)
        self._policy, self._weights, self._length = policy, weights, unroll_length
        self._version = -1
        self._rows: dict[int, UnrollRows] = {}
        self._generator = torch.Generator()
        self.restart(seed)

    def restart(self, seed: int) -> None:
        self._generator.manual_seed(derive_seed(seed, "actions"))
        self._envs.restart(seed)
        self._state = self._policy.initial_state(self._envs.env.num_envs)

    def produce(self, slot: Slot) -> None:
        """Fill the slot. The last row's observation is kept: it is the first of the next unroll."""
        self.timers.start()
        self._version = self._weights.pull(self._policy, self._version)
        self.timers.lap("weights")
        slot.first_version = slot.last_version = self._version
        rows = self._rows.get(slot.index)
        if rows is None or rows.data is not slot.data:
            rows = self._rows[slot.index] = UnrollRows(slot.data, self._length)
        self._envs.write_first(rows)
        for name, value in self._state.items():
            slot.data["state"][name].copy_(value)
        for t in range(self._length):
            self._step(rows, t)
            slot.progress()
        if "value" in slot.data:
            self._judge(rows, self._length)

    def _step(self, rows: UnrollRows, t: int) -> None:
        # The policy reads the slot's own memory; only a same-step engine wants it to act on
        # something else.
        acting_obs = self._envs.acting_obs
        obs = rows.obs[t] if acting_obs is None else tree_map(torch.as_tensor, acting_obs)
        if "value" in rows.data and acting_obs is None:
            # The learner need not look at everything once more before it begins.
            (action, logp, _), value = self._policy.act_and_judge(obs, generator=self._generator)
            rows.data["value"][t].copy_(value)
        else:
            action, logp, self._state = self._policy.act(
                obs, self._state, generator=self._generator
            )
            if "value" in rows.data:
                self._judge(rows, t)
        copy_tree(action, rows.action[t])
        rows.logp[t].copy_(logp)
        self.timers.lap("inference")
        self._envs.step(rows, t)
        self.timers.lap("env")
        if self._state and self._envs.fillers is not None:
            self._state = zero_state(self._state, torch.from_numpy(self._envs.fillers))

    def _judge(self, rows: UnrollRows, t: int) -> None:
        with torch.no_grad():
            alone = tree_map(lambda leaf: leaf[None], rows.obs[t])
            rows.data["value"][t].copy_(self._policy.value(alone)[0])
        self.timers.lap("inference")

    def close(self) -> None:
        self._envs.close()


def check_memory(env: VectorEnv, policy: PolicyConfig, env_id: str) -> None:
    """UniRLError for a recurrent policy where first observations are hidden, as by an engine that
    resets within the step: neither actor nor learner could remember them."""
    if policy.core == "none" or not env.hides_first_obs:
        return
    raise UniRLError(
        f'policy.core {policy.core!r} cannot play env "{env_id}" on this engine',
        "a policy with memory must see each episode's first observation,"
        " which an engine with autoreset mode SameStep hides",
        'set policy.core to "none", use env.engine "sync", or an autoreset mode of NextStep',
    )


def make_vector_actor(
    context: ActorContext, *, env: EnvConfig, policy: PolicyConfig, actor: ActorConfig, gamma: float
) -> VectorActor:
    """The factory of a plan: bind all but `context` with functools.partial."""
    if context.index == 0:
        warn_if_emulated(policy, "cpu", "the actor")
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
