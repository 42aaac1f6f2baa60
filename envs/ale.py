"""Atari on ale-py's C++ vector environment: small gray frames, frame skip, stack and sticky actions
in its threads.

Preprocessing follows Machado et al. 2018 (arXiv 1709.06009) and Mnih et al. 2015, as in Gymnasium's
v5 ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from unirl.envs.config import EnvConfig
from unirl.envs.vector import EngineStep, env_seeds
from unirl.errors import UniRLError


def register() -> None:
    """Put the ALE/* ids into Gymnasium's registry; ImportError without ale-py."""
    import ale_py
    import gymnasium

    gymnasium.register_envs(ale_py)


def preprocessing(config: EnvConfig) -> dict[str, Any]:
    """What the ale engine and EnvPool call by the same names."""
    return {
        "stack_num": config.frame_stack,
        "img_height": config.frame_size,
        "img_width": config.frame_size,
        "repeat_action_probability": config.repeat_action_probability,
        "noop_max": config.noop_max,
        "full_action_space": config.full_action_space,
    }


class AleEngine:
    """`ale_py.vector_env.AtariVectorEnv`: observations uint8 [B, stack, height, width], a new
    array at every step.

    An episode's first observations are padded with black frames, and FIRE is pressed once where a
    game has it. A lost life, with episodic_life, is reported as terminated; the game continues, and
    the filler row after it is a real step whose reward is lost. (The engine's own episodic_life
    starts the whole game again: later lives are never seen; so it is not what this setting uses.)
    """

    def __init__(self, config: EnvConfig, spec: EnvSpec, num_envs: int) -> None:
        from ale_py.vector_env import AtariVectorEnv

        if spec.kwargs.get("obs_type", "rgb") != "rgb":
            raise UniRLError(
                f'env "{config.id}" does not show pixels',
                f"engine ale needs obs_type rgb, found {spec.kwargs['obs_type']}",
                'use engine="sync"',
            )
        self._num_envs = num_envs
        settings: dict[str, Any] = {
            "num_threads": config.threads_for(num_envs),
            "frameskip": config.frame_skip,
            **preprocessing(config),
            "life_loss_info": config.episodic_life,
            "reward_clipping": False,  # slots hold raw rewards; the learner clips
        }
        # The engine counts frames, from the first one after the no-ops.
        if config.max_episode_steps is not None:
            settings["max_num_frames_per_episode"] = config.max_episode_steps * config.frame_skip
        self._env = AtariVectorEnv(spec.kwargs["game"], num_envs, **{**settings, **config.kwargs})
        self.observation_space: Space[Any] = self._env.single_observation_space
        self.action_space: Space[Any] = self._env.single_action_space

    @property
    def autoreset_mode(self) -> AutoresetMode:
        """Next-step unless env.kwargs says otherwise."""
        return self._env.autoreset_mode

    def reset(self, seed: int) -> Any:
        obs, _ = self._env.reset(seed=np.array(env_seeds(seed, self._num_envs), dtype=np.int64))
        return obs

    def step(self, action: NDArray[Any]) -> EngineStep:
        return self._env.step(action)

    def close(self) -> None:
        """The threads end when the engine is freed."""
        self.__dict__.pop("_env", None)
