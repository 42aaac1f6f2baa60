"""The model and the sequences it generates, one step at a time; who asked for them, and when they
may run, is the engine's business.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from unirl.errors import UniRLError
from unirl.llm.engine import Finish
from unirl.llm.engines.decoding import draw
from unirl.llm.engines.hf import attention
from unirl.llm.engines.hf.attention import CacheShapeProbe, Decode, Prefill, Step
from unirl.llm.engines.hf.kv_cache import KeyValueCache
from unirl.llm.engines.hf.sequences import Running, SequenceTable
from unirl.llm.engines.stops import STOP_MARGIN, longest_bytes, turn_start
from unirl.llm.models import model as models
from unirl.llm.models.dense_linear import quicken


class Generation:
    """Rows of a model's cache, and the tokens they have so far. Futures of rows that end are set.

    max_context: tokens of prompt and completion together; 0: what the model allows. Raises
    UniRLError for models that keep their memory elsewhere than in attention.
    """

    def __init__(
        self, model: Any, tokenizer: Any, device: torch.device, *, max_context: int = 0
    ) -> None:
        self.model = model.to(device).eval().requires_grad_(False)
        self.rows = SequenceTable()
        self._tokenizer, self._device = tokenizer, device
        attention.plug_in(model)
        quicken(model)
        probe = CacheShapeProbe()
        self._forward(np.zeros(1, np.int64), np.zeros(1, np.int64), probe)
        layers = model.config.get_text_config().num_hidden_layers
        self.cache = KeyValueCache(
            probe.shape(layers, type(model).__name__), model.dtype, self._device
        )
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        self.context = _context(model, max_context)
        ends = models.end_token_ids(tokenizer, model)
        self._ends = np.zeros(self.vocabulary, bool)
        self._ends[[end for end in ends if end < self.vocabulary]] = True
        self.counts = dict.fromkeys(("generated_tokens", "prefilled_tokens", "steps"), 0.0)

    def prefill(
        self,
        new: list[Running],
        documents: list[tuple[int, ...]],
        source: list[int],
        version: int,
    ) -> None:
        """Take these sequences in and draw their first token. documents: what is in the context of
        at least one of them; source: which of it, for each.
        """
        first = len(self.rows)
        lengths = [len(document) for document in documents]
        self._reserve(first + len(new), max(lengths) + 1)
        sources = torch.tensor(source, device=self._device)
        step = Prefill(self.cache, lengths, sources, first)
        tokens = np.array([token for document in documents for token in document])
        positions = np.concatenate([np.arange(length) for length in lengths])
        ends = torch.tensor(lengths, device=self._device).cumsum(0) - 1
        logits = self._forward(tokens, positions, step, logits_to_keep=ends)
        turns = [
            turn_start(one.request.partial, one.request.sampling.stop, self._tokenizer.decode)
            for one in new
        ]
        self.rows.add(new, self.context, turns)
        self.counts["prefilled_tokens"] += len(tokens)
        self._draw(first, logits.index_select(0, sources), version)

    def decode(self, version: int) -> None:
        length = self.rows.length
        longest, shortest = int(length.max()), int(length.min())
        self._reserve(len(self.rows), longest + 1)
        positions = torch.from_numpy(length.copy()).to(self._device)  # host -> device, per step
        step = Decode(self.cache, positions, longest, shortest)
        logits = self._forward(self.rows.last, positions, step)
        length += 1
        self._draw(0, logits, version)

    def score(self, tokens: tuple[int, ...]) -> Tensor:
        """Log-probabilities of all tokens but the first, each given those before it: [n - 1], on
        the host. In a row behind those in use, which stay as they are.
        """
        first, length = len(self.rows), len(tokens)
        self._reserve(first + 1, length)
        step = Prefill(
            self.cache, [length], torch.zeros(1, dtype=torch.int64, device=self._device), first
        )
        logits = self._forward(np.array(tokens), np.arange(length), step)
        following = torch.tensor(tokens[1:], device=self._device)
        logp = logits[:-1].float().log_softmax(-1)
        return logp.gather(1, following[:, None])[:, 0].cpu()

    def end(self, over: list[tuple[int, Finish]]) -> None:
        """Complete these rows, ascending, and close the gaps they leave."""
        for row, finish in over:
            self.rows.running[row].end(self.rows.completion(row, finish))
        used = int(self.rows.length.max())
        with torch.inference_mode():
            self.cache.move(*self.rows.remove([row for row, _ in over]), used)

    def move(self, device: torch.device) -> None:
        """Model and cache, to another device; an unused cache is released."""
        self.model.to(device)
        if not self.rows:
            self.cache.clear()
        self.cache.to(device)

    def _reserve(self, rows: int, positions: int) -> None:
        used = len(self.rows)
        longest = int(self.rows.length.max()) if used else 0
        with torch.inference_mode():
            self.cache.reserve(rows, positions, used_rows=used, used_positions=longest)

    def _forward(self, tokens: Any, positions: Any, step: Step, **settings: Any) -> Tensor:
        """Logits [N, V] of tokens [N] at these positions [N]."""
        with torch.inference_mode():
            result = self.model(
                input_ids=torch.as_tensor(tokens).to(self._device)[None],
                position_ids=torch.as_tensor(positions).to(self._device)[None],
                use_cache=False,
                **settings,
                **{attention.STEP: step},
            )
        logits: Tensor = result.logits[0]
        return logits

    def _draw(self, first: int, logits: Tensor, version: int) -> None:
        """The next token of the rows from `first` on; those that end leave."""
        rows = self.rows
        with torch.inference_mode():
            uniform = rows.uniforms(first, self._device)
            token, logp = draw(logits, uniform, **rows.filters(first, self._device))
            drawn = token.cpu().numpy()  # device -> host, once per step
            full = rows.record(first, drawn, logp.cpu().numpy(), version)
        self.counts["generated_tokens"] += len(drawn)
        self.counts["steps"] += 1
        ended = self._ends[drawn]
        for row in rows.stopping:
            if row >= first and not ended[row - first]:
                ended[row - first] = self._stops(row)
        over = np.flatnonzero(full | ended)
        if len(over):
            self.end([(int(row) + first, "stop" if ended[row] else "length") for row in over])

    def _stops(self, row: int) -> bool:
        """Whether the newest token completes a stop text: earlier ones would have ended it before,
        so the last few tokens of the turn are enough.
        """
        stop = self.rows.running[row].request.sampling.stop
        text = self._tokenizer.decode(self.rows.tail(row, longest_bytes(stop) + STOP_MARGIN))
        return any(one in text for one in stop)


def _context(model: Any, wanted: int) -> int:
    try:
        allowed = models.context_length(model)
    except UniRLError:
        if wanted:
            return wanted  # it has no bound of its own
        raise
    if wanted > allowed:
        raise UniRLError(
            f"engine.max_context is {wanted}",
            f"{type(model).__name__} allows {allowed} tokens of prompt and completion together",
            f"set it to {allowed} or less; 0 takes what the model allows",
        )
    return wanted or allowed
