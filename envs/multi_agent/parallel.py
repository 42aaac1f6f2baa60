"""Several agents in one environment: PettingZoo's parallel API as a VectorEnv, each agent a row.

All agents act at once, and each may come and go during an episode. PettingZoo itself is not needed:
any object with the methods of ParallelEnv will do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium import Space

from unirl.action_space import find_mask
from unirl.envs.config import EnvConfig
from unirl.envs.guard import check_flags, making
from unirl.envs.multi_agent.obs_rows import ObsRows
from unirl.envs.spaces import action_writer, one_by_one
from unirl.envs.vector import Bools, EnvStep, env_seeds
from unirl.envs.view.masks import detect_mask_source
from unirl.envs.view.obs_view import ObsView
from unirl.errors import UniRLError


class ParallelEnv(Protocol):
    """What an environment must offer: what is used here of PettingZoo's ParallelEnv."""

    @property
    def agents(self) -> list[Any]:
        """Who acts next; known once the environment was reset."""

    @property
    def possible_agents(self) -> list[Any]:
        """Everybody who may ever act."""

    def observation_space(self, agent: Any) -> Space[Any]:
        """What this agent sees."""

    def action_space(self, agent: Any) -> Space[Any]:
        """What this agent does."""

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Mapping[Any, Any], Mapping[Any, Any]]:
        """First observations and infos by agent."""

    def step(
        self, actions: dict[Any, Any]
    ) -> tuple[
        Mapping[Any, Any],
        Mapping[Any, float],
        Mapping[Any, bool],
        Mapping[Any, bool],
        Mapping[Any, Any],
    ]:
        """Observation, reward, terminated, truncated and info by agent."""

    def close(self) -> None:
        """Release everything."""


Factory = Callable[..., ParallelEnv]


class Agents(NamedTuple):
    """Who acts in one environment, and what each of them is shown and does."""

    names: tuple[Any, ...]
    """As the environment names them, in the order of their rows."""
    view: ObsView
    action_space: Space[Any]

    @property
    def observation_space(self) -> Space[Any]:
        """What is shown."""
        return self.view.space


def agents_of(config: EnvConfig, factory: Factory) -> Agents:
    """Makes one environment, asks who acts in it, and closes it."""
    env = _build(config, factory)
    try:
        return _agents(env, config)
    finally:
        env.close()


def find_mask_source(config: EnvConfig, factory: Factory) -> str:
    """What env.action_mask auto means: "info" where the infos of a reset have masks."""
    env = _build(config, factory)
    try:
        agents = _agents(env, config)
        return detect_mask_source(
            agents.observation_space,
            agents.action_space,
            lambda: {key for info in env.reset()[1].values() for key in info},
        )
    finally:
        env.close()


