"""Several agents in one environment: PettingZoo's parallel API (Terry et al. 2021, arXiv
2009.14471) as a VectorEnv in which each agent is a row.

All agents act at once, and each may come and go during an episode. Nothing here needs the package
itself: whatever has the methods of ParallelEnv will do, as UniRL's own games show.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib import util
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import create_empty_array
from numpy.typing import NDArray

from unirl.envs import catalog
from unirl.envs.config import MULTI_AGENT, EnvConfig
from unirl.envs.spaces import action_writer, obs_reader, wrong_shape
from unirl.envs.vector import Bools, EnvStep, env_seeds
from unirl.errors import UniRLError

TOYS = {
    "unirl/CountingAgents": "unirl.envs.toy:CountingAgents",
    "unirl/Duel": "unirl.envs.duel:Duel",
}
"""UniRL's own games, by the part of the id after "pettingzoo/"."""


class ParallelEnv(Protocol):
    """What an environment must offer: the part of PettingZoo's ParallelEnv that is used here."""

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


class Cast(NamedTuple):
    """Who plays in one environment, and what each of them sees and does."""

    agents: tuple[Any, ...]
    """As the environment names them, in the order of their rows."""
    observation_space: Space[Any]
    action_space: Space[Any]


def known_ids() -> list[str]:
    """Ids of UniRL's own games and of PettingZoo's that have a parallel API, sorted.

    The package's files are read and not imported: many of its games need packages of their own.
    """
    names = list(TOYS)
    spec = util.find_spec("pettingzoo")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in Path(folder).glob("*/*.py"):
            if re.search(r"_v\d+$", path.stem) and "parallel_env" in path.read_text("utf-8"):
                names.append(f"{path.parent.name}/{path.stem}")
    return sorted(MULTI_AGENT + name for name in names)


def find_factory(config: EnvConfig) -> Factory:
    """What makes one environment of config.id, which EnvConfig.id explains.

    Raises UniRLError for an unknown id, with suggestions, and ModuleNotFoundError for a package
    that is missing.
    """
    name = config.id.removeprefix(MULTI_AGENT)
    if name.startswith("unirl/") and name not in TOYS:
        raise catalog.unknown_id(config.id, known_ids())
    module_name, colon, attribute = TOYS.get(name, name).partition(":")
    if not colon:
        module_name, attribute = "pettingzoo." + name.replace("/", "."), "parallel_env"
    elif not module_name or not attribute or module_name.startswith("."):
        raise UniRLError(
            f'env "{config.id}" names no factory',
            "it must read pettingzoo/<module>:<factory>, with the module's full name",
            'for example "pettingzoo/my_package.games:parallel_env"',
        )
    try:
        if not colon:
            importlib.import_module("pettingzoo")  # else the game would seem to be what is missing
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name == "pettingzoo" or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # a package is missing that it needs
        if not colon:
            raise catalog.unknown_id(config.id, known_ids()) from error
        raise UniRLError(
            f'module "{module_name}" that should make env "{config.id}" was not found',
            "the module before the colon must be importable where the actors run",
            "install it, or set PYTHONPATH to its folder",
        ) from error
    factory: Factory | None = getattr(module, attribute, None)
    if not callable(factory):
        found = "its agents act in turns" if not colon else f'"{attribute}" is not there'
        raise UniRLError(
            f'env "{config.id}" cannot be made: {found}',
            f"module {module_name} must have a function {attribute}() that returns a ParallelEnv",
            "choose another (unirl list envs pettingzoo)" if not colon else "correct env.id",
        )
    return factory


