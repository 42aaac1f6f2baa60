"""The learner of language recipes: groups of completions become advantages, packs, losses and newer
weights. The formulas and their sources are in unirl.vtrace.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unirl.core.errors import UniRLError
from unirl.core.learner import LearnerState
from unirl.core.metrics import Metrics
from unirl.core.sample import Batch
from unirl.core.seeding import derive_seed
from unirl.core.weights import Weights
from unirl.learners.parallel import Ranks
from unirl.learners.update import OptimizerConfig, Update
from unirl.llm.algorithm import (
    Algorithm,
    advantages,
    aggregated,
    critic_loss,
    denominator,
    kl_loss,
    overlong_penalty,
    policy_terms,
)
from unirl.llm.group import read_group
from unirl.llm.language_policy import LanguagePolicy
from unirl.llm.lora import published_weights
from unirl.llm.packing import Pack, pack_groups
from unirl.llm.report import report_groups, sample_rows
from unirl.llm.token_batch import TokenBatch


@dataclass(frozen=True)
class LlmLearnerConfig:
    """How a batch of groups is learned from."""

    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(
            lr=1e-6, max_grad_norm=1.0, epsilon=1e-8, beta2=0.99
        )
    )
    epochs: int = 1
    """Passes over each batch. More: more from each completion, further from the policy that wrote
    it.
    """
    minibatches: int = 1
    """Steps of the optimiser per pass, each on a part of the groups. More: more progress per
    batch, noisier steps.
    """
    micro_tokens: int = 8192
    """Tokens computed at a time; the result does not depend on it. More: faster, more memory."""
    share_prompt: bool = True
    """Compute the prompt of a group once for all its completions. False: for comparison."""
    entropy: bool = True
    """Report the entropy of the policy; it costs one more pass over the logits."""
    device: str = "auto"
    """auto: cuda where there is one, else cpu."""

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches", "micro_tokens"):
            if getattr(self, name) < 1:
                raise UniRLError(
                    f"learner.{name} is {getattr(self, name)}",
                    f"learner.{name} >= 1 must hold",
                    "leave it out for the default",
                )


class LlmLearner:
    """See Learner. Its steps are completions, and so is what recent_returns has the rewards of.

    policy: on its device, in its compute dtype. reference: the frozen model that a KL term holds
    the policy to; None: the policy's own base below its adapters, or not needed. reward_weights:
    [R], by name in `reward_names`. tokenizer: to show samples; None: they are not shown.
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
        total_steps: int,
        seed: int,
        num_recent: int = 100,
        reference: LanguagePolicy | None = None,
        tokenizer: Any = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.version, self.num_steps = 0, 0
        self._policy, self._algorithm, self._config = policy, algorithm, config
        self._reference, self._tokenizer = reference, tokenizer
        self._reward_names = tuple(reward_weights)
        self._reward_weights = tuple(reward_weights.values())
        self._max_tokens = max_tokens
        # Without gradient it need not be computed, unless another term gives it one.
        self._skips = skip_zero and algorithm.skips_zero_advantage
        self._ranks = ranks or Ranks()
        self._update = Update(
            policy, config.optimizer, total_steps=total_steps, reduce=self._ranks.reduce
        )
        self._device = next(policy.parameters()).device
        self._generator = torch.Generator()
        self._generator.manual_seed(derive_seed(seed, "minibatches"))
        self._rewards: deque[float] = deque(maxlen=num_recent)
        self._lengths: deque[int] = deque(maxlen=num_recent)
        self._newest: tuple[TokenBatch, Tensor] | None = None
        self._ended: float | None = None

    @property
    def recent_returns(self) -> tuple[float, ...]:
        """Rewards of the most recent completions."""
        return tuple(self._rewards)

    def take_samples(self) -> list[dict[str, Any]]:
        """What was learned from since the last call, as rows of JSON; the newest batch at most."""
        newest, self._newest = self._newest, None
        if newest is None:
            return []
        return sample_rows(*newest, self._tokenizer, self.version)

    def step(self, batch: Batch) -> Metrics:
        """One update from one batch: up to epochs * minibatches steps of the optimiser."""
        started, metrics = time.monotonic(), Metrics()
        groups = [read_group(slot.data, slot.ticket) for slot in batch.slots]
        tokens = TokenBatch.of(groups, self._reward_weights)
        advantage, target, old_logp, old_value, reference, train = self._prepare(tokens)
        for _ in range(self._config.epochs):
            for part in self._parts(tokens):
                self._step(
                    tokens, part & train, part, advantage, target, old_logp, old_value, reference,
                    metrics,
                )  # fmt: skip
        self._count(tokens, batch, advantage, metrics)
        now = time.monotonic()
        drawn = int(tokens.length.sum())
        metrics.ratio("perf/learner_tokens_per_s", drawn, now - started)
        if self._ended is not None:
            metrics.ratio("perf/tokens_per_s", drawn, now - self._ended)
        self._ended = now
        self.version += 1
        metrics.last("losses/learning_rate", self._update.lr(self.num_steps))
        return metrics

    def _prepare(
        self, tokens: TokenBatch
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor]:
        """Advantages and values to learn, what the policy was before the update, the reference's
        log-probabilities, and which completions to compute: [N] x 5, [S].
        """
        algorithm, config = self._algorithm, self._config
        several = config.epochs * config.minibatches > 1
        in_reward = algorithm.kl_coef > 0 and algorithm.kl_in == "reward"
        before = in_reward or algorithm.advantage != "group"
        reward = tokens.reward + overlong_penalty(algorithm, tokens.length, self._max_tokens)

        def found(
            old_logp: Tensor | None, value: Tensor | None, reference: Tensor | None
        ) -> tuple[Tensor, Tensor | None, Tensor]:
            told = advantages(
                algorithm,
                reward,
                tokens.group,
                tokens.valid,
                tokens.mask,
                tokens.sequence,
                old_logp=_host(old_logp),
                logp=tokens.logp,
                reference=_host(reference),
                value=_host(value),
                reduce=self._ranks.reduce,
            )
            return told.token, told.target, told.active

        old_logp = value = reference = None
        train = tokens.valid & (tokens.length > 0)
        if not before:
            advantage, target, active = found(None, None, None)
            # Known before any forward pass: none is made for what has no gradient.
            train = train & active if self._skips else train
        if before or (several and algorithm.needs_old_logp):
            old_logp, value = self._policy.look(self._packs(tokens, train), tokens.mask.numel())
        if algorithm.needs_reference:
            reference = self._look_at_reference(tokens, train)
        if before:
            advantage, target, active = found(old_logp, value, reference)
            train = train & active if self._skips else train
        if not several:
            old_logp = None  # the forward pass with gradient finds it again
        return advantage, target, old_logp, value, reference, train

    def _look_at_reference(self, tokens: TokenBatch, train: Tensor) -> Tensor:
        packs, num = self._packs(tokens, train), tokens.mask.numel()
        if self._reference is not None:
            return self._reference.look(packs, num)[0]
        with self._policy.model.disable_adapter():
            return self._policy.look(packs, num)[0]

    def _packs(self, tokens: TokenBatch, train: Tensor) -> list[Pack]:
        packs = pack_groups(
            tokens.groups,
            self._config.micro_tokens,
            train=tokens.per_group(train),
            share_prompt=self._config.share_prompt,
        )
        return [pack.to(self._device) for pack in packs]

    def _parts(self, tokens: TokenBatch) -> list[Tensor]:
        """The minibatches of a pass, as flags of completions [S]: whole groups, drawn anew."""
        num = self._config.minibatches
        if num == 1:
            return [torch.ones(tokens.size, dtype=torch.bool)]
        order = torch.randperm(len(tokens.groups), generator=self._generator)
        return [torch.isin(tokens.group, part) for part in order.tensor_split(num)]

    def _step(
        self,
        tokens: TokenBatch,
        train: Tensor,
        part: Tensor,
        advantage: Tensor,
        target: Tensor | None,
        old_logp: Tensor | None,
        old_value: Tensor | None,
        reference: Tensor | None,
        metrics: Metrics,
    ) -> None:
        """One step of the optimiser. part: completions that it is the mean over; train: those of
        them that have a gradient.
        """
        algorithm, size = self._algorithm, tokens.size
        counted = tokens.mask & part[tokens.sequence]
        below = denominator(algorithm, counted, tokens.sequence, size)
        (below,) = self._ranks.sum([below])
        divisor = max(float(below), 1.0)
        policy_sum = kl_sum = entropy_sum = value_sum = 0.0
        token_metrics = None
        packs = self._packs(tokens, train)
        some = self._ranks.sum([torch.tensor(float(len(packs)))])[0]
        if not float(some):
            metrics.total("losses/empty_steps", 1)
            return
        for pack in packs:
            flat = pack.flat.cpu()
            terms = self._policy(
                pack, want_entropy=algorithm.entropy_coef > 0 or self._config.entropy
            )

            mask, sequence = torch.ones_like(pack.target, dtype=torch.bool), pack.sequence
            old = None if old_logp is None else old_logp[pack.flat]
            drawn = tokens.logp[flat].to(self._device)
            gain = advantage[flat].to(self._device)
            policy = policy_terms(algorithm, terms.logp, old, drawn, gain, mask, sequence, size)
            loss = policy.loss.numerator
            policy_sum += float(loss.detach())
            if algorithm.kl_coef and algorithm.kl_in == "loss":
                other = None if reference is None else reference[pack.flat]
                kl = kl_loss(
                    algorithm, terms.logp, old, drawn, other, mask, sequence, size
                ).numerator
                loss = loss + algorithm.kl_coef * kl
                kl_sum += float(kl.detach())
            if terms.entropy is not None:
                entropy = aggregated(algorithm, terms.entropy, mask, sequence, size).numerator
                if algorithm.entropy_coef:
                    loss = loss - algorithm.entropy_coef * entropy
                entropy_sum += float(entropy.detach())
            if terms.value is not None and target is not None and old_value is not None:
                value = critic_loss(
                    algorithm,
                    terms.value,
                    old_value[pack.flat],
                    target[flat].to(self._device),
                    mask,
                    sequence,
                    size,
                ).numerator
                loss = loss + algorithm.value_coef * value
                value_sum += float(value.detach())
            torch.autograd.backward(loss / divisor)
            self._update.gather()
            known = policy.metrics
            token_metrics = known if token_metrics is None else token_metrics + known
        norm = self._update.apply(self.num_steps)
        metrics.ratio("losses/policy", policy_sum, divisor)
        if algorithm.kl_coef and algorithm.kl_in == "loss":
            metrics.ratio("kl", kl_sum, divisor)
        if algorithm.entropy_coef > 0 or self._config.entropy:
            metrics.ratio("losses/entropy", entropy_sum, _computed(tokens, train, algorithm))
        if target is not None:
            metrics.ratio("losses/value", value_sum, divisor)
        metrics.mean("losses/grad_norm", norm)
        if token_metrics is not None:
            for name, number in token_metrics.values().items():
                metrics.mean(name, number)

    def _count(self, tokens: TokenBatch, batch: Batch, advantage: Tensor, metrics: Metrics) -> None:
        scored = tokens.reward[tokens.valid]
        self._rewards.extend(scored.tolist())
        self._lengths.extend(tokens.length[tokens.valid].tolist())
        self.num_steps += tokens.size
        report_groups(tokens, batch, self.version, self._reward_names, metrics)
        metrics.total("charts/episodes", tokens.size)
        if self._rewards:
            metrics.last("charts/episodic_return", sum(self._rewards) / len(self._rewards))
            metrics.last("charts/episodic_length", sum(self._lengths) / len(self._lengths))
        if self._tokenizer is not None:
            # Copied: the slots are written anew before anyone asks. Text is made when somebody does.
            copies = [one.copy() for one in tokens.groups]
            self._newest = replace(tokens, groups=tuple(copies)), advantage

    def weights(self) -> Weights:
        """See Learner: by the names of the transformers model, adapters merged."""
        return published_weights(self._policy.model)

    def state_dict(self) -> LearnerState:
        """See Learner."""
        counters = {
            "rewards": list(self._rewards),
            "lengths": list(self._lengths),
            "adaptive_lr": float(self._update.adaptive_lr),
        }
        optimizer = {
            "update": self._update.optimizer_state(),
            "generator": self._generator.get_state(),
        }
        return LearnerState(self._update.model_state(), optimizer, counters)

    def load_state_dict(self, state: LearnerState) -> None:
        """See Learner."""
        model: Any = state.model
        optimizer: Any = state.optimizer
        self._update.load(model, optimizer["update"])
        self._update.adaptive_lr.fill_(state.counters["adaptive_lr"])
        self._generator.set_state(optimizer["generator"])
        self._rewards.extend(state.counters["rewards"])
        self._lengths.extend(int(length) for length in state.counters["lengths"])


def _host(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()


def _computed(tokens: TokenBatch, train: Tensor, algorithm: Algorithm) -> float:
    """What the entropies of the completions that were computed are a sum over."""
    counted = tokens.mask & train[tokens.sequence]
    return float(denominator(algorithm, counted, tokens.sequence, tokens.size))
