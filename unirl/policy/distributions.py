"""Action distributions, in float32 whatever the networks compute in: sampling, log-probability,
entropy, KL.

Written out instead of torch.distributions because acting on a small policy is dominated by the
number of operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

LOG_2PI = math.log(2 * math.pi)
PADDED_LOGIT = -1e30
"""Logit of an action that does not exist: finite, so that 0 * log 0 never makes a NaN."""


class Distribution(Protocol):
    """What actors and losses need of a distribution over rows [...]; results are float32 [...].
    Actions are tensors, of a hybrid action dictionaries of them.
    """

    def log_prob(self, action: Any) -> Tensor: ...
    def entropy(self) -> Tensor: ...
    def mode(self) -> Any: ...
    def sample(self, generator: torch.Generator | None = None) -> Any: ...
    def kl(self, other: Any) -> Tensor: ...
    def __getitem__(self, rows: Index) -> Distribution: ...


Index: TypeAlias = "int | slice | Tensor | tuple[int | slice | Tensor, ...]"


class Categorical:
    """One choice out of A: logits [..., A], actions int64 [...] counted from 0."""

    def __init__(self, logits: Tensor) -> None:
        self.all_logp = torch.log_softmax(logits.float(), dim=-1)
        """Log-probability of every action, [..., A]."""

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability of actions [...], [...]."""
        return self.all_logp.gather(-1, action.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Entropy in nats, [...]."""
        return -(self.all_logp.exp() * self.all_logp).sum(-1)

    def mode(self) -> Tensor:
        """The likeliest action, [...]; of equals the first."""
        return self.all_logp.argmax(-1)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One action per row, [...]: the first arrival among exponential clocks of rates p.

        log(u) / p is minus an arrival time: the Gumbel trick with one logarithm fewer.
        """
        with torch.no_grad():
            clock = torch.empty_like(self.all_logp).uniform_(generator=generator)
            return clock.log_().div_(self.all_logp.exp()).argmax(-1)

    def kl(self, other: Categorical) -> Tensor:
        """KL(self || other) in nats, [...]."""
        return (self.all_logp.exp() * (self.all_logp - other.all_logp)).sum(-1)

    def __getitem__(self, rows: Index) -> Categorical:
        selected = Categorical.__new__(Categorical)
        selected.all_logp = self.all_logp[rows]
        return selected


class MultiCategorical:
    """n independent choices: logits [..., n, A], actions int64 [..., n] counted from 0.

    Choices with fewer than A options have the missing logits at PADDED_LOGIT. shape: of one action,
    where its n choices have more axes than one.
    """

    def __init__(self, logits: Tensor, shape: tuple[int, ...] = ()) -> None:
        self.choices, self.shape = Categorical(logits), shape or logits.shape[-2:-1]

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-probability of actions [..., n], summed over the choices: [...]."""
        if len(self.shape) != 1:
            action = action.flatten(-len(self.shape))
        return self.choices.log_prob(action).sum(-1)

    def entropy(self) -> Tensor:
        """Entropy in nats, summed over the choices: [...]."""
        return self.choices.entropy().sum(-1)

    def mode(self) -> Tensor:
        """The likeliest action, [..., n]."""
        return self._shaped(self.choices.mode())

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One action per row, [..., n]."""
        return self._shaped(self.choices.sample(generator))

    def kl(self, other: MultiCategorical) -> Tensor:
        """KL(self || other) in nats, summed over the choices: [...]."""
        return self.choices.kl(other.choices).sum(-1)

    def __getitem__(self, rows: Index) -> MultiCategorical:
        selected = MultiCategorical.__new__(MultiCategorical)
        selected.choices, selected.shape = self.choices[rows], self.shape
        return selected

    def _shaped(self, action: Tensor) -> Tensor:
        return action if len(self.shape) == 1 else action.reshape(action.shape[:-1] + self.shape)


class DiagGaussian:
    """Independent normals: mean [..., D], log_std [D] or [..., D]; unbounded float32 actions
    [..., *shape].

    shape is the Box's, with D elements.
    """

    def __init__(self, mean: Tensor, log_std: Tensor, shape: tuple[int, ...]) -> None:
        self.mean = mean.float()
        self.log_std = log_std.float()
        self.shape = shape

    def log_prob(self, action: Tensor) -> Tensor:
        """Log-density of actions [..., *shape], summed over dimensions: [...]."""
        noise = (action.reshape(self.mean.shape) - self.mean) * torch.exp(-self.log_std)
        constant = self.log_std.sum(-1) + 0.5 * self.log_std.shape[-1] * LOG_2PI
        return noise.square().sum(-1) * -0.5 - constant

    def entropy(self) -> Tensor:
        """Differential entropy in nats, summed over dimensions: [...]."""
        entropy = self.log_std.sum(-1) + 0.5 * self.log_std.shape[-1] * (1 + LOG_2PI)
        return entropy.expand(self.mean.shape[:-1])

    def mode(self) -> Tensor:
        """The mean, [..., *shape]."""
        return self._shaped(self.mean)

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """One action per row, [..., *shape], without gradient."""
        with torch.no_grad():
            noise = torch.empty_like(self.mean).normal_(generator=generator)
            return self._shaped(noise.mul_(self.log_std.exp()).add_(self.mean))

    def kl(self, other: DiagGaussian) -> Tensor:
        """KL(self || other) in nats, summed over dimensions: [...]."""
        shift = (self.mean - other.mean) * torch.exp(-other.log_std)
        ratio = torch.exp(2 * (self.log_std - other.log_std))
        return (other.log_std - self.log_std + 0.5 * (ratio + shift.square() - 1)).sum(-1)

    def __getitem__(self, rows: Index) -> DiagGaussian:
        log_std = self.log_std if self.log_std.dim() == 1 else self.log_std[rows]
        return DiagGaussian(self.mean[rows], log_std, self.shape)

    def _shaped(self, action: Tensor) -> Tensor:
        return action.reshape(action.shape[:-1] + self.shape)


class Hybrid:
    """Independent distributions over the parts of an action: actions are dictionaries of theirs,
    and what is said of an action is the sum over its parts.
    """

    def __init__(self, parts: Mapping[str, Distribution]) -> None:
        self.parts = parts

    def log_prob(self, action: Mapping[str, Any]) -> Tensor:
        """Log-probability (of a Box: density) of actions {name: [..., *shape]}, [...]."""
        return _sum([part.log_prob(action[name]) for name, part in self.parts.items()])

    def entropy(self) -> Tensor:
        """Entropy in nats, [...]."""
        return _sum([part.entropy() for part in self.parts.values()])

    def mode(self) -> dict[str, Any]:
        """The likeliest action: the likeliest of each part."""
        return {name: part.mode() for name, part in self.parts.items()}

    def sample(self, generator: torch.Generator | None = None) -> dict[str, Any]:
        """One action per row, part after part."""
        return {name: part.sample(generator) for name, part in self.parts.items()}

    def kl(self, other: Hybrid) -> Tensor:
        """KL(self || other) in nats, [...]."""
        return _sum([part.kl(other.parts[name]) for name, part in self.parts.items()])

    def __getitem__(self, rows: Index) -> Hybrid:
        return Hybrid({name: part[rows] for name, part in self.parts.items()})


def _sum(terms: list[Tensor]) -> Tensor:
    return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)
