"""What a policy is shown of an environment's observations: without the entries it is to ignore,
texts as numbers, and the mask of allowed actions beside them.

The tokeniser of a Text space is its characters: a text is max_length numbers, 0 where it has ended,
else 1 + the character's index among the space's characters in order. Policies read them as they
read any MultiDiscrete: one-hot where all positions have few values together, else embedded.

A mask comes from an entry of the observation or of the info: of a Discrete action one array [n]; of
MultiDiscrete one array for each choice, or all of them end to end; MultiBinary is a MultiDiscrete
of twos; of a Dict or Tuple a dictionary or sequence of its parts' masks, where a part that is
missing or None is free. Where an episode ends everything counts as allowed: no action follows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from itertools import accumulate
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from unirl.action_space import ActionMask, find_mask, first_options, num_options, parts
from unirl.envs.config import EnvConfig
from unirl.envs.vector import EnvStep, VectorEnv
from unirl.errors import UniRLError

MASK = "action_mask"
"""The entry that masks usually are in, of an observation (PettingZoo) or info (Gymnasium)."""
OBS = "obs"
"""What an observation that is no Dict is called beside others."""
MAX_TEXT = 256
"""Longer texts are refused: the first layer reads every position."""

Read = Callable[[Any], Any]


class ObsView:
    """Of one environment, or one agent: called with what it gave, it returns what is shown.

    Raises UniRLError for an entry that is to be dropped and is not there, and for a mask that
    cannot be had.
    """

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any],
        config: EnvConfig,
        reads_text: bool = True,
    ) -> None:
        self._id, self._num_options = config.id, sum(num_options(action_space))
        self._write = _mask_writer(action_space, config.id)
        dropped = set(config.drop_observations)
        shown, self._read = _without(observation_space, dropped, config.id, reads_text)
        self._source = _mask_source(shown, action_space, config)
        self._wraps = self._source == "info" and not isinstance(shown, spaces.Dict)
        if self._source:
            entries = {OBS: shown} if self._wraps else dict(shown.spaces)  # type: ignore[attr-defined]
            entry = MASK if self._source == "info" else self._source
            shown = spaces.Dict({**entries, entry: ActionMask(self._num_options)})
        self.space = shown
        self.changes = self._read is not None or bool(self._source)
        """False where observations are shown as they are: a view is then not needed."""

    def __call__(self, obs: Any, info: Mapping[str, Any], over: bool) -> Any:
        """over: the episode ended with this observation."""
        obs = obs if self._read is None else self._read(obs)
        if not self._source:
            return obs
        if self._source != "info":
            if not isinstance(obs, Mapping) or self._source not in obs:
                return obs  # the check of its structure says so
            return {**obs, self._source: self._flat(obs[self._source])}
        given = info.get(MASK)
        if given is None and not over:
            raise UniRLError(
                f'env "{self._id}" gave no info["{MASK}"]',
                f"with env.action_mask info every reset and step must, found {sorted(info)}",
                "correct the environment, or set env.action_mask to none",
            )
        mask = self._flat(given)
        return {OBS: obs, MASK: mask} if self._wraps else {**obs, MASK: mask}

    def _flat(self, given: Any) -> NDArray[np.int8]:
        mask = np.ones(self._num_options, np.int8)
        self._write(given, mask)
        return mask


def batch_view(observation_space: Space[Any], action_space: Space[Any], config: EnvConfig) -> Any:
    """The space that is shown of an engine that steps many environments itself: entries are dropped
    and an entry that is a mask is marked, which needs no change of what it returns.
    """
    view = ObsView(observation_space, action_space, config, reads_text=False)
    key = find_mask(view.space)
    if key is None:
        return view.space
    shape = (sum(num_options(action_space)),)
    entries = observation_space.spaces if isinstance(observation_space, spaces.Dict) else {}
    if config.action_mask == "info" or entries[key].shape != shape:
        raise UniRLError(
            f'env.action_mask {config.action_mask} cannot be read from env "{config.id}" on engine'
            f" {config.engine}",
            "of an engine that steps many environments itself, a mask is an entry of its"
            f" observations of shape {shape}",
            'use env.engine "sync" or "async", or set env.action_mask to none',
        )
    return view.space


class ViewedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One environment behind its view."""

    def __init__(self, env: gymnasium.Env[Any, Any], view: ObsView) -> None:
        super().__init__(env)
        self._view, self.observation_space = view, view.space

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        return self._view(obs, info, False), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        over = bool(terminated or truncated)
        return self._view(obs, info, over), reward, terminated, truncated, info


