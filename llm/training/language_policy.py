"""A language model as a policy over tokens, with a critic where one is needed; source: none."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from unirl.llm.models.dense_linear import quicken
from unirl.llm.training.packed_attention import hidden_states
from unirl.llm.training.packing import Pack
from unirl.llm.training.token_logp import output_head, token_logp


class TokenTerms(NamedTuple):
    """What the policy says of the targets of a pack, [M] each."""

    logp: Tensor
    entropy: Tensor | None
    value: Tensor | None
    """Of the text before the token; None without a critic."""


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
        """See TokenTerms; with gradients to every weight that learns."""
        head = self._head[0]
        hidden = hidden_states(self.model, pack).index_select(0, pack.source)
        logp, entropy = token_logp(
            hidden,
            head.weight,
            pack.target,
            bias=head.bias,
            temperature=self.temperature,
            want_entropy=want_entropy,
        )
        if self.critic is None:
            return TokenTerms(logp, entropy, None)
        value = self.critic(hidden.to(self.critic.weight.dtype)).squeeze(1)
        return TokenTerms(logp, entropy, value)

    @torch.no_grad()
    def look(self, packs: list[Pack], num_tokens: int) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and values of all packs' targets, [N] in the batch's numbering; 0 where
        no pack has the token.
        """
        dtype = torch.promote_types(self.compute_dtype, torch.float32)
        logp = torch.zeros(num_tokens, dtype=dtype, device=self._head[0].weight.device)
        value = torch.zeros_like(logp) if self.critic is not None else None
        for pack in packs:
            terms = self(pack)
            logp[pack.flat] = terms.logp
            if value is not None and terms.value is not None:
                value[pack.flat] = terms.value.to(dtype)
        return logp, value