def cast_of(config: EnvConfig, factory: Factory) -> Cast:
    """Makes one environment, asks who plays in it, and closes it."""
    env = _build(config, factory)
    try:
        return _cast(env, config.id)
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

    An agent that disappears from `agents` without being called terminated or truncated counts as
    truncated there. One that ends without a final observation keeps its last one. Past
    max_episode_steps all agents are truncated. What an agent would earn after its end is lost.
    Observations are rows of one array that the next step writes anew.
    """

    hides_first_obs = False

    def __init__(self, config: EnvConfig, factory: Factory, num_rows: int) -> None:
        """num_rows: n * A. UniRLError where it is no multiple of A, or agents are not alike."""
        self.num_envs = num_rows
        self._id, self._limit = config.id, config.max_episode_steps
        self._closed = False
        self._envs = [_build(config, factory)]
        try:
            cast = _cast(self._envs[0], config.id)
            self._names, num_agents = cast.agents, len(cast.agents)
            self.agents: tuple[str, ...] = tuple(str(name) for name in cast.agents)
            """Who the rows of one environment belong to, in order."""
            self.observation_space, self.action_space = cast.observation_space, cast.action_space
            _check_rows(num_rows, cast, config.id)
            self._place = {name: i for i, name in enumerate(self._names)}
            self._obs = _ObsRows(self.observation_space, num_rows, config.id)
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
        """New episodes everywhere, each environment with a seed of its own; see VectorEnv."""
        self._acting = np.zeros(self.num_envs, dtype=np.bool_)
        for index, own in enumerate(env_seeds(seed, len(self._envs))):
            self._begin(index, self._acting, own)
        return self._obs.read()

    def step(self, action: NDArray[Any]) -> EnvStep:
        """One step of every environment; see VectorEnv."""
        num_rows = self.num_envs
        actions = self._write(action)
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
                self._begin(index, self._acting, None)
        done.obs = done.acting_obs = self._obs.read()
        return done

    def close(self) -> None:
        """Close all environments, also where one of them fails to; see VectorEnv."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            for env in self._envs:
                stack.callback(env.close)

    def _begin(self, index: int, acting: Bools, seed: int | None) -> None:
        env = self._envs[index]
        obs, _ = env.reset() if seed is None else env.reset(seed=seed)
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
            acting[row] = name in present
            if name in present:
                self._obs.write(row, self._seen(obs, name))
            else:
                self._obs.clear(row)

    def _step(self, index: int, actions: NDArray[Any], done: EnvStep) -> None:
        """Step one environment and fill its rows of `done`."""
        env = self._envs[index]
        # Keyed by who the environment says is there, which is what it will look up.
        chosen = {name: actions[self._place[name]] for name in env.agents}
        obs, reward, terminated, truncated, _ = env.step(chosen)
        self._steps[index] += 1
        present, at_limit = self._present(env), self._steps[index] == self._limit
        for i, name in enumerate(self._names):
            row = index * len(self._names) + i
            ended, cut = bool(terminated.get(name, False)), bool(truncated.get(name, False))
            stays = name in present and not (ended or cut)
            goes_on = stays and not at_limit
            if done.mask[row]:
                done.terminated[row], done.truncated[row] = ended, cut or not (ended or goes_on)
                done.reward[row] = self._earned(reward, name, ended or cut or stays)
                if stays or obs.get(name) is not None:
                    self._obs.write(row, self._seen(obs, name))
            elif goes_on:
                self._obs.write(row, self._seen(obs, name))
            else:
                self._obs.clear(row)
            self._acting[row] = goes_on

    def _present(self, env: ParallelEnv) -> set[Any]:
        present = set(env.agents)
        if not present <= self._place.keys():
            strangers = sorted(str(name) for name in present - self._place.keys())
            raise UniRLError(
                f'env "{self._id}" has agents that it did not announce: {", ".join(strangers)}',
                f"`agents` must be among `possible_agents`: {', '.join(self.agents)}",
                "correct the environment's possible_agents",
            )
        return present

    def _seen(self, obs: Mapping[Any, Any], name: Any) -> Any:
        found = obs.get(name)
        if found is None:
            raise self._untold("observation", name, obs)
        return found

    def _earned(self, reward: Mapping[Any, float], name: Any, is_told: bool) -> float:
        if name in reward:
            return float(reward[name])
        if is_told:
            raise self._untold("reward", name, reward)
        return 0.0  # it disappeared, and nothing was said of it

    def _untold(self, what: str, name: Any, found: Mapping[Any, Any]) -> UniRLError:
        return UniRLError(
            f'env "{self._id}" returned no {what} for agent {name}',
            f"every agent that acts must get one, found {sorted(map(str, found)) or 'none'}",
            "correct the environment's step and reset",
        )


class _ObsRows:
    """The observations of all rows: one array per leaf, a row of which is written at a time."""

    def __init__(self, space: Space[Any], num_rows: int, env_id: str) -> None:
        self._space, self._num_rows, self._id = space, num_rows, env_id
        self._read = obs_reader(space, env_id)
        self._batch: Any = create_empty_array(space, n=num_rows, fn=np.zeros)
        # Discrete spaces may begin elsewhere: their zero is `start`.
        self._leaves = [
            (path, array, tuple(leaf.shape or ()), getattr(leaf, "start", 0))
            for path, array, leaf in _leaves(space, self._batch, ())
        ]

    def read(self) -> Any:
        """The tree of arrays [B, ...] for the slot."""
        return self._read(self._batch, self._num_rows)

    def write(self, row: int, obs: Any) -> None:
        """Copy one agent's observation in; UniRLError when it does not fit the space."""
        for path, array, shape, _ in self._leaves:
            leaf = obs
            try:
                for key in path:
                    leaf = leaf[key]
            except (KeyError, IndexError, TypeError) as error:
                raise UniRLError(
                    f'env "{self._id}" returned an observation without {_name(path)}',
                    f"the observation space is {self._space}, received {type(obs).__name__}",
                    "correct the environment's observation_space or its observations",
                ) from error
            received = np.shape(leaf)
            if received != shape:  # assigning would repeat a smaller one
                where = f" ({_name(path)})" if path else ""
                raise wrong_shape(self._id, shape, received, where)
            array[row] = leaf

    def clear(self, row: int) -> None:
        """What an agent sees that is not there."""
        for _, array, _, empty in self._leaves:
            array[row] = empty


def _leaves(
    space: Space[Any], batch: Any, path: tuple[Any, ...]
) -> list[tuple[tuple[Any, ...], NDArray[Any], Space[Any]]]:
    children = getattr(space, "spaces", None)  # of Dict a mapping, of Tuple a tuple
    if children is None:
        return [(path, batch, space)]
    keys = children if isinstance(children, Mapping) else range(len(children))
    return [leaf for key in keys for leaf in _leaves(children[key], batch[key], (*path, key))]


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(str(key) for key in path)


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


def _cast(env: ParallelEnv, env_id: str) -> Cast:
    agents = tuple(env.possible_agents)
    found: list[Space[Any]] = []
    for kind, space_of in (("observation", env.observation_space), ("action", env.action_space)):
        first = space_of(agents[0])
        for agent in agents[1:]:
            other = space_of(agent)
            if other != first:
                raise UniRLError(
                    f'agents of env "{env_id}" have different {kind} spaces',
                    "agents are rows of one batch, so their spaces must be equal:"
                    f" {agents[0]} has {first}, {agent} has {other}",
                    "pad them in a wrapper, and name it as pettingzoo/<module>:<factory>",
                )
        found.append(first)
    return Cast(agents, *found)


def _check_rows(num_rows: int, cast: Cast, env_id: str) -> None:
    num_agents = len(cast.agents)
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
