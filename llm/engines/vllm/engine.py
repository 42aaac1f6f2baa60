"""vLLM as an engine: AsyncLLM in this process, EngineCore and workers in processes of their own.

Source: vLLM's AsyncLLM (vllm.v1.engine.async_llm).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from contextlib import aclosing
from functools import cache, partial
from typing import Any

from unirl.core.weights import Weights
from unirl.errors import UniRLError
from unirl.llm.engine import (
    Capabilities,
    Completion,
    EngineConfig,
    EngineFailed,
    PauseMode,
    Request,
)
from unirl.llm.engines.stops import StopJoin, stop_join
from unirl.llm.engines.usage import Usage, continuation_seed, extend, finish_of
from unirl.llm.engines.vllm.adapter import ADAPTER_ID, ADAPTER_NAME, AdapterFolder
from unirl.llm.engines.vllm.core import VllmCore, closed
from unirl.llm.models.lora import with_base
from unirl.llm.models.model import ModelConfig, load_tokenizer
from unirl.llm.weights.probe import Probe, precision_of
from unirl.llm.weights.sync import WeightSync


class VllmEngine:
    """Engine (see there) on vLLM. One event loop for all calls.

    With engine.transfer lora, lora_rank and lora_alpha must be the learner's.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self._config, self._model = config, model
        self._usage = Usage()
        self.core = VllmCore(config, model, lambda: bool(self._usage.ids))
        self._sync = WeightSync(config, self.core)
        self._probe = Probe.named(config, model)
        self._tokenizer = cache(partial(load_tokenizer, model))
        self.adapter = None
        """Where adapters are written; None where whole weights travel."""
        if config.transfer == "lora":
            self.adapter = AdapterFolder(model.lora_alpha, config.folder)
        self._lora: Any = None
        self._version = -1
        self._starting = asyncio.Lock()
        self._paused = self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        """sleep: where engine.options has enable_sleep_mode."""
        asked = self._config.options.get("enable_sleep_mode", "false").lower()
        return Capabilities(sleep=asked == "true")

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        async with self._starting:
            if self._closed:
                raise closed()
            if self.core.llm is None:
                self._sync.meet(await self.core.start())

    async def generate(self, request: Request) -> Completion:
        self._require_started()
        if request.num_left <= 0:
            return extend(request, (), (), (), "length")
        self._check_length(request)
        join = stop_join(request, self._tokenizer)
        parameters, prompt = self._parameters(request, join), list(request.document)
        with self._usage.running(request.id):
            output = await self.core.first(self._finished(prompt, parameters, request.id, join))
        done = output.outputs[0]
        tokens, finish = tuple(done.token_ids), finish_of(done.finish_reason)
        logp = tuple(float(value) for value in done.logprobs.logprobs) if tokens else ()
        version = self._versions(done.weight_versions, len(tokens))
        self._usage.count(prompt=len(prompt), generated=len(tokens))
        if join is not None and join.found is not None:
            end, finish = join.found, "stop"
            tokens, logp, version = tokens[:end], logp[:end], version[:end]
        return extend(request, tokens, logp, version, finish)

    async def abort(self, ids: list[str] | None = None) -> None:
        if self.core.llm is None:
            return
        wanted = list(self._usage.ids) if ids is None else [i for i in ids if i in self._usage.ids]
        if wanted:
            await self.core.ask(self.core.llm.abort(wanted), "to abort requests")

    def so_far(self, id: str) -> Completion | None:
        """Known at the end alone: to know meanwhile costs a message for each token."""
        return None

    async def pause(self, mode: PauseMode = "keep") -> None:
        """wait has no deadline but that of a core that falls silent."""
        self._require_started()
        call = self.core.llm.pause_generation(mode=mode, clear_cache=False)
        if mode == "wait":
            await self.core.first(call)
        else:
            await self.core.ask(call, f"to pause ({mode})")
        self._paused = True

    async def resume(self) -> None:
        self._require_started()
        await self.core.ask(self.core.llm.resume_generation(), "to resume")
        self._paused = False
        await self._compare()

    async def load_weights(self, weights: Weights, version: int) -> None:
        """Pauses by itself (keep) where it is not paused and requests are running.

        Raises EngineFailed when a worker does not compute with what was sent; the engine is of no
        use then.
        """
        await self.start()
        self._require_started()
        pause = not self._paused and bool(self._usage.ids)
        if pause:
            await self.pause("keep")
        try:
            if self.adapter is not None:
                await self._load_adapter(weights, version)
            else:
                await self._sync.load(weights, version)
            # Adapters in a base that is read again, where they alone came.
            whole = partial(with_base, weights, self._model)
            await asyncio.to_thread(self._probe.expect, whole, version)
        except BaseException as error:
            # Whatever it computes with now belongs to no version.
            if not isinstance(error, UniRLError):
                self.core.break_off(error)
            raise
        self._version = version
        if pause:
            await self.resume()
        elif not self._paused:
            await self._compare()

    async def sleep(self) -> None:
        if self.capabilities.sleep and self.core.llm is not None:
            await self.core.ask(self.core.llm.sleep(level=1, mode="keep"), "to sleep")
            self._paused = True

    async def wake(self) -> None:
        if self.capabilities.sleep and self.core.llm is not None:
            await self.core.ask(self.core.llm.wake_up(), "to wake up")
            self._paused = False

    def stats(self) -> Mapping[str, float]:
        return self._usage.as_stats()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self.core.close()
        finally:
            self._sync.close()
            if self.adapter is not None:
                self.adapter.close()

    async def _compare(self) -> None:
        """Not before it draws again: what is asked of a paused engine waits."""
        llm = self.core.llm
        cached = str(llm.vllm_config.cache_config.cache_dtype)
        quantised = llm.model_config.quantization or "fp8" in cached or "int8" in cached
        precision = "quantised" if quantised else precision_of(self._sync.dtype)
        try:
            await self._probe.compare(self._score, self.core.peer(), precision)
        except (UniRLError, EngineFailed) as error:
            self._version = -1
            self.core.break_off(EngineFailed(*error.parts))
            raise

    async def _score(self, tokens: tuple[int, ...]) -> list[float]:
        from vllm import SamplingParams

        how = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, watermarking=False)
        name = f"probe-{uuid.uuid4().hex[:8]}"
        output = await self.core.ask(self._finished(list(tokens), how, name), "to judge a text")
        offered = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
        return [float(each[token].logprob) for token, each in offered]

    def _parameters(self, request: Request, join: StopJoin | None) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        how = request.sampling
        return SamplingParams(
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=how.top_k,
            max_tokens=request.num_left,
            stop=list(how.stop) or None,
            include_stop_str_in_output=True,
            detokenize=bool(how.stop),
            seed=continuation_seed(request),
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.CUMULATIVE if join else RequestOutputKind.FINAL_ONLY,
            watermarking=False,
        )

    async def _finished(
        self, prompt: list[int], parameters: Any, name: str, join: StopJoin | None = None
    ) -> Any:
        last = None
        stream = self.core.llm.generate(
            {"prompt_token_ids": prompt}, parameters, name, lora_request=self._lora
        )
        async with aclosing(stream):  # left early, the request ends
            async for output in stream:
                last = output  # without a join there is but one
                if join is not None and join.end(output.outputs[0].token_ids) is not None:
                    break
        return last

    def _check_length(self, request: Request) -> None:
        longest = self.core.llm.model_config.max_model_len
        length = len(request.document)
        if length >= longest:
            raise UniRLError(
                f"a prompt of {length} tokens leaves no room for a completion",
                f"prompt and completion together may have {longest} tokens",
                "raise engine.max_context as far as the model allows, or drop longer prompts",
            )

    def _versions(self, spans: Any, count: int) -> tuple[int, ...]:
        """Of each token. vLLM calls its own weights "default"."""
        if not spans:
            return (self._version,) * count
        return tuple(
            int(span.version) if span.version.lstrip("-").isdigit() else -1
            for span in spans
            for _ in range(span.start, span.end)
        )

    async def _load_adapter(self, weights: Weights, version: int) -> None:
        from vllm.lora.request import LoRARequest

        assert self.adapter is not None
        path = await asyncio.to_thread(self.adapter.write, weights, version, self._sync.dtype)
        # The same id, loaded in place: frozen requests continue under the new adapter, too.
        request = LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(path), load_inplace=True)
        await self.core.ask(self.core.llm.add_lora(request), "to load the adapter")
        update = self.core.llm.update_weight_version(str(version))
        await self.core.ask(update, "to take the version")
        await self.core.forget()
        reports = await self.core.call_workers("unirl_adapter", [str(ADAPTER_ID)])
        self.adapter.require(reports, self.core.peer())
        # Requests need not load it again.
        self._lora = LoRARequest(ADAPTER_NAME, ADAPTER_ID, str(path))

    def _require_started(self) -> None:
        if self._closed:
            raise closed()
        if self.core.llm is None:
            raise UniRLError("the engine has not started", "start comes first", "await start()")
        self.core.require_alive()
