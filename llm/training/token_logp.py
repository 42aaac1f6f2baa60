"""Log-probabilities of tokens and entropies, with gradients, without the logits of a whole batch in
float32. Log-sum-exp row by row as in any softmax.

The vocabulary makes this bound by memory: rows are worked on a few at a time, in place, while they
are in the processor's cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from unirl.errors import UniRLError
from unirl.llm.training.packed_attention import causal_model

CHUNK_BYTES = 128 * 2**20
"""Logits computed at a time where they are not kept. More: fewer and larger matrix products."""
KEEP_BYTES = 512 * 2**20
"""Logits, in the compute dtype, that are kept for the gradient. More memory, and less to compute
twice."""

_CACHE_ELEMENTS = 2**19
"""Elements that a CPU works on at a time in float32: they stay in its cache."""
_LOGIT_SETTINGS = {
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "logits_soft_cap": None,
    "lm_head_multiplier": 1.0,
    "output_multiplier": 1.0,
    "dim_model_base": None,
}
"""What some models do to their logits, and the value with which they do nothing."""


class TokenLogp(NamedTuple):
    """logp [M] and entropy [M] of the distribution each token is drawn from (None: not asked)."""

    logp: Tensor
    entropy: Tensor | None


def output_head(model: nn.Module) -> nn.Linear:
    """The layer that makes logits of hidden states. Raises UniRLError when it is more than that."""
    inner = causal_model(model)
    config = inner.config.get_text_config()
    for name, neutral in _LOGIT_SETTINGS.items():
        value = getattr(config, name, neutral)
        if value is not None and value != neutral:
            raise UniRLError(
                f"{type(inner).__name__} has {name} = {value}",
                "log-probabilities are taken from plain logits, hidden states times lm_head",
                "train a model without it",
            )
    head = inner.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not head.weight.is_floating_point():
        raise UniRLError(
            f"the output layer of {type(inner).__name__} is {type(head).__name__}",
            "it must be a linear layer without adapter and quantisation",
            "leave lm_head out of the adapter's target_modules and modules_to_save",
        )
    return head


def token_logp(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    want_entropy: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    keep_bytes: int = KEEP_BYTES,
) -> TokenLogp:
    """log softmax((hidden weight' + bias) / temperature)[target], and the entropy: [M] each.

    hidden [M, H], weight [V, H] and bias [V] of one dtype, in which logits are computed; target [M]
    of int64. The rest is float32 (float64 for float64). Logits of more than keep_bytes are computed
    chunk_bytes at a time, and once more for the gradient. Raises ValueError when shapes or dtypes
    disagree, UniRLError when the temperature is not positive.
    """
    _check(hidden, weight, target, bias, temperature)
    row_bytes = weight.shape[0] * hidden.element_size()
    fits = hidden.shape[0] * row_bytes <= keep_bytes
    given = (hidden, weight) if bias is None else (hidden, weight, bias)
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    keep = fits and learns
    rows = max(1, hidden.shape[0] if keep else chunk_bytes // row_bytes)
    logp, entropy = _TokenLogp.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, target, temperature, rows, keep, want_entropy
    )
    return TokenLogp(logp, entropy if want_entropy else None)


def _check(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, temperature: float
) -> None:
    if not temperature > 0:
        raise UniRLError(
            f"log-probabilities at temperature {temperature}",
            "logits are divided by it, it must be > 0",
            "set sampling.temperature to 1, say",
        )
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [M, H] and [V, H]"
        )
    if target.shape != hidden.shape[:1] or target.dtype != torch.int64:
        raise ValueError(
            f"target is {target.dtype} {list(target.shape)}, it must be int64 [{hidden.shape[0]}]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {list(bias.shape)} must be [{weight.shape[0]}]")
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None and given.dtype != hidden.dtype:
            raise ValueError(f"{name} is {given.dtype}, hidden is {hidden.dtype}: they must agree")


class _TokenLogp(torch.autograd.Function):
    """Rows go through in chunks of `rows`; inside, softmax goes through them in strips.

    What is kept, or computed again, for the gradient is p - 1[target] of each row: the gradient of
    logp is a multiple of it, so that nothing but matrix products is left to do. p - 1 is taken
    before it is rounded: where p is nearly 1 the gradient is small, but not wrong.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        temperature: float,
        rows: int,
        keep: bool,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        num = hidden.shape[0]
        logp = hidden.new_empty(num, dtype=dtype)
        lse = torch.empty_like(logp)
        entropy = torch.empty_like(logp) if want_entropy else None
        logits = hidden.new_empty(min(rows, num), weight.shape[0])
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in _ranges(num, rows):
                block = _logits(hidden[chunk], weight, bias, logits)
                for strip, at in _strips(block, chunk.start):
                    x = _scaled(block[strip], temperature, dtype)
                    h = None if entropy is None else entropy[at]
                    _softmax(x, target[at], logp[at], lse[at], h)
                    if keep:
                        block[strip] = _residual(x, target[at], logp[at])
        ctx.save_for_backward(hidden, weight, bias, target, logp, lse, entropy)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.kept = logits if keep else None
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, target, logp, lse, entropy = ctx.saved_tensors
        if grad_logp is None:
            grad_logp = torch.zeros_like(logp)
        kept = ctx.kept
        if grad_entropy is not None:
            # Its gradient is written over what is kept, which then serves once.
            ctx.kept = None
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if wants_hidden else None
        d_weight = _Sum(weight) if wants_weight else None
        d_bias = _Sum(bias) if wants_bias else None
        buffer = kept
        if kept is None:
            buffer = hidden.new_empty(min(ctx.rows, len(hidden)), weight.shape[0])
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in _ranges(len(hidden), ctx.rows):
                block, h = buffer[: chunk.stop - chunk.start], hidden[chunk]
                if kept is None:
                    _logits(h, weight, bias, buffer)
                    for strip, at in _strips(block, chunk.start):
                        x = _scaled(block[strip], ctx.temperature, lse.dtype)
                        x.sub_(lse[at, None]).exp_()
                        block[strip] = _residual(x, target[at], logp[at])
                factor = grad_logp[chunk, None] / -ctx.temperature
                if grad_entropy is not None:
                    for strip, at in _strips(block, chunk.start):
                        block[strip] = _with_entropy(
                            block[strip],
                            target[at],
                            logp[at],
                            entropy[at],
                            grad_logp[at],
                            grad_entropy[at],
                        )
                    factor = torch.full_like(factor, -1 / ctx.temperature)
                if d_hidden is not None:
                    torch.mm(block, weight, out=d_hidden[chunk])
                    d_hidden[chunk].mul_(factor)
                if d_weight is not None:
                    d_weight.add(block.t() @ (h * factor).to(h.dtype))
                if d_bias is not None:
                    d_bias.add((block.t() @ factor.to(h.dtype)).squeeze(1))
        return (
            d_hidden,
            None if d_weight is None else d_weight.value(),
            None if d_bias is None else d_bias.value(),
            *[None] * 5,
        )


class _Sum:
    """A sum of tensors like a given one, in at least float32 once there are two."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._total: Tensor | None = None

    def add(self, term: Tensor) -> None:
        if self._total is None:
            self._total = term
        else:
            dtype = torch.promote_types(term.dtype, torch.float32)
            self._total = self._total.to(dtype).add_(term)

    def value(self) -> Tensor:
        return (
            torch.zeros_like(self._like)
            if self._total is None
            else self._total.to(self._like.dtype)
        )


def _ranges(num: int, rows: int) -> list[slice]:
    return [slice(begin, min(begin + rows, num)) for begin in range(0, num, rows)]


def _strips(block: Tensor, start: int) -> list[tuple[slice, slice]]:
    """Rows to work on at a time, counted in the chunk and in the whole. A GPU takes them all: calls
    cost it more than memory.
    """
    rows = max(1, _CACHE_ELEMENTS // block.shape[1]) if block.device.type == "cpu" else len(block)
    strips = _ranges(len(block), rows)
    return [(strip, slice(start + strip.start, start + strip.stop)) for strip in strips]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    out = buffer[: len(hidden)]
    if bias is None:
        return torch.mm(hidden, weight.t(), out=out)
    return torch.addmm(bias, hidden, weight.t(), out=out)


def _scaled(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    x = logits.to(dtype, copy=True)
    return x if temperature == 1 else x.div_(temperature)


def _softmax(x: Tensor, target: Tensor, logp: Tensor, lse: Tensor, entropy: Tensor | None) -> None:
    """Fill logp, lse and entropy [m] of scaled logits x [m, V], which become probabilities."""
    top = x.amax(1, keepdim=True)
    x.sub_(top)
    chosen = x.gather(1, target[:, None]).squeeze(1)
    if entropy is not None:
        shifted = x.clone()
    x.exp_()
    total = x.sum(1, keepdim=True)
    x.div_(total)
    log_total = total.log_().squeeze(1)
    torch.sub(chosen, log_total, out=logp)
    torch.add(log_total, top.squeeze(1), out=lse)
    if entropy is not None:
        torch.sub(log_total, shifted.mul_(x).sum(1), out=entropy)


def _residual(p: Tensor, target: Tensor, logp: Tensor) -> Tensor:
    """p - 1[target], over p [m, V]."""
    return p.scatter_(1, target[:, None], torch.expm1(logp)[:, None])


def _with_entropy(
    residual: Tensor,
    target: Tensor,
    logp: Tensor,
    entropy: Tensor,
    grad_logp: Tensor,
    grad_entropy: Tensor,
) -> Tensor:
    """Minus the gradient of grad_logp logp + grad_entropy H by scaled logits [m, V].

    d logp / d x_j = 1[j = target] - p_j, and d H / d x_j = -p_j (log p_j + H).
    """
    p = residual.to(logp.dtype, copy=True).scatter_(1, target[:, None], logp.exp()[:, None])
    # A probability too small to differ from 0 counts for nothing, with whatever logarithm.
    x = p.clamp_min(torch.finfo(p.dtype).tiny).log_()
    x.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logp[:, None]).mul_(p)
    own = grad_entropy * logp.exp() * (logp + entropy) - grad_logp * -torch.expm1(logp)
    return x.scatter_(1, target[:, None], own[:, None])
