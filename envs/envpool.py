"""EnvPool: C++ environments on threads (Weng et al. 2022, arXiv 2206.10558); Atari, MuJoCo, Box2D,
classic control.

What its episodes look like: next-step autoreset with an empty filler row; at the step limit it
reports truncated and not terminated, also where the episode ended by its own rules in that very
step.
"""

from __future__ import annotations

from typing import Any

from gymnasium import Space
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from unirl.envs.ale import preprocessing
from unirl.envs.config import EnvConfig
from unirl.envs.vector import EngineStep, env_seeds
from unirl.envs.view.masks import refuse_mask
from unirl.errors import UniRLError


def known_ids() -> list[str]:
    """The ids that EnvPool knows; ImportError without EnvPool."""
    import envpool

    return list(envpool.list_all_envs())


class EnvPoolEngine:
    """One EnvPool, built by `reset`: it takes its seeds at construction, so another reset builds
    another pool."""

    autoreset_mode = AutoresetMode.NEXT_STEP

    def __init__(self, config: EnvConfig, num_envs: int) -> None:
        import envpool

        self._num_envs, self._config = num_envs, config
        self._id = config.id.removeprefix("ALE/")  # EnvPool lists Atari games without a namespace
        has_lives = "episodic_life" in envpool.make_spec(self._id).config._fields
        if has_lives and not config.is_atari:
            raise UniRLError(
                f'env "{config.id}" is an Atari game',
                "an Atari game's id begins with ALE/, with engine envpool too: without it"
                " env.frame_skip, env.episodic_life and the like would not count",
                f'write env.id "ALE/{config.id}"',
            )
        if config.is_atari and not has_lives:
            raise UniRLError(
                f'env "{config.id}" is no Atari game',
                "ids that begin with ALE/ are Atari games",
                f'write env.id "{self._id}"',
            )
        self._settings: dict[str, Any] = {
            "num_envs": num_envs,
            "num_threads": config.threads_for(num_envs),
        }
        if config.max_episode_steps is not None:
            self._settings["max_episode_steps"] = config.max_episode_steps
        if config.is_atari:
            self._settings |= {
                "frame_skip": config.frame_skip,
                **preprocessing(config),
                "episodic_life": config.episodic_life,
                "reward_clip": False,
            }
        self._settings |= config.kwargs
        taken = {"seed", "batch_size", "env_type"} & set(config.kwargs)
        if taken:
            raise UniRLError(
                f'env.kwargs of "{config.id}" sets {", ".join(sorted(taken))}',
                "UniRL sets these itself: one seed per environment, all of them stepped together",
                "remove them; the run's seed derives the environments' seeds",
            )
        spec = envpool.make_spec(self._id, **self._settings)
        self.observation_space: Space[Any] = spec.gymnasium_observation_space
        self.action_space: Space[Any] = spec.gymnasium_action_space
        self._pool: Any = None

    def reset(self, seed: int) -> Any:
        """First observations from a new pool; each environment has its own seed."""
        import envpool

        self.close()
        seeds = env_seeds(seed, self._num_envs)
        self._pool = envpool.make(self._id, env_type="gymnasium", seed=seeds, **self._settings)
        obs, info = self._pool.reset()
        refuse_mask(info, self._config)
        return obs

    def step(self, action: NDArray[Any]) -> EngineStep:
        """One step of every environment; EnvPool returns new arrays each time."""
        result: EngineStep = self._pool.step(action)
        return result

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None
