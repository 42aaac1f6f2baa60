"""Environments for tests: a counter to check by hand, alone and with several agents, and one that
breaks on demand. Importing this module registers them, in actor processes too (env.import_module).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode
from gymnasium.vector import VectorEnv as GymVectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from unirl.envs.config import EngineName, EnvConfig

Obs = NDArray[np.float32]
Info = dict[str, Any]


MODULE = "tests.toy_envs"
FAULT = {"env.id": "toy/Fault-v0", "env.import_module": MODULE}
"""A recipe's settings for `Fault`."""


def toy_env(name: str, engine: EngineName = "auto", **settings: Any) -> EnvConfig:
    """The configuration of toy/<name>-v0."""
    return EnvConfig(f"toy/{name}-v0", engine, import_module=MODULE, **settings)


class Counting(gymnasium.Env[Obs, np.int64]):
    """Observation [episode number, step number], reward the step number: every row can be predicted
    by hand.

    Even episodes terminate after `terminate_after` steps, odd ones are truncated after
    `truncate_after`; 0: never. With stagger, an odd seed begins with episode 1.
    """

    def __init__(
        self, terminate_after: int = 3, truncate_after: int = 2, stagger: bool = False
    ) -> None:
        self.observation_space = Box(0.0, np.inf, (2,), np.float32)
        self.action_space = Discrete(2)
        self._limits = (terminate_after, truncate_after)
        self._stagger = stagger
        self._episode, self._step = -1, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Obs, Info]:
        """A seed starts counting again; without one the next episode begins."""
        super().reset(seed=seed)
        first = seed % 2 if seed is not None and self._stagger else 0
        self._episode, self._step = (self._episode + 1, 0) if seed is None else (first, 0)
        return self._obs(), {}

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, Info]:
        """Count."""
        self._step += 1
        over = self._step == self._limits[self._episode % 2]
        odd = self._episode % 2 == 1
        return self._obs(), float(self._step), over and not odd, over and odd, {}

    def _obs(self) -> Obs:
        return np.array([self._episode, self._step], dtype=np.float32)


class CountingVector(GymVectorEnv[Obs, NDArray[np.int64], Obs]):
    """Counting as a vector class in any autoreset mode; with stagger, odd environments begin with
    episode 1."""

    def __init__(
        self,
        num_envs: int = 1,
        autoreset_mode: str = "NextStep",
        terminate_after: int = 3,
        truncate_after: int = 2,
        stagger: bool = False,
    ) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode(autoreset_mode)}
        self.single_observation_space = Box(0.0, np.inf, (2,), np.float32)
        self.single_action_space = Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._limits = np.array([terminate_after, truncate_after])
        self._first = np.arange(num_envs) % 2 if stagger else np.zeros(num_envs, dtype=np.int64)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: Info | None = None
    ) -> tuple[Obs, Info]:
        """Start counting again."""
        self._episode, self._steps = self._first.copy(), np.zeros(self.num_envs, dtype=np.int64)
        self._done = np.zeros(self.num_envs, dtype=np.bool_)
        return self._obs(), {}

    def step(self, actions: NDArray[np.int64]) -> tuple[Obs, Any, Any, Any, Info]:
        """Count everywhere."""
        resets = (
            self._done
            if self.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
            else self._done & False
        )
        self._next_episode(resets)
        self._steps += ~resets
        over = (self._steps == self._limits[self._episode % 2]) & ~resets
        odd = self._episode % 2 == 1
        reward, terminated, truncated = self._steps.astype(np.float64), over & ~odd, over & odd
        self._done, info = over, {}
        if self.metadata["autoreset_mode"] == AutoresetMode.SAME_STEP and over.any():
            info = {"final_obs": self._obs(), "_final_obs": over}
            self._next_episode(over)
        return self._obs(), reward, terminated, truncated, info

    def _next_episode(self, where: NDArray[np.bool_]) -> None:
        self._episode += where
        self._steps[where] = 0

    def _obs(self) -> Obs:
        return np.stack([self._episode, self._steps], axis=1).astype(np.float32)


class CountingAgents:
    """Counting with several agents, who come and go as given: every row can be predicted by hand.

    Episode e goes by lifetimes[e % len(lifetimes)], a number for each agent: n terminates after n
    steps, -n is truncated after n, 0 is not there at all. Observation [agent, episode number, step
    number], reward the step number. silent: at its end an agent only disappears from `agents`, and
    nothing more is said of it. With stagger, an odd seed begins with episode 1. Has PettingZoo's
    parallel API.
    """

    metadata: dict[str, Any] = {"name": "CountingAgents", "render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        lifetimes: Sequence[Sequence[int]] = ((2, 4, -3), (-1, 0, 2)),
        silent: bool = False,
        stagger: bool = False,
    ) -> None:
        self.possible_agents = [f"counter_{i}" for i in range(len(lifetimes[0]))]
        self.agents: list[str] = []
        self._lifetimes, self._silent, self._stagger = lifetimes, silent, stagger
        self._spaces = Box(0.0, np.inf, (3,), np.float32), Discrete(2)
        self._episode, self._step = -1, 0

    def observation_space(self, agent: str) -> Box:
        """Of any agent."""
        return self._spaces[0]

    def action_space(self, agent: str) -> Discrete:
        """Of any agent."""
        return self._spaces[1]

    def reset(
        self, seed: int | None = None, options: Info | None = None
    ) -> tuple[dict[str, Obs], dict[str, Info]]:
        """A seed starts counting again; without one the next episode begins."""
        first = seed % 2 if seed is not None and self._stagger else 0
        self._episode, self._step = (self._episode + 1, 0) if seed is None else (first, 0)
        self.agents = [agent for agent in self.possible_agents if self._lifetime(agent)]
        return self._obs(self.agents), {agent: {} for agent in self.agents}

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[dict[str, Obs], dict[str, float], dict[str, bool], dict[str, bool], dict[str, Info]]:
        """Count; exactly those who are there must act."""
        assert sorted(actions) == sorted(self.agents), (actions, self.agents)
        self._step += 1
        counted = self.agents
        self.agents = [agent for agent in counted if self._step < abs(self._lifetime(agent))]
        if self._silent:
            counted = self.agents
        ended = {agent: agent not in self.agents for agent in counted}
        return (
            self._obs(counted),
            {agent: float(self._step) for agent in counted},
            {agent: ended[agent] and self._lifetime(agent) > 0 for agent in counted},
            {agent: ended[agent] and self._lifetime(agent) < 0 for agent in counted},
            {agent: {} for agent in counted},
        )

    def close(self) -> None:
        """Nothing to let go of."""

    def _lifetime(self, agent: str) -> int:
        lifetimes = self._lifetimes[self._episode % len(self._lifetimes)]
        return lifetimes[self.possible_agents.index(agent)]

    def _obs(self, agents: Sequence[str]) -> dict[str, Obs]:
        return {
            agent: np.array(
                [self.possible_agents.index(agent), self._episode, self._step], np.float32
            )
            for agent in agents
        }


