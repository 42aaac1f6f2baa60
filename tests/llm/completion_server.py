"""A small HTTP server that speaks OpenAI's completions API as vLLM and SGLang extend it, around a
language model that is a table: the next token depends on the last one alone.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 32
END = 31


def table(seed: int) -> torch.Tensor:
    """Logits of the next token by the last one, [V, V]."""
    return torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 2


def distribution(logits: torch.Tensor, temperature: float, top_k: int) -> torch.Tensor:
    """Log-probabilities of what is drawn, [V]."""
    logits = logits / max(temperature, 1e-4)
    if top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], float("-inf"))
    return logits.log_softmax(-1)


@dataclass
class CompletionServer:
    """Listens on a port of this machine between `with`."""

    model: str = "table"
    port: int = 0
    """0: a free one."""
    key: str = ""
    gives_ids: bool = True
    gives_logp: bool = True
    tells_prompts: bool = True
    """Log-probabilities of a prompt's tokens."""
    processed: bool = True
    """Log-probabilities of the distribution that is drawn from; else the model's own."""
    failures: int = 0
    """Requests to answer with 503 before the first good one."""
    retry_after: str = ""
    """What then comes with them, in a header of that name."""
    broken: list[str] = field(default_factory=list)
    """What becomes of the next completions, one after the other: "json", cut off within a chunk;
    "end", cut off between two; "reset", the connection is; "error", as a chunk; or a status. "" is
    a good one.
    """
    faults: dict[str, int] = field(default_factory=dict)
    """Statuses by path, always; 0: it hangs up, -1: it hangs."""
    seconds_per_token: float = 0.0
    silent_after: int = -1
    """Tokens after which nothing comes any more."""
    hangs_up_after: int = -1
    kind: str = "plain"
    """sglang, vllm: has endpoints for new weights. vllm's take them, and cannot prove it."""
    has_extension: bool = True
    """vllm: UniRL's, in its workers."""
    paused: bool = False
    """vllm: completions wait."""
    updating: bool = False
    """vllm: an update of weights has begun and not ended; a token drawn meanwhile ends it."""
    orders: list[str] = field(default_factory=list)
    """Paths of all POST requests but those for completions."""
    refuses_weights: bool = False
    weights: torch.Tensor = field(default_factory=lambda: table(0))
    network: Any = None
    """A model of transformers, in place of the table."""
    ignores: str = ""
    """What the names of parameters have in them that a swap leaves as they were."""
    decode: Callable[[list[int]], str] | None = None
    """The text of tokens: of chunks, and what stop texts are looked for in."""
    version: str = "default"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of all completion requests."""
    streamed: list[int] = field(default_factory=list)
    """Tokens of all completions."""
    cut: threading.Event = field(default_factory=threading.Event)
    """A stream's reader has gone before its end."""
    most_at_a_time: int = 0
    """Streams that were open together."""

    def __enter__(self) -> CompletionServer:
        outer, self._lock, self._at_a_time = self, threading.Lock(), 0

        class Handler(_Handler):
            server_state = outer

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256  # many connect at once

        self._http = Server(("127.0.0.1", self.port), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Of the token after each, [n, V]."""
        if self.network is None:
            return self.weights[tokens]
        found: torch.Tensor = self.network(torch.tensor([tokens])).logits[0]
        return found

    def count(self, change: int) -> None:
        """So many streams more are open."""
        with self._lock:
            self._at_a_time += change
            self.most_at_a_time = max(self.most_at_a_time, self._at_a_time)


class _Handler(BaseHTTPRequestHandler):
    server_state: CompletionServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self._stopped():
            return
        if self.path == "/v1/models":
            self._answer(200, {"data": [{"id": self.server_state.model}]})
        elif self.path == "/get_model_info" and self.server_state.kind == "sglang":
            self._answer(200, {"weight_version": self.server_state.version})
        elif self.path == "/is_paused" and self.server_state.kind == "vllm":
            self._answer(200, {"is_paused": self.server_state.paused})
        else:
            self._answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"null")
        if self.path != "/v1/completions":
            self.server_state.orders.append(self.path)
        if self._stopped():
            return
        if self.path == "/v1/completions":
            self._complete(body)
        elif self.path == "/update_weights_from_disk" and self.server_state.kind == "sglang":
            self._update(body)
        elif self.server_state.kind == "vllm":
            self._control(body)
        else:
            self._answer(404, {"detail": "Not Found"})

    def _stopped(self) -> bool:
        state = self.server_state
        if state.key and self.headers.get("Authorization") != f"Bearer {state.key}":
            self._answer(401, {"error": "Unauthorized"})
            return True
        if state.failures > 0:
            state.failures -= 1
            self._answer(503, {"error": "not yet"})
            return True
        status = state.faults.get(self.path.partition("?")[0])
        if status is None:
            return False
        if status == -1:
            time.sleep(30)
        elif status == 0:
            self.close_connection = True
        else:
            self._answer(status, {"error": "it is broken"})
        return True

    def _control(self, body: dict[str, Any]) -> None:
        """vLLM's development endpoints, as far as they are asked before a proof."""
        state, path = self.server_state, self.path.partition("?")[0]
        if path in ("/pause", "/resume"):
            state.paused = path == "/pause"
        elif path == "/start_weight_update" and state.updating:
            error = "start_weight_update while one is active. Call finish_weight_update first."
            self._answer(500, {"error": error})
            return
        elif path in ("/start_weight_update", "/finish_weight_update"):
            state.updating = path == "/start_weight_update"
        elif path == "/collective_rpc" and not state.has_extension:
            error = f"Worker failed with error 'Method '{body['method']}' is not implemented.'"
            self._answer(500, {"error": error})
            return
        workers = [{"dtype": "float32", "device": "cpu"}]
        self._answer(200, {"results": workers if path == "/collective_rpc" else []})

    def _update(self, body: dict[str, Any]) -> None:
        from safetensors.torch import load_file

        if self.server_state.refuses_weights:
            self._answer(200, {"success": False, "message": "out of memory"})
            return
        assert (Path(body["model_path"]) / "config.json").exists()
        state = self.server_state
        sent = load_file(Path(body["model_path"]) / "model.safetensors")
        if state.network is None:
            state.weights = sent["t"]
        else:
            with torch.no_grad():
                for name, value in state.network.named_parameters():
                    if not (state.ignores and state.ignores in name):
                        value.copy_(sent[name])
        self.server_state.version = body["weight_version"]
        self._answer(200, {"success": True, "message": "ok"})

    def _complete(self, body: dict[str, Any]) -> None:
        state = self.server_state
        state.bodies.append(body)
        if body["model"] != state.model:
            self._answer(404, {"error": f"The model `{body['model']}` does not exist."})
            return
        if body.get("echo"):
            self._answer(200, {"choices": self._echoed(body)})
            return
        while state.paused:
            time.sleep(0.01)
        if state.updating:
            state.faults["/v1/completions"] = 500
            self._answer(500, {"error": "EngineCore encountered an issue."})
            return
        with state._lock:
            broken = state.broken.pop(0) if state.broken else ""
        if broken.isdigit():
            self._answer(int(broken), {"error": "not now"})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        generator = torch.Generator().manual_seed(body["seed"])
        tokens, drawn_tokens = list(body["prompt"]), []
        state.count(1)
        try:
            for index in range(body["max_tokens"]):
                if index == state.silent_after:
                    time.sleep(30)
                if broken and index == 2:
                    self._break(broken)
                    return
                if index == state.hangs_up_after:
                    self.connection.close()
                    return
                time.sleep(state.seconds_per_token)
                logits = state.logits(tokens)[-1]
                drawn = distribution(logits, body["temperature"], body["top_k"])
                last = int(torch.multinomial(drawn.exp(), 1, generator=generator))
                reported = drawn if state.processed else logits.log_softmax(-1)
                tokens.append(last)
                drawn_tokens.append(last)
                state.streamed.append(last)
                text = state.decode(drawn_tokens) if state.decode else ""
                stopped = last == END or any(one in text for one in body.get("stop", ()))
                ended = stopped or index + 1 == body["max_tokens"]
                choice: dict[str, Any] = {
                    "index": 0,
                    "text": state.decode([last]) if state.decode else f"<{last}\u2028>",
                    "finish_reason": ("stop" if stopped else "length") if ended else None,
                }
                if state.gives_ids and body.get("return_token_ids"):
                    choice["token_ids"] = [last]
                if state.gives_logp and body.get("logprobs") is not None:
                    choice["logprobs"] = {"token_logprobs": [float(reported[last])]}
                self._chunk({"choices": [choice]})
                if ended:
                    break
            self._piece(b"data: [DONE]\n\n")
            self._piece(b"")
        except OSError:
            state.cut.set()  # as it should be
        finally:
            state.count(-1)

    def _echoed(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Each prompt with the log-probability of its tokens and a token more; last one first."""
        choices = []
        for index, prompt in enumerate(body["prompt"]):
            logp = self.server_state.logits(prompt).log_softmax(-1)
            known = [float(logp[i, token]) for i, token in enumerate(prompt[1:])]
            gives = self.server_state.gives_logp and self.server_state.tells_prompts
            logprobs = {"token_logprobs": [None, *known, -0.5]} if gives else None
            choices.append({"index": index, "text": "", "logprobs": logprobs})
        return choices[::-1]

    def _break(self, how: str) -> None:
        if how == "json":
            self._piece(b'data: {"choices": [{"token_i\n\n')
        elif how == "error":
            self._chunk({"error": {"message": "out of memory", "code": 500}})
        elif how == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            return
        self._piece(b"")
        self.close_connection = True

    def _chunk(self, value: dict[str, Any]) -> None:
        # In two pieces, and U+2028 as it is: clients must take neither for the end of a line.
        data = f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()
        self._piece(data[:7])
        self._piece(data[7:])

    def _piece(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _answer(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        if status == 503 and self.server_state.retry_after:
            self.send_header("Retry-After", self.server_state.retry_after)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