def viewed(env: gymnasium.Env[Any, Any], config: EnvConfig) -> gymnasium.Env[Any, Any]:
    """The environment behind its view, or itself where that changes nothing."""
    view = ObsView(env.observation_space, env.action_space, config)
    return ViewedEnv(env, view) if view.changes else env


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
        step.acting_obs = step.obs if same else self._checked(step.acting_obs, over & False)
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


def mask_source_of(
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


def _mask_source(space: Space[Any], action_space: Space[Any], config: EnvConfig) -> str:
    """The entry of the observation that is the mask, "info", or "" for no mask."""
    wanted, entries = config.action_mask, {}
    if isinstance(space, spaces.Dict):
        entries = dict(space.spaces)
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


def _mask_writer(space: Space[Any], env_id: str) -> Callable[[Any, NDArray[np.int8]], None]:
    """A function that writes a mask as the environment gave it into one of all options, [n]; what
    it does not speak of stays.
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
        name: (_mask_writer(part, env_id), place)
        for (name, part), place in zip(inner, places, strict=True)
    }

    def write_parts(given: Any, out: NDArray[np.int8]) -> None:
        in_parts = isinstance(given, dict | tuple | list)
        if in_parts and isinstance(space, spaces.MultiDiscrete):
            in_parts = len(given) == len(inner) and not np.isscalar(given[0])
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


def _without(
    space: Space[Any], dropped: set[str], env_id: str, reads_text: bool
) -> tuple[Space[Any], Read | None]:
    """The space with texts as numbers and without dropped entries, and what reads it so; None where
    nothing changes.
    """
    left = set(dropped)

    def view(space: Space[Any], path: str) -> tuple[Space[Any], Read | None]:
        if reads_text and isinstance(space, spaces.Text) and space.max_length <= MAX_TEXT:
            return _tokens(space, path, env_id)
        if not isinstance(space, spaces.Dict | spaces.Tuple):
            return space, None
        shown: dict[Any, tuple[Space[Any], Read | None]] = {}
        keys: Any = range(len(space)) if isinstance(space, spaces.Tuple) else space.spaces
        for key in keys:
            name = f"{path}/{key}" if path else str(key)
            if isinstance(space, spaces.Dict) and name in dropped:
                left.discard(name)
            else:
                shown[key] = view(space[key], name)
        reads = [(key, read) for key, (_, read) in shown.items()]
        if len(shown) == len(space) and all(read is None for _, read in reads):
            return space, None
        if isinstance(space, spaces.Tuple):
            return spaces.Tuple([one for one, _ in shown.values()]), lambda obs: tuple(
                obs[key] if read is None else read(obs[key]) for key, read in reads
            )
        # What is missing, the check of the observation's structure names.
        return spaces.Dict({key: one for key, (one, _) in shown.items()}), lambda obs: {
            key: obs[key] if read is None else read(obs[key]) for key, read in reads if key in obs
        }

    result = view(space, "")
    if left:
        raise UniRLError(
            f'env "{env_id}" has no observation {", ".join(sorted(left))}',
            f"env.drop_observations names entries of a Dict, its observations are {space}",
            'correct the names; levels are separated by "/"',
        )
    if isinstance(result[0], spaces.Dict) and not result[0].spaces and dropped:
        raise UniRLError(
            f'env "{env_id}" has nothing left to observe',
            f"env.drop_observations is {sorted(dropped)}, and these are all entries it has",
            "keep one",
        )
    return result


def _tokens(text: spaces.Text, path: str, env_id: str) -> tuple[Space[Any], Read]:
    index = {character: i for i, character in enumerate(sorted(text.character_set), 1)}
    shown = spaces.MultiDiscrete([len(index) + 1] * text.max_length)

    def read(given: Any) -> NDArray[np.int64]:
        tokens = np.zeros(text.max_length, np.int64)
        known = isinstance(given, str) and len(given) <= len(tokens)
        if not known or not text.character_set.issuperset(given):
            raise UniRLError(
                f'env "{env_id}" returned a text outside of its space' + f" ({path})" * bool(path),
                f"the observation space promises {text}, received {given!r}",
                "correct the environment's observation_space or its observations",
            )
        tokens[: len(given)] = [index[character] for character in given]
        return tokens

    return shown, read
