"""Gymnasium's own engines: an environment's vector class, one after the other (sync), one process
each (async)."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import connection
from typing import Any, Literal

import gymnasium
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from gymnasium.vector import VectorEnv as GymVectorEnv

from unirl.envs.config import EnvConfig
from unirl.envs.lives import EpisodicLife
from unirl.envs.obs_check import ShapeCheck
from unirl.envs.vector import EngineStep, env_seeds
from unirl.envs.view.masks import refuse_mask
from unirl.envs.view.obs_view import viewed
from unirl.errors import EnvCrashed, UniRLError

Wrapper = Callable[[gymnasium.Env[Any, Any]], gymnasium.Env[Any, Any]]
PR_SET_PDEATHSIG = 1
# A worker must be a direct child for its tie to the parent, so a fork server will not do.
_IS_LINUX = sys.platform == "linux"


class GymEngine:
    """`gymnasium.make_vec` in one of its modes. Async workers die with their parent and leave
    Ctrl-C to it."""

    def __init__(
        self,
        config: EnvConfig,
        spec: EnvSpec,
        num_envs: int,
        mode: Literal["vector", "sync", "async"],
    ) -> None:
        self._id, self._num_envs, self.mode = config.id, num_envs, mode
        self._config = config
        self._step_timeout = config.step_timeout
        self._closed = self._stuck = False
        self.env = _make(config, spec, num_envs, mode)
        self.observation_space: Space[Any] = self.env.single_observation_space
        self.action_space: Space[Any] = self.env.single_action_space

    @property
    def autoreset_mode(self) -> AutoresetMode:
        """What the engine's metadata says; UniRLError where it says nothing."""
        mode = self.env.metadata.get("autoreset_mode")
        if mode is None:
            raise UniRLError(
                f'env "{self._id}" does not say when it resets',
                'the vector class must declare metadata["autoreset_mode"], found none',
                'declare AutoresetMode.NEXT_STEP, or use engine="sync"',
            )
        return AutoresetMode(mode)

    def reset(self, seed: int) -> Any:
        """First observations; a vector class gets one seed, all others one per environment."""
        seeds = env_seeds(seed, self._num_envs)
        if self.mode == "vector":
            obs, info = self.env.reset(seed=seeds[0])
            refuse_mask(info, self._config)
            return obs
        if isinstance(self.env, AsyncVectorEnv):
            send = partial(self.env.reset_async, seed=list(seeds))
            return self._ask_workers(self.env, send, self.env.reset_wait)[0]
        return self.env.reset(seed=list(seeds))[0]  # type: ignore[arg-type]

    def step(self, action: Any) -> EngineStep:
        if isinstance(self.env, AsyncVectorEnv):
            send = partial(self.env.step_async, action)
            result: EngineStep = self._ask_workers(self.env, send, self.env.step_wait)
            return result
        return self.env.step(action)

    def close(self) -> None:
        """End the environments; worker processes too, even where one of them is stuck or dead."""
        if self._closed:
            return
        self._closed = True
        if not isinstance(self.env, AsyncVectorEnv):
            self.env.close()
            return
        if self._stuck:
            _kill_workers(self.env)
            return
        try:
            self.env.close()
        except (EOFError, OSError):  # a worker died on its own; the others must not outlive it
            _kill_workers(self.env)

    def _ask_workers(
        self, env: AsyncVectorEnv, send: Callable[[], None], wait: Callable[[float], Any]
    ) -> Any:
        """`send`, then `wait` under the deadline; a worker's error is raised as it was there, one
        that died or hangs is an EnvCrashed."""
        started = time.monotonic()
        try:
            send()
            return wait(self._step_timeout)
        except multiprocessing.TimeoutError:
            self._stuck = True
            late = [
                i
                for i, pipe in enumerate(env.parent_pipes)
                if pipe is not None and not pipe.poll(0)
            ]
            raise EnvCrashed(
                f'env "{self._id}" is stuck: no answer from environment {late}',
                f"a step must take at most {self._step_timeout:g} s,"
                f" waited {time.monotonic() - started:.1f} s",
                "raise env.step-timeout, or find what the environment waits for",
            ) from None
        except (EOFError, ConnectionError) as error:
            self._stuck = True
            dead = _exit_codes(env)
            raise EnvCrashed(
                f'a worker process of env "{self._id}" died: environment {dead}',
                "engine async needs every worker alive",
                "look for a crash in native code, or for memory running out",
            ) from error
        except UniRLError as error:
            # Gymnasium wraps what a worker raised in its own type again.
            if isinstance(error.what, UniRLError):
                raise error.what from None
            raise


