"""What a policy is shown of an environment's observations: without the entries it is to ignore,
texts as numbers, and the mask of allowed actions beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from unirl.action_space import ActionMask, find_mask, num_options
from unirl.envs.config import EnvConfig
from unirl.envs.view.entries import shown_entries
from unirl.envs.view.masks import MASK, mask_source, mask_writer
from unirl.errors import UniRLError

OBS = "obs"
"""What an observation that is no Dict is called beside others."""


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
        self._write = mask_writer(action_space, config.id)
        shown, self._read = shown_entries(
            observation_space, config.drop_observations, config.id, reads_text
        )
        self._source = mask_source(shown, action_space, config)
        self._wraps = self._source == "info" and not isinstance(shown, spaces.Dict)
        if self._source:
            entries = {OBS: shown} if self._wraps else dict(shown.spaces)  # type: ignore[attr-defined]
            entry = MASK if self._source == "info" else self._source
            shown = spaces.Dict({**entries, entry: ActionMask(self._num_options)})
        self.raw_space, self.space = observation_space, shown
        """What the environment gives, and what is shown of it."""
        self.changes = self._read is not None or bool(self._source)
        """False where observations are shown as they are: a view is then not needed."""

    @property
    def reads_info(self) -> bool:
        """Whether it takes masks from the environment's info."""
        return self._source == "info"

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
