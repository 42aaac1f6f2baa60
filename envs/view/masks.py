"""Masks of allowed actions: where an environment gives them, and from its form to an array [n], an
int8 for each option of all choices.

A mask comes from an entry of the observation or of the info: of a Discrete action one array [n]; of
MultiDiscrete one array for each choice, or all of them end to end; MultiBinary is a MultiDiscrete
of twos; of a Dict or Tuple a dictionary or sequence of its parts' masks, where a part that is
missing or None is free. Where an episode ends everything counts as allowed: no action follows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from unirl.action_space import find_mask, first_options, num_options, parts
from unirl.envs.config import EnvConfig
from unirl.envs.vector import EnvStep, VectorEnv
from unirl.errors import UniRLError

MASK = "action_mask"
"""The entry that masks usually are in, of an observation (PettingZoo) or info (Gymnasium)."""


def detect_mask_source(
    space: Space[Any], action_space: Space[Any], first_info: Callable[[], Container[str]]
) -> str:
    """What env.action_mask auto means. first_info: resets the environment; called where only that
    can tell.
    """
    if not num_options(action_space):
        return "none"
    if isinstance(space, spaces.Dict) and MASK in space.spaces:
        return MASK if fits(space[MASK], action_space) else "none"
    return "info" if MASK in first_info() else "none"


def mask_source(space: Space[Any], action_space: Space[Any], config: EnvConfig) -> str:
    """The entry of the observation that is the mask, "info", or "" for no mask."""
    wanted = config.action_mask
    entries = dict(space.spaces) if isinstance(space, spaces.Dict) else {}
    if wanted == "none":
        return ""
    if wanted == "auto":
        return MASK if MASK in entries and fits(entries[MASK], action_space) else ""
    where = f'env.action_mask of env "{config.id}" is {wanted}'
    if not num_options(action_space):
        raise UniRLError(
            f"{where}, and its actions are {action_space}",
            "Discrete, MultiDiscrete and MultiBinary actions, or parts of actions, can be masked",
            "set env.action_mask to none",
        )
    if wanted == "info":
        if MASK in entries:
            raise UniRLError(
                f"{where}, and its observations have an entry {MASK!r} already",
                "a mask of the info becomes an entry of that name",
                f"set env.action_mask to {MASK}, or drop it: env.drop_observations",
            )
        return wanted
    if wanted not in entries or not fits(entries[wanted], action_space):
        found = f"its space is {entries[wanted]}" if wanted in entries else f"found {list(entries)}"
        raise UniRLError(
            where,
            "it must name an entry of the observation with one number for each of the"
            f" {sum(num_options(action_space))} options of {action_space}; {found}",
            "set env.action_mask to auto, info, none or such an entry",
        )
    return wanted


def fits(space: Space[Any], action_space: Space[Any]) -> bool:
    """Whether an entry of an observation can be a mask of these actions."""
    if isinstance(space, spaces.Dict) and isinstance(action_space, spaces.Dict):
        wanted = dict(parts(action_space))
        return all(name in wanted and fits(part, wanted[name]) for name, part in parts(space))
    if isinstance(space, spaces.Tuple):
        sizes = num_options(action_space)
        if isinstance(action_space, spaces.MultiDiscrete):
            return [np.prod(part.shape or ()) for part in space.spaces] == sizes
        wanted = dict(parts(action_space)) if isinstance(action_space, spaces.Tuple) else {}
        return len(wanted) == len(space) and all(
            fits(part, wanted[name]) for name, part in parts(space)
        )
    number = sum(num_options(action_space))
    is_flat = isinstance(space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete)
    return is_flat and number > 0 and int(np.prod(space.shape)) == number  # type: ignore[arg-type]


def mask_writer(space: Space[Any], env_id: str) -> Callable[[Any, NDArray[np.int8]], None]:
    """A function that writes a mask as the environment gave it into one of all options, [n]; parts
    that it leaves out stay as they are.
    """
    number = sum(num_options(space))

    def write_flat(given: Any, out: NDArray[np.int8]) -> None:
        if given is None:
            return
        mask = np.asarray(given)
        if mask.size != number or mask.dtype == object:
            raise _wrong_mask(env_id, f"one of shape {mask.shape}", space)
        np.not_equal(mask.reshape(-1), 0, out=out)

    inner = parts(space) if isinstance(space, spaces.Dict | spaces.Tuple) else []
    if isinstance(space, spaces.MultiDiscrete):
        choices = [spaces.Discrete(size) for size in num_options(space)]
        inner = parts(spaces.Tuple(choices))
    ends = list(accumulate(sum(num_options(part)) for _, part in inner))
    places = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    writers = {
        name: (mask_writer(part, env_id), place)
        for (name, part), place in zip(inner, places, strict=True)
    }

    def write_parts(given: Any, out: NDArray[np.int8]) -> None:
        if isinstance(space, spaces.MultiDiscrete):  # one for each choice, or all end to end
            is_list = isinstance(given, tuple | list) and len(given) == len(inner)
            in_parts = is_list and not np.isscalar(given[0])
        else:
            in_parts = isinstance(given, dict | tuple | list)
        if not in_parts:
            write_flat(given, out)
            return
        for name, mask in given.items() if isinstance(given, dict) else enumerate(given):
            if str(name) not in writers:
                raise _wrong_mask(env_id, f"a mask of {name}", space)
            write, place = writers[str(name)]
            write(mask, out[place])

    return write_parts if inner else write_flat


def _wrong_mask(env_id: str, found: str, space: Space[Any]) -> UniRLError:
    return UniRLError(
        f'env "{env_id}" gave an action mask that does not fit its actions',
        f"{space} has {sum(num_options(space))} options, each needs a number; found {found}",
        "correct the environment, or set env.action_mask to none",
    )


class MaskedEnv:
    """A VectorEnv with masks: makes sure that they allow something wherever an action follows."""

    def __init__(self, env: VectorEnv, env_id: str) -> None:
        self.num_envs, self.hides_first_obs = env.num_envs, env.hides_first_obs
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self._env, self._id, self._key = env, env_id, find_mask(env.observation_space)
        self._firsts = first_options(env.action_space)

    def reset(self, seed: int) -> Any:
        return self._checked(self._env.reset(seed), np.zeros(self.num_envs, np.bool_))

    def step(self, action: Any) -> EnvStep:
        step = self._env.step(action)
        over = step.terminated | step.truncated
        same = step.acting_obs is step.obs
        step.obs = self._checked(step.obs, over)
        step.acting_obs = step.obs if same else self._checked(step.acting_obs, np.zeros_like(over))
        return step

    def close(self) -> None:
        self._env.close()

    def _checked(self, obs: Any, over: NDArray[np.bool_]) -> Any:
        mask = np.where(over[:, None], np.int8(1), obs[self._key])
        check_allowed(mask, self._firsts, self._id)
        return {**obs, self._key: mask}


def check_allowed(mask: NDArray[Any], firsts: NDArray[np.intp], env_id: str) -> None:
    """UniRLError where a row of masks [B, n] allows no option of a choice."""
    allowed = np.logical_or.reduceat(mask != 0, firsts, axis=1)
    if not allowed.all():
        row, choice = np.argwhere(~allowed)[0]
        raise UniRLError(
            f'env "{env_id}" allows no action: environment {row} has an empty action mask',
            "each choice needs at least one allowed option until the episode ends;"
            f" choice {choice} of {len(firsts)} has none",
            "end the episode there, allow an action that does nothing, or set env.action_mask to"
            " none",
        )


def refuse_mask(info: Mapping[str, Any], config: EnvConfig) -> None:
    """UniRLError for an engine that steps many environments itself and gives masks in its info."""
    if MASK in info and config.action_mask in ("auto", "info"):
        raise UniRLError(
            f'env "{config.id}" gives info["{MASK}"], which engine {config.engine} cannot use here',
            "masks are read from the info of single environments, or from an entry of observations",
            'use env.engine "sync" or "async", or set env.action_mask to none',
        )
