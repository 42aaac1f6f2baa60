"""The IMPALA learner: V-trace targets and an actor-critic loss over unrolls (arXiv 1802.01561,
section 4).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from unirl.core.errors import UniRLError
from unirl.core.learner import LearnerContext, LearnerState
from unirl.core.metrics import Metrics
from unirl.core.sample import Batch, SampleSpec, collate
from unirl.core.seeding import derive_seed
from unirl.core.tree import tree_map
from unirl.core.weights import Weights
from unirl.learners.episodes import EpisodeWindow
from unirl.learners.update import OptimizerConfig, Update
from unirl.policy import Policy, PolicyConfig
from unirl.policy.normalize import ReturnNorm
from unirl.vtrace import entropy_loss, policy_gradient_loss, value_loss, vtrace_targets


@dataclass(frozen=True)
class ImpalaLearnerConfig:
    """The loss and how often each batch is used."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    gamma: float = 0.99
    """Discount per step. More: farther sight, noisier targets."""
    lambda_: float = 1.0
    """Shrinks V-trace's traces. Less: less variance, more bias. 1 is the paper's."""
    rho_clip: float = 1.0
    """Bound on the importance ratio of one step: decides which policy's value is learned."""
    c_clip: float = 1.0
    """Bound on the ratios that carry corrections back in time."""
    value_coef: float = 0.5
    """Weight of the value loss."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus. More: explores longer."""
    entropy_schedule: Literal["constant", "linear"] = "constant"
    """linear: falls to zero at run.total_steps."""
    reward_clip: float | None = None
    """Rewards are clamped to +- this before learning (1 for Atari, as in Nature DQN); logged
    returns stay raw.
    """
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    normalize_advantage: bool = False
    """Centre and scale advantages over each minibatch. Where few rows carry a reward or a minibatch
    has few environments, that makes noise as large as the signal: prefer normalize_reward there.
    """
    epochs: int = 1
    """Passes over each batch. V-trace corrects each pass for the policy it began with. More: fewer
    samples, more compute.
    """
    minibatches: int = 1
    """Parts a batch is split into along its environments. More: more and noisier updates per batch.
    """
    device: str = "cpu"
    """Where the learner computes: cpu or cuda."""

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 1 or not 0 <= self.lambda_ <= 1:
            raise UniRLError(
                f"learner.gamma is {self.gamma} and learner.lambda_ {self.lambda_}",
                "both must lie in [0, 1]",
                "0.99 and 1 are usual",
            )
        for name, minimum in (
            ("rho_clip", 0.0), ("c_clip", 0.0), ("value_coef", 0.0), ("entropy_coef", 0.0),
        ):  # fmt: skip
            if not getattr(self, name) >= minimum:
                raise UniRLError(
                    f"learner.{name} is {getattr(self, name)}",
                    f"learner.{name} >= 0 must hold",
                    "set it to 0 or more",
                )
        if self.reward_clip is not None and not self.reward_clip > 0:
            raise UniRLError(
                f"learner.reward_clip is {self.reward_clip}",
                "it must be > 0",
                "1 is usual for Atari",
            )
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise UniRLError(
                f"learner.device {self.device!r} is unknown", "known: cpu, cuda, cuda:N", "try cpu"
            )
        for name in ("epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise UniRLError(
                    f"learner.{name} is {getattr(self, name)}",
                    f"learner.{name} >= 1 must hold",
                    "set it to 1 or more",
                )


