"""The embedded engine: any transformers language model generates in this process, many sequences
at a time, on CPU or CUDA; sequences join and leave between steps (continuous batching, Orca, OSDI
2022).

A step runs on the event loop itself, not in a thread, and gives way after it. So nothing changes
during a step: abort, pause and new weights need no locks, and what is admitted when follows from
the order of calls alone: two runs that make the same calls generate the same. What else lives on
the loop (rewards, above all) runs between steps and must be short.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from unirl.core.errors import UniRLError
from unirl.core.weights import Weights
from unirl.llm import hf_attention
from unirl.llm import model as models
from unirl.llm.decoding import draw
from unirl.llm.engine import (
    Capabilities,
    Completion,
    EngineConfig,
    EngineFailed,
    Finish,
    PauseMode,
    Request,
)
from unirl.llm.hf_attention import Decode, Prefill, Probe, Step
from unirl.llm.hf_rows import Rows, Running
from unirl.llm.kv_cache import KeyValueCache
from unirl.llm.model_checksum import checksum

log = logging.getLogger(__name__)

_PREFILL_TOKENS = 8192
"""Of prompts that enter in one pass, unless one alone is longer: bounds its memory."""
_STOP_MARGIN = 8
"""Tokens decoded beyond those a stop text can have: the first of a piece may decode otherwise."""


class HfEngine:
    """See Engine. Loads the model in `start`; the first `generate` does it where nobody has.

    `loaded` brings model and tokenizer along instead; the engine then owns the model.
    """

    def __init__(
        self,
        model: models.ModelConfig,
        config: EngineConfig | None = None,
        *,
        loaded: tuple[Any, Any] | None = None,
    ) -> None:
        self._settings, self._config = model, config or EngineConfig()
        self._device = torch.device(_device_name(self._config.device))
        self._model, self._tokenizer = loaded or (None, None)
        self._ready = False
        self._version = -1
        self._rows = Rows()
        self._waiting: list[Running] = []
        self._orders = 0
        self._paused = False
        self._last_order: int | None = None
        self._drained: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._failure: EngineFailed | None = None
        self._asleep = False
        self._counts = dict.fromkeys(
            (
                "generated_tokens",
                "prompt_tokens",
                "prefilled_tokens",
                "steps",
                "busy_seconds",
                "aborted",
            ),
            0.0,
        )

    @property
    def capabilities(self) -> Capabilities:
        """See Engine."""
        return Capabilities(sleep=True)

    @property
    def version(self) -> int:
        """See Engine."""
        return self._version

    async def start(self) -> None:
        """See Engine."""
        if self._failure is not None:
            raise self._failure
        if self._ready:
            return
        if self._model is None:
            dtype = self._settings.dtype if self._config.dtype == "auto" else self._config.dtype
            settings = self._settings.__class__(**{**vars(self._settings), "dtype": dtype})
            self._tokenizer = models.load_tokenizer(settings)
            self._model = models.load_model(settings, self._device)
        model = self._model.to(self._device).eval().requires_grad_(False)
        hf_attention.plug_in(model)
        probe = Probe()
        self._forward(np.zeros(1, np.int64), np.zeros(1, np.int64), probe)
        shape = probe.shape(model.config.get_text_config().num_hidden_layers, type(model).__name__)
        self._cache = KeyValueCache(shape, model.dtype, self._device)
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self._ends = np.zeros(self._vocabulary, bool)
        ends = models.end_token_ids(self._tokenizer, model)
        self._ends[[end for end in ends if end < self._vocabulary]] = True
        self._context = self._config.max_context or models.context_length(model)
        self._ready = True

    async def generate(self, request: Request) -> Completion:
        """See Engine."""
        await self.start()
        self._check(request)
        done = request.partial
        limit = min(request.sampling.max_tokens, self._context - len(request.prompt))
        if done is not None and len(done.tokens) >= limit:
            return Completion(done.tokens, done.logp, done.version, "length")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        running = Running(request, self._orders, future)
        self._orders += 1
        self._waiting.append(running)
        self._counts["prompt_tokens"] += len(request.prompt)
        self._go()
        try:
            return await future
        except asyncio.CancelledError:
            self._abort([running])
            raise

    async def abort(self, ids: list[str] | None = None) -> None:
        """See Engine."""
        wanted = None if ids is None else set(ids)
        self._abort(
            [one for one in self._under_way() if wanted is None or one.request.id in wanted]
        )

    async def pause(self, mode: PauseMode = "keep") -> None:
        """See Engine. wait: requests made before this call are finished; later ones wait."""
        if mode == "wait" and self._under_way() and not self._paused:
            self._last_order = self._orders - 1
            drained = asyncio.get_running_loop().create_future()
            self._drained.append(drained)
            self._go()
            await drained
        if mode == "abort":
            self._abort(self._under_way())
        self._freeze()

    async def resume(self) -> None:
        """See Engine."""
        self._paused, self._last_order = False, None
        self._go()

    async def load_weights(self, weights: Weights, version: int) -> None:
        """See Engine. Frozen sequences keep the keys and values of the weights that made them."""
        await self.start()
        if self._under_way() and not self._paused:
            raise UniRLError(
                "engine hf cannot take new weights now",
                f"{len(self._under_way())} completions are under way, and it is not paused",
                "await engine.pause() first, engine.resume() after",
            )
        models.load_flat_weights(self._model, weights)
        expected = checksum({name: value.to(self._model.dtype) for name, value in weights.items()})
        found = checksum(self._model)
        if expected != found:
            raise self._fail(
                f"engine hf holds other weights than version {version}",
                f"their checksum must be {expected:x}, the model's is {found:x}",
                "start the engine again; if it happens again, test the memory of this machine",
            )
        self._version = version

    async def sleep(self) -> None:
        """See Engine. On CUDA, model and cache move to the host's memory."""
        if self._ready and not self._asleep:
            self._freeze()
            self._asleep = True
            self._move(torch.device("cpu"))
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    async def wake(self) -> None:
        """See Engine."""
        if self._asleep:
            self._asleep = False
            self._move(self._device)
            await self.resume()

    def stats(self) -> Mapping[str, float]:
        """See Engine. prefilled_tokens: of prompts, after sharing; running and waiting: now."""
        return {**self._counts, "running": len(self._rows), "waiting": len(self._waiting)}

    async def close(self) -> None:
        """See Engine."""
        if self._failure is None:
            self._fail("engine hf is closed", "it generates nothing any more", "make a new one")
        self._model = self._tokenizer = None
        self._ready = False
        if hasattr(self, "_cache"):
            self._cache.clear()

    def _check(self, request: Request) -> None:
        prompt, partial = request.prompt, request.partial
        used = len(prompt) + 1
        if used > self._context:
            raise UniRLError(
                f"the prompt of request {request.id} is too long",
                f"it has {len(prompt)} tokens; prompt and completion together may have "
                f"{self._context}",
                "drop long prompts (task.max_prompt), or raise engine.max_context where the model "
                "allows it",
            )
        tokens = prompt + (partial.tokens if partial else ())
        if not prompt or min(tokens) < 0 or max(tokens) >= self._vocabulary:
            raise UniRLError(
                f"the prompt of request {request.id} is not one of this model's",
                f"it must have at least one token, each from 0 to {self._vocabulary - 1}",
                "use the tokenizer that belongs to the model",
            )
        if any(one.request.id == request.id for one in self._under_way()):
            raise UniRLError(
                f'request "{request.id}" is under way already',
                "ids must be unique among the requests under way",
                "number the requests",
            )

    def _under_way(self) -> list[Running]:
        return [*self._rows.running, *self._waiting]

    def _go(self) -> None:
        """Have the loop work, if there is work and nothing forbids it."""
        if self._has_work() and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())

    def _has_work(self) -> bool:
        return not self._paused and self._failure is None and bool(self._rows or self._waiting)

    async def _run(self) -> None:
        try:
            while self._has_work():
                begin = time.perf_counter()
                with torch.inference_mode():
                    if not self._admit():
                        self._decode()
                self._counts["busy_seconds"] += time.perf_counter() - begin
                self._check_drained()
                await asyncio.sleep(0)
        except Exception as error:
            log.exception("engine hf failed")
            self._fail(
                f"engine hf failed: {type(error).__name__}: {error}",
                f"{len(self._under_way())} completions were under way",
                "the trace is in the log; less memory: lower engine.max_sequences",
            )

    def _admit(self) -> bool:
        """Take in as many waiting requests as there is room for, up to a bound on their tokens;
        whether there were any.
        """
        room = self._config.max_sequences - len(self._rows)
        documents: dict[tuple[int, ...], int] = {}
        new, source, tokens = [], [], 0
        for one in self._waiting[:room]:
            document = one.document
            if self._last_order is not None and one.order > self._last_order:
                break
            if document not in documents:
                if documents and tokens + len(document) > _PREFILL_TOKENS:
                    break
                documents[document] = len(documents)
                tokens += len(document)
            new.append(one)
            source.append(documents[document])
        if not new:
            return False
        del self._waiting[: len(new)]
        self._prefill(new, list(documents), source)
        return True

    def _prefill(
        self, new: list[Running], documents: list[tuple[int, ...]], source: list[int]
    ) -> None:
        first = len(self._rows)
        lengths = [len(document) for document in documents]
        longest = int(self._rows.length.max()) if first else 0
        self._cache.reserve(
            first + len(new), max(lengths) + 1, used_rows=first, used_positions=longest
        )
        sources = torch.tensor(source, device=self._device)
        step = Prefill(self._cache, lengths, sources, first)
        tokens = np.array([token for document in documents for token in document])
        places = np.concatenate([np.arange(length) for length in lengths])
        ends = torch.tensor(lengths, device=self._device).cumsum(0) - 1
        logits = self._forward(tokens, places, step, logits_to_keep=ends)
        self._rows.add(new, self._context)
        self._counts["prefilled_tokens"] += len(tokens)
        self._draw(first, logits.index_select(0, sources))

    def _decode(self) -> None:
        length = self._rows.length
        longest, shortest = int(length.max()), int(length.min())
        self._cache.reserve(
            len(self._rows), longest + 1, used_rows=len(self._rows), used_positions=longest
        )
        place = torch.from_numpy(length.copy()).to(self._device)
        step = Decode(self._cache, place, longest, shortest)
        logits = self._forward(self._rows.last, place, step)
        length += 1
        self._draw(0, logits)

    def _forward(self, tokens: Any, places: Any, step: Step, **settings: Any) -> torch.Tensor:
        """Logits [N, V] of tokens [N] at these positions [N]."""
        ids, positions = (torch.as_tensor(one).to(self._device)[None] for one in (tokens, places))
        with torch.inference_mode():
            result = self._model(
                input_ids=ids,
                position_ids=positions,
                use_cache=False,
                **settings,
                **{hf_attention.STEP: step},
            )
        logits: torch.Tensor = result.logits[0]
        return logits

    def _draw(self, first: int, logits: torch.Tensor) -> None:
        """The next token of the rows from `first` on; those that end leave."""
        rows = self._rows
        token, logp = draw(
            logits, rows.uniforms(first, self._device), **rows.filters(first, self._device)
        )
        drawn = token.cpu().numpy()  # device -> host, once per step
        full = rows.record(first, drawn, logp.cpu().numpy(), self._version)
        self._counts["generated_tokens"] += len(drawn)
        self._counts["steps"] += 1
        ended = self._ends[drawn]
        for row in rows.stopping:
            if row >= first and not ended[row - first]:
                ended[row - first] = self._stops(row)
        over = np.flatnonzero(full | ended)
        if len(over):
            self._end([(int(row) + first, "stop" if ended[row] else "length") for row in over])

    def _stops(self, row: int) -> bool:
        """Whether the newest token completes a stop text: earlier ones would have ended it before,
        so the last few tokens are enough.
        """
        stop = self._rows.running[row].request.sampling.stop
        longest = max(len(text.encode()) for text in stop)
        text = self._tokenizer.decode(self._rows.tail(row, longest + _STOP_MARGIN))
        return any(one in text for one in stop)

    def _end(self, over: list[tuple[int, Finish]]) -> None:
        """Tell who waits, and close the gaps these rows leave."""
        for row, finish in over:
            self._rows.running[row].end(self._rows.completion(row, finish))
        used = int(self._rows.length.max())
        with torch.inference_mode():
            self._cache.move(*self._rows.remove([row for row, _ in over]), used)

    def _abort(self, gone: list[Running]) -> None:
        if not gone:
            return
        dead = set(gone)
        self._counts["aborted"] += len(dead)
        rows = [row for row, one in enumerate(self._rows.running) if one in dead]
        if rows:
            self._end([(row, "aborted") for row in rows])
        for one in self._waiting:
            if one in dead:
                have = one.request.partial or Completion((), (), (), "aborted")
                one.end(Completion(have.tokens, have.logp, have.version, "aborted"))
        self._waiting = [one for one in self._waiting if one not in dead]
        self._check_drained()

    def _check_drained(self) -> None:
        """End a pause that waits, once all it waits for have ended."""
        if self._last_order is None:
            return
        if all(one.order > self._last_order for one in self._under_way()):
            self._freeze()

    def _freeze(self) -> None:
        self._paused, self._last_order = True, None
        for drained in self._drained:
            if not drained.done():
                drained.set_result(None)
        self._drained.clear()

    def _move(self, device: torch.device) -> None:
        self._model.to(device)
        if len(self._rows):
            self._cache.to(device)
        else:
            self._cache.clear()
            self._cache.to(device)

    def _fail(self, what: str, rule: str, remedy: str) -> EngineFailed:
        self._failure = EngineFailed(what, rule, remedy)
        for one in self._under_way():
            if not one.future.done():
                one.future.set_exception(self._failure)
        self._rows, self._waiting = Rows(), []
        self._freeze()
        return self._failure


def _device_name(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name
