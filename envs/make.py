"""From an EnvConfig to environments that step: picks the engine, and turns what may fail into
readable errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import torch
from gymnasium import Space

from unirl.action_space import find_mask
from unirl.descendants import descendants_ended
from unirl.envs import catalog
from unirl.envs.ale import AleEngine
from unirl.envs.answers import asked_once
from unirl.envs.config import EnvConfig
from unirl.envs.envpool import EnvPoolEngine, known_ids
from unirl.envs.guard import final, making
from unirl.envs.gym import GymEngine
from unirl.envs.last_action import LastAction, LastActionEnv
from unirl.envs.multi_agent import parallel, pettingzoo
from unirl.envs.random_bursts import RandomBurstEnv
from unirl.envs.sim.engine import SimEngine
from unirl.envs.sim.make import make_device_env
from unirl.envs.spaces import action_fields, obs_fields
from unirl.envs.vector import EngineEnv, VectorEngine, VectorEnv
from unirl.envs.view.masks import MaskedEnv, detect_mask_source
from unirl.envs.view.obs_view import batch_view
from unirl.errors import UniRLError


def make_vec(config: EnvConfig, num_envs: int) -> VectorEnv:
    """`num_envs` environments behind one step API, not yet reset.

    Raises UniRLError for an unknown id, a package that is not installed, an engine or argument that
    does not fit the environment, and spaces that slots cannot hold.
    """
    config.check_num_envs(num_envs)
    if config.is_multi_agent:
        with explaining(config):
            factory = pettingzoo.find_factory(config)
            return _wrap(parallel.ParallelEnvs(config, factory, num_envs), config)
    engine = _make_engine(config, num_envs)
    try:
        if not isinstance(engine, GymEngine) or engine.mode == "vector":
            engine.observation_space = batch_view(
                engine.observation_space, engine.action_space, config
            )
        obs_fields(engine.observation_space, num_envs, config.id)
        action_fields(engine.action_space, num_envs, config.id)
        return _wrap(EngineEnv(engine, num_envs, config.id, config.make_timeout), config)
    except UniRLError:
        engine.close()
        raise


def spaces(config: EnvConfig) -> tuple[Space[Any], Space[Any]]:
    """Observation and action space of one environment, or of one agent; builds an environment with
    the configured engine and closes it."""
    if config.is_multi_agent:
        agents = asked_once("agents", config, partial(_agents, config))
        obs_fields(agents.observation_space, 1, config.id)
        action_fields(agents.action_space, 1, config.id)
        observation = agents.observation_space
        if config.last_action:
            observation = LastAction(observation, agents.action_space, config.id).observation_space
        return observation, agents.action_space
    with descendants_ended(keeper=False):
        with explaining(config):
            one = _for_one(config)
        return asked_once("spaces", one, partial(_spaces_of_one, one))


def _for_one(config: EnvConfig) -> EnvConfig:
    """One environment needs no process of its own, and no threads. Raises as find_spec does."""
    name = config.engine
    known = config.is_atari or config.is_sim or config.is_multi_agent
    if name == "auto" and not known and catalog.find_spec(config).vector_entry_point is None:
        name = "sync"
    return replace(config, engine="sync" if name == "async" else name, num_threads=1)


def _spaces_of_one(config: EnvConfig) -> tuple[Space[Any], Space[Any]]:
    env = make_vec(config, 1)
    try:
        return env.observation_space, env.action_space
    finally:
        env.close()


def agents_of(config: EnvConfig) -> tuple[str, ...]:
    """Who the rows of one environment belong to, in order; () where there is one agent only.

    num_envs of `make_vec` is a multiple of their number. Builds one environment and closes it.
    """
    if not config.is_multi_agent:
        return ()
    agents = asked_once("agents", config, partial(_agents, config))
    return tuple(str(agent) for agent in agents.names)


def known_env_ids() -> list[str]:
    """All ids that can be made here without EnvPool, sorted."""
    return sorted([*catalog.known_env_ids(), *pettingzoo.known_ids()])


def settle_mask(config: EnvConfig) -> EnvConfig:
    """The config with env.action_mask decided where it is auto, which `make_vec` takes for an entry
    of the observation alone. An environment of its own is made and reset once, within
    env.make_timeout, since only its info says whether it gives masks. What fails there is left to
    those who meet it again with the means to report it.
    """
    if config.action_mask != "auto" or config.is_sim or config.is_atari:
        return config
    if config.engine in ("vector", "envpool"):
        return config
    with descendants_ended(keeper=False), final(), making(config.id, config.make_timeout):
        try:
            one = _for_one(config)
            found = asked_once("mask", one, partial(_find_mask, one))
        except Exception:  # who makes it next meets it again, and explains it
            return config
    return replace(config, action_mask=found)


def _find_mask(config: EnvConfig) -> str:
    quiet = replace(config, action_mask="none")
    if config.is_multi_agent:
        return parallel.find_mask_source(quiet, pettingzoo.find_factory(quiet))
    if config.engine == "auto":
        return "auto"  # of a vector class its entries alone can tell, and do so without a reset
    engine = GymEngine(quiet, catalog.find_spec(config), 1, "sync")
    try:
        reset = engine.env.reset
        return detect_mask_source(engine.observation_space, engine.action_space, lambda: reset()[1])
    finally:
        engine.close()


def _wrap(env: VectorEnv, config: EnvConfig) -> VectorEnv:
    if find_mask(env.observation_space) is not None:
        env = MaskedEnv(env, config.id)
    # Inside of bursts: the last action is the executed one.
    if config.last_action:
        env = LastActionEnv(env, config.id)
    if config.random_burst_probability:
        env = RandomBurstEnv(env, config)
    return env


def _agents(config: EnvConfig) -> parallel.Agents:
    with descendants_ended(keeper=False), explaining(config):
        return parallel.agents_of(config, pettingzoo.find_factory(config))


def _make_engine(config: EnvConfig, num_envs: int) -> VectorEngine:
    with explaining(config):
        if config.is_sim:
            return SimEngine(make_device_env(config, num_envs, torch.device("cpu")))
        if config.engine == "envpool":
            catalog.import_registering_module(config)
            known = known_ids()
            if config.id.removeprefix("ALE/") not in known:
                raise catalog.unknown_id(config.id, known)
            return EnvPoolEngine(config, num_envs)
        spec = catalog.find_spec(config)
        name = config.engine
        if name == "auto":
            name = "sync" if spec.vector_entry_point is None else "vector"
            name = "ale" if config.is_atari else name
        if name == "ale":
            if not config.is_atari:
                raise UniRLError(
                    f'engine ale cannot run env "{config.id}"',
                    'it runs ids that begin with "ALE/"',
                    "set env.engine to auto",
                )
            return AleEngine(config, spec, num_envs)
        if name == "vector" and (spec.vector_entry_point is None or config.is_atari):
            raise UniRLError(
                f'env "{config.id}" has no vector class for engine vector',
                "its registration must name a vector_entry_point",
                f'use engine="{"ale" if config.is_atari else "sync"}"',
            )
        if name in ("sync", "async") and spec.entry_point is None:
            raise UniRLError(
                f'env "{config.id}" has no class of one environment for engine {name}',
                "its registration names a vector_entry_point alone",
                'use engine="vector"',
            )
        return GymEngine(config, spec, num_envs, name)


@contextmanager
def explaining(config: EnvConfig) -> Iterator[None]:
    """Turns what goes wrong while environments are made into errors a person can act on."""
    with making(config.id, config.make_timeout):
        try:
            yield
        except ImportError as error:
            raise catalog.missing_package(config, error) from error
        except gymnasium.error.DependencyNotInstalled as error:
            raise catalog.missing_package(config, ModuleNotFoundError(str(error))) from error
        except TypeError as error:
            if "unexpected keyword argument" not in str(error):
                raise
            limit = config.max_episode_steps
            if limit is not None and "max_episode_steps" in str(error):
                raise UniRLError(
                    f'env "{config.id}" does not take env.max_episode_steps, which is {limit}',
                    str(error),
                    "let its vector class take max_episode_steps, or leave the setting out",
                ) from error
            raise UniRLError(
                f'env "{config.id}" does not take these arguments: {sorted(config.kwargs)}',
                str(error),
                "correct env.kwargs",
            ) from error