class ImpalaLearner:
    """See Learner. total_steps: what schedules end at. num_recent: episodes that the training
    return is the mean of.
    """

    def __init__(
        self,
        policy: Policy,
        spec: SampleSpec,
        config: ImpalaLearnerConfig,
        *,
        batch_size: int,
        total_steps: int,
        seed: int,
        num_recent: int = 100,
    ) -> None:
        check_minibatches(spec.fields["logp"].shape[1] * batch_size, config.minibatches)
        self._device = torch.device(config.device)
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise UniRLError(
                f"learner.device is {config.device!r}",
                "this machine has no usable CUDA device",
                "set learner.device to cpu",
            )
        self.version, self.num_steps = 0, 0
        self._policy, self._spec, self._config = policy.to(self._device), spec, config
        self._update = Update(self._policy, config.optimizer, total_steps=total_steps)
        self._total_steps = total_steps
        self._staging = spec.allocate(batch_size) if batch_size > 1 else None
        self._return_norm = ReturnNorm().to(self._device) if config.normalize_reward else None
        self._episodes = EpisodeWindow(num_recent)
        self._generator = torch.Generator().manual_seed(derive_seed(seed, "minibatches"))

    @property
    def recent_returns(self) -> tuple[float, ...]:
        """Raw returns of the most recent training episodes."""
        return tuple(self._episodes.returns)

    def step(self, batch: Batch) -> Metrics:
        """One update, or epochs * minibatches optimiser steps, from one batch."""
        config, metrics = self._config, Metrics()
        data = collate(batch, self._spec, self._staging)
        num_rows = int(data["mask"].sum())
        self._episodes.read(data, metrics)
        if self._device.type != "cpu":
            data = tree_map(
                lambda leaf: leaf.to(self._device, non_blocking=True), data
            )  # host -> device, once per batch
        reward = self._reward(data)
        discount = config.gamma * (~data["terminated"]).float()
        # A state begins anew after a filler row: also that of the bootstrap row.
        reset = torch.cat((torch.zeros_like(data["mask"][:1]), ~data["mask"]))
        rows = {
            **{name: data[name] for name in ("obs", "action", "logp", "mask")},
            "state": data.get("state", {}),
            "reward": reward,
            "discount": discount,
            "reset": reset,
        }
        for _ in range(config.epochs):
            for part in self._minibatches(rows):
                self._learn(part, metrics)
        self._policy.update_normalizer(data["obs"], data["mask"])
        self.num_steps += num_rows
        self.version += 1
        metrics.last("losses/learning_rate", self._update.lr(self.num_steps))
        return metrics

    def _reward(self, data: Mapping[str, Any]) -> torch.Tensor:
        reward: torch.Tensor = data["reward"]
        if self._return_norm is not None:
            done = data["terminated"] | data["truncated"]
            self._return_norm.update(reward, done, data["mask"], data["carry"], self._config.gamma)
            reward = self._return_norm.scale(reward)
        if self._config.reward_clip is not None:
            reward = reward.clamp(-self._config.reward_clip, self._config.reward_clip)
        return reward

    def _minibatches(self, rows: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Parts of the batch along its environments, in a new random order each time; the batch
        itself if undivided.
        """
        num_parts = self._config.minibatches
        if num_parts == 1:
            yield rows
            return
        order = torch.randperm(rows["logp"].shape[1], generator=self._generator).to(self._device)
        for indices in order.chunk(num_parts):
            part = {
                name: tree_map(lambda leaf, at=indices: leaf[:, at], tree)
                for name, tree in rows.items()
                if name != "state"
            }
            part["state"] = tree_map(lambda leaf, at=indices: leaf[at], rows["state"])
            yield part

    def _learn(self, rows: Mapping[str, Any], metrics: Metrics) -> None:
        config, mask = self._config, rows["mask"]
        unroll = self._policy.unroll(rows["obs"], rows["state"], rows["reset"])
        distribution = unroll.distribution[:-1]
        new_logp = distribution.log_prob(rows["action"])
        log_rho = new_logp.detach() - rows["logp"]
        targets = vtrace_targets(
            log_rho,
            rows["discount"],
            rows["reward"],
            unroll.value.detach(),
            mask=mask,
            rho_clip=config.rho_clip,
            c_clip=config.c_clip,
            lambda_=config.lambda_,
        )
        advantage = targets.advantage
        if config.normalize_advantage:
            advantage = _whiten(advantage, log_rho, mask, config.rho_clip)
        policy = policy_gradient_loss(new_logp, advantage, mask)
        value = value_loss(unroll.value[:-1], targets.target, mask)
        entropy = entropy_loss(distribution.entropy(), mask)
        loss = (
            policy.mean() + config.value_coef * value.mean() + self._entropy_coef() * entropy.mean()
        )
        torch.autograd.backward(loss)
        norm = self._update.apply(self.num_steps)
        metrics.ratio("losses/policy", policy.numerator, policy.denominator)
        metrics.ratio("losses/value", value.numerator, value.denominator)
        metrics.ratio("losses/entropy", -entropy.numerator, entropy.denominator)
        metrics.mean("losses/grad_norm", norm)
        # The low-variance estimate of KL(behaviour || new): how far this batch is from its own
        # policy.
        kl = torch.where(mask, log_rho.exp() - 1 - log_rho, 0.0)
        metrics.ratio("losses/approx_kl", kl.sum(), policy.denominator)

    def _entropy_coef(self) -> float:
        if self._config.entropy_schedule == "constant":
            return self._config.entropy_coef
        return self._config.entropy_coef * max(0.0, 1 - self.num_steps / self._total_steps)

    def weights(self) -> Weights:
        """See Learner: the policy in its compute dtype, with its statistics."""
        return self._policy.weights()

    def state_dict(self) -> LearnerState:
        """See Learner."""
        optimizer: dict[str, Any] = {
            "update": self._update.optimizer_state(),
            "generator": self._generator.get_state(),
        }
        if self._return_norm is not None:
            optimizer["return_norm"] = self._return_norm.state_dict()
        counters = {"episodes": self._episodes.state_dict(), "settings": self._settings()}
        return LearnerState(self._update.model_state(), optimizer, counters)

    def _settings(self) -> dict[str, Any]:
        """Settings that decide what a saved state consists of."""
        config = self._config
        return {
            "learner.optimizer.name": config.optimizer.name,
            "learner.normalize_reward": config.normalize_reward,
        }

    def load_state_dict(self, state: LearnerState) -> None:
        """See Learner."""
        for name, wanted in self._settings().items():
            found = state.counters["settings"].get(name)
            if found != wanted:
                raise UniRLError(
                    f"the checkpoint was made with {name} = {found}",
                    f"this run has {name} = {wanted}, which needs another saved state",
                    "resume without changing it",
                )
        optimizer: Any = state.optimizer
        model: Any = state.model
        self._update.load(model, optimizer["update"])
        self._generator.set_state(optimizer["generator"])
        if self._return_norm is not None:
            self._return_norm.load_state_dict(optimizer["return_norm"])
        self._episodes.load_state_dict(state.counters["episodes"])


def check_minibatches(num_envs: int, minibatches: int) -> None:
    """Raise UniRLError unless a batch of so many environments splits evenly."""
    if num_envs % minibatches:
        nearest = min(
            (d for d in range(1, num_envs + 1) if num_envs % d == 0),
            key=lambda divisor: abs(divisor - minibatches),
        )
        raise UniRLError(
            f"batch of {num_envs} environments does not split into {minibatches} minibatches",
            f"(actor.num_envs * queue.batch_size) % learner.minibatches must be 0, "
            f"it is {num_envs % minibatches}",
            f"try learner.minibatches {nearest}",
        )


def _whiten(
    advantage: torch.Tensor, log_rho: torch.Tensor, mask: torch.Tensor, rho_clip: float
) -> torch.Tensor:
    """V-trace's advantages rho * A with A centred and the product scaled to unit size; [T, B].

    Centred before the weight: a row that the policy has left (rho near 0) must keep no advantage,
    while a shift of the product would give it one and push the policy further away.
    """
    rho = torch.where(mask, log_rho.clamp(max=20.0).exp().clamp(max=rho_clip), 0.0)
    centred = advantage - rho * (advantage.sum() / rho.sum().clamp(min=1e-8))
    return centred / (centred.square().sum() / mask.sum().clamp(min=1)).sqrt().clamp(min=1e-8)


def make_impala_learner(
    context: LearnerContext,
    *,
    spaces: tuple[Any, Any],
    policy: PolicyConfig,
    spec: SampleSpec,
    learner: ImpalaLearnerConfig,
    batch_size: int,
    total_steps: int,
    num_recent: int,
) -> ImpalaLearner:
    """The factory of a plan: bind all but `context` with functools.partial."""
    module = Policy(*spaces, policy, seed=context.seed % 2**31)
    make = partial(
        ImpalaLearner, batch_size=batch_size, total_steps=total_steps, num_recent=num_recent
    )
    return make(module, spec, learner, seed=context.seed)
