"""The policy: acts on one step of many environments, and is unrolled over time by the learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import gymnasium
import torch
from torch import Tensor, nn

from unirl.action_space import find_mask
from unirl.core.tree import Tree, leaves, tree_map
from unirl.errors import UniRLError
from unirl.policy.action_head import Columns, linear_layers, make_action_head
from unirl.policy.config import PolicyConfig
from unirl.policy.distributions import Distribution
from unirl.policy.initialize import linear
from unirl.policy.inputs import Inputs, ObservationInputs
from unirl.policy.networks import Torso
from unirl.policy.own.inputs import OwnInputs
from unirl.policy.own.network import OwnNetwork
from unirl.policy.precision import settle_dtype
from unirl.policy.recurrent import Core, State

COMPUTE_DTYPE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class ActResult(NamedTuple):
    """What acting returns; the action is unclipped, discrete actions are counted from 0."""

    action: Tree
    """int64 [B] or [B, n], or float32 [B, *shape of the Box]; a dictionary of a hybrid's parts."""
    logp: Tensor
    """float32 [B]."""
    state: State
    """After this step."""


class Unroll(NamedTuple):
    """What the learner reads off an unroll."""

    distribution: Distribution
    """Over rows 0..T; `distribution[:-1]` leaves the bootstrap row out."""
    value: Tensor
    """float32 [T+1, B]."""


