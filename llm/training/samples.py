"""What people are shown of a batch that was learned from: its texts, and of a few completions what
engine and learner say of each token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from unirl.llm.group import FINISHES, Group
from unirl.llm.outcome import ENDINGS, SCORE
from unirl.llm.training.pack_loss import Known
from unirl.llm.training.token_batch import TokenBatch

MAX_TOKENS = 2048
"""Tokens of a batch that are shown one by one: 60 KB of a file to which a batch is added every
`run.log_seconds`.
"""


class NewestBatch:
    """The newest batch, kept until it is asked for, and what the learner's first forward pass over
    it has found. tokenizer: None where nothing is to be shown.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kept: tuple[TokenBatch, Tensor] | None = None
        self._new_logp: Tensor | None = None
        """[N], on the policy's device, where nothing waits for it; NaN where no pass was made."""

    def begin(self, tokens: TokenBatch, known: Known) -> None:
        """Before its first step."""
        if self._tokenizer is None:
            return
        if known.old_logp is None:
            self._new_logp = torch.full_like(known.drawn, math.nan, dtype=torch.float32)
        else:
            passed = known.train[tokens.sequence].to(known.old_logp.device)
            self._new_logp = known.old_logp.float().masked_fill(~passed, math.nan)

    def saw(self, flat: Tensor, logp: Tensor) -> None:
        """Log-probabilities of the tokens with these numbers; those of an earlier step stay."""
        if self._new_logp is not None:
            before = self._new_logp[flat]
            self._new_logp[flat] = torch.where(before.isnan(), logp.detach().float(), before)

    def keep(self, tokens: TokenBatch, advantage: Tensor) -> None:
        """When it was learned from."""
        if self._tokenizer is not None:
            # Copied: slots are written again before they are asked for. Text is made when they are.
            copies = [one.copy() for one in tokens.groups]
            self._kept = replace(tokens, groups=tuple(copies)), advantage.cpu()

    def take(self, version: int) -> list[dict[str, Any]]:
        """Its rows, once."""
        kept, self._kept = self._kept, None
        if kept is None:
            return []
        new_logp = None if self._new_logp is None else self._new_logp.cpu()  # device -> host
        return sample_rows(*kept, self._tokenizer, version, new_logp)


def sample_rows(
    tokens: TokenBatch,
    advantage: Tensor,
    tokenizer: Any,
    version: int,
    new_logp: Tensor | None = None,
) -> list[dict[str, Any]]:
    """A row for each completion. Those of the first groups that taught something have a list for
    each property of their tokens, too.
    """
    rows, first, parts = [], 0, list[tuple[dict[str, Any], Group, Tensor, Tensor, Tensor]]()
    for group in tokens.groups:
        prompt = tokenizer.decode(group.prompt.tolist())
        owner = torch.repeat_interleave(group.owner, group.lengths)
        some = slice(first, first + group.token.numel())
        gains = advantage[some]
        news = torch.full_like(gains, math.nan) if new_logp is None else new_logp[some]
        for i in range(group.size):
            own = owner == i
            gain, mask = gains[own], group.mask[own]
            finish = FINISHES[int(group.finish[i])]
            row = {
                "update": version,
                "ticket": group.ticket,
                "place": i,
                "prompt": prompt,
                "completion": tokenizer.decode(group.token[own].tolist()),
                "reward": [round(float(value), 6) for value in group.reward[i]],
                "outcome": [int(code) for code in group.outcome[i]],
                "advantage": round(float(gain.mean()), 6) if len(gain) else 0.0,
                "finish": finish if group.ending is None else ENDINGS[int(group.ending[i])],
                "tokens": int(own.sum()),
                "versions": sorted(set(group.version[own][mask].tolist())),
            }
            rows.append(row)
            parts.append((row, group, own, gain, news[own]))
        first += group.token.numel()
    _add_tokens(parts)
    return rows


def _add_tokens(parts: list[tuple[dict[str, Any], Group, Tensor, Tensor, Tensor]]) -> None:
    room = MAX_TOKENS
    taught = {group.ticket for _, group, _, gain, _ in parts if bool(gain.any())}
    for row, group, own, gain, news in sorted(parts, key=lambda part: part[1].ticket not in taught):
        size = min(room, int(own.sum()))
        if size == 0:
            continue
        room -= size
        row["each"] = {
            "token": group.token[own][:size].tolist(),
            "drawn": group.mask[own][:size].int().tolist(),
            "version": group.version[own][:size].tolist(),
            "logp": _rounded(group.logp[own][:size]),
            "new_logp": _rounded(news[:size]),
            "advantage": _rounded(gain[:size]),
        }


def _rounded(values: Tensor) -> list[float | None]:
    return [round(each, 4) if math.isfinite(each) else None for each in values.tolist()]


def vocabulary(tokenizer: Any) -> list[str]:
    """The text of each token id by itself."""
    ids = [[token] for token in range(len(tokenizer))]
    quick = getattr(tokenizer, "backend_tokenizer", None)
    if quick is not None:  # in parallel: less than a second for 150 000
        return list(quick.decode_batch(ids, skip_special_tokens=False))
    return [str(tokenizer.decode(each)) for each in ids]


def summary(row: Mapping[str, Any]) -> str:
    """One of `sample_rows` in a line: the end of the prompt, the beginning of the completion."""
    prompt, completion = (" ".join(str(row[key]).split()) for key in ("prompt", "completion"))
    rewards = ", ".join(
        f"{value:g}" if outcome == SCORE else "failed"
        for value, outcome in zip(row["reward"], row["outcome"], strict=True)
    )
    return f"sample, reward {rewards}: ...{prompt[-50:]} -> {completion[:70]}"
