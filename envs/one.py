"""One environment for a loop of the user's own, as a run's actors step it: its arguments, its time
limit, Atari's frames; and what a policy is shown of what it gives.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import Space

from unirl.core.tree import tree_map
from unirl.envs import catalog
from unirl.envs.config import EnvConfig
from unirl.envs.guard import final
from unirl.envs.make import explaining, make_vec
from unirl.envs.multi_agent import parallel, pettingzoo
from unirl.envs.vector import VectorEnv
from unirl.envs.view.obs_view import ObsView


class RawSpaces(NamedTuple):
    """What one environment, or one agent, gives and takes."""

    observation: Space[Any]
    """As the environment gives it."""
    action: Space[Any]
    view: ObsView | None
    """What is shown of it; None: that is what it gives."""

    @property
    def is_changed(self) -> bool:
        """Whether anything else is shown than it gives."""
        return self.view is not None and self.view.changes

    @property
    def shown(self) -> Space[Any]:
        """What a policy is shown, the last action aside."""
        return self.observation if self.view is None else self.view.space


def make_one(config: EnvConfig, render_mode: str | None = None) -> Any:
    """A gymnasium.Env; with several agents what PettingZoo's parallel API asks for. Whole games:
    lost lives end no episode. Raises UniRLError where it cannot be made.
    """
    config = _for_one(config)
    with final(), explaining(config):
        if config.is_multi_agent:
            return pettingzoo.find_factory(config)(**config.kwargs)
        if _is_alone(config):
            return gymnasium_env(config, render_mode)
        return FirstOfVector(make_vec(config, 1))


def gymnasium_env(config: EnvConfig, render_mode: str | None = None) -> gymnasium.Env[Any, Any]:
    """As Gymnasium makes it, whatever engine steps many of them."""
    # Not all take a render_mode, not even none.
    drawing = {} if render_mode is None else {"render_mode": render_mode}
    return gymnasium.make(
        catalog.find_spec(config),
        max_episode_steps=config.max_episode_steps,
        **drawing,  # type: ignore[arg-type]
        **config.kwargs,
    )


def raw_spaces(config: EnvConfig) -> RawSpaces:
    """Makes one environment, asks it, and closes it."""
    config = _for_one(config)
    if config.is_multi_agent:
        agents = parallel.agents_of(config, pettingzoo.find_factory(config))
        return RawSpaces(agents.view.raw_space, agents.action_space, agents.view)
    env = make_one(config)
    try:
        observation, action = env.observation_space, env.action_space
    finally:
        env.close()
    view = ObsView(observation, action, config) if _is_alone(config) else None
    return RawSpaces(observation, action, view)


class FirstOfVector(gymnasium.Env[Any, Any]):
    """The only environment of a vector: for those that an engine steps many of, Atari above all."""

    def __init__(self, env: VectorEnv) -> None:
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self._env = env

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31)) if seed is None else seed
        return _first(self._env.reset(drawn)), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        step = self._env.step(np.asarray(action)[None])
        ended = bool(step.terminated[0]), bool(step.truncated[0])
        return _first(step.obs), float(step.reward[0]), *ended, {}

    def close(self) -> None:
        self._env.close()


def _for_one(config: EnvConfig) -> EnvConfig:
    engine = "sync" if config.engine == "async" else config.engine
    return replace(
        config,
        engine=engine,
        num_threads=1,
        episodic_life=False,
        random_burst_probability=0.0,
        last_action=False,  # a policy remembers what it did
    )


def _is_alone(config: EnvConfig) -> bool:
    """Whether Gymnasium makes single ones of it."""
    if config.is_atari or config.is_sim or config.engine == "envpool":
        return False
    return catalog.find_spec(config).entry_point is not None


def _first(obs: Any) -> Any:
    # Copied: a vector may write to the same memory again.
    return tree_map(lambda leaf: leaf[0].copy(), obs)
