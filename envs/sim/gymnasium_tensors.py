"""Gymnasium vector environments that return torch tensors, "gymnasium/<id>", as simulators on a
device; and what adapters of tensor environments share: reading observations, finding rows that are
not finite. Source: the vector API of Gymnasium 1.1 and later.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

from unirl.envs import catalog
from unirl.envs.config import EnvConfig
from unirl.envs.device import CRITIC, POLICY, Groups, SimSpec, SimStep
from unirl.errors import UniRLError

log = logging.getLogger(__name__)

FAMILY = "gymnasium/"


def known_ids() -> list[str]:
    """Empty: any id of Gymnasium's registry may be one, and none of Gymnasium's own is."""
    return []


def make_sim(config: EnvConfig, num_envs: int, device: torch.device) -> GymnasiumTensors:
    """`gymnasium.make_vec` with config.kwargs, for an id that has a vector class.

    Raises UniRLError for an unknown id, one without a vector class, one that returns NumPy arrays,
    another device or number of environments than asked for, and arguments it does not take.
    """
    name, device = config.id.removeprefix(FAMILY), with_index(device)
    catalog.import_registering_module(config)
    spec = gymnasium.registry.get(name)
    if spec is None:
        raise catalog.unknown_id(config.id, [FAMILY + known for known in _vector_ids()])
    if spec.vector_entry_point is None:
        raise _not_tensors(config, "its registration names no vector_entry_point")
    kwargs = dict(config.kwargs)
    if config.max_episode_steps is not None:
        kwargs["max_episode_steps"] = config.max_episode_steps
    try:
        env = gymnasium.make_vec(spec, num_envs, vectorization_mode="vector_entry_point", **kwargs)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise UniRLError(
            f'env "{config.id}" does not take these arguments: {sorted(kwargs)}',
            str(error),
            "correct env.kwargs and env.max-episode-steps",
        ) from error
    try:
        return GymnasiumTensors(config, env, num_envs, device)
    except BaseException:
        env.close()
        raise


class GymnasiumTensors:
    """A vector environment of tensors, in either autoreset mode; see DeviceEnv.

    Gymnasium has no call that resets single rows without the host, so a row whose state is not
    finite stays invalid until its environment ends the episode; each such step is counted. A row
    that a same-step environment truncates without info["final_obs"] is invalid too, since nothing
    could be bootstrapped from: counters()["missing_final_obs"].
    """

    def __init__(self, config: EnvConfig, env: Any, num_envs: int, device: torch.device) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            raise UniRLError(
                f'env "{config.id}" does not start the next episode by itself',
                'metadata["autoreset_mode"] must be NEXT_STEP or SAME_STEP,'
                f" found {getattr(mode, 'value', mode)}",
                "declare the mode in the vector class, or change it in env.kwargs",
            )
        self._env = env
        self._id = config.id
        self._read = ObsReader(env.single_observation_space, num_envs, config.id)
        self._write = action_writer(env.single_action_space, device, config.id)
        self._same_step = mode == AutoresetMode.SAME_STEP
        # A reset ahead of time: a wrong type or device should fail here, not in the first rollout.
        raw, _ = env.reset(seed=0)
        if not _holds_tensors(raw):
            raise _not_tensors(config, f"its observations are {type(raw).__name__}")
        self._read.check(raw, device)
        self._due = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self._counts = {"nan_states": torch.zeros((), dtype=torch.int64, device=device)}
        if self._same_step:
            self._counts["missing_final_obs"] = torch.zeros((), dtype=torch.int64, device=device)
        self._checked = self._closed = False
        self.spec = SimSpec(
            id=config.id,
            num_envs=num_envs,
            observation=self._read.sizes,
            action_space=env.single_action_space,
            max_episode_length=_episode_length(config, env),
            device=device,
            step_dt=float(getattr(env.unwrapped, "step_dt", 0.0)),
            autoreset="same_step" if self._same_step else "next_step",
            gives_final_obs=self._same_step,
            truncates_early=True,
        )

    def reset(self, seed: int, *, random_phases: bool = False) -> Groups:
        """New episodes; random phases need an `episode_length_buf`, see DeviceEnv."""
        raw, _ = self._env.reset(seed=seed)
        if random_phases:
            self._shift_phases(seed)
        obs = self._read(raw)
        sound = finite_rows(*obs.values())
        torch.logical_not(sound, out=self._due)
        self._counts["nan_states"].add_(self._due.sum())
        return keep_rows(sound, obs)

    def step(self, action: Tensor) -> SimStep:
        """One step; see DeviceEnv."""
        raw, reward, terminated, truncated, info = self._env.step(self._write(action))
        if not self._checked:
            self._check(reward, terminated, truncated)
        obs = self._read(raw)
        over = terminated.logical_or(truncated)
        sound_now = finite_rows(*obs.values())
        sound = sound_now & finite_rows(reward)
        valid = sound & ~self._due
        final: Groups | None = None
        if self._same_step:
            final = final_rows(over, obs, self._final(info))
            sound_final = finite_rows(*final.values())
            valid &= sound_final
            sound &= sound_final
            final = keep_rows(sound_final, final)
            if info.get("final_obs") is None:
                lost = truncated & ~terminated & valid
                self._counts["missing_final_obs"].add_(lost.sum())
                valid &= ~lost
        self._counts["nan_states"].add_((~sound_now | (~sound & ~self._due)).sum())
        # What follows a lost state is no transition, and neither is what follows an end where the
        # environment resets in the next step.
        self._due = ~sound_now if self._same_step else over | ~sound_now
        return SimStep(
            obs=keep_rows(sound_now, obs),
            reward=torch.where(valid, reward.float(), 0.0),
            terminated=terminated & valid,
            truncated=truncated & ~terminated & valid,
            final_obs=final,
            valid=valid,
            extras=scalars(info),
        )

    def counters(self) -> Mapping[str, Tensor]:
        """See DeviceEnv."""
        return self._counts

    def close(self) -> None:
        """See DeviceEnv."""
        if not self._closed:
            self._closed = True
            self._env.close()

    def _shift_phases(self, seed: int) -> None:
        steps = getattr(self._env.unwrapped, "episode_length_buf", None)
        if not isinstance(steps, Tensor) or self.spec.max_episode_length == sys.maxsize:
            log.warning(
                'env "%s" has no episode_length_buf to write to: its time limits will fall on the'
                " same steps in all rows",
                self._id,
            )
            return
        steps.copy_(random_steps(seed, self.spec.num_envs, self.spec))

    def _final(self, info: Mapping[str, Any]) -> Groups | None:
        raw = info.get("final_obs")
        if raw is None:  # no row ended
            return None
        if not _holds_tensors(raw):
            raise UniRLError(
                f'env "{self._id}" gives its final observations as {type(raw).__name__}',
                'info["final_obs"] must have the layout of the observations, tensors of all rows',
                "let the vector class return the observations before the reset",
            )
        self._read.check(raw, self.spec.device)
        return self._read(raw)

    def _check(self, *columns: Any) -> None:
        for name, column in zip(("reward", "terminated", "truncated"), columns, strict=True):
            if not isinstance(column, Tensor) or column.shape != (self.spec.num_envs,):
                raise UniRLError(
                    f'env "{self._id}" returned a {name} of the wrong form',
                    f"it must be a tensor [{self.spec.num_envs}],"
                    f" found {type(column).__name__} {list(getattr(column, 'shape', []))}",
                    "correct the vector class",
                )
            if column.device != self.spec.device:
                raise wrong_device(self._id, self.spec.device, column.device)
        self._checked = True


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
        """UniRLError where `raw` lies on another device, or is not of the promised shape."""
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
    """The error for a simulator whose tensors are not where they were asked for."""
    return UniRLError(
        f'env "{env_id}" simulates on "{found}"',
        f'its tensors must be on the device of the run, "{wanted}"',
        f'run with device "{found}", or tell the simulator the other one (env.kwargs)',
    )


def with_index(device: torch.device) -> torch.device:
    """The device as tensors name it: "cuda" is "cuda:0"."""
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _join(space: Space[Any], raw: Any) -> Tensor:
    if isinstance(space, spaces.Dict):
        parts = [_join(child, raw[key]) for key, child in space.spaces.items()]
        return torch.cat(parts, dim=1)
    tensor: Tensor = raw
    return tensor.float()


def _holds_tensors(raw: Any) -> bool:
    if isinstance(raw, Mapping):
        return bool(raw) and all(_holds_tensors(child) for child in raw.values())
    return isinstance(raw, Tensor)


def _outline(raw: Any) -> str:
    return str(sorted(raw)) if isinstance(raw, Mapping) else type(raw).__name__


def _vector_ids() -> list[str]:
    return sorted(s.id for s in gymnasium.registry.values() if s.vector_entry_point is not None)


def _episode_length(config: EnvConfig, env: Any) -> int:
    """What the registration or the environment says; sys.maxsize where nothing is said."""
    if config.max_episode_steps is not None:
        return config.max_episode_steps
    spec = getattr(env, "spec", None) or getattr(env.unwrapped, "spec", None)
    for source, name in (
        (spec, "max_episode_steps"),
        (env.unwrapped, "max_episode_length"),
        (env.unwrapped, "max_episode_steps"),
    ):
        length = getattr(source, name, None)
        if length is not None:
            return int(length)
    return sys.maxsize


def _not_tensors(config: EnvConfig, found: str) -> UniRLError:
    name = config.id.removeprefix(FAMILY)
    return UniRLError(
        f'env "{config.id}" does not return torch tensors',
        f"a simulator on a device must be a vector class of tensors; {found}",
        f"off the device any environment will do: `unirl train ppo --env.id {name}`,"
        " or appo, or impala",
    )
