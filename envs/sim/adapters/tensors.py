"""What adapters of tensor environments share: reading observations, writing actions, and rows that
are not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor

from unirl.envs.device import CRITIC, POLICY, Groups, SimSpec
from unirl.errors import UniRLError


class ObsReader:
    """Observations of tensors as Groups, float32 [N, D].

    A space with a "policy" group is read by groups, "policy" and "critic"; others are left out. Any
    other space is the policy group. A group that is a Dict of vectors is their concatenation, in
    the order of the space. Reading copies nothing where nothing has to be joined or converted.
    """

    def __init__(self, space: Space[Any], num_envs: int, env_id: str) -> None:
        self._num_envs, self._id = num_envs, env_id
        self._by_group = isinstance(space, spaces.Dict) and POLICY in space.spaces
        if isinstance(space, spaces.Dict) and self._by_group:
            self._groups = {k: space[k] for k in (POLICY, CRITIC) if k in space.spaces}
        else:
            self._groups = {POLICY: space}
        self.sizes = {name: self._size(group) for name, group in self._groups.items()}
        """D of each group."""

    def __call__(self, raw: Any) -> Groups:
        """The groups of `raw`; they may share its memory."""
        return {
            name: _join(group, raw[name] if self._by_group else raw)
            for name, group in self._groups.items()
        }

    def check(self, raw: Any, device: torch.device) -> None:
        """UniRLError where `raw` is on another device, or is not of the promised shape."""
        try:
            groups = self(raw)
        except (KeyError, TypeError, IndexError) as error:
            raise UniRLError(
                f'env "{self._id}" returned an observation of the wrong structure',
                f"the observation space promises {self._groups}, found {_outline(raw)} ({error!r})",
                "correct the environment's observation space or its observations",
            ) from error
        for name, group in groups.items():
            if group.device != device:
                raise wrong_device(self._id, device, group.device)
            expected = (self._num_envs, self.sizes[name])
            if tuple(group.shape) != expected:
                raise UniRLError(
                    f'env "{self._id}" returned observations "{name}" of the wrong shape',
                    f"{self._num_envs} environments of {self.sizes[name]} numbers were promised,"
                    f" {list(expected)}; found {list(group.shape)}",
                    "set num_envs to what the environment was made with, or correct its spaces",
                )

    def _size(self, space: Space[Any]) -> int:
        if isinstance(space, spaces.Dict):
            return sum(self._size(child) for child in space.spaces.values())
        if isinstance(space, spaces.Box) and len(space.shape) == 1:
            return int(space.shape[0])
        raise UniRLError(
            f'env "{self._id}" has observations that are no vectors',
            f"each must be a Box of one dimension, or a Dict of such; found {space}",
            "flatten them in the environment, or train it with `unirl train ppo` off the device",
        )


def action_writer(
    space: Space[Any], device: torch.device, env_id: str
) -> Callable[[Tensor], Tensor]:
    """A function from sampled actions to what the environment takes: clipped to a Box that has
    bounds, counted from the start of a Discrete. UniRLError for other spaces."""
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return (lambda action: action + start) if start else (lambda action: action)
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise UniRLError(
            f'env "{env_id}" has an action space that is not supported on a device',
            f"it must be Discrete or a Box of floats, found {space}",
            "choose another environment",
        )
    if not np.isfinite(space.low).any() and not np.isfinite(space.high).any():
        return lambda action: action
    low = torch.as_tensor(space.low, dtype=torch.float32, device=device)
    high = torch.as_tensor(space.high, dtype=torch.float32, device=device)
    return lambda action: torch.clamp(action, low, high)


def finite_rows(*columns: Tensor) -> Tensor:
    """bool [N]: which rows are finite in all of `columns`, each [N] or [N, D]."""
    rows = [
        torch.isfinite(column) if column.dim() == 1 else torch.isfinite(column).all(dim=1)
        for column in columns
    ]
    sound = rows[0]
    for row in rows[1:]:
        sound = sound & row
    return sound


def keep_rows(rows: Tensor, groups: Groups) -> Groups:
    """New tensors with the rows of `groups` where `rows` [N] is True, 0 elsewhere.

    New, because simulators write the next step into the memory of the last one.
    """
    return {name: torch.where(rows.unsqueeze(1), group, 0.0) for name, group in groups.items()}


def final_rows(over: Tensor, obs: Groups, final: Groups | None) -> Groups:
    """The observations before the reset in every row: `final` where an episode is over [N], which
    may be stale elsewhere, and `obs` in the others."""
    if final is None:
        return obs
    return {name: torch.where(over.unsqueeze(1), final[name], obs[name]) for name in obs}


def random_steps(seed: int, num_envs: int, spec: SimSpec) -> Tensor:
    """int64 [N]: how long each episode pretends to have run, uniform in [0, max_episode_length)."""
    generator = torch.Generator(spec.device)
    generator.manual_seed(seed)
    return torch.randint(
        spec.max_episode_length, (num_envs,), generator=generator, device=spec.device
    )


def scalars(info: Mapping[str, Any]) -> dict[str, Tensor]:
    """The entries of `info` that are tensors of one float each."""
    return {
        name: value.detach().reshape(()).clone()
        for name, value in info.items()
        if isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
    }


def wrong_device(env_id: str, wanted: torch.device, found: torch.device | str) -> UniRLError:
    return UniRLError(
        f'env "{env_id}" simulates on "{found}"',
        f'its tensors must be on the device of the run, "{wanted}"',
        f'run with device "{found}", or set the simulator to the other one (env.kwargs)',
    )


def check_placement(
    env_id: str, num_envs: int, device: torch.device, env: Any, remedy: str
) -> None:
    """UniRLError where a simulator has another device or number of environments than asked for."""
    if torch.device(env.device) != device:
        raise wrong_device(env_id, device, env.device)
    if env.num_envs != num_envs:
        raise UniRLError(
            f'env "{env_id}" made another number of environments',
            f"num_envs must be {num_envs}, found {env.num_envs}",
            remedy,
        )


def _join(space: Space[Any], raw: Any) -> Tensor:
    if isinstance(space, spaces.Dict):
        columns = [_join(child, raw[key]) for key, child in space.spaces.items()]
        return torch.cat(columns, dim=1)
    tensor: Tensor = raw
    return tensor.float()


def _outline(raw: Any) -> str:
    return str(sorted(raw)) if isinstance(raw, Mapping) else type(raw).__name__
