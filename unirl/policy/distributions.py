"""Action distributions, in float32 whatever the networks compute in: sampling, log-probability,
entropy, KL.

Written out instead of torch.distributions because acting on a small policy is dominated by the
number of operations.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

LOG_2PI = math.log(2 * math.pi)
PADDED_LOGIT = -1e30
"""Logit of an action that does not exist: finite, so that 0 * log 0 never makes a NaN."""


class Distribution(Protocol):
    """What actors and losses need to know of a distribution over [...] rows; results per row are
    float32 [...].
    """

    def log_prob(self, action: Tensor) -> Tensor: ...
    def entropy(self) -> Tensor: ...
    def mode(self) -> Tensor: ...
    def sample(self, generator: torch.Generator | None = None) -> Tensor: ...
    def sample_with_logp(
        self, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]: ...
    def kl(self, other: Any) -> Tensor: ...
    def __getitem__(self, rows: Index) -> Distribution: ...


Index: TypeAlias = "int | slice | Tensor | tuple[int | slice | Tensor, ...]"


class Categorical:
    """One choice out of A: logits [..., A], actions int64 [...] counted from `start` (an int64
    tensor, None is 0).
    """

    def __init__(self, logits: Tensor, start: Tensor | None = None) -> None:
        self.all_logp = torch.log_softmax(logits.float(), dim=-1)
        """Log-probability of every action, [..., A]."""
        self.start = start

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability of actions [...], [...]."""
        index = action.long() if self.start is None else action.long() - self.start
        return self.all_logp.gather(-1, index.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropy in nats, [...]."""
        return -(self.all_logp.exp() * self.all_logp).sum(-1)

    def mode(self) -> Tensor:
        """The likeliest action, [...]; of equals the first."""
        index = self.all_logp.argmax(-1)
        return index if self.start is None else index + self.start

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One action per row, [...]."""
        return self.sample_with_logp(generator)[0]

    def sample_with_logp(self, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """One action per row and its log-probability: the first arrival of exponential clocks of
        rate p.

        log(u) / p is minus the arrival time, so its maximum is the Gumbel trick with one logarithm
        fewer.
        """
        clock = torch.empty_like(self.all_logp, requires_grad=False).uniform_(generator=generator)
        with torch.no_grad():
            index = clock.log_().div_(self.all_logp.exp()).argmax(-1)
        logp = self.all_logp.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        return (index if self.start is None else index + self.start), logp

    def kl(self, other: Categorical) -> Tensor:
        """KL(self || other) in nats, [...]."""
        return (self.all_logp.exp() * (self.all_logp - other.all_logp)).sum(-1)

    def __getitem__(self, rows: Index) -> Categorical:
        selected = Categorical.__new__(Categorical)
        selected.all_logp, selected.start = self.all_logp[rows], self.start
        return selected


class MultiCategorical:
    """Independent choices: logits [..., n, A] (missing ones at PADDED_LOGIT), actions int64 [...,
    *shape].

    shape has n elements; `start` [n] is the first value of each choice, None is 0.
    """

    def __init__(self, logits: Tensor, shape: tuple[int, ...], start: Tensor | None = None) -> None:
        self.choices = Categorical(logits, start)
        self.shape = shape

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability of actions [..., *shape], summed over the choices: [...]."""
        return self.choices.log_prob(action.reshape(self.choices.all_logp.shape[:-1])).sum(-1)

    def entropy(self) -> Tensor:
        """Entropy in nats, summed over the choices: [...]."""
        return self.choices.entropy().sum(-1)

    def mode(self) -> Tensor:
        """The likeliest action, [..., *shape]."""
        return self._shaped(self.choices.mode())

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One action per row, [..., *shape]."""
        return self.sample_with_logp(generator)[0]

    def sample_with_logp(self, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """One action per row, [..., *shape], and its log-probability, [...]."""
        action, logp = self.choices.sample_with_logp(generator)
        return self._shaped(action), logp.sum(-1)

    def kl(self, other: MultiCategorical) -> Tensor:
        """KL(self || other) in nats, summed over the choices: [...]."""
        return self.choices.kl(other.choices).sum(-1)

    def __getitem__(self, rows: Index) -> MultiCategorical:
        selected = MultiCategorical.__new__(MultiCategorical)
        selected.choices, selected.shape = self.choices[rows], self.shape
        return selected

    def _shaped(self, action: Tensor) -> Tensor:
        return action.reshape(action.shape[:-1] + self.shape)


class DiagGaussian:
    """Independent normals: mean [..., D], log_std [D]; actions float32 [..., *shape] with D
    elements, unbounded.
    """

    def __init__(self, mean: Tensor, log_std: Tensor, shape: tuple[int, ...]) -> None:
        self.mean = mean.float()
        self.log_std = log_std.float()
        self.shape = shape

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-density of actions [..., *shape], summed over dimensions: [...]."""
        noise = (action.reshape(self.mean.shape) - self.mean) * torch.exp(-self.log_std)
        return self._logp(noise)

    def entropy(self) -> Tensor:
        """Differential entropy in nats, summed over dimensions: [...]."""
        entropy = self.log_std.sum() + 0.5 * self.log_std.numel() * (1 + LOG_2PI)
        return entropy.expand(self.mean.shape[:-1])

    def mode(self) -> Tensor:
        """The mean, [..., *shape]."""
        return self._shaped(self.mean)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One action per row, [..., *shape]."""
        return self.sample_with_logp(generator)[0]

    def sample_with_logp(self, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """One action per row, [..., *shape], and its log-density, [...]. The action carries no
        gradient.
        """
        noise = torch.empty_like(self.mean, requires_grad=False).normal_(generator=generator)
        with torch.no_grad():
            action = torch.addcmul(self.mean, noise, self.log_std.exp())
        return self._shaped(action), self.log_prob(action)

    def kl(self, other: DiagGaussian) -> Tensor:
        """KL(self || other) in nats, summed over dimensions: [...]."""
        shift = (self.mean - other.mean) * torch.exp(-other.log_std)
        ratio = torch.exp(2 * (self.log_std - other.log_std))
        return (other.log_std - self.log_std + 0.5 * (ratio + shift.square() - 1)).sum(-1)

    def __getitem__(self, rows: Index) -> DiagGaussian:
        return DiagGaussian(self.mean[rows], self.log_std, self.shape)

    def _logp(self, noise: Tensor) -> Tensor:
        constant = self.log_std.sum() + 0.5 * self.log_std.numel() * LOG_2PI
        return noise.square().sum(-1).mul_(-0.5).sub_(constant)

    def _shaped(self, action: Tensor) -> Tensor:
        return action.reshape(action.shape[:-1] + self.shape)
