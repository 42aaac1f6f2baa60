"""One optimiser step: full-precision master weights under a policy of any compute dtype, clipping
and schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from unirl.core.errors import UniRLError
from unirl.core.tree import Tree


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients become new weights."""

    name: Literal["adam", "rmsprop"] = "adam"
    """adam, or rmsprop as in IMPALA and A3C."""
    lr: float = 6e-4
    """Step size. More: faster, until it diverges."""
    lr_schedule: Literal["constant", "linear"] = "constant"
    """linear: falls to zero at run.total_steps."""
    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm. Less: steadier, slower."""
    epsilon: float = 1e-5
    """Added to the denominator (adam), or under the root (rmsprop, as TensorFlow does)."""
    decay: float = 0.99
    """rmsprop: memory of the squared gradients. More: smoother."""
    momentum: float = 0.0
    """rmsprop: momentum. adam has its own (0.9)."""

    def __post_init__(self) -> None:
        if self.lr <= 0 or self.max_grad_norm <= 0 or self.epsilon <= 0:
            raise UniRLError(
                f"learner.optimizer has lr {self.lr}, epsilon {self.epsilon}, "
                f"max_grad_norm {self.max_grad_norm}",
                "all three must be > 0",
                "start from lr 6e-4, max_grad_norm 0.5, epsilon 1e-5",
            )
        if not 0 <= self.decay < 1 or not 0 <= self.momentum < 1:
            raise UniRLError(
                f"learner.optimizer has decay {self.decay}, momentum {self.momentum}",
                "both must lie in [0, 1)",
                "0.99 and 0 are usual",
            )


class Update:
    """Owns the optimiser and the float32 master copy of every parameter that computes in less.

    The module's own float32 parameters are their own masters. `total_steps` is what a linear
    schedule ends at.
    """

    def __init__(self, module: nn.Module, config: OptimizerConfig, *, total_steps: int) -> None:
        self._module, self._config, self._total_steps = module, config, total_steps
        self._parameters = dict(module.named_parameters())
        self._masters: dict[str, torch.Tensor] = {
            name: p if p.dtype == torch.float32 else p.detach().float().requires_grad_()
            for name, p in self._parameters.items()
        }
        low = [name for name, p in self._parameters.items() if p.dtype != torch.float32]
        self._low: list[torch.Tensor] = [self._parameters[name] for name in low]
        self._low_masters = [self._masters[name] for name in low]
        parameters = list(self._masters.values())
        if config.name == "adam":
            self._optimizer: torch.optim.Optimizer = torch.optim.Adam(
                parameters, lr=config.lr, eps=config.epsilon, fused=True
            )
        else:
            self._optimizer = torch.optim.RMSprop(
                parameters,
                lr=config.lr,
                alpha=config.decay,
                eps=config.epsilon,
                momentum=config.momentum,
            )

    def lr(self, num_steps: int) -> float:
        """The step size after `num_steps` samples."""
        if self._config.lr_schedule == "constant":
            return self._config.lr
        return self._config.lr * max(0.0, 1.0 - num_steps / self._total_steps)

    def apply(self, num_steps: int) -> torch.Tensor:
        """Step with the gradients that lie in the module and clear them; returns their norm before
        clipping.
        """
        for low, master in zip(self._low, self._low_masters, strict=True):
            master.grad = low.grad.float() if low.grad is not None else None
            low.grad = None
        norm = nn.utils.clip_grad_norm_(self._masters.values(), self._config.max_grad_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self.lr(num_steps)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._round_masters()
        return norm

    def _round_masters(self) -> None:
        if self._low:
            with torch.no_grad():
                torch._foreach_copy_(self._low, self._low_masters)

    def model_state(self) -> dict[str, torch.Tensor]:
        """Parameters in full precision and buffers, by name: the model of a checkpoint."""
        state = self._module.state_dict(keep_vars=True)
        return {name: self._masters.get(name, value).detach() for name, value in state.items()}

    def optimizer_state(self) -> Tree:
        """The optimiser's tensors by parameter name; step sizes come from the config."""
        state = self._optimizer.state
        return {
            name: dict(state[master].items())
            for name, master in self._masters.items()
            if state.get(master)
        }

    def load(self, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
        """Put a saved state back in place. Raises UniRLError when it is of another model."""
        own = self.model_state()
        for name in sorted({*own, *model}):
            found, wanted = model.get(name), own.get(name)
            if found is None or wanted is None or found.shape != wanted.shape:
                raise UniRLError(
                    f"the saved model does not fit at {name!r}",
                    f"it has {'nothing' if found is None else tuple(found.shape)}, "
                    f"this policy {'nothing' if wanted is None else tuple(wanted.shape)} there",
                    "resume with the policy settings of the saved run",
                )
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(model[name])
        self._round_masters()
        for name, tensors in optimizer.items():
            master = self._masters[name]
            # Adam keeps its step counter as float32 wherever the parameter lives.
            self._optimizer.state[master] = {
                key: value.clone()
                if key == "step" and master.device.type == "cpu"
                else value.clone().to(master.device)
                for key, value in tensors.items()
            }
