"""Plays whole episodes with given weights: returns for evaluations, pictures for videos.

Atari is judged on full games with raw scores (Machado et al. 2018, arXiv 1709.06009): here a lost
life ends no episode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector.utils import concatenate, create_empty_array
from numpy.typing import NDArray

from unirl.action_space import find_mask, first_options
from unirl.actors.acting_policy import ActingPolicy
from unirl.actors.drawing import Picture, drawn, undrawable
from unirl.actors.evaluate_device import MAX_STEPS, DeviceEvaluator, check_episodes
from unirl.actors.vector import check_memory
from unirl.core.evaluator import EvalResult
from unirl.core.seeding import derive_seed
from unirl.core.tree import tree_map
from unirl.core.weights import Weights
from unirl.descendants import descendants_ended
from unirl.envs import catalog
from unirl.envs.config import EnvConfig
from unirl.envs.guard import explained, final, making, stepping
from unirl.envs.last_action import LastAction
from unirl.envs.make import agents_of, make_vec, settle_mask
from unirl.envs.obs_check import ShapeCheck, check_finite
from unirl.envs.one import gymnasium_env
from unirl.envs.sim.make import make_device_env
from unirl.envs.spaces import action_writer, obs_reader, one_by_one
from unirl.envs.vector import VectorEnv
from unirl.envs.view.masks import check_allowed
from unirl.envs.view.obs_view import viewed
from unirl.errors import UniRLError
from unirl.policy import PolicyConfig
from unirl.policy.precision import for_cpu

# ALE shows 60 frames per second, of which the policy sees one in frame_skip.
_ATARI_FPS = 60.0
_ATARI_SCREEN = {"grayscale": False, "img_height": 210, "img_width": 160}
# Part of what is said where an environment raised.
_WHEN = "in an evaluation"


def make_evaluator(
    env: EnvConfig, policy: PolicyConfig, seed: int, *, num_envs: int = 8
) -> PolicyEvaluator | DeviceEvaluator:
    """What plays a policy in this environment, all of it on the CPU, in float32 where that only
    emulates bfloat16. num_envs: how many environments are stepped at once.
    """
    policy = for_cpu(policy)
    if not env.is_sim:
        return PolicyEvaluator(settle_mask(env), policy, seed, num_envs=num_envs)
    # Behind `make_vec` a simulator would hide one step of each later episode.
    make_env = partial(make_device_env, env, device=torch.device("cpu"))
    return DeviceEvaluator(make_env, policy, seed, num_envs=num_envs)


class PolicyEvaluator:
    """Plays a policy in environments of its own, made again for each call.

    Weights are copied, and the statistics of normalised observations stay as they came with them.
    The same seed, weights and number of episodes give the same episodes, whatever ran before.
    """

    def __init__(self, env: EnvConfig, policy: PolicyConfig, seed: int, *, num_envs: int) -> None:
        self._config = replace(env, episodic_life=False, random_burst_probability=0.0)
        self._policy_config, self._seed, self._num_envs = policy, seed, num_envs
        self._env_seed = derive_seed(seed, "eval", "environments") % 2**32
        self._env: VectorEnv | None = None
        self._begin: Callable[[], None] = lambda: None
        """Called before each step, see `stepping`."""
        self.frames_per_second = 30.0
        """The speed at which the frames look right; known once `frames` gave the first one."""
        self.played = EvalResult([], [])
        """Return and length of the episodes that `frames` finished."""

    def evaluate(
        self, weights: Weights, num_episodes: int, *, deterministic: bool = False
    ) -> EvalResult:
        """Returns and lengths of `num_episodes` episodes, in no order that means anything."""
        check_episodes(num_episodes)
        self.close()
        with descendants_ended(), final():
            agents = len(agents_of(self._config)) or 1  # each a row: whole environments only
            num_rows = max(agents, min(self._num_envs, num_episodes) // agents * agents)
            self._env = make_vec(self._config, num_rows)
            try:
                with self._watched():
                    return self._evaluate(self._env, weights, num_episodes, deterministic)
            finally:
                self.close()

    def frames(
        self, weights: Weights, *, deterministic: bool = False, num_episodes: int = 1
    ) -> Iterator[Picture]:
        """Pictures [height, width, 3] of whole episodes, one per step."""
        self.played = EvalResult([], [])
        episodes = self._atari_frames if self._config.is_atari else self._gym_frames
        with descendants_ended(), final(), self._watched():
            for picture in episodes(weights, deterministic, num_episodes):
                yield picture
                self._begin()  # not who draws is watched

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """In this block an environment that hangs is named."""
        with stepping(self._config.id, self._config.step_timeout) as self._begin:
            yield

    def close(self) -> None:
        """Close environments that an interrupted call left open; idempotent."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _evaluate(
        self, env: VectorEnv, weights: Weights, num_episodes: int, deterministic: bool
    ) -> EvalResult:
        check_memory(env, self._policy_config, self._config.id)
        num_envs = env.num_envs
        player = self._player((env.observation_space, env.action_space), weights, deterministic)
        # How many episodes each environment plays is settled before the first step: to take those
        # that end first would favour short ones.
        left = np.full(num_envs, num_episodes // num_envs)
        left[: num_episodes % num_envs] += 1
        result = EvalResult([], [])
        if not env.hides_first_obs:
            self._play(env, player, left, self._env_seed, result)
            return result
        # Only a reset shows all of an episode; later ones would lack their first step.
        for round_number in range(int(left.max())):
            seed = derive_seed(self._env_seed, "round", round_number) % 2**32
            self._play(env, player, (left > round_number).astype(left.dtype), seed, result)
        return result

    def _play(
        self,
        env: VectorEnv,
        player: ActingPolicy,
        left: NDArray[np.int64],
        seed: int,
        result: EvalResult,
    ) -> None:
        """Episodes from a reset on, as many of each environment as `left` says, into result."""
        num_envs = env.num_envs
        with explained(self._config.id, _WHEN):
            obs = env.reset(seed)
        player.begin(num_envs)
        returns, lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        since_end = 0
        while left.any():
            action = _act(player, obs)
            self._begin()
            with explained(self._config.id, _WHEN):
                step = env.step(action)
            seen = tree_map(lambda leaf: _tensor(leaf)[None], step.obs)
            check_finite(seen, _tensor(step.reward)[None], self._config.id)
            obs = step.acting_obs
            returns += step.reward
            lengths += step.mask
            for index in np.flatnonzero((step.terminated | step.truncated) & (left > 0)):
                result.returns.append(float(returns[index]))
                result.lengths.append(int(lengths[index]))
                left[index] -= 1
                since_end = 0
            since_end += 1
            filler = ~step.mask
            if filler.any():
                returns[filler], lengths[filler] = 0.0, 0
                player.forget(torch.from_numpy(filler))
            # Also where an agent never comes to play: its rows are fillers for ever.
            if since_end > MAX_STEPS:
                raise UniRLError(
                    f'env "{self._config.id}" does not end its episode',
                    f"an episode must end within {MAX_STEPS} steps to be evaluated",
                    "set env.max_episode_steps",
                )

    def _gym_frames(
        self, weights: Weights, deterministic: bool, num_episodes: int
    ) -> Iterator[Picture]:
        env = self._drawing_env()
        try:
            self.frames_per_second = float(env.metadata.get("render_fps") or 30.0)
            last: LastAction | None = None
            space = env.observation_space
            if self._config.last_action:
                last = LastAction(space, env.action_space, self._config.id)
                space = last.observation_space
            player = self._player((space, env.action_space), weights, deterministic)
            masked, firsts = find_mask(space), first_options(env.action_space)
            read = obs_reader(env.observation_space, self._config.id)
            write = action_writer(env.action_space, 1, self._config.id)
            for episode in range(num_episodes):
                with explained(self._config.id, _WHEN):
                    raw, _ = env.reset(seed=self._env_seed % 2**31 if episode == 0 else None)
                player.begin(1)
                executed = None if last is None else last.none(1)
                episode_return, length, over = 0.0, 0, False
                yield drawn(self._config.id, env.render)
                while not over and length < MAX_STEPS:
                    empty: Any = create_empty_array(env.observation_space, 1)
                    obs = read(concatenate(env.observation_space, [raw], empty), 1)
                    if last is not None and executed is not None:
                        obs = last.beside(obs, executed)
                    if masked is not None:
                        check_allowed(obs[masked], firsts, self._config.id)
                    action = _act(player, obs)
                    chosen = one_by_one(env.action_space, write(action))[0]
                    with explained(self._config.id, _WHEN):
                        raw, reward, terminated, truncated, _ = env.step(chosen)
                    executed = None if last is None else last.executed(action)
                    episode_return += float(reward)
                    length += 1
                    over = bool(terminated or truncated)
                    yield drawn(self._config.id, env.render)
                self.played.returns.append(episode_return)
                self.played.lengths.append(length)
        finally:
            env.close()

    def _atari_frames(
        self, weights: Weights, deterministic: bool, num_episodes: int
    ) -> Iterator[Picture]:
        """Two games in step from one seed: as the policy sees it, and in full size and colour."""
        config = replace(self._config, engine="ale", num_threads=1)
        screen_kwargs = {**config.kwargs, **_ATARI_SCREEN}
        game = make_vec(config, 1)
        shown_as = replace(config, frame_stack=1, kwargs=screen_kwargs, last_action=False)
        screen = make_vec(shown_as, 1)
        try:
            self.frames_per_second = _ATARI_FPS / config.frame_skip
            check_memory(game, self._policy_config, config.id)
            spaces = game.observation_space, game.action_space
            player = self._player(spaces, weights, deterministic)
            obs = game.reset(self._env_seed)
            picture = screen.reset(self._env_seed)
            player.begin(1)
            episode_return, length = 0.0, 0
            while len(self.played.returns) < num_episodes:
                yield picture[0, -1]
                action = _act(player, obs)
                step, shown = game.step(action), screen.step(action)
                obs, picture = step.acting_obs, shown.acting_obs
                episode_return += float(step.reward[0])
                length += int(step.mask[0])
                if step.terminated[0] or step.truncated[0]:
                    self.played.returns.append(episode_return)
                    self.played.lengths.append(length)
                    episode_return, length = 0.0, 0
                if not step.mask[0]:
                    player.begin(1)
            yield picture[0, -1]
        finally:
            game.close()
            screen.close()

    def _drawing_env(self) -> gymnasium.Env[Any, Any]:
        config = self._config
        catalog.find_spec(config)  # what is wrong with the id, it says
        with making(config.id, config.make_timeout):
            try:
                env = gymnasium_env(config, "rgb_array")
                return ShapeCheck(viewed(env, config), config.id)
            except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
                raise catalog.missing_package(config, ModuleNotFoundError(str(error))) from error
            except (TypeError, gymnasium.error.Error) as error:
                # Videos are of one environment that Gymnasium makes, whatever engine trained it.
                remedy = "its constructor must take render_mode"
                if config.kwargs:
                    remedy += (
                        f" and env.kwargs ({', '.join(config.kwargs)}): some engines take others"
                    )
                raise undrawable(config.id, f"it cannot be made: {error}", remedy) from error

    def _player(
        self, spaces: tuple[Any, Any], weights: Weights, deterministic: bool
    ) -> ActingPolicy:
        config, seed = self._policy_config, self._seed
        return ActingPolicy(spaces, config, weights, seed=seed, deterministic=deterministic)


def _act(player: ActingPolicy, obs: Any) -> Any:
    return tree_map(lambda leaf: leaf.numpy(), player.act(tree_map(_tensor, obs)))


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    # torch warns about memory it may not write to.
    return torch.from_numpy(array if array.flags.writeable else array.copy())
