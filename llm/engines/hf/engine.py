"""The embedded engine: any transformers language model generates in this process, many sequences
at a time, on CPU or CUDA; sequences join and leave between steps (continuous batching, Orca, OSDI
2022).

A step runs on the event loop itself, not in a thread, and yields after it. So nothing changes
during a step: abort, pause and new weights need no locks, and what is admitted when follows from
the order of calls alone: two runs that make the same calls generate the same. What else runs on
the loop (rewards, above all) runs between steps and must be short.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from unirl.core.weights import Weights
from unirl.errors import UniRLError
from unirl.llm.device import device_of
from unirl.llm.engine import (
    Capabilities,
    Completion,
    EngineConfig,
    EngineFailed,
    PauseMode,
    Request,
)
from unirl.llm.engines.hf.generation import Generation
from unirl.llm.engines.hf.kept import Document
from unirl.llm.engines.hf.sequences import Running
from unirl.llm.engines.usage import Usage
from unirl.llm.models import model as models
from unirl.llm.models.checksum import checksum
from unirl.llm.models.dtype import warn_if_emulated
from unirl.llm.models.plain import PlainModel
from unirl.llm.weights.probe import Probe, precision_of

log = logging.getLogger(__name__)

_PREFILL_TOKENS = 8192
"""Of prompts that enter in one pass, unless one alone is longer: bounds its memory."""


class HfEngine:
    """Engine (see there) in this process. `start`, else the first `generate`, loads the model.

    loaded: a model and its tokenizer that are there already; the engine then owns the model.
    """

    def __init__(
        self,
        model: models.ModelConfig,
        config: EngineConfig | None = None,
        *,
        loaded: tuple[Any, Any] | None = None,
    ) -> None:
        self._settings, self._config = model, config or EngineConfig()
        self._device = torch.device(device_of(self._config.device, "engine.device"))
        self._loaded = loaded
        self.generation: Generation | None = None
        """The model and its sequences; None before `start` and after a failure."""
        self._probe: Probe | None = None
        self._version = -1
        self._waiting: list[Running] = []
        self._usage = Usage()
        self._orders = 0
        self._paused = self._asleep = False
        self._resume_awake = False
        self._last_order: int | None = None
        """While a pause waits: the last request that it waits for."""
        self._drained: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._failure: EngineFailed | None = None
        self._counts = dict.fromkeys(("prompt_tokens", "aborted", "compute_seconds"), 0.0)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(sleep=True)

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        self._started()

    async def generate(self, request: Request) -> Completion:
        generation = self._started()
        self._check(request, generation)
        done = request.partial
        limit = min(request.sampling.max_tokens, generation.context - len(request.prompt))
        if done is not None and len(done.tokens) >= limit:
            return replace(done, finish="length")
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        running = Running(request, self._orders, future)
        with self._usage.running(request.id):
            self._orders += 1
            self._waiting.append(running)
            self._counts["prompt_tokens"] += len(request.prompt)
            self._continue()
            try:
                return await future
            except asyncio.CancelledError:
                self._abort([running])
                raise

    def so_far(self, id: str) -> Completion | None:
        rows = self.generation.rows if self.generation is not None else None
        for row, one in enumerate(rows.running if rows is not None else []):
            if one.request.id == id and rows is not None:
                return rows.completion(row, "aborted")
        return None

    async def abort(self, ids: list[str] | None = None) -> None:
        wanted = None if ids is None else set(ids)
        self._abort(
            [one for one in self._in_flight() if wanted is None or one.request.id in wanted]
        )

    async def pause(self, mode: PauseMode = "keep") -> None:
        """wait: requests made before this call are finished; later ones wait."""
        if mode == "wait" and self._in_flight() and not self._paused:
            self._last_order = self._orders - 1
            drained = asyncio.get_running_loop().create_future()
            self._drained.append(drained)
            await drained
        if mode == "abort":
            self._abort(self._in_flight())
        self._freeze()

    async def resume(self) -> None:
        if self._asleep:
            self._resume_awake = True  # it cannot work before `wake`
            return
        self._paused, self._last_order = False, None
        self._continue()

    async def load_weights(self, weights: Weights, version: int) -> None:
        """Frozen sequences keep the keys and values of the weights that made them; those of ended
        ones are forgotten.
        """
        generation = self._started()
        model = generation.model
        if self._in_flight() and not self._paused:
            raise UniRLError(
                "engine hf cannot take new weights now",
                f"{len(self._in_flight())} completions are in flight, and it is not paused",
                "await engine.pause() first, engine.resume() after",
            )
        generation.forget_prefixes()
        models.load_flat_weights(model, weights)
        expected = checksum(weights, model.dtype)
        found = checksum(model)
        if expected != found:
            raise self._fail(
                f"engine hf holds other weights than version {version}",
                f"their checksum must be {expected:x}, the model's is {found:x}",
                "start the engine again; if it happens again, test the memory of this machine",
            )
        if (probe := self._probe) is not None:
            probe.expect(partial(models.flat_weights, model), version)
            if probe.tokens:
                said = generation.score(probe.tokens)
                probe.require(said, "engine hf", precision_of(model.dtype))
        self._version = version

    async def sleep(self) -> None:
        """On CUDA, model and cache move to the host's memory."""
        if self.generation is None or self._asleep:
            return
        self._asleep, self._resume_awake = True, not self._paused
        self._freeze()
        self.generation.move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    async def wake(self) -> None:
        if self._asleep and self.generation is not None:
            self.generation.move(self._device)
            self._asleep = False
            if self._resume_awake:
                await self.resume()

    def stats(self) -> Mapping[str, float]:
        """prefilled_tokens: of prompts, after sharing, and without reused_tokens, which the prefix
        cache had; compute_seconds: of its steps; running and waiting: now.
        """
        counts = {"generated_tokens": 0.0, **self._counts}
        running = 0
        if self.generation is not None:
            counts |= self.generation.counts
            running = len(self.generation.rows)
        return counts | {"running": running, "waiting": len(self._waiting)}

    async def close(self) -> None:
        if self._failure is None:
            self._fail("engine hf is closed", "it generates nothing any more", "make a new one")

    def _started(self) -> Generation:
        if self._failure is not None:
            raise self._failure
        if self.generation is None:
            if self._loaded is None:
                dtype = self._settings.dtype if self._config.dtype == "auto" else self._config.dtype
                settings = replace(self._settings, dtype=dtype)
                tokenizer = models.load_tokenizer(settings)
                model = models.load_model(settings, self._device)
                warn_if_emulated(model, "engine hf", "model.dtype")
            else:
                (model, tokenizer), self._loaded = self._loaded, None
            self._probe = Probe(self._config, partial(PlainModel.of, model), lambda: tokenizer)
            self.generation = Generation(
                model,
                tokenizer,
                self._device,
                max_context=self._config.max_context,
                prefix_bytes=int(self._config.prefix_cache_gib * 2**30),
            )
        return self.generation

    def _check(self, request: Request, generation: Generation) -> None:
        prompt, document = request.prompt, request.document
        if len(prompt) + 1 > generation.context:
            raise UniRLError(
                f"the prompt of request {request.id} is too long",
                f"it has {len(prompt)} tokens; prompt and completion together may have "
                f"{generation.context}",
                "drop long prompts (task.max_prompt), or raise engine.max_context where the model "
                "allows it",
            )
        if not prompt or min(document) < 0 or max(document) >= generation.vocabulary:
            raise UniRLError(
                f"the prompt of request {request.id} is not one of this model's",
                f"it must have at least one token, each from 0 to {generation.vocabulary - 1}",
                "use the tokenizer that belongs to the model",
            )

    def _in_flight(self) -> list[Running]:
        running = self.generation.rows.running if self.generation is not None else []
        return [*running, *self._waiting]

    def _continue(self) -> None:
        if self._has_work() and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._run())

    def _has_work(self) -> bool:
        return not self._paused and self._failure is None and bool(self._in_flight())

    async def _run(self) -> None:
        has_admitted = False
        try:
            while self._has_work():
                generation, started = self._started(), time.perf_counter()
                # After one pass of prompts a token of all: else prompts that trickle in would hold
                # those in flight up until all are in step, and wait for their tools together.
                may_admit = not has_admitted or not generation.rows
                has_admitted = may_admit and self._admit(generation)
                if not has_admitted:
                    generation.decode(self._version)
                self._counts["compute_seconds"] += time.perf_counter() - started
                self._check_drained()
                await asyncio.sleep(0)
        except Exception as error:
            log.exception("engine hf failed")
            self._fail(
                f"engine hf failed: {type(error).__name__}: {error}",
                f"{len(self._in_flight())} completions were in flight",
                "the trace is in the log; less memory: lower engine.max_sequences",
            )

    def _admit(self, generation: Generation) -> bool:
        """Take in as many waiting requests as there is room for, up to a bound on their tokens;
        whether there were any.
        """
        room = self._config.max_sequences - len(generation.rows)
        number: dict[tuple[int, ...], int] = {}
        documents: list[Document] = []
        new, source, tokens = [], [], 0
        for one in self._waiting[:room]:
            document = one.request.document
            if self._last_order is not None and one.order > self._last_order:
                break
            if document not in number:
                found = generation.prefixes.look_up(document)
                if documents and tokens + found.num_new > _PREFILL_TOKENS:
                    break
                number[document] = len(documents)
                documents.append(found)
                tokens += found.num_new
            new.append(one)
            source.append(number[document])
        if new:
            del self._waiting[: len(new)]
            generation.prefill(new, documents, source, self._version)
        return bool(new)

    def _abort(self, gone: list[Running]) -> None:
        if not gone:
            return
        dead = set(gone)
        self._counts["aborted"] += len(dead)
        if self.generation is not None:
            rows = enumerate(self.generation.rows.running)
            if running := [row for row, one in rows if one in dead]:
                self.generation.end([(row, "aborted") for row in running])
        for one in self._waiting:
            if one in dead:
                have = one.request.partial or Completion((), (), (), "aborted")
                one.end(replace(have, finish="aborted"))
        self._waiting = [one for one in self._waiting if one not in dead]
        self._check_drained()

    def _check_drained(self) -> None:
        """End a pause that waits, once all it waits for have ended."""
        last = self._last_order
        if last is not None and all(one.order > last for one in self._in_flight()):
            self._freeze()

    def _freeze(self) -> None:
        self._paused, self._last_order = True, None
        for drained in self._drained:
            if not drained.done():
                drained.set_result(None)
        self._drained.clear()

    def _fail(self, what: str, rule: str, remedy: str) -> EngineFailed:
        self._failure = EngineFailed(what, rule, remedy)
        for one in self._in_flight():
            if not one.future.done():
                one.future.set_exception(self._failure)
        if self.generation is not None:
            self._counts |= self.generation.counts
        self.generation, self._waiting = None, []
        self._freeze()
        return self._failure
