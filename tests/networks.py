"""Networks of a user's own, for tests that name them `tests.networks:...`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from unirl.policy.action_head import num_parameters


def flat(obs: Any) -> Tensor:
    """Any observation as [N, D]."""
    if isinstance(obs, dict):
        return torch.cat([flat(one) for one in obs.values()], dim=1)
    return obs.float().flatten(1) if obs.dim() > 1 else obs.float()[:, None]


def size_of(space: Space[Any]) -> int:
    if isinstance(space, spaces.Dict | spaces.Tuple):
        inner: Any = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return sum(map(size_of, inner))
    return int(np.prod(space.shape)) if space.shape else 1


class Torso(nn.Module):
    """Features for UniRL's heads."""

    def __init__(
        self, observation_space: Space[Any], action_space: Space[Any], width: int = 32
    ) -> None:
        super().__init__()
        self.body = nn.Linear(size_of(observation_space), width)

    def forward(self, obs: Any) -> Tensor:
        return torch.tanh(self.body(flat(obs)))


class Whole(nn.Module):
    """With heads of its own."""

    def __init__(
        self, observation_space: Space[Any], action_space: Space[Any], width: int = 32
    ) -> None:
        super().__init__()
        self.body = Torso(observation_space, action_space, width)
        self.policy = nn.Linear(width, num_parameters(action_space))
        self.value = nn.Linear(width, 1)
        nn.init.zeros_(self.policy.weight)

    def forward(self, obs: Any) -> tuple[Tensor, Tensor]:
        features = self.body(obs)
        return self.policy(features), self.value(features).squeeze(1)


class Memory(nn.Module):
    """A torso that remembers a mean of what it saw."""

    def __init__(self, observation_space: Space[Any], action_space: Space[Any]) -> None:
        super().__init__()
        self.body = Torso(observation_space, action_space, 32)
        self.gate = nn.Linear(32, 32)

    def initial_state(self, num_envs: int) -> dict[str, Tensor]:
        return {"trace": torch.zeros(num_envs, 32)}

    def forward(self, obs: Any, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        features = self.body(obs)
        keep = torch.sigmoid(self.gate(features))
        trace = keep * state["trace"] + (1 - keep) * features
        return trace, {"trace": trace}


class WholeMemory(Memory):
    """A memory, and heads of its own."""

    def __init__(self, observation_space: Space[Any], action_space: Space[Any]) -> None:
        super().__init__(observation_space, action_space)
        self.policy = nn.Linear(32, num_parameters(action_space))
        self.value = nn.Linear(32, 1)

    def forward(self, obs: Any, state: dict[str, Tensor]) -> Any:
        features, state = super().forward(obs, state)
        return self.policy(features), self.value(features), state


class Convolutions(nn.Module):
    """Reads uint8 images [N, C, H, W]."""

    def __init__(self, observation_space: Space[Any], action_space: Space[Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(observation_space.shape[0], 8, 8, stride=8)  # type: ignore[index]

    def forward(self, obs: Tensor) -> Tensor:
        assert obs.dtype == torch.uint8
        return torch.relu(self.conv(obs / 255)).flatten(1)


# -- what is refused ---------------------------------------------------------------------------


class WrongShape(Torso):
    def forward(self, obs: Any) -> Tensor:
        return super().forward(obs).sum()


class WrongHeads(Whole):
    def forward(self, obs: Any) -> tuple[Tensor, Tensor]:
        parameters, value = super().forward(obs)
        return parameters[:, :-1], value


class Dropout(Torso):
    def forward(self, obs: Any) -> Tensor:
        return nn.functional.dropout(super().forward(obs), training=self.training)


class BatchNorm(Torso):
    def __init__(self, observation_space: Space[Any], action_space: Space[Any]) -> None:
        super().__init__(observation_space, action_space)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, obs: Any) -> Tensor:
        found: Tensor = self.norm(super().forward(obs))
        return found


class MeanOfRows(Torso):
    def forward(self, obs: Any) -> Tensor:
        features = super().forward(obs)
        return features - features.mean(0)


class OtherEachTime(Torso):
    def __init__(self, observation_space: Space[Any], action_space: Space[Any]) -> None:
        super().__init__(observation_space, action_space)
        drawn = np.random.default_rng().normal(size=32)
        self.body.bias.data.copy_(torch.as_tensor(drawn))


class Frozen(Torso):
    def __init__(self, observation_space: Space[Any], action_space: Space[Any]) -> None:
        super().__init__(observation_space, action_space)
        self.body.bias.requires_grad_(False)


class Failing(Torso):
    def forward(self, obs: Any) -> Tensor:
        return self.body(flat(obs)[:, :1])


class NotAModule:
    def __init__(self, observation_space: Space[Any], action_space: Space[Any]) -> None:
        """No network."""


class MemoryOfOnes(Memory):
    def initial_state(self, num_envs: int) -> dict[str, Tensor]:
        return {"trace": torch.ones(num_envs, 32)}
