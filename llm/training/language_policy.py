"""A language model as a policy over tokens, with a critic where one is needed: a layer on its
hidden states, or a model of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unirl.errors import UniRLError
from unirl.llm.algorithms.terms import Algorithm
from unirl.llm.learner_config import CriticConfig
from unirl.llm.models.dense_linear import quicken
from unirl.llm.models.model import ModelConfig, load_model, require_same_tokens
from unirl.llm.training.packed_attention import hidden_states
from unirl.llm.training.packing import Pack
from unirl.llm.training.token_logp import output_head, token_logp


class TokenTerms(NamedTuple):
    """What the policy says of the targets of a pack, [M], and of its ends, [E]."""

    logp: Tensor
    entropy: Tensor | None
    value: Tensor | None
    """Of the text before the token; None without a critic."""
    after: Tensor | None
    """[E]: value of the whole text of the pack's ends; None without a critic."""

    def nothing(self) -> Tensor:
        """A loss of zero that depends on every weight, for a pack without targets."""
        none = self.logp.sum()
        return none if self.value is None else none + self.value.sum()


class Critic(nn.Module):
    """A language model whose hidden states become values by a linear layer, zero at first; it
    shares no weight with the policy.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        quicken(model)
        self.model, unused = model, output_head(model)
        if unused.weight is not model.get_input_embeddings().weight:
            unused.requires_grad_(False)
        self.head = value_layer(unused)

    def forward(self, pack: Pack) -> tuple[Tensor, Tensor]:
        """Values before the targets of a pack, [M], and of its ends, [E]."""
        return values(self.head, hidden_states(self.model, pack), pack)


class LanguagePolicy(nn.Module):
    """model: a causal language model of transformers. critic: whether to learn values too, by a
    linear layer on its hidden states, zero at first. detached: without changing these. own_critic:
    values are its affair instead; its weights are not among the policy's.
    """

    def __init__(
        self,
        model: Any,
        *,
        temperature: float,
        critic: bool = False,
        detached: bool = False,
        own_critic: Critic | None = None,
    ) -> None:
        super().__init__()
        self._detached, self._own_critic = detached, [own_critic]  # in a list: no child of it
        self.model, self.temperature = model, temperature
        quicken(model)
        self._head = [output_head(model)]  # in a list: it is the model's, not a second child
        self.compute_dtype = self._head[0].weight.dtype
        self.critic: nn.Linear | None = None
        if critic:
            self.critic = value_layer(self._head[0])

    @property
    def own_critic(self) -> Critic | None:
        return self._own_critic[0]

    def forward(self, pack: Pack, *, want_entropy: bool = False) -> TokenTerms:
        """With gradients to every weight that learns."""
        head = self._head[0]
        states = hidden_states(self.model, pack)
        hidden = states.index_select(0, pack.source)
        logp, entropy = token_logp(
            hidden,
            head.weight,
            pack.target,
            bias=head.bias,
            temperature=self.temperature,
            want_entropy=want_entropy,
        )
        if self.own_critic is not None:
            return TokenTerms(logp, entropy, *self.own_critic(pack))
        if self.critic is None:
            return TokenTerms(logp, entropy, None, None)
        states = states.detach() if self._detached else states
        return TokenTerms(logp, entropy, *values(self.critic, states, pack))

    @torch.no_grad()
    def look(
        self, packs: list[Pack], num_tokens: int, *, after: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and values of all packs' targets, [N] in the batch's numbering; 0 where
        no pack has the token. after: [S], gets the values of the whole text of the packs' ends.
        """
        dtype = torch.promote_types(self.compute_dtype, torch.float32)
        logp = torch.zeros(num_tokens, dtype=dtype, device=self._head[0].weight.device)
        has_values = self.critic is not None or self.own_critic is not None
        value = torch.zeros_like(logp) if has_values else None
        for pack in packs:
            terms = self(pack)
            logp[pack.flat] = terms.logp
            if value is not None and terms.value is not None:
                value[pack.flat] = terms.value.to(dtype)
            if after is not None and terms.after is not None:
                after[pack.end_sequence] = terms.after.to(after.dtype)
        return logp, value


def value_layer(head: nn.Linear) -> nn.Linear:
    """From hidden states, as an output layer gets them, to values."""
    layer = nn.Linear(head.weight.shape[1], 1, device=head.weight.device)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def values(layer: nn.Linear, states: Tensor, pack: Pack) -> tuple[Tensor, Tensor]:
    hidden = states.index_select(0, torch.cat([pack.source, pack.end]))
    # In one call: where it is divided, each call gathers it among all processes.
    value = layer(hidden.to(layer.weight.dtype)).squeeze(1)
    return value[: pack.num_targets], value[pack.num_targets :]


def check_critic(config: CriticConfig, algorithm: Algorithm, student: ModelConfig) -> None:
    """Raise UniRLError where settings of a critic's own model cannot be, or have no effect."""
    own = algorithm.needs_critic and algorithm.critic == "model"
    if not own and config != CriticConfig():
        kind = algorithm.critic if algorithm.needs_critic else "none"
        raise UniRLError(
            f"critic.path or critic.lr is set, and the critic of {algorithm.name} is: {kind}",
            "they are those of a critic that is a model of its own",
            "set algorithm.critic to model, with an algorithm that has a critic, or leave them out",
        )
    if own and student.shard:
        raise UniRLError(
            "model.shard with a critic that is a model of its own",
            "the policy is divided among the processes, and this critic would not be",
            "set algorithm.critic to head or detached, or model.shard to false",
        )
    if own and config.path:
        require_same_tokens("critic", replace(student, path=config.path, revision=""), student)


def make_critic(config: CriticConfig, student: ModelConfig, device: torch.device) -> Critic:
    """All of its weights learn, whatever of the policy's do."""
    other = replace(student, path=config.path, revision="") if config.path else student
    model = load_model(replace(other, lora_rank=0), device).requires_grad_(True)
    if student.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()  # as the policy's
    return Critic(model)
