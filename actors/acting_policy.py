"""A policy that plays: given weights, its memory of each environment, random numbers of its own."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import Space
from torch import Tensor

from unirl.core.seeding import derive_seed
from unirl.core.weights import Weights
from unirl.policy import Policy, PolicyConfig, zero_state


class ActingPolicy:
    """Acts in evaluations and for users. `begin` comes before the first action."""

    def __init__(
        self,
        spaces: tuple[Space[Any], Space[Any]],
        config: PolicyConfig,
        weights: Weights,
        *,
        seed: int,
        deterministic: bool,
        device: torch.device | str = "cpu",
    ) -> None:
        self._device, self._deterministic = device, deterministic
        self._policy = Policy(*spaces, config, seed=0).eval().to(device)
        self._policy.load_weights(weights)
        self._generator = torch.Generator(device)
        self._generator.manual_seed(derive_seed(seed, "eval", "actions"))

    def begin(self, num_envs: int) -> None:
        """New episodes in this many environments."""
        state = self._policy.initial_state(num_envs)
        self._state = {name: value.to(self._device) for name, value in state.items()}

    def forget(self, rows: Tensor) -> None:
        """New episodes where `rows` [B] is true."""
        if self._state:
            self._state = zero_state(self._state, rows)

    @property
    def remembers(self) -> bool:
        """Whether what it does depends on earlier steps."""
        return self._policy.core is not None

    def act(self, obs: Any, *, deterministic: bool | None = None) -> Any:
        """Actions [B, ...] for a tree of tensors [B, ...]. deterministic: None: as it was made."""
        likeliest = self._deterministic if deterministic is None else deterministic
        action, _, self._state = self._policy.act(
            obs, self._state, generator=self._generator, deterministic=likeliest
        )
        return action