class ParallelEnvs:
    """n parallel environments of A possible agents as a VectorEnv of n * A rows: the row of an
    agent is env_index * A + agent_index.

    An agent's last row brings its true final observation. From then on its rows are fillers with an
    empty observation (zeros) until the whole environment is reset, which takes one row more: that
    row is a filler for everybody and brings the next episode's first observations. An agent that is
    not there when an episode begins has fillers too; when it joins later, or comes back, the filler
    before its first action brings its first observation.

    An agent that disappears from `agents`, neither terminated nor truncated, counts as truncated
    there. One that ends without a final observation keeps its last one. Past
    max_episode_steps all agents are truncated. What an agent would earn after its end is lost.
    An agent whose mask allows nothing waits for its turn, as in PettingZoo's games: anything counts
    as allowed, and none of it has an effect. Observations are rows of one array that the next step
    overwrites.
    """

    hides_first_obs = False

    def __init__(self, config: EnvConfig, factory: Factory, num_rows: int) -> None:
        """num_rows: n * A. UniRLError where it is no multiple of A, or agents are not alike."""
        self.num_envs = num_rows
        self._id, self._limit = config.id, config.max_episode_steps
        self._make_timeout = config.make_timeout
        self._closed = False
        self._envs = [_build(config, factory)]
        try:
            agents = _agents(self._envs[0], config)
            self._view = agents.view
            self._names, num_agents = agents.names, len(agents.names)
            self.agents: tuple[str, ...] = tuple(str(name) for name in agents.names)
            """Who the rows of one environment belong to, in order."""
            self.observation_space, self.action_space = (
                agents.observation_space,
                agents.action_space,
            )
            _check_rows(num_rows, agents, config.id)
            self._index_of = {name: i for i, name in enumerate(self._names)}
            self._mask = find_mask(self.observation_space)
            self._obs = ObsRows(self.observation_space, num_rows, config.id)
            self._write = action_writer(self.action_space, num_rows, config.id)
            while len(self._envs) < num_rows // num_agents:
                self._envs.append(_build(config, factory))
        except BaseException:
            self.close()
            raise
        self._acting: Bools = np.zeros(num_rows, dtype=np.bool_)
        """Whose next row counts."""
        self._steps = [0] * len(self._envs)

    def reset(self, seed: int) -> Any:
        """New episodes everywhere, each environment with a seed of its own."""
        self._acting = np.zeros(self.num_envs, dtype=np.bool_)
        with making(self._id, self._make_timeout, "reset"):
            for index, env_seed in enumerate(env_seeds(seed, len(self._envs))):
                self._begin(index, env_seed)
        return self._obs.read()

    def step(self, action: Any) -> EnvStep:
        num_rows = self.num_envs
        actions = one_by_one(self.action_space, self._write(action))
        mask, self._acting = self._acting, np.zeros(num_rows, dtype=np.bool_)
        reward = np.zeros(num_rows, dtype=np.float32)
        terminated, truncated = (np.zeros(num_rows, dtype=np.bool_) for _ in range(2))
        done = EnvStep(None, None, reward, terminated, truncated, mask)
        num_agents = len(self._names)
        for index in range(len(self._envs)):
            first = index * num_agents
            if mask[first : first + num_agents].any():
                self._step(index, actions[first : first + num_agents], done)
            else:
                self._begin(index, None)
        done.obs = done.acting_obs = self._obs.read()
        return done

    def close(self) -> None:
        """Close all environments, also where one of them fails to."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            for env in self._envs:
                stack.callback(env.close)

    def _begin(self, index: int, seed: int | None) -> None:
        env = self._envs[index]
        obs, infos = env.reset() if seed is None else env.reset(seed=seed)
        self._steps[index] = 0
        present = self._present(env)
        if not present:
            raise UniRLError(
                f'env "{self._id}" began an episode without agents',
                "at least one agent must be there after reset, found none in `agents`",
                "correct the environment's reset",
            )
        for i, name in enumerate(self._names):
            row = index * len(self._names) + i
            self._acting[row] = name in present
            if name in present:
                self._obs.write(row, self._seen(obs, infos, name))
            else:
                self._obs.clear(row)

    def _step(self, index: int, actions: Sequence[Any], done: EnvStep) -> None:
        """Step one environment and fill its rows of `done`."""
        env = self._envs[index]
        # Keyed by who the environment says is there, which is what it will look up.
        chosen = {name: actions[self._index_of[name]] for name in env.agents}
        obs, reward, terminated, truncated, infos = env.step(chosen)
        self._steps[index] += 1
        present, at_limit = self._present(env), self._steps[index] == self._limit
        for i, name in enumerate(self._names):
            row = index * len(self._names) + i
            ended, cut = terminated.get(name, False), truncated.get(name, False)
            if not (type(ended) is bool and type(cut) is bool):
                check_flags(self._id, 0.0, ended, cut)
                ended, cut = bool(ended), bool(cut)
            stays = name in present and not (ended or cut)
            continues = stays and not at_limit
            if done.mask[row]:
                done.terminated[row], done.truncated[row] = ended, cut or not (ended or continues)
                done.reward[row] = self._earned(reward, name, ended or cut or stays)
                if stays or obs.get(name) is not None:
                    self._obs.write(row, self._seen(obs, infos, name, not stays))
            elif continues:
                self._obs.write(row, self._seen(obs, infos, name))
            else:
                self._obs.clear(row)
            self._acting[row] = continues

    def _present(self, env: ParallelEnv) -> set[Any]:
        present = set(env.agents)
        if not present <= self._index_of.keys():
            strangers = sorted(str(name) for name in present - self._index_of.keys())
            raise UniRLError(
                f'env "{self._id}" has agents that it did not announce: {", ".join(strangers)}',
                f"`agents` must be among `possible_agents`: {', '.join(self.agents)}",
                "correct the environment's possible_agents",
            )
        return present

    def _seen(
        self, obs: Mapping[Any, Any], infos: Mapping[Any, Any], name: Any, over: bool = False
    ) -> Any:
        found = obs.get(name)
        if found is None:
            raise self._missing("observation", name, obs)
        if not self._view.changes:
            return found
        found = self._view(found, infos.get(name, {}), over)
        if self._mask is not None and not np.any(found[self._mask]):
            # Not on turn: PettingZoo's games then ignore what an agent does, and allow nothing.
            found[self._mask] = np.ones_like(found[self._mask])
        return found

    def _earned(self, reward: Mapping[Any, float], name: Any, is_due: bool) -> float:
        if name in reward:
            if type(reward[name]) is not float:
                check_flags(self._id, reward[name], False, False)
            return float(reward[name])
        if is_due:
            raise self._missing("reward", name, reward)
        return 0.0  # it disappeared, without a last reward

    def _missing(self, what: str, name: Any, found: Mapping[Any, Any]) -> UniRLError:
        return UniRLError(
            f'env "{self._id}" returned no {what} for agent {name}',
            f"every agent that acts must get one, found {sorted(map(str, found)) or 'none'}",
            "correct the environment's step and reset",
        )


def _build(config: EnvConfig, factory: Factory) -> ParallelEnv:
    env = factory(**config.kwargs)
    if hasattr(env, "agent_iter"):
        env.close()
        raise UniRLError(
            f'env "{config.id}" lets its agents act in turns',
            "its factory must return a ParallelEnv, in which all act at once; found an AECEnv",
            "where turns do not matter, convert it with pettingzoo.utils.aec_to_parallel",
        )
    if not getattr(env, "possible_agents", None):
        env.close()
        raise UniRLError(
            f'env "{config.id}" does not say who may act',
            "each possible agent is a row, so `possible_agents` must name them before reset",
            "set possible_agents in its constructor",
        )
    return env


def _agents(env: ParallelEnv, config: EnvConfig) -> Agents:
    env_id = config.id
    names = tuple(env.possible_agents)
    found: list[Space[Any]] = []
    for kind, space_of in (("observation", env.observation_space), ("action", env.action_space)):
        first = space_of(names[0])
        for agent in names[1:]:
            other = space_of(agent)
            if other != first:
                raise UniRLError(
                    f'agents of env "{env_id}" have different {kind} spaces',
                    "agents are rows of one batch, so their spaces must be equal:"
                    f" {names[0]} has {first}, {agent} has {other}",
                    "pad them in a wrapper, and name it as pettingzoo/<module>:<factory>",
                )
        found.append(first)
    return Agents(names, ObsView(found[0], found[1], config), found[1])


def _check_rows(num_rows: int, agents: Agents, env_id: str) -> None:
    num_agents = len(agents.names)
    if num_rows % num_agents == 0:
        return
    below = num_rows // num_agents * num_agents
    fitting = [str(number) for number in (below, below + num_agents) if number]
    raise UniRLError(
        f'{num_rows} rows do not hold whole environments of "{env_id}"',
        f"each of its {num_agents} agents is a row: num_envs % {num_agents} must be 0,"
        f" found {num_rows % num_agents}",
        f"set num_envs to {' or '.join(fitting)}",
    )
