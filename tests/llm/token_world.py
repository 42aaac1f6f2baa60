"""An enumerable world of tokens: every completion with its probability, so that the expected
gradient of an estimator over all samples is a sum, not a measurement.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from unirl.llm.algorithms.advantages import advantages
from unirl.llm.algorithms.algorithm import denominator, policy_terms
from unirl.llm.algorithms.terms import Algorithm

VOCABULARY = 3
END = 2


class TokenWorld:
    """Vocabulary of 3, one of which ends; a table of logits per prefix; rewards per completion.

    Two prompts share the table: an easy one, where most completions are right, and a hard one.
    """

    def __init__(self, max_length: int, seed: int = 0) -> None:
        self.completions = [
            (*head, last)
            for num in range(1, max_length + 1)
            for head in itertools.product((0, 1), repeat=num - 1)
            for last in range(VOCABULARY)
            if last == END or num == max_length
        ]
        prefixes = sorted({c[:t] for c in self.completions for t in range(len(c))})
        state_of = {prefix: index for index, prefix in enumerate(prefixes)}
        self.num_states = len(prefixes)
        self.states = [[state_of[c[:t]] for t in range(len(c))] for c in self.completions]
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.table = normal(self.num_states, VOCABULARY)
        self.stale = self.table + normal(self.num_states, VOCABULARY)
        # Easy: wrong is what begins with 1. Hard: right is only the last of what begins with 1.
        easy = [float(c[0] != 1) for c in self.completions]
        hard = [0.0] * len(easy)
        hard[max(i for i, c in enumerate(self.completions) if c[0] == 1)] = 1.0
        self.reward = torch.tensor([easy, hard], dtype=torch.float64)  # [prompts, completions]

    def log_prob(self, table: Tensor) -> Tensor:
        """Of each completion, [C]."""
        logp = table.log_softmax(-1)
        rows = zip(self.states, self.completions, strict=True)
        return torch.stack([logp[states, list(tokens)].sum() for states, tokens in rows])

    def exact(self, prompts: Sequence[int], reward: Tensor | None = None) -> Tensor:
        """Gradient of minus the expected reward, mean over the prompts."""
        table = self.table.clone().requires_grad_()
        rewards = (self.reward if reward is None else reward)[list(prompts)].mean(0)
        (found,) = torch.autograd.grad(-(self.log_prob(table).exp() * rewards).sum(), table)
        return found

    def value(self, table: Tensor, prompt: int) -> Tensor:
        """Exact value of each state under a policy, [states]."""
        policy = table.softmax(-1)
        found = torch.zeros(self.num_states, dtype=torch.float64)
        weight = torch.zeros(self.num_states, dtype=torch.float64)
        for number, (states, tokens) in enumerate(zip(self.states, self.completions, strict=True)):
            chance = 1.0
            for state, token in reversed(list(zip(states, tokens, strict=True))):
                chance = chance * float(policy[state, token])
                found[state] += chance * self.reward[prompt, number]
                weight[state] += chance
        assert torch.allclose(weight, torch.ones_like(weight))
        return found

    def expected(
        self,
        algorithm: Algorithm,
        prompts: Sequence[int],
        *,
        stale: bool = False,
        apart: bool = False,
        critic: Tensor | None = None,
        reference: Tensor | None = None,
    ) -> Tensor:
        """Expected gradient of the algorithm's policy loss over all batches that hold one
        completion for each of `prompts`; completions of the same prompt are a group.

        stale: an older policy drew them. apart: every batch is whitened and scaled by itself, as
        it must be where statistics reach across groups. critic: values, [prompts, states].

        All losses scale with positive factors of the advantage: so all batches are one, in which
        each advantage is multiplied by its batch's probability over its denominator.
        """
        size = len(prompts)
        drawn_by = self.stale if stale else self.table
        chance = self.log_prob(drawn_by).exp()
        picks = torch.tensor(list(itertools.product(range(len(chance)), repeat=size)))  # [B, size]
        num_batches = picks.shape[0]
        probability = chance[picks].prod(1)
        flat = picks.flatten().tolist()
        state = torch.tensor([s for c in flat for s in self.states[c]])
        token = torch.tensor([t for c in flat for t in self.completions[c]])
        sequence = torch.tensor([i for i, c in enumerate(flat) for _ in self.states[c]])
        prompt = torch.tensor(list(prompts)).repeat(num_batches)
        batch = torch.arange(num_batches).repeat_interleave(size)
        reward = self.reward[prompt, picks.flatten()]
        table = self.table.clone().requires_grad_()
        new_logp = table.log_softmax(-1)[state, token]
        logp = drawn_by.log_softmax(-1)[state, token]
        mask = torch.ones(token.numel(), dtype=torch.bool)
        value = critic[prompt[sequence], state] if critic is not None else None
        ref = reference.log_softmax(-1)[state, token] if reference is not None else None
        num_tokens = torch.tensor([len(self.states[c]) for c in flat]).view(num_batches, size)
        ends = num_tokens.sum(1).cumsum(0).tolist()
        advantage = torch.zeros_like(logp)
        for part in range(num_batches) if apart else range(1):
            rows = slice(ends[part - 1] if part else 0, ends[part] if apart else None)
            mine = slice(part * size, (part + 1) * size) if apart else slice(None)
            advantage[rows] = advantages(
                algorithm,
                reward[mine],
                (batch * 2 + prompt)[mine],
                torch.ones_like(reward[mine]),
                mask[rows],
                sequence[rows] - part * size,
                old_logp=new_logp.detach()[rows],
                logp=logp[rows],
                value=None if value is None else value[rows],
                reference=None if ref is None else ref[rows],
            ).token
        # A batch's denominator is that of its tokens alone.
        lengths, kind = num_tokens.unique(dim=0, return_inverse=True)
        below = torch.stack(
            [
                denominator(
                    algorithm,
                    mask[: int(each.sum())],
                    torch.arange(size).repeat_interleave(each),
                    size,
                )
                for each in lengths
            ]
        )[kind]
        factor = (probability / below)[batch][sequence]
        terms = policy_terms(
            algorithm,
            new_logp,
            new_logp.detach(),
            logp,
            advantage * factor,
            mask,
            sequence,
            reward.numel(),
        )
        (found,) = torch.autograd.grad(terms.loss.numerator, table)
        return found


def compare(found: Tensor, exact: Tensor) -> tuple[float, float]:
    """How long the found gradient is along the exact one, and the angle between them in degrees."""
    inner = float((found * exact).sum())
    cosine = inner / float(found.norm() * exact.norm())
    return inner / float(exact.square().sum()), math.degrees(math.acos(min(1.0, cosine)))


def changed(**terms: object) -> Algorithm:
    """REINFORCE with sums over tokens, without bias on-policy; some terms changed."""
    plain = Algorithm(
        preset="test", baseline="none", objective="reinforce", aggregation="seq-mean-token-sum"
    )
    return replace(plain, **terms)  # type: ignore[arg-type]
