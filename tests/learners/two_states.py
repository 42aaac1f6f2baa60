"""Two states that follow each other for ever; leaving the first one pays 1. Episodes are cut off
after one step, so values are right only where the state after the cut is taken into account.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from gymnasium import spaces
from torch import Tensor

from unirl.envs.device import POLICY, Groups, SimSpec, SimStep

GAMMA = 0.9
VALUES = (1 / (1 - GAMMA**2), GAMMA / (1 - GAMMA**2))
"""Of the endless task: V(A) = 1 + gamma V(B), V(B) = gamma V(A)."""


class TwoStates:
    """N environments; observation: one-hot state. The action means nothing."""

    def __init__(self, num_envs: int) -> None:
        self.spec = SimSpec(
            id="torch/TwoStates",
            num_envs=num_envs,
            observation={POLICY: 2},
            action_space=spaces.Discrete(2),
            max_episode_length=1,
            device=torch.device("cpu"),
            step_dt=0.0,
        )
        self._generator = torch.Generator()

    def reset(self, seed: int, *, random_phases: bool = False) -> Groups:
        self._generator.manual_seed(seed)
        self._draw()
        return self._obs()

    def step(self, action: Tensor) -> SimStep:
        reward = (self._state == 0).float()
        self._state = 1 - self._state
        final = self._obs()
        self._draw()
        never = torch.zeros(self.spec.num_envs, dtype=torch.bool)
        return SimStep(self._obs(), reward, never, ~never, final, ~never, {})

    def counters(self) -> Mapping[str, Tensor]:
        return {}

    def generators(self) -> Sequence[torch.Generator]:
        return ()

    def close(self) -> None:
        pass

    def _draw(self) -> None:
        self._state = torch.randint(2, (self.spec.num_envs,), generator=self._generator)

    def _obs(self) -> Groups:
        return {POLICY: torch.nn.functional.one_hot(self._state, 2).float()}