class Fault(gymnasium.Env[Obs, np.int64]):
    """Works until it does not: counts its steps over all episodes and breaks at the ones given; 0:
    never.

    raise_at: RuntimeError. nan_at: a NaN observation. shape_at: an observation of shape (3,)
    instead of (2,). sleep_at: sleeps for sleep_seconds. reset_seconds: what the first reset takes.
    """

    def __init__(
        self,
        raise_at: int = 0,
        nan_at: int = 0,
        shape_at: int = 0,
        sleep_at: int = 0,
        sleep_seconds: float = 0.0,
        reset_seconds: float = 0.0,
        episode_length: int = 10,
    ) -> None:
        self.observation_space = Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space = Discrete(2)
        self._raise_at, self._nan_at, self._shape_at = raise_at, nan_at, shape_at
        self._sleep_at, self._sleep_seconds = sleep_at, sleep_seconds
        self._reset_seconds, self._episode_length = reset_seconds, episode_length
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Obs, Info]:
        """A new episode; the count of steps continues."""
        super().reset(seed=seed)
        if seed is not None:
            time.sleep(self._reset_seconds)
        return np.zeros(2, dtype=np.float32), {}

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, Info]:
        """Break, if it is time."""
        self._step += 1
        if self._step == self._raise_at:
            raise RuntimeError(f"fault at step {self._step}, as asked for")
        if self._step == self._sleep_at:
            time.sleep(self._sleep_seconds)
        size = 3 if self._step == self._shape_at else 2
        value = np.nan if self._step == self._nan_at else float(self._step)
        return (
            np.full(size, value, dtype=np.float32),
            1.0,
            self._step % self._episode_length == 0,
            False,
            {},
        )


class Paced(Counting):
    """A step waits, or computes, for so long."""

    def __init__(self, step_seconds: float = 0.0, computes: bool = False) -> None:
        super().__init__(10, 10)
        self._seconds, self._computes = step_seconds, computes

    def step(self, action: np.int64) -> tuple[Obs, float, bool, bool, Info]:
        until = time.thread_time() + self._seconds
        while self._computes and time.thread_time() < until:
            pass
        if not self._computes and self._seconds:
            time.sleep(self._seconds)
        return super().step(action)


class Returns(Counting):
    """Counting, with values of its own for what a step returns: reward, terminated, truncated."""

    def __init__(self, value: Info) -> None:
        super().__init__()
        self._value = value

    def step(self, action: np.int64) -> Any:
        """What it was given."""
        obs, reward, terminated, truncated, info = super().step(action)
        named = {"reward": reward, "terminated": terminated, "truncated": truncated}
        return obs, *(named | self._value).values(), info


class ReturnsVector(CountingVector):
    """The same for a vector class."""

    def __init__(self, num_envs: int = 1, *, value: Info) -> None:
        super().__init__(num_envs)
        self._value = value

    def step(self, actions: NDArray[np.int64]) -> tuple[Obs, Any, Any, Any, Info]:
        """What it was given."""
        obs, reward, terminated, truncated, info = super().step(actions)
        named = {"reward": reward, "terminated": terminated, "truncated": truncated}
        named |= self._value
        return obs, named["reward"], named["terminated"], named["truncated"], info


class Unmade(Counting):
    """Cannot be made: its constructor, or its first reset, fails, exits or hangs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        if how == "fails":
            raise AssertionError("no simulator here")
        if how == "exits":
            sys.exit(0)
        while how == "hangs":
            with contextlib.suppress(Exception):
                time.sleep(600)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Obs, Info]:
        """Never."""
        time.sleep(600)
        return super().reset(seed=seed, options=options)


gymnasium.register(
    "toy/Returns-v0",
    entry_point=f"{MODULE}:Returns",
    vector_entry_point=f"{MODULE}:ReturnsVector",
)
gymnasium.register("toy/Unmade-v0", entry_point=f"{MODULE}:Unmade")
gymnasium.register(
    "toy/Counting-v0",
    entry_point=f"{MODULE}:Counting",
    vector_entry_point=f"{MODULE}:CountingVector",
)
gymnasium.register("toy/Fault-v0", entry_point=f"{MODULE}:Fault")
gymnasium.register("toy/Paced-v0", entry_point=f"{MODULE}:Paced")
