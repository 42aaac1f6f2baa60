"""One optimiser step: full-precision master weights under a policy of any compute dtype, clipping
and schedules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from unirl.config.rules import check_at_least, check_positive
from unirl.core.schedule import Schedule, ScheduleName, check_name
from unirl.core.training_budget import ScheduleProgress
from unirl.core.tree import Tree
from unirl.errors import UniRLError
from unirl.learners.sharded import full_tensor, is_sharded, local_shard, shard_of
from unirl.vtrace.advantages import Reduce

_ADAM_BETA1 = 0.9
_ADAPTIVE_FACTOR = 1.5
ADAPTIVE_BOUNDS = (1e-5, 1e-2)
"""What `adapt` keeps the step size in: a smaller one would jump up where it should fall."""
_ROUNDING = 1e-9
"""Nats that a policy seems to have moved where only the order of additions differs."""


@dataclass(frozen=True)
class OptimizerConfig:
    """How gradients become new weights."""

    name: Literal["adam", "rmsprop"] = "adam"
    """adam, or rmsprop as in IMPALA and A3C."""
    lr: float = field(default=6e-4, metadata={"common": True})
    """Step size. More: faster, until it diverges."""
    lr_schedule: Literal["adaptive"] | ScheduleName = "constant"
    """linear: falls to zero at the end of the run (run.anneal_over, run.anneal_from). cosine: so
    too, slowly at both ends. module:function of your own: from the share of the run that is done, 0
    to 1, to what lr is multiplied by. adaptive: after each pass over a batch, divided by 1.5 where
    the policy moved more than 2 target_kl, times 1.5 where less than half of it; 1e-5 to 1e-2.
    """
    target_kl: float = 0.01
    """adaptive: how far one batch should move the policy, in nats. More: larger steps."""
    max_grad_norm: float = field(default=0.5, metadata={"infinite": True})
    """Gradients are scaled down to this norm. Less: steadier, slower."""
    epsilon: float = 1e-5
    """Added to the denominator (adam), or under the root (rmsprop, as TensorFlow does)."""
    decay: float = 0.99
    """rmsprop: memory of the squared gradients. More: smoother."""
    momentum: float = 0.0
    """rmsprop: momentum. adam has its own (0.9)."""
    beta2: float = 0.999
    """adam: memory of the squared gradients. Less: reacts sooner, noisier."""
    weight_decay: float = 0.0
    """adam: weights shrink by lr times this at every step, as in AdamW. More: smaller weights."""
    warmup_steps: int = 0
    """The step size rises from zero over so many samples. More: a gentler start."""

    def __post_init__(self) -> None:
        check_name(self.lr_schedule, "learner.optimizer.lr_schedule", "adaptive")
        check_positive("learner.optimizer.lr", self.lr, "start from 6e-4")
        check_positive("learner.optimizer.max_grad_norm", self.max_grad_norm, "start from 0.5")
        check_positive("learner.optimizer.epsilon", self.epsilon, "start from 1e-5")
        check_positive("learner.optimizer.target_kl", self.target_kl, "0.01 is usual")
        check_at_least(0, "learner.optimizer", self, "weight_decay", "warmup_steps")
        for name in ("decay", "momentum", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UniRLError(
                    f"learner.optimizer.{name} is {getattr(self, name)}",
                    "it must lie in [0, 1)",
                    "leave it out for the usual value",
                )
        if self.warmup_steps and self.lr_schedule == "adaptive":
            raise UniRLError(
                f"learner.optimizer.warmup_steps is {self.warmup_steps} and has no effect",
                "an adaptive step size rises and falls with the KL alone",
                "leave it out, or set learner.optimizer.lr_schedule to constant or linear",
            )


class Optimizer:
    """Owns the optimiser and the float32 master copy of every parameter that computes in less.

    The module's own parameters of float32 and above are their own masters. schedule: what schedules
    follow. reduce: sums gradients over the processes that share a batch; None: alone.
    """

    def __init__(
        self,
        module: nn.Module,
        config: OptimizerConfig,
        *,
        schedule: ScheduleProgress,
        reduce: Reduce | None = None,
    ) -> None:
        self._module, self.config = module, config
        key = "learner.optimizer.lr_schedule"
        self._schedule = Schedule(config.lr_schedule, key, schedule)
        self._reduce = reduce
        self._parameters = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        device = next(iter(self._parameters.values())).device
        self.adaptive_lr = torch.tensor(config.lr, dtype=torch.float64, device=device)
        """The step size that `adapt` has come to: on the device, so that nobody waits for it."""
        self._is_sharded = any(is_sharded(p) for p in self._parameters.values())
        self._masters: dict[str, Tensor] = {
            name: _master(p) for name, p in self._parameters.items()
        }
        low = [name for name, p in self._parameters.items() if self._masters[name] is not p]
        self._low: list[Tensor] = [self._parameters[name] for name in low]
        self._low_masters = [self._masters[name] for name in low]
        # Torch's optimizer classes import its compiler, 70 MB and a second of start-up; the
        # function under them does not.
        self._state: dict[str, dict[str, Tensor]] = {}

    def lr(self, num_steps: int) -> float | Tensor:
        """The step size after `num_steps` samples; a tensor where it is adaptive."""
        if self.config.lr_schedule == "adaptive":
            return self.adaptive_lr
        # The first step is not of size zero: it would only cost time.
        rise = min(1.0, (num_steps + 1) / (self.config.warmup_steps + 1))
        return self.config.lr * rise * self._schedule.factor(num_steps)

    def adapt(self, kl: Tensor) -> None:
        """Correct the adaptive step size by how far the policy has moved, in nats; a scalar.

        The rule of rsl_rl (arXiv 2109.11978), once per pass instead of once per minibatch. A policy
        that has not moved, as before the first step on a batch, changes nothing.
        """
        low, high = ADAPTIVE_BOUNDS
        far, near = kl > 2 * self.config.target_kl, kl < self.config.target_kl / 2
        moved = kl > _ROUNDING
        lr = self.adaptive_lr
        lower = (lr / _ADAPTIVE_FACTOR).clamp_(min=low)
        higher = (lr * _ADAPTIVE_FACTOR).clamp_(max=high)
        lr.copy_(torch.where(far, lower, torch.where(near & moved, higher, lr)))

    def gather(self) -> None:
        """Add the gradients of low precision to those of the masters and clear them. After each
        micro-batch: added up among themselves, they would lose what is small.
        """
        for low, master in zip(self._low, self._low_masters, strict=True):
            if low.grad is not None:
                gradient = local_shard(low.grad)
                if master.grad is None:
                    master.grad = gradient.to(master.dtype)
                else:
                    master.grad.add_(gradient)
                low.grad = None

    def gather_nothing(self) -> None:
        """A gradient of zero: for a process that has nothing to add to what the others sum up."""
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master, requires_grad=False)

    def apply(self, num_steps: int) -> Tensor:
        """Step with the module's gradients and clear them; returns their norm before clipping."""
        self.gather()
        moving = [name for name, master in self._masters.items() if master.grad is not None]
        with torch.no_grad():
            self._sum_gradients()
            norm = self._clip()
            self._move(moving, self.lr(num_steps))
        for master in self._masters.values():
            master.grad = None
        self._round_masters()
        return norm

    def _clip(self) -> Tensor:
        masters, bound = list(self._masters.values()), self.config.max_grad_norm
        if not self._is_sharded or self._reduce is None:
            return nn.utils.clip_grad_norm_(masters, bound)
        gradients = [master.grad for master in masters if master.grad is not None]
        (square,) = self._reduce([nn.utils.get_total_norm(gradients).square()])
        norm = square.sqrt()
        nn.utils.clip_grads_with_norm_(masters, bound, norm)
        return norm

    def _sum_gradients(self) -> None:
        # What divides parameters has summed their gradients.
        if self._reduce is not None and not self._is_sharded:
            masters = self._masters.values()
            gradients = [master.grad for master in masters if master.grad is not None]
            torch._foreach_copy_(gradients, list(self._reduce(gradients)))

    def _move(self, names: list[str], lr: float | Tensor) -> None:
        """One step of the optimiser for the masters of these names, which all have a gradient."""
        config, masters = self.config, [self._masters[name] for name in names]
        if isinstance(lr, Tensor):
            lr = lr.float()  # CUDA's fused kernel reads no other kind
        gradients = [master.grad for master in masters if master.grad is not None]
        states = [self._state.get(name) or self._new_state(name) for name in names]
        if config.name == "adam":
            if config.weight_decay:
                torch._foreach_mul_(masters, 1 - lr * config.weight_decay)
            adam(
                masters,
                gradients,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=_ADAM_BETA1,
                beta2=config.beta2,
                lr=lr,
                weight_decay=0.0,
                eps=config.epsilon,
                maximize=False,
            )
            return
        squares = [state["square_avg"] for state in states]
        torch._foreach_mul_(squares, config.decay)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - config.decay)
        roots = torch._foreach_sqrt(torch._foreach_add(squares, config.epsilon))
        moves = list(torch._foreach_div(gradients, roots))
        if config.momentum:
            buffers = [state["momentum_buffer"] for state in states]
            torch._foreach_mul_(buffers, config.momentum)
            torch._foreach_add_(buffers, moves)
            moves = buffers
        if isinstance(lr, Tensor):
            # Not in place: with momentum these are the buffers themselves.
            torch._foreach_sub_(masters, torch._foreach_mul(moves, lr))
        else:
            torch._foreach_add_(masters, moves, alpha=-lr)

    def _new_state(self, name: str) -> dict[str, Tensor]:
        master = self._masters[name]
        if self.config.name == "adam":
            state = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
            }
        else:
            state = {"square_avg": torch.zeros_like(master, requires_grad=False)}
            if self.config.momentum:
                state["momentum_buffer"] = torch.zeros_like(master, requires_grad=False)
        self._state[name] = state
        return state

    def _round_masters(self) -> None:
        # The master of a shard is its own memory.
        if self._low and not self._is_sharded:
            with torch.no_grad():
                torch._foreach_copy_(self._low, self._low_masters)

    def model_state(self) -> dict[str, Tensor]:
        """Parameters in full precision and buffers, by name: the model of a checkpoint. Frozen
        parameters, and second names of shared ones, are not in it. All processes call it where
        parameters are divided, and get the whole of them.
        """
        return {
            name: full_tensor(self._parameters[name], value) if name in self._parameters else value
            for name, value in self._own_state().items()
        }

    def _own_state(self) -> dict[str, Tensor]:
        state = self._module.state_dict(keep_vars=True)
        return {
            name: self._masters.get(name, value).detach()
            for name, value in state.items()
            if name in self._masters or not isinstance(value, nn.Parameter)
        }

    def optimizer_state(self) -> Tree:
        """The optimiser's tensors by parameter name; step sizes come from the config. As
        `model_state`.
        """
        return {
            name: {
                key: full_tensor(self._parameters[name], tensor) if tensor.dim() else tensor
                for key, tensor in state.items()
            }
            for name, state in self._state.items()
        }

    def load(self, model: Mapping[str, Any], optimizer: Mapping[str, Any]) -> None:
        """Put a saved state back in place. Raises UniRLError when it is of another model."""
        own = self._own_state()
        for name in sorted({*own, *model}):
            found, wanted = model.get(name), self._parameters.get(name, own.get(name))
            if found is None or wanted is None or found.shape != wanted.shape:
                raise UniRLError(
                    f"the saved model does not fit at {name!r}",
                    f"it has {'nothing' if found is None else tuple(found.shape)}, "
                    f"this policy {'nothing' if wanted is None else tuple(wanted.shape)} there",
                    "resume with the policy settings of the saved run",
                )
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(self._shard(name, model[name]))
        self._round_masters()
        for each in (*self._masters.values(), *self._low):
            each.grad = None  # of an update that was broken off
        for name, tensors in optimizer.items():
            device = self._masters[name].device
            self._state[name] = {
                key: self._loaded(name, value) if value.dim() else value.clone().to(device)
                for key, value in tensors.items()
            }

    def _loaded(self, name: str, full: Tensor) -> Tensor:
        """A saved moment, in the memory layout of its master: files know none, and fused kernels
        walk through the memory of both side by side (convolutions are channels_last).
        """
        own = torch.empty_like(self._masters[name], requires_grad=False)
        return own.copy_(self._shard(name, full))

    def _shard(self, name: str, full: Tensor) -> Tensor:
        return shard_of(self._parameters[name], full) if name in self._parameters else full


def _master(parameter: nn.Parameter) -> Tensor:
    """What the optimiser moves: the parameter itself, a copy in float32, or this process' shard."""
    if is_sharded(parameter):
        return local_shard(parameter).requires_grad_()
    if parameter.dtype.itemsize >= 4:
        return parameter
    return parameter.detach().float().requires_grad_()
