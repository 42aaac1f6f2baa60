"""What every learner over unrolls does, whatever its objective: read batches, divide them, step the
optimiser, count, save. UnrollRows are time-major as in docs/overview.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor

from unirl.core.learner import LearnerContext, LearnerState
from unirl.core.sample import Batch, SampleSpec, collate
from unirl.core.schedule import Schedule
from unirl.core.seeding import derive_seed
from unirl.core.training_budget import ScheduleProgress, TrainingBudget
from unirl.core.tree import tree_map
from unirl.core.weights import Weights
from unirl.device import usable_device
from unirl.errors import ActorFailed, UniRLError
from unirl.learners.config import UnrollLearnerConfig, check_minibatches, tuned
from unirl.learners.episodes import EpisodeWindow
from unirl.learners.objective import Losses, UnrollObjective, UnrollRows, select
from unirl.learners.optimizer import Optimizer
from unirl.learners.parallel import Ranks
from unirl.learners.shares import Shares, add_up, gradients, num_shares
from unirl.metrics.metrics import Metrics
from unirl.policy import Policy, PolicyConfig
from unirl.policy.normalize import ReturnNorm, RunningNorm
from unirl.policy.precision import warn_if_emulated
from unirl.vtrace import Loss

log = logging.getLogger(__name__)

Share: TypeAlias = Callable[[], UnrollRows]
"""Gathers some rows of a minibatch."""


class UnrollLearner:
    """A Learner. budget: what schedules end at. num_recent: episodes that the training return is
    the mean of.

    ranks: processes whose batches make up one; the objective sums over them too. Losses, steps
    and statistics are then those of the whole batch, and all ranks hold the same weights.
    """

    def __init__(
        self,
        policy: Policy,
        objective: UnrollObjective,
        spec: SampleSpec,
        config: UnrollLearnerConfig,
        *,
        batch_size: int,
        budget: TrainingBudget,
        seed: int,
        num_recent: int = 100,
        ranks: Ranks | None = None,
    ) -> None:
        num_steps, num_envs = spec.fields["logp"].shape[:2]
        check_minibatches(
            config.minibatches,
            num_envs * batch_size,
            num_steps if objective.splits_steps else None,
        )
        self._device = usable_device("learner.device", config.device)
        self.version, self.num_steps = 0, 0
        self.policy, self.objective = policy.to(self._device), objective
        self._spec, self._config = spec, config
        self._ranks = ranks or Ranks()
        self._schedule = ScheduleProgress(budget, self._ranks.leading)
        key = "learner.entropy_schedule"
        self._entropy_schedule = Schedule(config.entropy_schedule, key, self._schedule)
        self._optimizer = Optimizer(
            self.policy, config.optimizer, schedule=self._schedule, reduce=self._ranks.reduce
        )
        self._parameters = [p for p in self.policy.parameters() if p.requires_grad]
        self._shares = Shares(num_shares(self.policy, self._device) if objective.is_additive else 1)
        self._staging = spec.allocate(batch_size) if batch_size > 1 else None
        self._return_norm = ReturnNorm().to(self._device) if config.normalize_reward else None
        self._episodes = EpisodeWindow(num_recent)
        self._generator = torch.Generator(self._device)
        self._generator.manual_seed(derive_seed(seed, "minibatches"))
        self._num_nan_states = 0
        self._tuned: dict[str, float] = {}
        norms = [module for module in policy.modules() if isinstance(module, RunningNorm)]
        if self._return_norm is not None:
            norms.append(self._return_norm.returns)
        for norm in norms:
            norm.reduce = self._ranks.reduce

    @property
    def recent_returns(self) -> tuple[float, ...]:
        return tuple(self._episodes.returns)

    def record_training_seconds(self, seconds: float) -> None:
        self._schedule.record_training_seconds(seconds)

    def step(self, batch: Batch) -> Metrics:
        """One update from one batch: up to epochs * minibatches optimiser steps."""
        metrics = Metrics()
        for slot in batch.slots:
            slot.wait_written()
        data = collate(batch, self._spec, self._staging)
        num_rows, num_nan_states = self._ranks.count(*self._episodes.read(data, metrics))
        self._count(data, num_nan_states, metrics)
        if self._device.type != "cpu" and self._spec.device == "cpu":
            data = tree_map(
                lambda leaf: leaf.to(self._device, non_blocking=True), data
            )  # host -> device, once per batch
        self._learn(self.objective.prepare(self.rows(data), metrics), metrics)
        self.policy.update_normalizer(data["obs"], data["mask"])
        self.num_steps += num_rows
        self.version += 1
        metrics.last("losses/learning_rate", self._optimizer.lr(self.num_steps))
        return metrics

    def rows(self, data: Mapping[str, Any]) -> UnrollRows:
        """What the objective gets of a batch: rewards scaled and clipped, discounts, resets."""
        rows = {
            **{name: data[name] for name in ("obs", "action", "logp", "mask")},
            **({"value": data["value"]} if "value" in data else {}),
            "state": data.get("state", {}),
            "reward": self._reward(data),
            # A state is reset after a filler row: also that of the bootstrap row.
            "reset": torch.cat((torch.zeros_like(data["mask"][:1]), ~data["mask"])),
        }
        over = data["terminated"]
        if self._spec.resets_in_step:
            # The next row belongs to another episode whatever ended this one.
            over = over | data["truncated"]
            rows["truncated"] = data["truncated"]
            if "final_obs" in data:
                rows["final_obs"] = data["final_obs"]
        rows["discount"] = self._config.gamma * (~over).float()
        return rows

    def _count(self, data: Mapping[str, Any], num_nan_states: int, metrics: Metrics) -> None:
        """What the simulator counted while it filled the batch."""
        counters = {name: counted.sum() for name, counted in data.get("counter", {}).items()}
        for name, total in zip(counters, self._ranks.sum(list(counters.values())), strict=True):
            metrics.total(f"env/{name}", total)
        self._num_nan_states += num_nan_states
        if self._num_nan_states > self._config.max_nan_states:
            # Nothing was learned from this batch: the learner is sound, and will be saved.
            raise ActorFailed(
                f"{self._num_nan_states} environments reached a state that is not finite",
                f"at most {self._config.max_nan_states} are reset (learner.max_nan_states)",
                "use a smaller time step or weaker actuators, or allow more",
            )

    def _reward(self, data: Mapping[str, Any]) -> Tensor:
        reward: Tensor = data["reward"]
        if self._config.reward_scale != 1.0:
            reward = reward * self._config.reward_scale
        if self._return_norm is not None:
            done = data["terminated"] | data["truncated"]
            carry = data["carry"] * self._config.reward_scale  # as the environment gave it
            self._return_norm.update(reward, done, data["mask"], carry, self._config.gamma)
            reward = self._return_norm.scale(reward)
        if self._config.reward_clip is not None:
            reward = reward.clamp(-self._config.reward_clip, self._config.reward_clip)
        return reward

    def _learn(self, rows: UnrollRows, metrics: Metrics) -> None:
        config, divergence, num_epochs = self._config, None, 0
        # Kept where the same are read at each pass; else one at a time needs less memory.
        once = [_read(each) for each in self.minibatches(rows)] if config.shuffle == "batch" else ()
        while num_epochs < config.epochs:
            divergence = None
            for minibatch in once or self.minibatches(rows):
                found = self._step(minibatch, metrics)
                divergence = found if divergence is None else divergence + found
            num_epochs += 1
            if config.optimizer.lr_schedule == "adaptive" and divergence is not None:
                self._optimizer.adapt(divergence.mean())
            limit = config.stop_kl
            if limit is not None and divergence is not None and float(divergence.mean()) > limit:
                break
        if config.stop_kl is not None:
            metrics.mean("losses/epochs", num_epochs)

    def minibatches(self, rows: UnrollRows) -> Iterator[Sequence[Share]]:
        """The batch split along its environments, in a new random order each time; the batch itself
        if learner.minibatches is 1. Each in shares that are read when they are asked for.
        """
        num = rows["mask"].shape[1]
        if self._config.minibatches == 1:
            if self._shares.num == 1:
                yield (lambda: rows,)
                return
            order = torch.arange(num, device=self._device)
        else:
            order = torch.randperm(num, generator=self._generator, device=self._device)
        for envs in order.chunk(self._config.minibatches):
            yield [partial(select, rows, share) for share in envs.chunk(self._shares.num)]

    def _step(self, shares: Sequence[Share], metrics: Metrics) -> Loss:
        """One step of the optimiser; returns how far the policy was before it."""
        found = self._shares.map(self._losses, shares)
        for _, counted in found:
            metrics.update(counted)
        own = [losses for losses, _ in found]
        losses = self._over_ranks(own[0] if len(own) == 1 else _sum(own))
        if len(own) == 1:
            torch.autograd.backward(self._total(own[0], losses))
        else:
            add_up(self._parameters, self._shares.map(partial(self._gradients, losses), own))
        norm = self._optimizer.apply(self.num_steps)
        metrics.ratio("losses/policy", *losses.policy)
        metrics.ratio("losses/value", *losses.value)
        metrics.ratio("losses/entropy", -losses.entropy.numerator, losses.entropy.denominator)
        metrics.ratio("losses/approx_kl", *losses.divergence)
        metrics.mean("losses/grad_norm", norm)
        return losses.divergence

    def _losses(self, share: Share) -> tuple[Losses, Metrics]:
        metrics = Metrics()
        return self.objective.losses(share(), metrics), metrics

    def _gradients(self, losses: Losses, own: Losses) -> Sequence[Tensor | None]:
        return gradients(self._total(own, losses), self._parameters)

    def _total(self, own: Losses, losses: Losses) -> Tensor:
        """What is minimised. own: of some of the rows, losses: of all of them. Their share of the
        mean is over the rows of all: gradients then need only a sum.
        """
        policy, value, entropy = (
            Loss(loss.numerator, total.denominator).mean()
            for loss, total in zip(own[:3], losses[:3], strict=True)
        )
        return policy + self._config.value_coef * value + self._entropy_coef() * entropy

    def _over_ranks(self, own: Losses) -> Losses:
        """The losses of this minibatch on all ranks together, without gradient."""
        if self._ranks.world_size == 1:
            return own
        sums = self._ranks.sum([scalar for loss in own for scalar in loss])
        return Losses(*(Loss(*sums[i : i + 2]) for i in range(0, len(sums), 2)))

    def _entropy_coef(self) -> float:
        return self._config.entropy_coef * self._entropy_schedule.factor(self.num_steps)

    def setting(self, key: str) -> float:
        """The value of one of TUNABLE."""
        value: Any = self._config
        for name in key.split(".")[1:]:
            value = getattr(value, name)
        return float(value)

    def tune(self, settings: Mapping[str, float]) -> None:
        """Other values of some of TUNABLE from the next update on; checkpoints keep them."""
        self._tuned |= settings
        self._config = tuned(self._config, settings)
        self._optimizer.config = self._config.optimizer
        self.objective.config = self._config

    def adopt(self, other: LearnerState) -> None:
        """Continue as another learner would, but for its settings, its random numbers and its
        episodes: no return has been earned since.
        """
        generator = self._generator.get_state()
        counters = {**other.counters, "tuned": dict(self._tuned)}
        self.load_state_dict(replace(other, counters=counters))
        self._generator.set_state(generator)
        self._episodes.clear()

    def weights(self) -> Weights:
        """The policy in its compute dtype, with its statistics."""
        return self.policy.weights()

    def state_dict(self) -> LearnerState:
        optimizer: dict[str, Any] = {
            "update": self._optimizer.optimizer_state(),
            "generator": self._generator.get_state(),
        }
        if self._return_norm is not None:
            optimizer["return_norm"] = self._return_norm.state_dict()
        if objective := self.objective.state_dict():
            optimizer["objective"] = objective
        counters = {
            "episodes": self._episodes.state_dict(),
            "settings": self._settings(),
            "adaptive_lr": float(self._optimizer.adaptive_lr),
            "nan_states": self._num_nan_states,
            **({"tuned": dict(self._tuned)} if self._tuned else {}),
        }
        return LearnerState(self._optimizer.model_state(), optimizer, counters)

    def _settings(self) -> dict[str, Any]:
        """Settings that decide what a saved state consists of."""
        return {
            "learner.optimizer.name": self._config.optimizer.name,
            "learner.normalize_reward": self._config.normalize_reward,
            **self.objective.settings(),
        }

    def load_state_dict(self, state: LearnerState) -> None:
        for name, wanted in self._settings().items():
            found = state.counters["settings"].get(name, False)  # a switch it did not know
            if found != wanted:
                raise UniRLError(
                    f"the checkpoint was made with {name} = {found}",
                    f"this run has {name} = {wanted}, which needs another saved state",
                    "resume without changing it",
                )
        optimizer: Any = state.optimizer
        model: Any = state.model
        self._optimizer.load(model, optimizer["update"])
        self._optimizer.adaptive_lr.fill_(state.counters["adaptive_lr"])
        self._num_nan_states = int(state.counters.get("nan_states", 0))
        self._restore_generator(optimizer["generator"])
        if self._return_norm is not None:
            self._return_norm.load_state_dict(optimizer["return_norm"])
        self.objective.load_state_dict(optimizer.get("objective", {}))
        self._episodes.load_state_dict(state.counters["episodes"])
        self.tune(state.counters.get("tuned", {}))

    def _restore_generator(self, saved: Tensor) -> None:
        if saved.shape == self._generator.get_state().shape:
            self._generator.set_state(saved)
            return
        # The state of another kind of device: minibatches continue from a seed of this moment.
        log.warning("minibatches are drawn from a new seed: the checkpoint is of another device")
        self._generator.manual_seed(derive_seed(self._generator.initial_seed(), self.num_steps))


def _read(shares: Sequence[Share]) -> Sequence[Share]:
    """The same, read now and kept."""

    def keep(rows: UnrollRows) -> Share:
        return lambda: rows

    return [keep(share()) for share in shares]


def _sum(shares: Sequence[Losses]) -> Losses:
    """The losses of all rows, without gradient."""
    parts = zip(*shares, strict=True)
    totals = (reduce(Loss.__add__, part) for part in parts)
    return Losses(*(Loss(total.numerator.detach(), total.denominator) for total in totals))


def make_unroll_learner(
    context: LearnerContext,
    *,
    objective: Callable[..., UnrollObjective],
    spaces: tuple[Any, Any],
    policy: PolicyConfig,
    spec: SampleSpec,
    learner: UnrollLearnerConfig,
    batch_size: int,
    budget: TrainingBudget,
    num_recent: int,
    ranks: Ranks | None = None,
) -> UnrollLearner:
    """The factory of a plan: bind all but `context` with functools.partial. objective: from the
    policy, `learner` and `reduce`.
    """
    ranks = ranks or Ranks()
    learner = replace(learner, device=ranks.own_device(learner.device))
    warn_if_emulated(policy, learner.device, "the learner")
    module = Policy(*spaces, policy, seed=context.seed % 2**31)
    return UnrollLearner(
        module,
        objective(module, learner, reduce=ranks.reduce),
        spec,
        learner,
        batch_size=batch_size,
        budget=budget,
        seed=context.seed,
        num_recent=num_recent,
        ranks=ranks,
    )
