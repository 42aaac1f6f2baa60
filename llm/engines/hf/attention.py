"""Attention of the embedded engine: plugged into transformers' AttentionInterface, it finds keys
and values in a KeyValueCache instead of transformers' own.

All tokens of a step pass through the model as one row [1, N], whatever sequence they belong to:
linear layers see no padding, and `logits_to_keep` picks the positions that need logits. Only here
does it matter who may see whom.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from unirl.errors import UniRLError
from unirl.llm.engines.hf.kv_cache import CacheShape, KeyValueCache

NAME = "unirl_cached"
"""The attention implementation, as transformers knows it."""
STEP = "unirl_step"
"""Keyword that carries the Step from the call of the model to every attention layer."""
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


class Step(Protocol):
    """One pass through the model: stores what a layer computed and attends to what it may."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        """query [N, heads, d], key and value [N, kv_heads, d]; window: how many positions a token
        sees, itself included (0: all before it). Returns [N, heads, d].
        """


class CacheShapeProbe:
    """Finds the shape of what the layers of a model keep; every token sees only itself."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[int, ...]] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        self._seen[layer] = (key.shape[1], key.shape[2], value.shape[2])
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)

    def shape(self, layers: int, name: str) -> CacheShape:
        """Of all layers. Raises UniRLError where some keep their memory elsewhere."""
        shapes = set(self._seen.values())
        alike = len(shapes) == 1 and all(keys == values for _, keys, values in shapes)
        if sorted(self._seen) != list(range(layers)) or not alike:
            raise UniRLError(
                f"engine hf cannot generate with {name}",
                f"its {layers} layers must all be attention of one shape through transformers' "
                f"AttentionInterface; {len(self._seen)} are, of {len(shapes)} shapes",
                "set engine.kind to vllm",
            )
        heads, size, _ = shapes.pop()
        return CacheShape(layers, heads, size)


