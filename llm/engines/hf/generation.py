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
from unirl.llm.engines.hf.attention import CacheShapeProbe, Decode, Extend, Prefill, Step
from unirl.llm.engines.hf.kept import Document, PrefixCache
from unirl.llm.engines.hf.kv_cache import KeyValueCache
from unirl.llm.engines.hf.sequences import Running, SequenceTable
from unirl.llm.engines.stops import STOP_MARGIN, longest_bytes, turn_start
from unirl.llm.models import model as models
from unirl.llm.models.dense_linear import quicken

Rows = list[tuple[Running, int]]
"""Sequences that are to become rows, each with the number of its document."""
_PADDED_TOKENS = 4096
"""Of documents whose beginning is kept, in one pass."""
_COUNTS = ("generated_tokens", "prefilled_tokens", "reused_tokens", "steps")


class Generation:
    """Rows of a model's cache, and the tokens they have so far. Futures of rows that end are set.

    max_context: tokens of prompt and completion together; 0: what the model allows. prefix_bytes:
    of the prefix cache. Raises UniRLError for models that keep their memory elsewhere than in
    attention.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        device: torch.device,
        *,
        max_context: int = 0,
        prefix_bytes: int = 0,
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
        self.prefixes = PrefixCache(prefix_bytes)
        self.vocabulary: int = model.get_input_embeddings().weight.shape[0]
        self.context = _context(model, max_context)
        ends = models.end_token_ids(tokenizer, model)
        self._ends = np.zeros(self.vocabulary, bool)
        self._ends[[end for end in ends if end < self.vocabulary]] = True
        self.counts = dict.fromkeys(_COUNTS, 0.0)

    def prefill(
        self, new: list[Running], documents: list[Document], source: list[int], version: int
    ) -> None:
        """Take these sequences in and draw their first token. documents: what is in the context of
        at least one of them; source: which of it, for each.
        """
        for part in _passes(documents):
            number = {i: n for n, i in enumerate(part)}
            rows = [(one, number[i]) for one, i in zip(new, source, strict=True) if i in number]
            those = [documents[i] for i in part]
            longest = max(len(one.tokens) for one in those)
            self._reserve(len(self.rows) + len(rows), longest + 1)
            enter = self._extend if those[0].num_kept else self._begin
            enter(those, rows, version)

    def _begin(self, documents: list[Document], rows: Rows, version: int) -> None:
        """Nothing of them is kept."""
        lengths = [len(one.tokens) for one in documents]
        source = torch.tensor([i for _, i in rows], device=self._device)
        step = Prefill(self.cache, lengths, source, len(self.rows))
        self._add(rows, self._read(documents, step), version)

    def _extend(self, documents: list[Document], rows: Rows, version: int) -> None:
        """A beginning of each is kept."""
        first, leads = len(self.rows), {i: one for one, i in reversed(rows)}
        # A row of each document, and then those that become copies of one of them.
        others = [(one, i) for one, i in rows if leads[i] is not one]
        rows = [*((leads[i], i) for i in range(len(documents))), *others]
        kept, new = [one.num_kept for one in documents], [one.num_new for one in documents]
        with torch.inference_mode():
            for row, one in enumerate(documents, first):
                if one.beginning is not None:
                    self.cache.put(row, one.beginning)
        logits = self._read(documents, Extend(self.cache, kept, new, first))
        with torch.inference_mode():
            copies = range(first + len(documents), first + len(rows))
            longest = max(len(one.tokens) for one in documents)
            self.cache.move([first + i for _, i in others], [*copies], longest)
        self.counts["reused_tokens"] += sum(kept)
        self._add(rows, logits, version)

    def _read(self, documents: list[Document], step: Step) -> Tensor:
        """Logits behind each document: [U, V]."""
        tokens = np.array([each for one in documents for each in one.tokens[one.num_kept :]])
        positions = [np.arange(one.num_kept, len(one.tokens)) for one in documents]
        lengths = torch.tensor([one.num_new for one in documents], device=self._device)
        self.counts["prefilled_tokens"] += len(tokens)
        ends = lengths.cumsum(0) - 1
        return self._forward(tokens, np.concatenate(positions), step, logits_to_keep=ends)

    def _add(self, rows: Rows, logits: Tensor, version: int) -> None:
        """Rows whose documents are in the cache; logits: of their documents."""
        first, new = len(self.rows), [one for one, _ in rows]
        turns = [
            turn_start(one.request.partial, one.request.sampling.stop, self._tokenizer.decode)
            for one in new
        ]
        self.rows.add(new, self.context, turns)
        source = torch.tensor([i for _, i in rows], device=self._device)
        self._draw(first, logits.index_select(0, source), version)

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
            running, completion = self.rows.running[row], self.rows.completion(row, finish)
            if running.request.may_continue and not running.is_mixed:
                self._keep(row, running.request.prompt + completion.tokens)
            running.end(completion)
        used = int(self.rows.length.max())
        with torch.inference_mode():
            self.cache.move(*self.rows.remove([row for row, _ in over]), used)

    def forget_prefixes(self) -> None:
        """The weights are about to change. Rows in flight keep what the old ones made; of them
        nothing will be kept.
        """
        self.prefixes.clear()
        for running in self.rows.running:
            running.is_mixed = True

    def move(self, device: torch.device) -> None:
        """Model and cache, to another device; an unused cache is released."""
        self.model.to(device)
        self.prefixes.clear()
        if not self.rows:
            self.cache.clear()
        self.cache.to(device)

    def _keep(self, row: int, tokens: tuple[int, ...]) -> None:
        length = int(self.rows.length[row])  # the last one drawn is not in the cache
        with torch.inference_mode():
            self.prefixes.keep(tokens[:length], self.cache, row)

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


def _passes(documents: list[Document]) -> list[list[int]]:
    """Numbers of documents that pass the model together: all that are new; of those whose beginning
    is kept, those of similar length, because attention pads them and computes a mask.
    """
    new = [i for i, one in enumerate(documents) if not one.num_kept]
    kept = [i for i, one in enumerate(documents) if one.num_kept]
    found, last = [new] if new else [], list[int]()
    for i in sorted(kept, key=lambda i: documents[i].num_new):
        if last and (len(last) + 1) * documents[i].num_new > _PADDED_TOKENS:
            found.append(last)
            last = []
        last.append(i)
    return [*found, last] if last else found


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
