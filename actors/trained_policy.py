"""A trained policy in a loop of the user's own: observations as the environment gives them, actions
in its own structure, memory kept inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from unirl.action_space import find_mask, first_options
from unirl.actors.acting_policy import ActingPolicy
from unirl.core.tree import tree_map
from unirl.core.weights import Weights
from unirl.envs.config import EnvConfig
from unirl.envs.last_action import LastAction
from unirl.envs.one import raw_spaces
from unirl.envs.spaces import action_writer, obs_reader, one_by_one
from unirl.envs.view.masks import check_allowed
from unirl.errors import UniRLError
from unirl.policy import PolicyConfig
from unirl.policy.precision import for_cpu


class TrainedPolicy:
    """Acts on one observation, or on a batch [N, ...] as Gymnasium's vector environments give it.

    policy.reset() begins an episode, policy.reset(rows) one in each row of a batch where `rows` is
    true. What it remembers between two steps (recurrent state, the last action) is of as many rows
    as it acted on last. Computes on the CPU.
    """

    def __init__(
        self, env: EnvConfig, policy: PolicyConfig, weights: Weights, *, seed: int = 1
    ) -> None:
        self._id, self._raw = env.id, raw_spaces(env)
        shown, action = self._raw.shown, self._raw.action
        self._last = LastAction(shown, action, env.id) if env.last_action else None
        space = shown if self._last is None else self._last.observation_space
        both = (space, action)
        self._player = ActingPolicy(both, for_cpu(policy), weights, seed=seed, deterministic=True)
        self._mask, self._firsts = find_mask(space), first_options(action)
        self._view = view = self._raw.view if self._raw.is_changed else None
        self._takes_mask = view is not None and view.reads_info
        # What the value function alone reads nobody has outside of a simulator.
        hidden = "" if view is not None else policy.critic_group
        self._given, self._read_space = (
            _without(one, hidden) for one in (self._raw.observation, shown)
        )
        self._read = obs_reader(self._read_space, env.id)
        self._num_rows = 0
        self._executed: Any = None

    @property
    def observation_space(self) -> Space[Any]:
        """Of one observation, as the environment gives it."""
        return self._raw.observation

    @property
    def action_space(self) -> Space[Any]:
        """Of one action, as the environment takes it."""
        return self._raw.action

    def reset(self, rows: NDArray[np.bool_] | None = None) -> None:
        """A new episode begins, in these rows of a batch; None: everywhere."""
        if rows is None:
            self._num_rows = 0
        elif self._num_rows:
            chosen = np.asarray(rows, np.bool_)
            if chosen.shape != (self._num_rows,):
                raise UniRLError(
                    f"policy.reset got rows of shape {chosen.shape}",
                    f"it acted on {self._num_rows} rows last: a truth value is needed for each",
                    "pass terminated | truncated of the vector environment",
                )
            self._player.forget(torch.from_numpy(chosen))
            if self._executed is not None:
                tree_map(lambda leaf: _clear(leaf, chosen), self._executed)

    def act(self, observation: Any, *, deterministic: bool = True, action_mask: Any = None) -> Any:
        """An action for one observation, actions for a batch. deterministic: the likeliest ones;
        else they are sampled. action_mask: what allows actions, where the run read it from
        info["action_mask"]; of a batch one for each row.
        """
        num = self._rows_of(observation)
        is_one, num_rows = num is None, num or 1
        if num_rows != self._num_rows:
            if self._num_rows and (self._last is not None or self._player.remembers):
                raise UniRLError(
                    f"the policy is asked for {num_rows} row(s) after {self._num_rows}",
                    "it remembers what it did in each row since the last reset",
                    "call policy.reset() first",
                )
            self._player.begin(num_rows)
            self._num_rows = num_rows
            self._write = action_writer(self._raw.action, num_rows, self._id)
            self._executed = None if self._last is None else self._last.none(num_rows)
        obs = self._shown(observation, is_one, num_rows, action_mask)
        if self._mask is not None:
            check_allowed(obs[self._mask], self._firsts, self._id)
        if self._last is not None:
            obs = self._last.beside(obs, self._executed)
        chosen = self._player.act(tree_map(_tensor, obs), deterministic=deterministic)
        action = tree_map(lambda leaf: leaf.numpy(), chosen)
        if self._last is not None:
            self._executed = self._last.executed(action)
        written = self._write(action)
        return one_by_one(self._raw.action, written)[0] if is_one else written

    def _shown(self, observation: Any, is_one: bool, num_rows: int, action_mask: Any) -> Any:
        """What the policy reads, [num_rows, ...]."""
        if (action_mask is not None) != self._takes_mask:
            raise UniRLError(
                f"policy.act was given {'an' if action_mask is not None else 'no'} action_mask",
                f'the run of env "{self._id}" read its masks from info["action_mask"]'
                if self._takes_mask
                else f'the run of env "{self._id}" read no masks from info["action_mask"]',
                'policy.act(observation, action_mask=info["action_mask"])'
                if self._takes_mask
                else "leave action_mask out",
            )
        view, raw = self._view, self._raw.observation
        if view is not None:
            batch = batch_space(raw, num_rows)
            rows = [observation] if is_one else list(iterate(batch, observation))
            masks = [action_mask] if is_one else action_mask
            infos = [{}] * num_rows if masks is None else [{"action_mask": one} for one in masks]
            shown = [view(row, info, False) for row, info in zip(rows, infos, strict=True)]
            return self._read(_stacked(view.space, shown), num_rows)
        if is_one:
            observation = _stacked(self._read_space, [observation])
        return self._read(observation, num_rows)

    def _rows_of(self, observation: Any) -> int | None:
        """How many observations these are; None: a single one. UniRLError where they are none of
        the space.
        """
        found = set(_numbers(self._given, observation))
        if len(found) == 1 and (num := found.pop()) != 0:
            return num
        raise UniRLError(
            f"policy.act got an observation of {_in_words(observation)}",
            f'env "{self._id}" gives {self._given}; a batch has one more axis in front of each',
            "pass what env.reset() or env.step() returned",
        )


def _numbers(space: Space[Any], given: Any) -> Iterator[int | None]:
    """Of each leaf: how many of it these are, None: it is one; 0: it does not fit."""
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            fits = isinstance(given, Mapping) and key in given
            yield from _numbers(part, given[key]) if fits else (0,)
    elif isinstance(space, spaces.Tuple):
        fits = isinstance(given, tuple | list) and len(given) == len(space)
        yield from (
            number
            for part, one in zip(space.spaces, given if fits else (), strict=False)
            for number in _numbers(part, one)
        )
        if not fits:
            yield 0
    elif isinstance(space, spaces.Text):
        yield None if isinstance(given, str) else len(given)
    else:
        shape, wanted = np.shape(given), space.shape or ()
        is_batch = len(shape) == len(wanted) + 1 and shape[1:] == wanted
        yield None if shape == wanted else shape[0] if is_batch else 0


def _in_words(given: Any) -> str:
    if isinstance(given, Mapping):
        return "{" + ", ".join(f"{key}: {_in_words(one)}" for key, one in given.items()) + "}"
    if isinstance(given, tuple):
        return "(" + ", ".join(map(_in_words, given)) + ")"
    return f"shape {np.shape(given)}" if np.shape(given) else type(given).__name__


def _stacked(space: Space[Any], observations: list[Any]) -> Any:
    empty: Any = create_empty_array(space, len(observations))
    return concatenate(space, observations, empty)


def _without(space: Space[Any], name: str) -> Space[Any]:
    if not name or not isinstance(space, spaces.Dict):
        return space
    return spaces.Dict({key: one for key, one in space.spaces.items() if key != name})


def _clear(leaf: NDArray[Any], rows: NDArray[np.bool_]) -> None:
    leaf[rows] = 0


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())
