"""The PPO objective (arXiv 1707.06347, eq. 9), decoupled (arXiv 2110.00641): the policy that
ratios are clipped around is the one that the update begins with, not the one that acted.

On-policy both are the same, and this is PPO with GAE. Where samples lag, V-trace weights correct
for it, and the clip still bounds one update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unirl.config.rules import check_positive
from unirl.core.tree import tree_map
from unirl.learners.config import UnrollLearnerConfig
from unirl.learners.objective import Losses, UnrollRows, select
from unirl.learners.optimizer import OptimizerConfig
from unirl.learners.truncation import bootstrapped, spread
from unirl.metrics.metrics import Metrics
from unirl.policy import Policy
from unirl.policy.normalize import RunningNorm
from unirl.vtrace import (
    clipped_policy_loss,
    clipped_value_loss,
    entropy_loss,
    kl_estimate,
    value_loss,
    vtrace_gae,
    whiten,
)
from unirl.vtrace.advantages import Reduce


@dataclass(frozen=True)
class PpoLearnerConfig(UnrollLearnerConfig):
    """Several clipped passes over each batch, against targets that are computed once."""

    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=2.5e-4, lr_schedule="linear")
    )
    lambda_: float = 0.95
    """Of GAE and of V-trace's traces. Less: less variance, more bias. 0.95 is usual."""
    normalize_reward: bool = True
    """Divide rewards by the running standard deviation of the discounted return: losses and the
    clipped gradient then have one scale in every environment.
    """
    epochs: int = field(default=4, metadata={"common": True})
    """Passes over each batch. More: fewer samples, more compute; the clip bounds how far they lead.
    """
    minibatches: int = field(default=4, metadata={"common": True})
    """How many minibatches a batch is split into: of steps from everywhere, or of whole unrolls of
    some environments where the policy has memory. More: more and noisier updates per batch.
    """
    policy_clip: float = 0.2
    """How far the ratio of new policy to old may leave 1 and still gain. More: larger steps."""
    value_clip: float | None = None
    """How far one update may move a value; none: as far as it likes. In the units that values are
    learned in: of the scaled reward, or of normalize_value.
    """
    normalize_value: bool = False
    """Learn values in units of the targets' running mean and deviation: where returns are large or
    grow.
    """
    normalize_advantage: bool = True
    """Centre and scale advantages over the whole batch. False: the step size has to fit the scale
    of the rewards.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("learner.policy_clip", self.policy_clip, "0.1 to 0.3 is usual")
        check_positive(
            "learner.value_clip", self.value_clip, "0.2 is usual; leave it out for no limit"
        )


class PpoObjective:
    """Proximal policy, targets and advantages are held fixed over a batch.

    on_policy: every sample is of the policy that the update begins with, so its log-probabilities
    need not be computed again.
    """

    def __init__(
        self,
        policy: Policy,
        config: PpoLearnerConfig,
        *,
        on_policy: bool = False,
        reduce: Reduce | None = None,
    ) -> None:
        self._policy, self.config, self._on_policy = policy, config, on_policy
        self._reduce = reduce
        self.splits_steps = policy.core is None
        """A policy without memory takes each step on its own."""
        self.is_additive = True
        self.value_norm: RunningNorm | None = None
        if config.normalize_value:
            # The clip is for wild inputs; a target must come through.
            self.value_norm = RunningNorm((), clip=math.inf).to(torch.device(config.device))
            self.value_norm.reduce = reduce

    def prepare(self, rows: UnrollRows, metrics: Metrics) -> UnrollRows:
        """Targets and advantages by the policy that this update begins with."""
        config, mask = self.config, rows["mask"]
        prox_logp, prox_value = self._proximal(rows)
        value = self._restored(prox_value)
        log_rho = prox_logp - rows["logp"]
        target, advantage = vtrace_gae(
            log_rho,
            rows["discount"],
            self._reward(rows, value),
            value,
            mask=mask,
            rho_clip=config.rho_clip,
            c_clip=config.c_clip,
            pg_rho_clip=config.pg_rho_clip,
            lambda_=config.lambda_,
        )
        if config.normalize_advantage:
            weight = config.rho_clip if config.pg_rho_clip is None else config.pg_rho_clip
            advantage = whiten(advantage, log_rho, mask, rho_clip=weight, reduce=self._reduce)
        metrics.ratio("losses/behaviour_kl", *kl_estimate(prox_logp, rows["logp"], mask))
        unexplained, variance = (_scatter(x, mask) for x in (target - value[:-1], target))
        metrics.ratio("losses/explained_variance", variance - unexplained, variance)
        if self.value_norm is not None:
            self.value_norm.update(target, mask)
            target = self.value_norm.normalize(target)
        prepared = {
            **{name: rows[name] for name in ("obs", "state", "reset", "action", "mask")},
            "prox_logp": prox_logp,
            "prox_value": prox_value[:-1],
            "target": target,
            "advantage": advantage,
        }
        return _side_by_side(prepared) if self.splits_steps else prepared

    def _restored(self, value: Tensor) -> Tensor:
        return value if self.value_norm is None else self.value_norm.restore(value)

    def _reward(self, rows: UnrollRows, value: Tensor) -> Tensor:
        """With the value of what follows a time limit, where the next row is of another episode."""
        if "truncated" not in rows:
            reward: Tensor = rows["reward"]
            return reward
        if self.config.truncation == "previous":
            ahead = value[:-1]
        else:
            with torch.no_grad():
                final_value = self._policy.value(rows["final_obs"])
            ahead = spread(self._restored(final_value), rows["truncated"])
        return bootstrapped(rows["reward"], rows["truncated"], ahead, self.config.gamma)

    def _proximal(self, rows: UnrollRows) -> tuple[Tensor, Tensor]:
        """Log-probabilities [T, B] and values [T+1, B] of the policy as it is: that which acted, if
        it left values.

        A minibatch at a time: this pass needs no more memory than those that follow.
        """
        if "value" in rows:
            return rows["logp"], rows["value"]
        if self._on_policy:
            with torch.no_grad():
                return rows["logp"], self._policy.value(rows["obs"])
        rows = {name: rows[name] for name in ("obs", "state", "reset", "action", "mask")}
        num_envs = rows["mask"].shape[1]
        logps, values = [], []
        with torch.no_grad():
            every = torch.arange(num_envs, device=rows["mask"].device)
            for envs in every.chunk(self.config.minibatches):
                some = rows if len(envs) == num_envs else select(rows, envs)
                unroll = self._policy.unroll(some["obs"], some["state"], some["reset"])
                logps.append(unroll.distribution[:-1].log_prob(some["action"]))
                values.append(unroll.value)
        return torch.cat(logps, 1), torch.cat(values, 1)

    def losses(self, rows: UnrollRows, metrics: Metrics) -> Losses:
        """The divergence is from the proximal policy."""
        config, mask, prox_logp = self.config, rows["mask"], rows["prox_logp"]
        unroll = self._policy.unroll(rows["obs"], rows["state"], rows.get("reset"))
        num_rows = mask.shape[0]  # without the bootstrap row, where there is one
        distribution, value = unroll.distribution[:num_rows], unroll.value[:num_rows]
        new_logp = distribution.log_prob(rows["action"])
        policy = clipped_policy_loss(
            new_logp, prox_logp, rows["advantage"], mask, clip=config.policy_clip
        )
        outside = ((new_logp.detach() - prox_logp).exp() - 1).abs() > config.policy_clip
        metrics.ratio("losses/clip_fraction", (outside & mask).sum(), policy.denominator)
        return Losses(
            policy,
            value_loss(value, rows["target"], mask)
            if config.value_clip is None
            else clipped_value_loss(
                value, rows["prox_value"], rows["target"], mask, clip=config.value_clip
            ),
            entropy_loss(distribution.entropy(), mask),
            kl_estimate(new_logp, prox_logp, mask),
        )

    def settings(self) -> Mapping[str, Any]:
        return {"learner.normalize_value": self.config.normalize_value}

    def state_dict(self) -> dict[str, Any]:
        return {} if self.value_norm is None else dict(self.value_norm.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.value_norm is not None:
            self.value_norm.load_state_dict(state)


def _side_by_side(rows: UnrollRows) -> UnrollRows:
    """The steps of all environments side by side, [1, T * B]: without memory a minibatch need not
    hold whole unrolls, and steps drawn from everywhere resemble each other less.
    """
    num_rows = rows["mask"].shape[0]
    return {
        name: tree_map(lambda leaf: leaf[:num_rows].flatten(0, 1)[None], tree)
        for name, tree in rows.items()
        if name not in ("state", "reset")
    } | {"state": {}}


def _scatter(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of squared distances from the mean over the rows of mask, a scalar."""
    mean = torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)
    return torch.where(mask, x - mean, 0.0).square().sum()