def _make(
    config: EnvConfig, spec: EnvSpec, num_envs: int, mode: Literal["vector", "sync", "async"]
) -> GymVectorEnv[Any, Any, Any]:
    kwargs = dict(config.kwargs)
    if config.max_episode_steps is not None:
        kwargs["max_episode_steps"] = config.max_episode_steps
    if mode == "vector":
        return gymnasium.make_vec(spec, num_envs, vectorization_mode="vector_entry_point", **kwargs)
    if mode == "async" and multiprocessing.current_process().daemon:
        raise UniRLError(
            f'env "{config.id}" cannot start its worker processes',
            "engine async needs a parent process that may have children; this one is daemonic",
            'use engine="sync", or start the actor with daemon=False',
        )
    wrappers = _atari_wrappers(config) if config.is_atari else []
    wrappers += [partial(viewed, config=config), partial(ShapeCheck, env_id=config.id)]
    if mode == "async":
        wrappers.append(partial(_tie_to_parent, parent=os.getpid()))
    return gymnasium.make_vec(
        spec,
        num_envs,
        vectorization_mode=mode,
        vector_kwargs={"context": "fork"} if mode == "async" and _IS_LINUX else None,
        wrappers=wrappers,  # type: ignore[arg-type]  # any function of an env will do
        # ShapeCheck looks at every step; Gymnasium's checker would only warn, and only once.
        disable_env_checker=True,
        **(kwargs | _ale_kwargs(config) if config.is_atari else kwargs),
    )


def _exit_codes(env: AsyncVectorEnv) -> str:
    """Which worker processes have ended, with their exit codes."""
    ended = connection.wait([process.sentinel for process in env.processes], timeout=1.0)
    dead = [(i, process) for i, process in enumerate(env.processes) if process.sentinel in ended]
    for _, process in dead:
        process.join(1.0)  # its pipes close a moment before its exit code is there
    return ", ".join(f"{i} (exit code {process.exitcode})" for i, process in dead)


def _kill_workers(env: AsyncVectorEnv) -> None:
    for process in env.processes:
        process.kill()
    for process in env.processes:
        process.join()
    for pipe in env.parent_pipes:
        if pipe is not None:
            pipe.close()
    env.closed = True


def _tie_to_parent(env: gymnasium.Env[Any, Any], parent: int) -> gymnasium.Env[Any, Any]:
    """In a worker process: die when the parent does (kill -9 included), leave Ctrl-C and a closed
    terminal to it.
    """
    # Gymnasium also builds one environment in the parent, to ask for its spaces.
    if os.getpid() == parent:
        return env
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if _IS_LINUX:
        # Bound to the thread that started this process: an actor must make its environments where
        # it steps them.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent died before the request was made
            os._exit(1)
    return env


def _ale_kwargs(config: EnvConfig) -> dict[str, Any]:
    kwargs: dict[str, Any] = {
        "frameskip": 1,  # AtariPreprocessing skips frames itself, to max-pool the last two
        "repeat_action_probability": config.repeat_action_probability,
        "full_action_space": config.full_action_space,
    }
    if config.max_episode_steps is not None:  # Gymnasium's limit counts single frames here
        kwargs["max_episode_steps"] = config.max_episode_steps * config.frame_skip
    return kwargs


def _atari_wrappers(config: EnvConfig) -> list[Wrapper]:
    """The ale engine's preprocessing with Gymnasium's wrappers (without FIRE at reset); needs
    OpenCV."""
    wrappers: list[Wrapper] = [
        partial(
            gymnasium.wrappers.AtariPreprocessing,
            noop_max=config.noop_max,
            frame_skip=config.frame_skip,
            screen_size=config.frame_size,
        ),
        partial(
            gymnasium.wrappers.FrameStackObservation,
            stack_size=config.frame_stack,
            padding_type="zero",
        ),
    ]
    return [*wrappers, EpisodicLife] if config.episodic_life else wrappers
