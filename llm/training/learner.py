"""The learner of language recipes: groups of completions become advantages, packs, losses and newer
weights. The formulas and their sources are in unirl.vtrace.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from unirl.core.learner import LearnerState
from unirl.core.sample import Batch
from unirl.core.schedule import Schedule
from unirl.core.seeding import derive_seed
from unirl.core.training_budget import ScheduleProgress, TrainingBudget
from unirl.core.weights import Weights
from unirl.errors import UniRLError
from unirl.learners.optimizer import Optimizer
from unirl.learners.parallel import Ranks
from unirl.learners.sharded import is_sharded
from unirl.llm.algorithms.advantages import Advantages, advantages, shaped_reward
from unirl.llm.algorithms.algorithm import denominator
from unirl.llm.algorithms.resolve import check_num_steps
from unirl.llm.algorithms.terms import Algorithm
from unirl.llm.algorithms.turn_credit import TurnCredit, Turns
from unirl.llm.group import read_group
from unirl.llm.in_vain import InVain
from unirl.llm.learner_config import CriticConfig, LlmLearnerConfig
from unirl.llm.models.lora import published_weights
from unirl.llm.training.distill import Teacher
from unirl.llm.training.language_policy import LanguagePolicy
from unirl.llm.training.pack_loss import SUMS, Known, pack_loss
from unirl.llm.training.packing import Pack, pack_groups
from unirl.llm.training.report import report_groups
from unirl.llm.training.samples import NewestBatch, summary, vocabulary
from unirl.llm.training.sharding import empty_pack, whole_weights
from unirl.llm.training.token_batch import TokenBatch
from unirl.metrics.metrics import Metrics
from unirl.vtrace import TokenMetrics

log = logging.getLogger(__name__)

_CRITIC = "critic_model"
"""Where a checkpoint has it."""


class LlmLearner:
    """Its steps are completions, and so is what recent_returns has the rewards of.

    policy: on its device, in its compute dtype. reference: the frozen model that a KL term holds
    the policy to; None: the policy's own base below its adapters, or not needed. teacher: see
    unirl.llm.training.distill. reward_weights: by name, in the order of a group's rewards.
    tokenizer: to show samples; None: they are not shown. publish: what of the model engines get.
    give_up_after: see RolloutConfig. credit: of step rewards.
    """

    def __init__(
        self,
        policy: LanguagePolicy,
        algorithm: Algorithm,
        config: LlmLearnerConfig,
        *,
        reward_weights: Mapping[str, float],
        max_tokens: int,
        skip_zero: bool,
        budget: TrainingBudget,
        seed: int,
        num_recent: int = 100,
        reference: LanguagePolicy | None = None,
        teacher: Teacher | None = None,
        tokenizer: Any = None,
        ranks: Ranks | None = None,
        publish: Callable[[Any], Weights] = published_weights,
        give_up_after: int = 0,
        critic: CriticConfig = CriticConfig(),  # noqa: B008  frozen
        credit: TurnCredit | None = None,
    ) -> None:
        check_num_steps(algorithm, config.epochs * config.minibatches)
        self.version, self.num_steps = 0, 0
        self.policy, self._algorithm, self._config = policy, algorithm, config
        self._publish, self._credit, self._in_vain = publish, credit, InVain(give_up_after)
        self._reference, self._teacher, self._tokenizer = reference, teacher, tokenizer
        self._reward_weights, self._max_tokens = dict(reward_weights), max_tokens
        # Without gradient it need not be computed, unless another term gives it one.
        self._skips = skip_zero and algorithm.skips_zero_advantage and teacher is None
        self._ranks = ranks or Ranks()
        self.is_divided = any(is_sharded(parameter) for parameter in policy.parameters())
        self._whole: tuple[int, Weights] = -1, {}
        """Where the policy is divided: version and weights that were gathered last."""
        self._schedule = ScheduleProgress(budget, self._ranks.leading)
        key = "algorithm.entropy_schedule"
        self._entropy_schedule = Schedule(algorithm.entropy_schedule, key, self._schedule)
        reduce = self._ranks.reduce
        self._update = Optimizer(policy, config.optimizer, schedule=self._schedule, reduce=reduce)
        self._critic: Optimizer | None = None
        """Of the critic's own model."""
        if policy.own_critic is not None:
            self._critic = Optimizer(
                policy.own_critic,
                critic.optimizer(config.optimizer),
                schedule=self._schedule,
                reduce=reduce,
            )
        self._device = next(policy.parameters()).device
        self._dtype = str(policy.compute_dtype).removeprefix("torch.")
        self._generator = torch.Generator().manual_seed(derive_seed(seed, "minibatches"))
        self._rewards: deque[float] = deque(maxlen=num_recent)
        self._lengths: deque[int] = deque(maxlen=num_recent)
        self._newest = NewestBatch(tokenizer if self._ranks.is_main else None)
        self._ended: float | None = None

    @property
    def recent_returns(self) -> tuple[float, ...]:
        return tuple(self._rewards)

    def take_samples(self) -> list[dict[str, Any]]:
        """What was learned from since the last call, as rows of JSON; the newest batch at most."""
        return self._newest.take(self.version)

    def summary(self, row: Mapping[str, Any]) -> str:
        return summary(row)

    def vocabulary(self) -> list[str]:
        return vocabulary(self._tokenizer)

    def record_training_seconds(self, seconds: float) -> None:
        self._schedule.record_training_seconds(seconds)

    def step(self, batch: Batch) -> Metrics:
        """One update from one batch: up to epochs * minibatches steps of the optimiser."""
        started, metrics = time.monotonic(), Metrics()
        groups = [read_group(slot.data, slot.ticket) for slot in batch.slots]
        weights, masks = tuple(self._reward_weights.values()), self._algorithm.mask_truncated
        tokens = TokenBatch.of(groups, weights, mask_truncated=masks)
        known = self._prepare(tokens, metrics)
        self._newest.begin(tokens, known)
        for _ in range(self._config.epochs):
            moved = [self._step(tokens, each, known, metrics) for each in self._minibatches(tokens)]
            steps = [one for one in moved if one is not None]
            self._count_in_vain(tokens, steps)
            if steps and self._config.optimizer.lr_schedule == "adaptive":
                self._update.adapt(reduce(add, steps).approx_kl.to(self._device))
        report_groups(tokens, batch, self.version, tuple(self._reward_weights), metrics)
        now, drawn = time.monotonic(), int(tokens.length.sum())
        # Tokens of all ranks per second of one: merging adds up both.
        share = 1 / self._ranks.world_size
        metrics.ratio("perf/learner_tokens_per_s", drawn, (now - started) * share)
        if self._ended is not None:
            metrics.ratio("perf/tokens_per_s", drawn, (now - self._ended) * share)
        self._ended = now
        self._newest.keep(tokens, known.advantage)
        metrics = self._count(tokens, metrics)
        self.version += 1
        metrics.last("losses/learning_rate", self._update.lr(self.num_steps))
        return metrics

    def _prepare(self, tokens: TokenBatch, metrics: Metrics) -> Known:
        """Advantages and values to learn, what policy and reference say before the update, and
        which completions to compute.
        """
        algorithm, config = self._algorithm, self._config
        several = config.epochs * config.minibatches > 1
        pays_kl = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
        before = pays_kl or algorithm.advantage != "group"
        wants_old = algorithm.needs_old_logp or config.optimizer.lr_schedule == "adaptive"
        reward = shaped_reward(algorithm, tokens.reward, tokens.sequence, self._max_tokens)
        turns = Turns.of(tokens.groups, self._credit.compare) if self._credit else None

        def found(**known: Tensor | None) -> Advantages:
            return advantages(
                algorithm,
                reward,
                tokens.group,
                tokens.valid,
                tokens.loss_mask,
                tokens.sequence,
                logp=tokens.logp,
                reduce=self._ranks.reduce,
                credit=self._credit,
                turns=turns,
                **{name: each if each is None else each.cpu() for name, each in known.items()},
            )

        old_logp = value = reference = after = ends = None
        train = tokens.learned & (tokens.length > 0)
        if not before:
            result = found()
            # Known before any forward pass: none is made for what has no gradient.
            train = train & result.active if self._skips else train
        if algorithm.bootstraps:
            after = torch.zeros(tokens.size, dtype=torch.float64, device=self._device)
            ends = tokens.cut_off
        if before or (several and wants_old):
            packs = self._packs(tokens, train, ends)
            old_logp, value = self.policy.look(packs, tokens.mask.numel(), after=after)
        if algorithm.needs_reference:
            reference = self._look_at_reference(tokens, train)
        teacher = None
        if self._teacher is not None:
            teacher = self._teacher.logp(tokens, train, self._packs).to(self._device)
        if before:
            result = found(old_logp=old_logp, value=value, reference=reference, bootstrap=after)
            train = train & result.active if self._skips else train
        if result.kl is not None:
            metrics.ratio("kl", result.kl.sum(), tokens.loss_mask.sum())
        if not several:
            old_logp = None  # the forward pass with gradient finds it again
        device, target, advantage = self._device, result.target, result.token
        if self._teacher is not None and self._teacher.alone:
            advantage = torch.zeros_like(advantage)
        return Known(
            advantage.to(device),
            train,
            tokens.logp.to(device),
            None if target is None else target.to(device),
            old_logp,
            value,
            reference,
            teacher,
        )

    def _look_at_reference(self, tokens: TokenBatch, train: Tensor) -> Tensor:
        packs, num = self._packs(tokens, train), tokens.mask.numel()
        if self._reference is not None:
            return self._reference.look(packs, num)[0]
        with self.policy.model.disable_adapter():
            return self.policy.look(packs, num)[0]

    def _packs(self, tokens: TokenBatch, train: Tensor, ends: Tensor | None = None) -> list[Pack]:
        packs = pack_groups(
            tokens.groups,
            self._config.micro_tokens,
            train=tokens.per_group(train),
            ends=None if ends is None else tokens.per_group(ends),
            share_prompt=self._config.share_prompt,
        )
        packs = [pack.to(self._device) for pack in packs]
        if self.is_divided:
            most = max(self._ranks.share(len(packs)))
            packs += [empty_pack(self._device)] * (most - len(packs))
        return packs

    def _minibatches(self, tokens: TokenBatch) -> list[Tensor]:
        """The minibatches of a pass, as flags of completions [S]: whole groups, drawn again."""
        num = self._config.minibatches
        if num == 1:
            return [torch.ones(tokens.size, dtype=torch.bool)]
        order = torch.randperm(len(tokens.groups), generator=self._generator)
        return [torch.isin(tokens.group, groups) for groups in order.tensor_split(num)]

    def _step(
        self, tokens: TokenBatch, minibatch: Tensor, known: Known, metrics: Metrics
    ) -> TokenMetrics | None:
        """One step of the optimiser, at the completions `minibatch`, [S]. Returns what it found at
        the tokens of all ranks; None: nothing had a gradient.
        """
        algorithm = self._algorithm.annealed(self._entropy_schedule.factor(self.num_steps))
        size, train = tokens.size, minibatch & known.train
        wants_entropy = self._algorithm.entropy_coef > 0 or self._config.entropy
        packs = self._packs(tokens, train)
        # What is left out counts all the same: a mean is over the whole step, and over all ranks.
        counted = tokens.loss_mask if algorithm.aggregation == "token-mean" else tokens.mask
        below, computed, num_packs = self._ranks.sum(
            [
                denominator(algorithm, counted & chosen[tokens.sequence], tokens.sequence, size)
                for chosen in (minibatch, train)
            ]
            + [torch.tensor(float(len(packs)))]
        )
        if not num_packs:
            metrics.total("losses/empty_steps", int(self._ranks.is_main))
            return None
        divisor = max(float(below), 1.0)
        teacher_coef = self._teacher.coef if self._teacher is not None else 0.0
        sums, of_packs = torch.zeros(len(SUMS), dtype=torch.float64, device=self._device), []
        for pack in packs:
            terms = self.policy(pack, want_entropy=wants_entropy)
            if not pack.num_targets:
                torch.autograd.backward(terms.nothing())
                self._update.gather()
                continue
            self._newest.saw(pack.flat, terms.logp)
            found = pack_loss(algorithm, terms, pack, known, size, teacher_coef=teacher_coef)
            torch.autograd.backward(found.loss / divisor)
            self._update.gather()
            if self._critic is not None:
                self._critic.gather()
            sums += found.sums
            of_packs.append(found.metrics)
        for each in () if packs else filter(None, (self._update, self._critic)):
            each.gather_nothing()
        if self._critic is not None:
            metrics.mean("losses/critic_grad_norm", self._critic.apply(self.num_steps).cpu())
        norm = self._update.apply(self.num_steps).cpu()
        # device -> host, once per step
        own = [TokenMetrics(*(each.cpu() for each in reduce(add, of_packs)))] if of_packs else []
        shared = self._ranks.share((sums.cpu(), own))
        total = dict(zip(SUMS, sum(each for each, _ in shared).tolist(), strict=True))  # type: ignore[union-attr]
        metrics.ratio("losses/policy", total["policy"], divisor)
        if algorithm.kl_coef and algorithm.kl_in == "loss":
            metrics.ratio("kl", total["kl"], divisor)
        if wants_entropy:
            metrics.ratio("losses/entropy", total["entropy"], float(computed))
        if known.target is not None:
            metrics.ratio("losses/value", total["value"], divisor)
        metrics.mean("losses/grad_norm", norm)
        everywhere = reduce(add, [one for _, some in shared for one in some])
        if known.teacher is not None:
            metrics.ratio("kl_to_teacher", total["apart"], everywhere.num_tokens)
        # By tokens: a mean over all of them, however steps and batches differ in their number.
        for name, number in everywhere.values().items():
            metrics.mean(name, number, everywhere.num_tokens)
        return everywhere

    def _count_in_vain(self, tokens: TokenBatch, steps: list[TokenMetrics]) -> None:
        """Raise ActorFailed where masks have long left nothing to learn, on all ranks alike."""
        weighed = sum((each.maxima[:1] for each in steps), torch.zeros(1))
        left, groups = self._ranks.sum(
            [tokens.learned.sum().double(), torch.tensor(float(len(tokens.groups)))]
        )
        if self._algorithm.mask_truncated and not left:
            self._in_vain.count("truncated", int(groups))
        elif steps and self._algorithm.weighs and not weighed:
            self._in_vain.count("rejected", int(groups))
        else:
            self._in_vain.reset()

    def _count(self, tokens: TokenBatch, metrics: Metrics) -> Metrics:
        """Count the completions of all ranks; the metrics of all of them."""
        rewards, lengths = tokens.reward[tokens.valid], tokens.length[tokens.valid]
        total = Metrics()
        for found in self._ranks.share((metrics, rewards.tolist(), lengths.tolist(), tokens.size)):
            total.update(found[0])
            self._rewards.extend(found[1])
            self._lengths.extend(found[2])
            self.num_steps += found[3]
            total.total("charts/episodes", found[3])
        if self._rewards:
            total.last("charts/episodic_return", sum(self._rewards) / len(self._rewards))
            total.last("charts/episodic_length", sum(self._lengths) / len(self._lengths))
        return total

    def weights(self) -> Weights:
        """By the names of the transformers model, adapters merged unless engines take
        them alone.
        """
        if not self.is_divided:
            return self._publish(self.policy.model)
        # Kept: an evaluation asks for them in one process alone.
        if self._whole[0] != self.version:
            self._whole = self.version, whole_weights(self.policy, self._publish)
        return self._whole[1]

    def state_dict(self) -> LearnerState:
        counters = {
            "rewards": list(self._rewards),
            "lengths": list(self._lengths),
            "adaptive_lr": float(self._update.adaptive_lr),
            "dtype": self._dtype,
        }
        optimizer = {
            "update": self._update.optimizer_state(),
            "generator": self._generator.get_state(),
        }
        learned: dict[str, Any] = self._update.model_state()
        if self._critic is not None:
            optimizer["critic"] = self._critic.optimizer_state()
            learned = {**learned, _CRITIC: self._critic.model_state()}
        return LearnerState(learned, optimizer, counters)

    def load_state_dict(self, state: LearnerState) -> None:
        model: Any = dict(state.model)
        optimizer: Any = state.optimizer
        own = model.pop(_CRITIC, None)
        if (own is None) != (self._critic is None):
            kinds = ("no critic model", "a critic model")
            raise UniRLError(
                f"the checkpoint has {kinds[own is not None]}",
                f"algorithm.critic is {self._algorithm.critic}: {kinds[own is None]} is expected",
                "resume with --algorithm.critic "
                + ("head, as it was trained" if own is None else "model"),
            )
        if self._critic is not None:
            self._critic.load(own, optimizer["critic"])
        self._whole = -1, {}
        before, now = state.counters.get("dtype"), self._dtype
        if before not in (None, now):
            log.warning("the run continues in %s; until now it computed in %s", now, before)
        self._update.load(model, optimizer["update"])
        self._update.adaptive_lr.fill_(state.counters["adaptive_lr"])
        self._generator.set_state(optimizer["generator"])
        self._rewards.extend(state.counters["rewards"])
        self._lengths.extend(int(length) for length in state.counters["lengths"])
