"""An engine behind a server that speaks OpenAI's API (vLLM, SGLang) and returns token ids and
log-probabilities.

Source: POST /v1/completions as vLLM and SGLang extend it (return_token_ids).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal

from unirl.core.weights import Weights
from unirl.errors import UniRLError
from unirl.llm.engine import (
    Capabilities,
    Completion,
    EngineConfig,
    EngineFailed,
    Finish,
    PauseMode,
    Request,
    SamplingConfig,
)
from unirl.llm.engines.openai.controls import Controls, find_controls
from unirl.llm.engines.openai.refusals import (
    no_log_probabilities,
    no_prompt_log_probabilities,
    no_token_ids,
    other_distribution,
    refusal,
    takes_no_weights,
    unknown_model,
)
from unirl.llm.engines.stops import stop_join
from unirl.llm.engines.usage import Usage, continuation_seed, extend, finish_of
from unirl.llm.http import PAUSES, BadStatus, HttpClient, HttpFailed, bearer
from unirl.llm.models.model import ModelConfig, load_tokenizer
from unirl.llm.weights.probe import Probe

LogpKind = Literal["all", "temperature", "raw"]
"""Which distribution a server's log-probabilities are of: the one that tokens are drawn from, the
one before top_p and top_k, or the model's own.
"""


class OpenAiEngine:
    """Engine (see there) over HTTP. Requests are streamed: `abort` and `pause` cut them, and what
    was cut is continued with its tokens behind the prompt.

    The server is asked for model.path, or engine.options.served_model_name. Engine vllm with a url
    is this one; then the server must take weights. pauses: before further attempts to reach it.
    """

    def __init__(
        self, model: ModelConfig, config: EngineConfig, *, pauses: Sequence[float] = PAUSES
    ) -> None:
        self._config, self._source = config, model.path
        self._model = config.options.get("served_model_name", model.path)
        self._http = HttpClient(
            config.url,
            bearer(config.api_key_variable, "engine.api_key_variable"),
            seconds=config.timeout_seconds,
            pauses=pauses,
            failure=EngineFailed,
        )
        self._usage = Usage()
        self._probe = Probe.named(config, model)
        self._tokenizer = cache(partial(load_tokenizer, model))
        self._runs: dict[str, _Run] = {}
        self._controls: Controls | None = None
        self._logp_kind: LogpKind = "all"
        self._version = -1
        self._open = asyncio.Event()
        self._open.set()
        self._streams = asyncio.Semaphore(config.max_sequences)
        self._starting = asyncio.Lock()
        self._started = self._closed = False
        self._retries_before = 0

    @property
    def capabilities(self) -> Capabilities:
        """load_weights: known after `start`; only servers with endpoints for it."""
        return Capabilities(load_weights=self._controls is not None)

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        """Waits for a server that is not up yet, and resumes one that a swap left paused; then asks
        for one token, to see that ids and log-probabilities come with it, and of which
        distribution.
        """
        async with self._starting:
            if self._closed:
                raise EngineFailed("the engine is closed", "it cannot be used", "make a new one")
            if self._started:
                return
            try:
                listed = await self._http.get_json("/models", patience=self._config.timeout_seconds)
                names = [str(one.get("id")) for one in (listed or {}).get("data", [])]
                if names and self._model not in names:
                    raise unknown_model(self._http.url, self._model, names)
                self._drop_controls()
                # Before the first token is asked for: a paused server would never draw it.
                self._controls = await find_controls(self._http, self._config, self._source)
            except BadStatus as error:
                raise self._refusal(error) from error
            self._logp_kind = await self._find_logp_kind()
            if self._config.kind == "vllm" and self._controls is None:
                raise takes_no_weights(self._http.url, needed=True)
            self._retries_before = self._http.num_retries
            self._started = True

    async def generate(self, request: Request) -> Completion:
        if self._closed or not self._started:
            raise UniRLError(
                "the engine has not started", "start comes before all else", "await start()"
            )
        self._check_sampling(request.sampling)
        if request.num_left <= 0:
            return extend(request, (), (), (), "length")
        with self._usage.running(request.id):
            run = self._runs[request.id] = _Run()
            try:
                return await self._whole(request, run)
            except EngineFailed as error:
                error.partial = run.broken
                raise
            finally:
                run.idle.set()  # cancelled while its stream was being closed: a pause waits for it
                del self._runs[request.id]

    def so_far(self, id: str) -> Completion | None:
        run = self._runs.get(id)
        if run is None or run.request is None:
            return None
        return self._extend(run.request, run)

    async def abort(self, ids: list[str] | None = None) -> None:
        for name in list(self._runs) if ids is None else ids:
            if name in self._runs:
                self._runs[name].aborted = True
                self._runs[name].cut.set()

    async def pause(self, mode: PauseMode = "keep") -> None:
        self._open.clear()
        for run in self._runs.values():
            if mode != "wait":
                run.aborted = run.aborted or mode == "abort"
                run.cut.set()
        # A stream that is cut ends at once; one that is waited for has a deadline of its own.
        for run in list(self._runs.values()):
            await run.idle.wait()

    async def resume(self) -> None:
        self._open.set()

    async def load_weights(self, weights: Weights, version: int) -> None:
        """UniRLError where the server has no endpoints for it. After a failure the server's weights
        are unknown: the version is -1, and no token is drawn until `resume`.
        """
        if self._controls is None:
            raise takes_no_weights(self._http.url, needed=False)
        was_open = self._open.is_set()
        if was_open:
            await self.pause("keep")
        try:
            await self._controls.load(weights, version)
            await asyncio.to_thread(self._probe.expect, lambda: weights, version)
            precision = self._controls.precision(self._config)
            await self._probe.compare(self._score, self._controls.peer(), precision)
        except BaseException as error:
            self._version = -1
            if isinstance(error, BadStatus):
                raise self._refusal(error) from error
            raise
        self._version = version
        if was_open:
            await self.resume()

    async def sleep(self) -> None:
        """Not for servers."""

    async def wake(self) -> None:
        """Not for servers."""

    def stats(self) -> Mapping[str, float]:
        """retries: requests that were repeated since it started."""
        retries = self._http.num_retries - self._retries_before
        return {**self._usage.as_stats(), "retries": float(retries)}

    async def answers(self, seconds: float) -> bool:
        """Whether its server is there, asked once."""
        try:
            async with (
                asyncio.timeout(seconds),
                aclosing(await self._http.ask("GET", "/models")),
            ):
                return True
        except (HttpFailed, TimeoutError):
            return False

    async def close(self) -> None:
        self._closed = True
        await self.abort()
        self._drop_controls()

    def _drop_controls(self) -> None:
        if self._controls is not None:
            self._controls.close()
            self._controls = None

    async def _whole(self, request: Request, run: _Run) -> Completion:
        """Stream it, again and again where pauses cut it."""
        while True:
            await self._gate(run)
            if run.aborted:
                return extend(request, (), (), (), "aborted")
            async with self._streams:
                if not self._open.is_set():
                    continue
                done = await self._stream(request, run)
            if done.finish != "aborted" or run.aborted:
                return done
            request = replace(request, partial=done)
            if request.num_left <= 0:
                return replace(done, finish="length")

    async def _gate(self, run: _Run) -> None:
        if not run.aborted:
            run.cut.clear()
        if self._open.is_set():
            return
        waits = [asyncio.ensure_future(one.wait()) for one in (self._open, run.cut)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    async def _stream(self, request: Request, run: _Run) -> Completion:
        body = self._body(request)
        run.idle.clear()
        reading = asyncio.create_task(self._read(body, request, run))
        cutting = asyncio.create_task(run.cut.wait())
        run.tokens, run.logp, run.version, run.request = [], [], [], request
        try:
            await asyncio.wait({reading, cutting}, return_when=asyncio.FIRST_COMPLETED)
            finish: Finish = reading.result() if reading.done() else "aborted"
        except BadStatus as error:
            raise self._refusal(error) from error
        finally:
            for task in (reading, cutting):
                task.cancel()
            await asyncio.gather(reading, cutting, return_exceptions=True)
            run.idle.set()
        self._usage.count(prompt=len(body["prompt"]), generated=len(run.tokens))
        done, had = replace(self._extend(request, run), finish=finish), run.broken
        # Once it is given up, others continue from whatever there is.
        longer = had is not None and len(had.tokens) > len(done.tokens)
        return had if had and longer and self._closed and finish == "aborted" else done

    def _extend(self, request: Request, run: _Run) -> Completion:
        """As if it were aborted now."""
        return extend(request, run.tokens[:], run.logp[:], run.version[:], "aborted")

    async def _read(self, body: dict[str, Any], request: Request, run: _Run) -> Finish:
        """Fill the run. An answer that breaks off is asked for again, with the same seed: what had
        come of it is drawn once more, and counts once.
        """

        async def attempt() -> Finish:
            reason = None
            headers = {"X-Request-Id": f"{request.id}-{uuid.uuid4().hex[:8]}"}
            join = stop_join(request, self._tokenizer)
            try:
                async with self._http.events("/completions", body, headers) as chunks:
                    async for chunk in chunks:
                        for choice in chunk.get("choices") or []:
                            ids, logp = self._tokens(choice)
                            run.tokens += ids
                            run.logp += logp
                            own = [self._version] * len(ids)
                            run.version += choice.get("token_versions") or own
                            reason = choice.get("finish_reason") or reason
                        if join is not None and (end := join.end(run.tokens)) is not None:
                            del run.tokens[end:], run.logp[end:], run.version[end:]
                            return "stop"
                if reason is None:
                    raise HttpFailed("it ended a stream without a finish_reason")
            except HttpFailed:
                have = len(run.broken.tokens) if run.broken is not None else 0
                if len(request.document) - len(request.prompt) + len(run.tokens) > have:
                    run.broken = self._extend(request, run)
                run.tokens, run.logp, run.version = [], [], []
                raise
            return finish_of(reason)

        with self._http.explained("/completions"):
            return await self._http.again(attempt)

    def _tokens(self, choice: Mapping[str, Any]) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities of a chunk. Raises UniRLError when either is missing."""
        ids = choice.get("token_ids")
        logp = (choice.get("logprobs") or {}).get("token_logprobs") or []
        if ids is None and (choice.get("text") or logp):
            raise no_token_ids(self._http.url)
        ids = ids or []
        if len(logp) != len(ids):
            raise no_log_probabilities(self._http.url, len(ids), len(logp))
        return [int(one) for one in ids], [float(one) for one in logp]

    def _body(self, request: Request) -> dict[str, Any]:
        how = request.sampling
        return {
            "model": self._model,
            "prompt": list(request.document),
            "max_tokens": request.num_left,
            "temperature": how.temperature,
            "top_p": how.top_p,
            "top_k": how.top_k or -1,
            "seed": continuation_seed(request),
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
            # A server may have other defaults of its own, from the model's generation settings.
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            **({"stop": list(how.stop), "include_stop_str_in_output": True} if how.stop else {}),
        }

    async def _find_logp_kind(self) -> LogpKind:
        """Draw the likeliest token twice, the second time coldly: a server that reports certainty
        reports the distribution it draws from; one to which the cold makes no difference, the
        model's own.
        """
        top = await self._one_token(SamplingConfig(top_k=1, max_tokens=1))
        if top.logp[0] > -1e-6:
            return "all"
        cold = await self._one_token(SamplingConfig(top_k=1, temperature=0.05, max_tokens=1))
        return "raw" if abs(cold.logp[0] - top.logp[0]) < 1e-3 else "temperature"

    async def _one_token(self, sampling: SamplingConfig) -> Completion:
        request = Request(f"probe-{uuid.uuid4().hex[:8]}", (1, 1), sampling, 0)
        done = await self._stream(request, _Run())
        if not done.tokens:
            raise no_token_ids(self._http.url)
        return done

    async def _score(self, tokens: tuple[int, ...]) -> list[float]:
        body = {"model": self._model, "prompt": [list(tokens)], "echo": True, "logprobs": 1}
        # Some servers refuse to draw none.
        answer = await self._http.post_json("/completions", body | {"max_tokens": 1})
        choices = answer.get("choices") if isinstance(answer, dict) else None
        logps = ((choices or [{}])[0].get("logprobs") or {}).get("token_logprobs") or []
        logps = logps[1 : len(tokens)]
        if len(logps) < len(tokens) - 1 or None in logps:
            raise no_prompt_log_probabilities(self._http.url)
        return [float(one) for one in logps]

    def _check_sampling(self, how: SamplingConfig) -> None:
        cut = how.top_p < 1 or how.top_k > 0
        if (self._logp_kind == "raw" and how.temperature not in (0.0, 1.0)) or (
            self._logp_kind != "all" and cut
        ):
            raise other_distribution(
                self._http.url,
                f"it reports {self._logp_kind} ones; temperature is {how.temperature:g}, "
                f"top_p {how.top_p:g}, top_k {how.top_k}",
            )

    def _refusal(self, error: BadStatus) -> UniRLError | EngineFailed:
        variable = self._config.api_key_variable
        return refusal(error, self._http.url, model=self._model, key_variable=variable)


@dataclass
class _Run:
    cut: asyncio.Event = field(default_factory=asyncio.Event)  # its stream is to end now
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """No stream of it is open."""
    aborted: bool = False  # it is not to be continued
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    broken: Completion | None = None
    """The most that had come when an answer broke off."""
    request: Request | None = None
    """What the present stream was asked for."""

    def __post_init__(self) -> None:
        self.idle.set()
