"""Gymnasium vector environments that return torch tensors, "gymnasium/<id>", as simulators on a
device. Source: the vector API of Gymnasium 1.1 and later.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import gymnasium
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from unirl.device import with_index
from unirl.envs import catalog
from unirl.envs.config import EnvConfig
from unirl.envs.device import Groups, SimSpec, SimStep
from unirl.envs.sim.adapters.tensors import (
    ObsReader,
    action_writer,
    final_rows,
    finite_rows,
    keep_rows,
    random_steps,
    scalars,
    wrong_device,
)
from unirl.errors import UniRLError

log = logging.getLogger(__name__)

FAMILY = "gymnasium/"


def known_ids() -> list[str]:
    """Empty: any id of Gymnasium's registry may be one, and none of Gymnasium's own is."""
    return []


def make_sim(config: EnvConfig, num_envs: int, device: torch.device) -> GymnasiumTensors:
    """`gymnasium.make_vec` with config.kwargs, for an id that has a vector class."""
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
        self.env = env
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
        """New episodes; random phases need an `episode_length_buf`."""
        raw, _ = self.env.reset(seed=seed)
        if random_phases:
            self._shift_phases(seed)
        obs = self._read(raw)
        sound = finite_rows(*obs.values())
        torch.logical_not(sound, out=self._due)
        self._counts["nan_states"].add_(self._due.sum())
        return keep_rows(sound, obs)

    def step(self, action: Tensor) -> SimStep:
        raw, reward, terminated, truncated, info = self.env.step(self._write(action))
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
        return self._counts

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.env.close()

    def _shift_phases(self, seed: int) -> None:
        steps = getattr(self.env.unwrapped, "episode_length_buf", None)
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


def _holds_tensors(raw: Any) -> bool:
    if isinstance(raw, Mapping):
        return bool(raw) and all(_holds_tensors(child) for child in raw.values())
    return isinstance(raw, Tensor)


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