class Prefill:
    """New sequences: each prompt attends to itself once, and its keys and values are copied to all
    rows that begin with it.

    lengths [U] of the prompts, one after the other; source [new]: the prompt of each new row;
    first: the row they begin at.
    """

    def __init__(
        self, cache: KeyValueCache, lengths: list[int], source: Tensor, first: int
    ) -> None:
        self._cache, self._source, self._first = cache, source, first
        self._longest = max(lengths)
        self._padding = _Padding(lengths, source.device)
        self._masks: dict[int, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        q, k, v = (self._padding.pad(one) for one in (query, key, value))
        self._cache.fill(layer, self._first, self._source, k, v)
        windowed = 0 < window < self._longest
        result = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self._mask(window, q.device) if windowed else None,
            is_causal=not windowed,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return self._padding.unpad(result)

    def _mask(self, window: int, device: torch.device) -> Tensor:
        if window not in self._masks:
            position = torch.arange(self._longest, device=device)
            age = position[:, None] - position
            self._masks[window] = (age >= 0) & (age < window)
        return self._masks[window]


class Extend:
    """Rows first .. first + U - 1, whose beginnings are in the cache already: what follows attends
    to them and to what of itself stands before it.

    kept [U]: tokens in the cache; lengths [U] of what follows, one after the other.
    """

    def __init__(
        self, cache: KeyValueCache, kept: list[int], lengths: list[int], first: int
    ) -> None:
        device = cache.data.device
        self._cache, self._rows = cache, slice(first, first + len(lengths))
        self._padding = _Padding(lengths, device)
        have, length = torch.tensor(kept), torch.tensor(lengths)
        self._end = int((have + length).max())
        position = torch.cat([torch.arange(a, a + n) for a, n in zip(kept, lengths, strict=True)])
        row = first + torch.arange(len(lengths)).repeat_interleave(length)
        self._cells = cache.cells_at(row.to(device), position.to(device))
        query = have[:, None] + torch.arange(int(length.max()))
        self._query = query.clamp(max=self._end - 1).to(device)
        """Position of each query: [U, Q]; of those that pad, any."""
        self._masks: dict[int, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        size = key.shape[2]
        self._cache.append(layer, self._cells, key.reshape(-1, size), value.reshape(-1, size))
        memory = self._cache.data[layer, :, self._rows, :, : self._end]
        result = functional.scaled_dot_product_attention(
            self._padding.pad(query),
            memory[0],
            memory[1],
            attn_mask=self._mask(window, query.dtype),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return self._padding.unpad(result)

    def _mask(self, window: int, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            position = torch.arange(self._end, device=self._query.device)
            age = self._query[:, :, None] - position
            self._masks[window] = _hiding(age, window, dtype)[:, None]
        return self._masks[window]


class Decode:
    """One more token of each running sequence, rows 0 .. n-1. length [n]: tokens in the cache so
    far, on the device; longest and shortest: of these, known to the host.
    """

    def __init__(self, cache: KeyValueCache, length: Tensor, longest: int, shortest: int) -> None:
        self._cache, self._length = cache, length
        self._cells = cache.next_cells(length)
        self._end = longest + 1
        self._ragged = shortest != longest
        self._masks: dict[int, Tensor | None] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int
    ) -> Tensor:
        rows, heads, size = key.shape
        self._cache.append(layer, self._cells, key.reshape(-1, size), value.reshape(-1, size))
        memory = self._cache.data[layer, :, :rows, :, : self._end]
        # Queries that share a head of keys attend as if they were positions: nothing is repeated.
        result = functional.scaled_dot_product_attention(
            query.reshape(rows, heads, -1, size),
            memory[0],
            memory[1],
            attn_mask=self._mask(window, query.dtype),
            scale=scale,
        )
        return result.reshape(query.shape)

    def _mask(self, window: int, dtype: torch.dtype) -> Tensor | None:
        if window not in self._masks:
            if not self._ragged and not 0 < window < self._end:
                self._masks[window] = None
            else:
                position = torch.arange(self._end, device=self._length.device)
                age = self._length[:, None] - position
                self._masks[window] = _hiding(age, window, dtype)[:, None, None]
        return self._masks[window]


class _Padding:
    """Of tokens that pass the model one sequence after the other, for attention alone: on the
    right, where causality hides it. lengths [U], P of the longest.
    """

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self._count, self._longest = len(lengths), max(lengths)
        self._gather: Tensor | None = None
        if min(lengths) < self._longest:
            length = torch.tensor(lengths)
            begin = length.cumsum(0) - length
            position = torch.arange(self._longest)
            gather = begin[:, None] + position.minimum(length[:, None] - 1)
            real = (position < length[:, None]).view(-1).nonzero()[:, 0]
            self._gather = gather.view(-1).to(device)
            self._real = real.to(device)

    def pad(self, one: Tensor) -> Tensor:
        """[N, heads, d] -> [U, heads, P, d]."""
        if self._gather is not None:
            one = one.index_select(0, self._gather)
        return one.view(self._count, self._longest, *one.shape[1:]).transpose(1, 2)

    def unpad(self, one: Tensor) -> Tensor:
        """[U, heads, P, d] -> [N, heads, d]."""
        flat = one.transpose(1, 2).reshape(-1, one.shape[1], one.shape[3])
        return flat if self._gather is None else flat.index_select(0, self._real)


def _hiding(age: Tensor, window: int, dtype: torch.dtype) -> Tensor:
    """What attention adds: -inf where a key is of a later position, or older than the window."""
    hidden = age < 0
    if window:
        hidden |= age >= window
    mask = torch.zeros(age.shape, dtype=dtype, device=age.device)
    return mask.masked_fill_(hidden, float("-inf"))


def plug_in(model: Any) -> None:
    """Make the model attend through the Step that its call is given. Raises UniRLError where its
    code knows no AttentionInterface.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise UniRLError(
            f"engine hf cannot generate with {type(model).__name__}",
            "its attention does not go through transformers' AttentionInterface",
            "set engine.kind to vllm",
        )


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: query [1, heads, N, d]; returns [1, N, heads, d] and no weights."""
    step: Step | None = settings.get(STEP)
    if step is None:
        raise RuntimeError(f"attention {NAME} is for the engine alone: call it with {STEP}")
    for name in _UNSUPPORTED:
        if settings.get(name) is not None:
            raise UniRLError(
                f"engine hf cannot generate with a model whose attention uses {name}",
                "plain softmax attention, with or without a window, is all it computes",
                "set engine.kind to vllm",
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    result = step.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale,
        settings.get("sliding_window") or 0,
    )
    return result[None], None
