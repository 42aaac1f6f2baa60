"""A language model as a policy over tokens, with a critic where one is needed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unirl.llm.models.dense_linear import quicken
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


class LanguagePolicy(nn.Module):
    """model: a causal language model of transformers. critic: whether to learn values too, by a
    linear layer on its hidden states, zero at first.
    """

    def __init__(self, model: Any, *, temperature: float, critic: bool = False) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature
        quicken(model)
        self._head = [output_head(model)]  # in a list: it is the model's, not a second child
        self.compute_dtype = self._head[0].weight.dtype
        self.critic: nn.Linear | None = None
        if critic:
            weight = self._head[0].weight
            self.critic = nn.Linear(weight.shape[1], 1, device=weight.device)
            nn.init.zeros_(self.critic.weight)
            nn.init.zeros_(self.critic.bias)

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
        if self.critic is None:
            return TokenTerms(logp, entropy, None, None)
        if pack.end.numel():
            hidden = torch.cat([hidden, states.index_select(0, pack.end)])
        # In one call: where it is divided, each call gathers it among all processes.
        value = self.critic(hidden.to(self.critic.weight.dtype)).squeeze(1)
        num = pack.num_targets
        return TokenTerms(logp, entropy, value[:num], value[num:])

    @torch.no_grad()
    def look(
        self, packs: list[Pack], num_tokens: int, *, after: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and values of all packs' targets, [N] in the batch's numbering; 0 where
        no pack has the token. after: [S], gets the values of the whole text of the packs' ends.
        """
        dtype = torch.promote_types(self.compute_dtype, torch.float32)
        logp = torch.zeros(num_tokens, dtype=dtype, device=self._head[0].weight.device)
        value = torch.zeros_like(logp) if self.critic is not None else None
        for pack in packs:
            terms = self(pack)
            logp[pack.flat] = terms.logp
            if value is not None and terms.value is not None:
                value[pack.flat] = terms.value.to(dtype)
            if after is not None and terms.after is not None:
                after[pack.end_sequence] = terms.after.to(after.dtype)
        return logp, value
