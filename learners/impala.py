"""The IMPALA objective: V-trace targets and an actor-critic loss over unrolls (arXiv 1802.01561,
section 4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unirl.config.rules import check_positive
from unirl.learners.config import UnrollLearnerConfig
from unirl.learners.objective import Losses, UnrollRows
from unirl.learners.truncation import bootstrapped, spread
from unirl.metrics.metrics import Metrics
from unirl.policy import Policy
from unirl.vtrace import (
    entropy_loss,
    kl_estimate,
    policy_gradient_loss,
    value_loss,
    vtrace_targets,
)
from unirl.vtrace.advantages import Reduce


@dataclass(frozen=True)
class ImpalaLearnerConfig(UnrollLearnerConfig):
    """V-trace corrects each pass over a batch for the policy that it began with."""

    normalize_advantage: bool = False
    """Divide advantages by the root of a running mean of their squares: the step size then fits any
    scale of rewards. The scale changes slowly, so a batch without much signal moves little.
    With policy_clip, each batch's are centred and scaled by themselves, as in PPO.
    """
    policy_clip: float | None = None
    """none: IMPALA's policy gradient. A number: PPO's clipped objective (see recipe ppo) on V-trace
    advantages, which keeps several passes over a batch close to the policy that they began with
    (IMPACT, arXiv 1912.00167). 0.2 is usual; more: larger steps.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(
            "learner.policy_clip", self.policy_clip, "0.2 is usual; leave it out for no clip"
        )


class ImpalaObjective:
    """Targets follow the policy from step to step: nothing is held fixed."""

    splits_steps = False
    """Targets follow from unroll to unroll."""

    def __init__(
        self, policy: Policy, config: ImpalaLearnerConfig, *, reduce: Reduce | None = None
    ) -> None:
        self._policy, self.config = policy, config
        self.is_additive = not config.normalize_advantage
        """The running scale is of whole minibatches, in their order."""
        self._scale = RunningScale(torch.device(config.device), reduce)

    def prepare(self, rows: UnrollRows, metrics: Metrics) -> UnrollRows:
        """Add values after time limits; all else depends on the policy of the moment."""
        if "truncated" not in rows:
            return rows
        config, truncated = self.config, rows["truncated"]
        with torch.no_grad():
            if config.truncation == "final":
                value = spread(self._policy.value(rows["final_obs"]), truncated)
            else:
                value = self._policy.unroll(rows["obs"], rows["state"], rows["reset"]).value[:-1]
        reward = bootstrapped(rows["reward"], truncated, value, config.gamma)
        rest = {k: v for k, v in rows.items() if k not in ("truncated", "final_obs")}
        return {**rest, "reward": reward}

    def losses(self, rows: UnrollRows, metrics: Metrics) -> Losses:
        """The divergence is from the policies that acted."""
        config, mask = self.config, rows["mask"]
        unroll = self._policy.unroll(rows["obs"], rows["state"], rows["reset"])
        distribution = unroll.distribution[:-1]
        new_logp = distribution.log_prob(rows["action"])
        target, advantage = vtrace_targets(
            new_logp.detach() - rows["logp"],
            rows["discount"],
            rows["reward"],
            unroll.value.detach(),
            mask=mask,
            rho_clip=config.rho_clip,
            c_clip=config.c_clip,
            pg_rho_clip=config.pg_rho_clip,
            lambda_=config.lambda_,
        )
        if config.normalize_advantage:
            self._scale.update(advantage, mask)
            advantage = self._scale.divide(advantage)
        return Losses(
            policy_gradient_loss(new_logp, advantage, mask),
            value_loss(unroll.value[:-1], target, mask),
            entropy_loss(distribution.entropy(), mask),
            kl_estimate(new_logp, rows["logp"], mask),
        )

    def settings(self) -> Mapping[str, Any]:
        return {"learner.normalize_advantage": self.config.normalize_advantage}

    def state_dict(self) -> dict[str, Any]:
        return self._scale.state_dict() if self.config.normalize_advantage else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.config.normalize_advantage:
            self._scale.load_state_dict(state)


class RunningScale:
    """The root of a running mean of squares: the n-th update weighs 1/n, and 1/500 at least.

    So the first updates count alike, and later the scale follows the last few hundred.
    """

    SMALLEST_WEIGHT = 0.002

    def __init__(self, device: torch.device, reduce: Reduce | None = None) -> None:
        self._num_updates, self._reduce = 0, reduce
        self._mean_square = torch.zeros((), dtype=torch.float64, device=device)

    def update(self, x: Tensor, mask: Tensor) -> None:
        """Count x where mask is true; both of one shape, x 0 where mask is false."""
        self._num_updates += 1
        weight = max(1 / self._num_updates, self.SMALLEST_WEIGHT)
        # In float64: a square of float32 overflows from 2e19 on, and a sum loses small ones.
        squares, num_rows = x.double().square().sum(), mask.sum()
        if self._reduce is not None:
            squares, num_rows = self._reduce((squares, num_rows))
        self._mean_square.lerp_(squares / num_rows.clamp(min=1), weight)

    def divide(self, x: Tensor) -> Tensor:
        """x over the scale, in its own dtype; before anything but zeros was seen, x is 0 anyway."""
        return x / self._mean_square.sqrt().clamp(min=1e-8).to(x.dtype)

    def state_dict(self) -> dict[str, Tensor]:
        return {
            "mean_square": self._mean_square.clone(),
            "num_updates": torch.tensor(self._num_updates),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        self._mean_square.copy_(state["mean_square"])
        self._num_updates = int(state["num_updates"])
