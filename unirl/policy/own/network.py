"""A network of the user's own, `policy.module`: a torch module that stands for the torso, or for
torso and heads, and may have a memory.

    class Mine(torch.nn.Module):
        def __init__(self, observation_space, action_space, width=64):  # and policy.kwargs
            super().__init__()
            self.body = torch.nn.Linear(observation_space.shape[0], width)

        def forward(self, obs):  # [N, ...]
            return torch.tanh(self.body(obs))  # features [N, F]

Features are read by UniRL's heads. A network with heads of its own returns the parameters of the
distribution [N, P] and the value [N] in their place (action_head.Columns says which). With
policy.core "own" it has a memory: initial_state(num_envs), and forward(obs, state) that returns the
next state after all else.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import torch
from torch import Tensor, nn

from unirl.core.tree import leaves, tree_map
from unirl.errors import UniRLError, format_error
from unirl.imports import load_own
from unirl.policy.action_head import num_parameters
from unirl.policy.config import PolicyConfig
from unirl.policy.own.inputs import OwnInputs, example_rows
from unirl.policy.recurrent import State, zero_state

_ROWS = 3
_CLOSE = 1e-4
"""How far a row may differ with the rows beside it: matrix products add in other orders."""


class OwnNetwork(nn.Module):
    """The user's module in the place of a torso, or with a memory in that of a core.

    What it returns is one tensor [N, num_out]: features, or the parameters of the distribution with
    the value behind them where it `has_heads`. Raises UniRLError for one that does not keep to what
    is said above.
    """

    def __init__(
        self,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
        config: PolicyConfig,
        seed: int,
    ) -> None:
        super().__init__()
        self.name, self._core = f"policy.module {config.module}", config.core
        self._arguments = (observation_space, action_space, config, seed)
        self.example = OwnInputs(observation_space, PolicyConfig())(
            example_rows(observation_space, _ROWS)
        )
        """A few observations as it gets them."""
        self._num_parameters = num_parameters(action_space)
        make = load_own(config.module, self.name)
        # Equal seeds give equal weights, and the global generator is left alone.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            try:
                module = make(observation_space, action_space, **config.kwargs)
            except Exception as error:
                raise UniRLError(
                    f"{self.name} could not be made: {format_error(error)}",
                    "it is called with the observation space, the action space and what is in "
                    f"policy.kwargs: {dict(config.kwargs)}",
                    "correct its __init__, or policy.kwargs",
                ) from error
            if not isinstance(module, nn.Module):
                raise UniRLError(
                    f"{self.name} is no network",
                    f"it must be a class of torch.nn.Module, and made a {type(module).__name__}",
                    "derive it from torch.nn.Module",
                )
            self.module = module
            self.has_heads = False
            self.state_sizes = self._find_state()
            self.num_out = self._try_out()
        self._check_parameters()

    def forward(self, obs: Any) -> Tensor:
        """Of a network without memory: observations [N, ...] -> [N, num_out]."""
        return self._joined(self.module(obs), 0)[0]

    def initial_state(self, num_envs: int) -> State:
        """Zeros, float32 [B, size] each."""
        device = next(self.module.parameters()).device
        return {
            name: torch.zeros(num_envs, size, device=device)
            for name, size in self.state_sizes.items()
        }

    def step(self, obs: Any, state: State) -> tuple[Tensor, State]:
        """One row of a network with memory: observations [B, ...] -> [B, num_out], next state."""
        return self._joined(self.module(obs, state), 1)

    def unroll(self, obs: Any, state: State, reset: Tensor | None) -> Tensor:
        """Rows [T, B, ...] -> [T, B, num_out]; reset [T, B] zeroes the state before its row."""
        outputs = []
        for t in range(next(leaves(obs))[1].shape[0]):
            if reset is not None:
                state = zero_state(state, reset[t])
            output, state = self.step(tree_map(lambda leaf, t=t: leaf[t], obs), state)
            outputs.append(output)
        return torch.stack(outputs)

    def made_again(self) -> OwnNetwork:
        """Another one of the same arguments."""
        return OwnNetwork(*self._arguments)

    def require_alone(self, has_critic_group: bool) -> None:
        """Raise UniRLError where something else would have to stand between it and its heads."""
        core = self._core if self._core in ("lstm", "gru") else ""
        if core or has_critic_group:
            raise UniRLError(
                f"{self.name} has heads of its own, and "
                + (f"policy.core is {core}" if core else "the value has observations of its own"),
                "a memory of UniRL's, and what the value alone may see, come before the heads",
                "return features [N, F] for UniRL's heads"
                + (', or set policy.core to "none" or "own"' if core else ""),
            )

    def _joined(self, found: Any, num_more: int) -> tuple[Tensor, State]:
        """What the module returned as one tensor, and the next state. num_more: of what it returns
        besides features, or parameters and value.
        """
        state: State = found[-1] if num_more else {}
        if not self.has_heads:
            features: Tensor = found[0] if num_more else found
            return features.float(), state
        return torch.cat((found[0].float(), found[1].float().reshape(-1, 1)), 1), state

    def _find_state(self) -> dict[str, int]:
        if self._core != "own":
            return {}
        make = getattr(self.module, "initial_state", None)
        state = make(_ROWS) if callable(make) else None
        if not isinstance(state, dict) or not state or not all(map(_is_zeros, state.values())):
            raise UniRLError(
                f"{self.name} has no memory that policy.core own could carry",
                "initial_state(num_envs) must return a dictionary of zeros, float32 [num_envs, "
                f"size] each; found {_shape_of(state) if callable(make) else 'no such method'}",
                "define it, or set policy.core to none, lstm or gru",
            )
        return {name: value.shape[1] for name, value in state.items()}

    def _try_out(self) -> int:
        """One forward pass of a few rows; how wide what it returns is."""
        self.module.eval()
        obs = self.example
        more = (self.initial_state(_ROWS),) if self._core == "own" else ()
        try:
            with torch.no_grad():
                found = self.module(obs, *more)
        except Exception as error:
            given = "forward(obs, state)" if more else "forward(obs)"
            raise UniRLError(
                f"{self.name} failed in a forward pass: {format_error(error)}",
                f"{given} was called with observations of {_shape_of(obs)}",
                "correct its forward",
            ) from error
        self.module.train()
        return self._width_of(found, bool(more))

    def _width_of(self, found: Any, has_state: bool) -> int:
        """Of what it returned; UniRLError where that is nothing that a policy can read."""
        returned = list(found) if isinstance(found, tuple | list) else [found]
        state = returned.pop() if has_state and returned else {}
        shapes = [tuple(one.shape) if isinstance(one, Tensor) else () for one in returned]
        parameters = (_ROWS, self._num_parameters)
        self.has_heads = shapes in ([parameters, (_ROWS,)], [parameters, (_ROWS, 1)])
        is_features = [shape[:1] for shape in shapes] == [(_ROWS,)] and len(shapes[0]) == 2
        wanted = {name: (_ROWS, size) for name, size in self.state_sizes.items()}
        same = isinstance(state, dict) and wanted == {
            name: tuple(getattr(value, "shape", ())) for name, value in state.items()
        }
        if not (is_features or self.has_heads) or not same:
            raise UniRLError(
                f"{self.name} returned {_shape_of(found)} for {_ROWS} observations",
                f"it must return features [{_ROWS}, F] for UniRL's heads, or ([{_ROWS}, "
                f"{self._num_parameters}], [{_ROWS}]): the parameters of the distribution and the "
                "value" + ", and the next state of the same shapes after them" * has_state,
                "correct what its forward returns",
            )
        return self._num_parameters + 1 if self.has_heads else shapes[0][1]

    def _check_parameters(self) -> None:
        """What a checkpoint holds must be all that the network consists of."""
        everything = dict(self.module.named_parameters(remove_duplicate=False))
        frozen = [name for name, value in everything.items() if not value.requires_grad]
        twice = everything.keys() - dict(self.module.named_parameters()).keys()
        if not everything or frozen or twice:
            names = ", ".join([*frozen, *sorted(twice)][:3])
            raise UniRLError(
                f"{self.name} has {f'parameters that do not learn: {names}' if frozen else ''}"
                f"{f'parameters with two names: {names}' if twice and not frozen else ''}"
                f"{'' if everything else 'no parameters'}",
                "each parameter must learn and have one name: checkpoints hold these and buffers",
                "use register_buffer for what is fixed, and call shared layers by one name",
            )


def check_own_networks(policy: nn.Module) -> None:
    """Raise UniRLError unless each network of the user's in it is the same when it is made again,
    and each row of what it returns depends on its observation and the parameters alone: actors and
    learner must agree on what an action's probability was.
    """
    for network in policy.modules():
        if isinstance(network, OwnNetwork):
            _check_made_alike(network, network.made_again())
            _check_rows(network)


def _check_made_alike(network: OwnNetwork, again: OwnNetwork) -> None:
    first, second = network.state_dict(), again.state_dict()
    if list(first) != list(second) or any(
        first[key].shape != second[key].shape or not torch.equal(first[key], second[key])
        for key in first
    ):
        raise UniRLError(
            f"{network.name} is another network each time it is made",
            "with the same arguments and torch's generator at the same seed, its parameters must "
            "have the same names, shapes and values",
            "draw them with torch alone",
        )


def _check_rows(network: OwnNetwork) -> None:
    obs = network.example
    in_training = _outputs(network.train(), obs)
    one = tree_map(lambda leaf: leaf[:1], obs)
    for found, wanted, when in (
        (_outputs(network, obs), in_training, "when it is called again"),
        (_outputs(network.eval(), obs), in_training, "in eval mode, which actors use"),
        (_outputs(network, one), in_training[:1], "when it sees one row alone"),
    ):
        if not torch.allclose(found, wanted, rtol=_CLOSE, atol=_CLOSE):
            raise UniRLError(
                f"{network.name} returns other numbers {when}",
                "each row must follow from its observation and the parameters alone, in training "
                f"as in acting; they differ by {float((found - wanted).abs().max()):.3g}",
                "leave out dropout, batch norm and other noise; layer norm is fine",
            )
    network.train()


def _outputs(network: OwnNetwork, obs: Any) -> Tensor:
    with torch.no_grad():
        if network.state_sizes:
            return network.step(obs, network.initial_state(next(leaves(obs))[1].shape[0]))[0]
        return network(obs)  # type: ignore[no-any-return]


def _is_zeros(value: object) -> bool:
    is_rows = isinstance(value, Tensor) and value.dim() == 2 and value.shape[0] == _ROWS
    return is_rows and value.dtype == torch.float32 and not value.any()  # type: ignore[attr-defined]


def _shape_of(found: Any) -> str:
    """What a module was given or returned, in words."""
    if isinstance(found, Tensor):
        return f"{str(found.dtype).removeprefix('torch.')} {list(found.shape)}"
    if isinstance(found, dict):
        return "{" + ", ".join(f"{key}: {_shape_of(one)}" for key, one in found.items()) + "}"
    if isinstance(found, tuple | list):
        return "(" + ", ".join(map(_shape_of, found)) + ")"
    return type(found).__name__
