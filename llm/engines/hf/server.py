"""Engine hf behind HTTP, for a run whose agents or rewards are on another machine: prompts come as
token ids, and tokens go back with their log-probabilities and the version that drew each.

    GET  /v1/models                     names of the model
    POST /v1/completions                as vLLM's server with return_token_ids, and token_versions
    GET  /unirl/engine                  {"version": 3, "checksum": "0f...", "dtype": "float32"}
    POST /unirl/weights?version=4       a safetensors file; answered as GET /unirl/engine

Every request needs the key, as a bearer. What is in flight while weights arrive is frozen, and
continues under them. Engine openai is the client.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

from unirl.errors import UniRLError
from unirl.llm.engine import Completion, EngineFailed, Request, SamplingConfig
from unirl.llm.engines.hf.engine import HfEngine
from unirl.llm.models.checksum import digits
from unirl.llm.packages import needs

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.02
"""How often what has been drawn is sent."""
_MOST_BODY = 16 << 20
"""Bytes of a request for tokens."""
_REASONS = {"stop": "stop", "length": "length", "aborted": "abort"}
Handler = Callable[["HttpRequest"], Awaitable["Response"]]


class TokenServer:
    """Serves an engine that it owns, on the engine's loop. key: what clients must send."""

    def __init__(self, engine: HfEngine, name: str, key: str) -> None:
        if not key:
            raise UniRLError(
                "an engine is to be served without a key",
                "who reaches it can replace its weights",
                "choose a secret",
            )
        self._engine, self._name, self._key = engine, name, f"Bearer {key}".encode()
        self._numbers, self._swap = count(), asyncio.Lock()
        self._checksum = ""
        self._server: Any = None

    async def serve(self, listening: socket.socket, ready: Callable[[], None]) -> None:
        """Until it is cancelled, or the engine fails. ready: called when it is served."""
        with needs("starlette", "engine hf cannot be served"):
            from starlette.applications import Starlette
            from starlette.routing import Route
        with needs("uvicorn", "engine hf cannot be served"):
            import uvicorn
        await self._engine.start()
        routes = [
            Route("/v1/models", self._checked(self._models)),
            Route("/v1/completions", self._checked(self._completions), methods=["POST"]),
            Route("/unirl/engine", self._checked(self._state)),
            Route("/unirl/weights", self._checked(self._weights), methods=["POST"]),
        ]
        settings = uvicorn.Config(
            Starlette(routes=routes), lifespan="off", log_level="error", access_log=False,
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(settings)
        serving = asyncio.ensure_future(self._server.serve([listening]))
        try:
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.01)
            ready()
            await asyncio.shield(serving)
        finally:
            self._server.should_exit = True
            await self._engine.close()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    def _checked(self, handler: Handler) -> Handler:
        from starlette.requests import ClientDisconnect

        async def handle(request: HttpRequest) -> Response:
            given = request.headers.get("authorization", "").encode()
            if not hmac.compare_digest(given, self._key):
                return _said(401, "the key is missing or wrong: send it as a bearer")
            try:
                return await handler(request)
            except EngineFailed as error:
                self._server.should_exit = True  # it never works again
                return _said(500, str(error))
            except (UniRLError, _Bad) as error:
                return _said(400, str(error))
            except ClientDisconnect:
                return _said(499, "the client has closed the connection")

        return handle

    async def _models(self, request: HttpRequest) -> Response:
        return _json({"object": "list", "data": [{"id": self._name, "object": "model"}]})

    async def _state(self, request: HttpRequest) -> Response:
        generation = self._engine.generation
        if generation is None:
            raise EngineFailed("the engine has failed", "it generates nothing", "see its log")
        dtype = str(generation.model.dtype).removeprefix("torch.")
        about = {"version": self._engine.version, "checksum": self._checksum, "dtype": dtype}
        return _json(about)

    async def _weights(self, request: HttpRequest) -> Response:
        with needs("safetensors", "weights come as safetensors"):
            from safetensors import SafetensorError
            from safetensors.torch import load_file
        version = request.query_params.get("version", "")
        if not version.isdecimal():
            raise _Bad(f"version must be a whole number, it is {version[:20]!r}")
        assert self._engine.generation is not None
        model = self._engine.generation.model
        room = 8 * sum(each.numel() for each in model.parameters()) + _MOST_BODY
        with tempfile.NamedTemporaryFile(prefix="unirl-weights-") as file:
            async for chunk in request.stream():
                room -= len(chunk)
                if room < 0:
                    raise _Bad("the file is larger than the model's weights can be")
                file.write(chunk)
            file.flush()
            try:
                weights = await asyncio.to_thread(load_file, file.name)
            except SafetensorError as error:
                raise _Bad(f"the body is no safetensors file: {error}") from None
            async with self._swap:
                await self._engine.pause("keep")
                try:
                    await self._engine.load_weights(weights, int(version))
                finally:
                    await self._engine.resume()
                self._checksum = digits(model)
        return await self._state(request)

    async def _completions(self, request: HttpRequest) -> Response:
        from starlette.responses import StreamingResponse

        body = await _body(request)
        if body.get("echo"):
            return self._scored(body)
        asked = self._asked(body)
        drawing = asyncio.ensure_future(self._engine.generate(asked))
        await asyncio.sleep(0)
        if drawing.done():
            drawing.result()  # what is wrong with it is answered with a status
        return StreamingResponse(self._chunks(asked.id, drawing), media_type="text/event-stream")

    async def _chunks(self, id: str, drawing: asyncio.Future[Completion]) -> AsyncIterator[str]:
        sent = 0
        try:
            while True:
                await asyncio.wait({drawing}, timeout=_LOOK_SECONDS)
                have = drawing.result() if drawing.done() else self._engine.so_far(id)
                if have is not None and (len(have.tokens) > sent or drawing.done()):
                    reason = _REASONS[have.finish] if drawing.done() else None
                    yield _event({"choices": [_choice(have, sent, reason)]})
                    sent = len(have.tokens)
                if drawing.done():
                    yield "data: [DONE]\n\n"
                    return
        except (UniRLError, EngineFailed) as error:
            self._server.should_exit = isinstance(error, EngineFailed)
            yield _event({"error": {"message": str(error), "code": 500}})
        finally:
            drawing.cancel()

    def _asked(self, body: Mapping[str, Any]) -> Request:
        stop = body.get("stop") or ()
        try:
            sampling = SamplingConfig(
                temperature=float(body.get("temperature", 1.0)),
                top_p=float(body.get("top_p", 1.0)),
                top_k=max(0, int(body.get("top_k", 0))),
                max_tokens=int(body["max_tokens"]),
                stop=(stop,) if isinstance(stop, str) else tuple(map(str, stop)),
            )
            seed = int(body.get("seed", 0)) % 2**63
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise _Bad(f"how to draw is not said as it must be: {error!r}") from None
        return Request(f"http-{next(self._numbers)}", _ids(body.get("prompt")), sampling, seed)

    def _scored(self, body: Mapping[str, Any]) -> Response:
        """Log-probabilities of a text's tokens: what a client compares the weights by."""
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or len(prompt) != 1:
            raise _Bad("echo takes one list of token ids")
        tokens, generation = _ids(prompt[0]), self._engine.generation
        if generation is None or max(tokens) >= generation.vocabulary or len(tokens) < 2:
            raise _Bad("echo takes two tokens of the model at least")
        if len(tokens) > generation.context:
            raise _Bad(f"echo takes {generation.context} tokens at most")
        logp = [None, *generation.score(tokens).tolist()]
        return _json({"choices": [{"logprobs": {"token_logprobs": logp}}]})


class _Bad(Exception):
    """Nothing can be made of a request."""


async def _body(request: HttpRequest) -> dict[str, Any]:
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MOST_BODY:
            raise _Bad(f"a request may have {_MOST_BODY} bytes at most")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _Bad(f"the body must be JSON: {error}") from None
    if not isinstance(body, dict):
        raise _Bad("the body must be an object")
    return body


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(type(one) is int for one in value):
        raise _Bad("prompt must be a list of token ids")
    if min(value) < 0:
        raise _Bad("token ids must be >= 0")
    return tuple(value)


def _choice(have: Completion, sent: int, reason: str | None) -> dict[str, Any]:
    return {
        "index": 0,
        "text": "",
        "token_ids": list(have.tokens[sent:]),
        "token_versions": list(have.version[sent:]),
        "logprobs": {"token_logprobs": list(have.logp[sent:])},
        "finish_reason": reason,
    }


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _json(value: Any, status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(json.dumps(value).encode(), status, media_type="application/json")


def _said(status: int, why: str) -> Response:
    return _json({"error": {"message": why, "code": status}}, status)
