"""Plays whole episodes with given weights: returns for evaluations, pictures for videos; source: none.

Atari is judged on full games with raw scores (Machado et al. 2018, arXiv 1709.06009): lost lives end no episode here.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from unirl.core.errors import UniRLError
from unirl.core.evaluator import EvalResult
from unirl.core.seeding import derive_seed
from unirl.core.tree import tree_map
from unirl.core.weights import Weights
from unirl.envs import catalog
from unirl.envs.config import EnvConfig
from unirl.envs.guard import check_finite
from unirl.envs.make import make_vec
from unirl.envs.spaces import action_writer, obs_reader
from unirl.envs.vector import VectorEnv
from unirl.policy import Policy, PolicyConfig

MAX_STEPS = 1_000_000
"""Steps per environment after which an evaluation gives up: some environments have no time limit."""

# ALE shows 60 frames per second, of which the policy sees one in frame_skip.
_ATARI_FPS = 60.0
_ATARI_SCREEN = {"grayscale": False, "img_height": 210, "img_width": 160}


class PolicyEvaluator:
    """Plays a policy in environments of its own, made anew for each call; weights are read, never changed.

    Statistics of normalised observations stay as the weights bring them. The same seed, weights and number of episodes
    give the same episodes. num_envs: how many are stepped at once.
    """

    def __init__(
        self, env: EnvConfig, policy: PolicyConfig, *, seed: int, num_envs: int = 8
    ) -> None:
        self._config = replace(env, episodic_life=False)
        self._policy_config = policy
        self._seed, self._num_envs = seed, num_envs
        self._env: VectorEnv | None = None
        self._fps = 30.0
        self.played = EvalResult([], [])
        """Return and length of the episodes that `frames` finished."""

    def evaluate(
        self, weights: Weights, num_episodes: int, *, deterministic: bool = False
    ) -> EvalResult:
        """Returns and lengths of `num_episodes` episodes, in no order that means anything.

        Raises UniRLError when weights do not fit, or an environment returns NaN or does not end its episodes.
        """
        if num_episodes < 1:
            raise UniRLError(
                f"an evaluation of {num_episodes} episodes was asked for",
                "the number of episodes must be >= 1",
                "20 or 100 are usual",
            )
        self.close()
        self._env = make_vec(self._config, min(self._num_envs, num_episodes))
        try:
            return self._evaluate(self._env, weights, num_episodes, deterministic)
        finally:
            self.close()

    @property
    def frames_per_second(self) -> float:
        """At which speed the frames show the episode as it was; known once `frames` gave the first one."""
        return self._fps

    def frames(
        self, weights: Weights, *, deterministic: bool = False, num_episodes: int = 1
    ) -> Iterator[NDArray[np.uint8]]:
        """Pictures [height, width, 3] of whole episodes, one per step.

        Raises UniRLError when the environment cannot draw itself here.
        """
        self.played = EvalResult([], [])
        episodes = self._atari_frames if self._config.is_atari else self._gym_frames
        yield from episodes(weights, deterministic, num_episodes)

    def close(self) -> None:
        """Close environments that an interrupted call left open; idempotent."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _evaluate(
        self, env: VectorEnv, weights: Weights, num_episodes: int, deterministic: bool
    ) -> EvalResult:
        num_envs = env.num_envs
        player = self._player(env.observation_space, env.action_space, weights, deterministic)
        obs = env.reset(self._env_seed)
        player.begin(num_envs)
        # How many episodes each environment plays is settled before the first step: taking the first ones that end
        # would favour short episodes.
        left = np.full(num_envs, num_episodes // num_envs)
        left[: num_episodes % num_envs] += 1
        result = EvalResult([], [])
        returns, lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        while left.any():
            step = env.step(player.act(obs))
            check_finite(step.obs, step.reward, self._config.id)
            obs = step.acting_obs
            # Rewards are summed in float64: long Atari games score beyond float32's exact integers.
            returns += step.reward
            lengths += step.mask
            for index in np.flatnonzero((step.terminated | step.truncated) & (left > 0)):
                result.returns.append(float(returns[index]))
                result.lengths.append(int(lengths[index]))
                left[index] -= 1
            filler = ~step.mask
            if filler.any():
                returns[filler], lengths[filler] = 0.0, 0
                player.reset_rows(filler)
            if (lengths > MAX_STEPS).any():
                raise UniRLError(
                    f'env "{self._config.id}" does not end its episode',
                    f"an episode must end within {MAX_STEPS} steps to be evaluated",
                    "set env.max_episode_steps",
                )
        return result

    def _gym_frames(
        self, weights: Weights, deterministic: bool, num_episodes: int
    ) -> Iterator[NDArray[np.uint8]]:
        env = self._drawing_env()
        try:
            self._fps = float(env.metadata.get("render_fps") or 30.0)
            player = self._player(env.observation_space, env.action_space, weights, deterministic)
            read = obs_reader(env.observation_space, self._config.id)
            write = action_writer(env.action_space, 1, self._config.id)
            for episode in range(num_episodes):
                raw, _ = env.reset(seed=self._env_seed % 2**31 if episode == 0 else None)
                player.begin(1)
                episode_return, length, over = 0.0, 0, False
                yield _picture(env, self._config)
                while not over and length < MAX_STEPS:
                    obs = read(tree_map_leaves(raw), 1)
                    action = write(player.act(obs))[0]
                    raw, reward, terminated, truncated, _ = env.step(action)
                    episode_return += float(reward)
                    length += 1
                    over = bool(terminated or truncated)
                    yield _picture(env, self._config)
                self.played.returns.append(episode_return)
                self.played.lengths.append(length)
        finally:
            env.close()