class Policy(nn.Module):
    """Networks for the observations and actions of one environment, or the user's own
    (config.module).

    Equal seeds give equal weights, and the global random state is left alone. Torsos and core hold
    their parameters in the compute dtype. Heads (policy, value, log_std), embeddings and statistics
    are float32: they cost nothing, and a value rounded to bfloat16 has three digits left. Raises
    UniRLError for spaces it cannot serve.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        config: PolicyConfig,
        *,
        seed: int,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        if config.compute_dtype == "auto":  # outside a recipe, which decides for all its devices
            config = settle_dtype(config, "cpu")
        self.config = config
        self._mask = find_mask(observation_space)
        if self._mask is not None:  # for the action head; nobody else reads it
            shown = dict(observation_space.spaces)  # type: ignore[attr-defined]
            del shown[self._mask]
            observation_space = gymnasium.spaces.Dict(shown)
        actor_space, critic_space = _split(observation_space, config.critic_group)
        self.core: Core | OwnNetwork | None = None
        self.value_torso: Torso | OwnNetwork | None = None
        self.value_inputs: ObservationInputs | OwnInputs | None = None
        """Of the critic's own group; None: it reads what the actor reads."""
        self.inputs: ObservationInputs | OwnInputs
        self.torso: Torso | OwnNetwork | nn.Identity
        if config.module:
            self._add_own(actor_space, action_space, critic_space, seed, generator)
        else:
            self._add_networks(actor_space, action_space, critic_space, generator)
        for module in (self.torso, self.core, self.value_torso):
            if module is not None:
                module.to(COMPUTE_DTYPE[config.compute_dtype])

    def _add_networks(
        self,
        actor_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        critic_space: gymnasium.Space[Any] | None,
        generator: torch.Generator,
    ) -> None:
        config = self.config
        inputs = self.inputs = ObservationInputs(actor_space, config, generator)
        torso = self.torso = Torso(inputs, config, generator)
        num_features = self._add_core(torso.num_out, generator)
        layers = linear_layers(num_features, generator)
        self.action_head = make_action_head(action_space, layers, config.initial_std)
        # A critic's own observations may make for another width than the actor's.
        num_value_features = num_features
        if critic_space is not None:
            inputs = self.value_inputs = ObservationInputs(critic_space, config, generator)
        if not config.shared_torso:
            self.value_torso = Torso(inputs, config, generator)
            num_value_features = self.value_torso.num_out
        self.value_head: nn.Module = linear(num_value_features, 1, 1.0, generator)

    def _add_own(
        self,
        actor_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        critic_space: gymnasium.Space[Any] | None,
        seed: int,
        generator: torch.Generator,
    ) -> None:
        """Of the user's module: the torso, or all of it."""
        config = self.config
        self.inputs = OwnInputs(actor_space, config)
        network = OwnNetwork(actor_space, action_space, config, seed)
        if network.state_sizes:
            self.torso, self.core = nn.Identity(), network
        else:
            self.torso = network
        if network.has_heads:
            network.require_alone(critic_space is not None)
            columns = Columns()
            self.action_head = make_action_head(action_space, columns, None)
            self.value_head = columns(1)
            return
        num_features = network.num_out
        if self.core is None:
            num_features = self._add_core(num_features, generator)
        layers = linear_layers(num_features, generator)
        self.action_head = make_action_head(action_space, layers, config.initial_std)
        if critic_space is not None:
            self.value_inputs = OwnInputs(critic_space, config)
        if not config.shared_torso:
            seen = actor_space if critic_space is None else critic_space
            self.value_torso = OwnNetwork(seen, action_space, config, seed + 1)
            num_features = self.value_torso.num_out
        self.value_head = linear(num_features, 1, 1.0, generator)

    def _add_core(self, num_features: int, generator: torch.Generator) -> int:
        """How many features it makes of so many."""
        kind, size = self.config.core, self.config.core_size
        if kind == "none":
            return num_features
        self.core = Core(kind, num_features, size, generator)
        return size

    def initial_state(self, num_envs: int) -> State:
        """Before an episode's first step: {} without a core, else float32 [B, core_size] each."""
        return {} if self.core is None else self.core.initial_state(num_envs)

    # Not inference_mode: its tensors refuse in-place updates and autograd outside, and it measures
    # no faster here.
    @torch.no_grad()
    def act(
        self,
        obs: Any,
        state: State,
        *,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
    ) -> ActResult:
        """Choose actions for obs (tree of [B, ...]): sampled, or the mode when deterministic.

        The state passed in is not changed; the caller resets the rows whose episode begins
        (zero_state). generator: on the policy's device.
        """
        distribution, state = self.decide(obs, state)
        action = distribution.mode() if deterministic else distribution.sample(generator)
        return ActResult(action, distribution.log_prob(action), state)

    @torch.no_grad()
    def act_and_judge(
        self, obs: Any, *, generator: torch.Generator | None = None
    ) -> tuple[ActResult, Tensor]:
        """`act` of a policy without memory, and the values of obs, float32 [B]."""
        inputs = self.inputs(obs)
        features = self.torso(inputs)
        distribution = self._distribution(features, obs)
        action = distribution.sample(generator)
        value = self.value_head(self._value_features(inputs, features, obs).float()).squeeze(-1)
        return ActResult(action, distribution.log_prob(action), {}), value

    @torch.no_grad()
    def act_groups(
        self, obs: Any, state: State, generators: Sequence[torch.Generator]
    ) -> list[ActResult]:
        """`act` for equally large groups of rows in one pass, each with a generator of its own.

        What a group gets does not depend on which others it is batched with, but for rounding: a
        larger matrix product may add in another order.
        """
        distribution, state = self.decide(obs, state)
        size = next(leaves(obs))[1].shape[0] // len(generators)
        results = []
        for i, generator in enumerate(generators):
            rows = slice(i * size, (i + 1) * size)
            own, own_state = distribution[rows], {k: value[rows] for k, value in state.items()}
            action = own.sample(generator)
            results.append(ActResult(action, own.log_prob(action), own_state))
        return results

    def decide(self, obs: Any, state: State) -> tuple[Distribution, State]:
        """What `act` chooses from, and the state after this step."""
        features = self.torso(self.inputs(obs))
        if self.core is not None:
            features, state = self.core.step(features, state)
        return self._distribution(features, obs), state

    def _distribution(self, features: Tensor, obs: Any) -> Distribution:
        mask = None if self._mask is None else obs[self._mask]
        distribution: Distribution = self.action_head(features.float(), mask)
        return distribution

    def unroll(self, obs: Any, state: State, reset: Tensor | None = None) -> Unroll:
        """Distribution and value of rows 0..T, with gradients.

        obs: tree of [T+1, B, ...]; state: before row 0; reset [T+1, B] bool: rows whose state
        starts from zero (only read with a core). reset[t] is the same as the row before being a
        filler.
        """
        shape = next(leaves(obs))[1].shape[:2]
        # One flat batch of rows for all but the core: a larger matrix product is a faster one.
        flat = tree_map(lambda leaf: leaf.flatten(0, 1), obs)
        inputs = self.inputs(flat)
        features = tree_map(lambda leaf: leaf.unflatten(0, shape), self.torso(inputs))
        if self.core is not None:
            features = self.core.unroll(features, state, reset)
        value_features = features
        if self.value_torso is not None:
            own = self._value_features(inputs, features, flat)
            value_features = own.reshape(*shape, -1)
        value = self.value_head(value_features.float()).squeeze(-1)
        return Unroll(self._distribution(features, obs), value)

    def _value_features(self, inputs: Inputs, features: Tensor, obs: Any) -> Tensor:
        """What the value function reads of rows [N, ...]; features: the actor's of them."""
        if self.value_torso is None:
            return features
        own: Tensor = self.value_torso(
            inputs if self.value_inputs is None else self.value_inputs(obs)
        )
        return own

    def value(self, obs: Any) -> Tensor:
        """Values of observations (tree of [K, B, ...]) on their own: float32 [K, B]."""
        if self.core is not None:
            raise UniRLError(
                "the value of a lone observation was asked of a policy with memory",
                f"it depends on the state of its {self.config.core}",
                "set policy.core to none",
            )
        shape = next(leaves(obs))[1].shape[:2]
        flat = tree_map(lambda leaf: leaf.flatten(0, 1), obs)
        torso = self.torso if self.value_torso is None else self.value_torso
        features = torso((self.value_inputs or self.inputs)(flat))
        value: Tensor = self.value_head(features.float())
        return value.reshape(shape)

    def update_normalizer(self, obs: Any, mask: Tensor) -> None:
        """Merge obs [>= T, B, ...] into the statistics where mask [T, B] is true.

        Rows after T are not counted: they come again as the first of the next unroll. For the
        learner, after its update: actors get the statistics as weights. Where nothing is
        normalised, nothing happens.
        """
        readers = [reader for reader in (self.inputs, self.value_inputs) if reader is not None]
        if not any(reader.has_statistics for reader in readers):
            return
        num_rows = mask.shape[0]
        flat = tree_map(lambda leaf: leaf[:num_rows].flatten(0, 1), obs)
        for reader in readers:
            reader.update(flat, mask.flatten())

    def weights(self) -> dict[str, Tensor]:
        """Every parameter and every statistic by name: detached views, not copies."""
        return {name: tensor.detach() for name, tensor in self.state_dict(keep_vars=True).items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights in, converting dtype, device and memory format."""
        current = self.state_dict(keep_vars=True)
        wrong = sorted(current.keys() ^ weights.keys())
        wrong = wrong or [
            name for name, tensor in current.items() if tensor.shape != weights[name].shape
        ]
        if wrong:
            raise UniRLError(
                f"weights do not fit this policy at {', '.join(wrong[:4])}",
                f"names and shapes must be its own ({len(current)} tensors, given {len(weights)})",
                "use the configuration and environment the weights were trained with",
            )
        with torch.no_grad():
            torch._foreach_copy_(list(current.values()), [weights[name] for name in current])


def _split(
    space: gymnasium.Space[Any], critic_group: str
) -> tuple[gymnasium.Space[Any], gymnasium.Space[Any] | None]:
    """What the actor reads, and what the value function reads where that is something else."""
    if not critic_group:
        return space, None
    groups = dict(space.spaces) if isinstance(space, gymnasium.spaces.Dict) else {}
    if critic_group not in groups or len(groups) < 2:
        raise UniRLError(
            f"policy.critic_group {critic_group!r} is not an entry of the observations",
            f"they are {space}",
            "name one entry of a Dict that has others too, or leave policy.critic_group out",
        )
    critic = gymnasium.spaces.Dict({critic_group: groups.pop(critic_group)})
    return gymnasium.spaces.Dict(groups), critic
