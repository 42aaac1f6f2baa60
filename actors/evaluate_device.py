"""Plays whole episodes of a simulator with given weights, on its device: many environments at once,
every step of every episode counted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unirl.actors.acting_policy import ActingPolicy
from unirl.actors.drawing import Picture, drawing_of, frames_per_second
from unirl.core.evaluator import EvalResult
from unirl.core.seeding import derive_seed
from unirl.core.weights import Weights
from unirl.envs.device import POLICY, DeviceEnv, Groups, SimStep
from unirl.errors import UniRLError
from unirl.policy import PolicyConfig

MAX_STEPS = 1_000_000
"""Steps of one episode after which an evaluation gives up: some environments have no time limit."""

_PATIENCE = 4
"""How many times as long as without lost states an evaluation may take."""
_STEPS_PER_LOOK = 16
"""Steps between two looks at whether all is played: each look waits for the device."""


class DeviceEvaluator:
    """Plays a policy in a simulator of its own, made again for each call.

    Weights are copied. The same seed, weights and number of episodes give the same episodes. An
    episode whose state was lost (not finite) counts for nothing and is played again.
    make_env: from a number of environments, such as make_device_env with all else bound.
    num_envs: how many are stepped at once, at most.
    """

    def __init__(
        self,
        make_env: Callable[[int], DeviceEnv],
        policy: PolicyConfig,
        seed: int,
        *,
        num_envs: int = 512,
    ) -> None:
        self._make_env, self._policy_config = make_env, policy
        self._seed, self._num_envs = seed, num_envs
        self._env: DeviceEnv | None = None
        self.frames_per_second = 30.0
        """The speed at which the frames look right; known once `frames` gave the first one."""
        self.played = EvalResult([], [])
        """Return and length of the episodes that `frames` finished."""

    def evaluate(
        self, weights: Weights, num_episodes: int, *, deterministic: bool = False
    ) -> EvalResult:
        """Returns and lengths of `num_episodes` episodes, in no order that means anything."""
        check_episodes(num_episodes)
        with self._opened(min(num_episodes, self._num_envs)) as env:
            player, tally = self._player(env, weights, deterministic), _Tally(env, num_episodes)
            for num_steps in itertools.count(1):
                tally.add(player.step())
                if num_steps % _STEPS_PER_LOOK == 0:
                    if tally.is_full():
                        break
                    self._check_patience(env, tally, num_episodes)
            return tally.result()

    def frames(
        self, weights: Weights, *, deterministic: bool = False, num_episodes: int = 1
    ) -> Iterator[Picture]:
        """Pictures [height, width, 3] of whole episodes: each state that was acted on. Where an
        episode ended, a simulator that resets within the step is in the next one already.
        """
        self.played = EvalResult([], [])
        with self._opened(1) as env, drawing_of(env) as draw:
            self.frames_per_second = frames_per_second(env)
            player, tally = self._player(env, weights, deterministic), _Tally(env, num_episodes)
            while len(self.played.returns) < num_episodes:
                picture = draw(player.obs)
                step = player.step()
                # A row that is no transition shows what is over, or what is lost.
                if bool(step.valid[0]):
                    yield picture
                tally.add(step)
                self._check_patience(env, tally, num_episodes)
                self.played = tally.result()

    def close(self) -> None:
        """Close a simulator that an interrupted call left open; idempotent."""
        if self._env is not None:
            self._env.close()
            self._env = None

    @contextmanager
    def _opened(self, num_envs: int) -> Iterator[DeviceEnv]:
        self.close()
        self._env = self._make_env(num_envs)
        try:
            yield self._env
        finally:
            self.close()

    def _check_patience(self, env: DeviceEnv, tally: _Tally, num_episodes: int) -> None:
        # One step more than the limit, where fillers follow ends.
        length = min(env.spec.max_episode_length + 1, MAX_STEPS)
        if tally.num_steps > _PATIENCE * tally.most * length + _STEPS_PER_LOOK:
            lost = int(env.counters().get("nan_states", torch.zeros(())))
            num_ended = len(tally.result().returns)
            raise UniRLError(
                f'env "{env.spec.id}" does not end its episodes',
                f"{num_ended} of {num_episodes} ended in {tally.num_steps:,} steps of"
                f" {env.spec.num_envs} environments, and {lost} states were not finite",
                "set env.max_episode_steps, or see why states are lost (env/nan_states)",
            )

    def _player(self, env: DeviceEnv, weights: Weights, deterministic: bool) -> _DevicePlayer:
        spec = env.spec
        policy = ActingPolicy(
            (spec.observation_space, spec.action_space),
            self._policy_config,
            weights,
            seed=self._seed,
            deterministic=deterministic,
            device=spec.device,
        )
        policy.begin(spec.num_envs)
        obs = env.reset(derive_seed(self._seed, "eval", "environments") % 2**32)
        return _DevicePlayer(env, policy, obs)


def check_episodes(num_episodes: int) -> None:
    if num_episodes < 1:
        raise UniRLError(
            f"an evaluation of {num_episodes} episodes was asked for",
            "the number of episodes must be >= 1",
            "20 or 100 are usual",
        )


@dataclass
class _DevicePlayer:
    """A policy in a simulator, and what it sees."""

    env: DeviceEnv
    policy: ActingPolicy
    obs: Groups

    def step(self) -> SimStep:
        tree: Any = self.obs if len(self.obs) > 1 else self.obs[POLICY]
        step = self.env.step(self.policy.act(tree))
        self.obs = step.obs
        self.policy.forget(_over(step))
        return step


class _Tally:
    """Returns and lengths of the first episodes of each environment, kept on the device.

    How many count of each is settled before the first step: to take those that end first would
    favour short ones.
    """

    def __init__(self, env: DeviceEnv, num_episodes: int) -> None:
        num_envs, device = env.spec.num_envs, env.spec.device
        self.num_steps = 0
        self.most = -(-num_episodes // num_envs)
        """Episodes of the environment that plays most."""

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros((*shape, num_envs), dtype=dtype, device=device)

        self._wanted = zeros(torch.int64) + num_episodes // num_envs
        self._wanted[: num_episodes % num_envs] += 1
        self._played = zeros(torch.int64)
        self._return, self._length = zeros(torch.float64), zeros(torch.int64)
        self._returns = zeros(torch.float64, self.most)
        self._lengths = zeros(torch.int64, self.most)

    def add(self, step: SimStep) -> None:
        """Count one step; nothing waits for the device."""
        self.num_steps += 1
        self._return.add_(torch.where(step.valid, step.reward, 0.0))
        self._length.add_(step.valid)
        kept = (step.terminated | step.truncated) & (self._played < self._wanted)
        index = self._played.clamp(max=self.most - 1).unsqueeze(0)
        for found, total in ((self._returns, self._return), (self._lengths, self._length)):
            found.scatter_(0, index, torch.where(kept, total, found.gather(0, index)))
        self._played.add_(kept)
        over = _over(step)
        self._return.masked_fill_(over, 0.0)
        self._length.masked_fill_(over, 0)

    def is_full(self) -> bool:
        """Whether all episodes were played; waits for the device."""
        return bool((self._played >= self._wanted).all())

    def result(self) -> EvalResult:
        """The episodes played so far; waits for the device."""
        played = torch.arange(self.most, device=self._played.device).unsqueeze(1) < self._played
        return EvalResult(self._returns[played].tolist(), self._lengths[played].tolist())


def _over(step: SimStep) -> Tensor:
    """Rows behind which another episode begins: bool [N]."""
    return step.terminated | step.truncated | ~step.valid
