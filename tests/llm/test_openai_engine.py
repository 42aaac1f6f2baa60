"""The engine behind an OpenAI-compatible server, against a real HTTP server of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.llm.completion_server import END, CompletionServer, distribution, table
from unirl.errors import UniRLError
from unirl.llm.engine import Completion, EngineConfig, EngineFailed, Request, SamplingConfig
from unirl.llm.engines.openai.engine import OpenAiEngine
from unirl.llm.http import BadStatus, HttpClient, bearer, require_url
from unirl.llm.models.model import ModelConfig
from unirl.llm.models.tiny import tiny_tokenizer

pytest.importorskip("httpx2", reason="servers are asked through it")


PAUSES = (0.01,) * 4
TOKENIZER = tiny_tokenizer()


def engine_at(server: CompletionServer, **settings: Any) -> OpenAiEngine:
    model = settings.pop("model", server.model)
    settings.setdefault("timeout_seconds", 5.0)
    config = EngineConfig(kind="openai", url=server.url, **settings)
    return OpenAiEngine(ModelConfig(path=model), config, pauses=PAUSES)


def request(name: str = "a", *, tokens: int = 20, **how: Any) -> Request:
    return Request(name, (3, 5), SamplingConfig(max_tokens=tokens, **how), seed=7)


def run(
    server: CompletionServer, what: Callable[[OpenAiEngine], Awaitable[Any]], **settings: Any
) -> Any:
    async def main() -> Any:
        engine = engine_at(server, **settings)
        try:
            await engine.start()
            return await what(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def check_logp(done: Completion, weights: torch.Tensor, how: SamplingConfig) -> None:
    last = 5
    for token, logp in zip(done.tokens, done.logp, strict=True):
        wanted = distribution(weights[last], how.temperature, how.top_k)[token]
        assert logp == pytest.approx(float(wanted), abs=1e-5)
        last = token


@pytest.mark.parametrize(
    "how", [{}, {"temperature": 0.7}, {"temperature": 1.3, "top_k": 5}], ids=str
)
def test_tokens_come_with_the_log_probability_of_the_distribution_they_were_drawn_from(
    how: dict[str, Any],
) -> None:
    with CompletionServer() as server:
        done = run(server, lambda engine: engine.generate(request(**how)))
        check_logp(done, server.weights, SamplingConfig(**how))
        assert done.finish == ("stop" if done.tokens[-1] == END else "length")
        assert set(done.version) == {-1}


def test_equal_seeds_draw_equal_tokens_and_other_seeds_do_not() -> None:
    async def many(engine: OpenAiEngine) -> list[Completion]:
        seeds = [1, 1, 2, 3, 4]
        return await asyncio.gather(
            *[
                engine.generate(Request(str(i), (3, 5), SamplingConfig(max_tokens=9), seed))
                for i, seed in enumerate(seeds)
            ]
        )

    with CompletionServer() as server:
        first, again, *others = run(server, many)
    assert first.tokens == again.tokens
    assert len({one.tokens for one in others}) == 3


def test_an_aborted_request_returns_what_there_is_and_continues_from_there() -> None:
    async def interrupted(engine: OpenAiEngine) -> tuple[Completion, Completion]:
        task = asyncio.create_task(engine.generate(request(tokens=40)))
        await asyncio.sleep(0.15)
        await engine.abort(["a", "unknown"])
        part = await task
        again = Request("b", (3, 5), SamplingConfig(max_tokens=40), 7, partial=part)
        return part, await engine.generate(again)

    with CompletionServer(seconds_per_token=0.02) as server:
        server.weights[:, END] = -100
        part, whole = run(server, interrupted)
        assert part.finish == "aborted"
        assert 0 < len(part.tokens) < 40
        assert whole.tokens[: len(part.tokens)] == part.tokens
        assert len(whole.tokens) == 40
        check_logp(whole, server.weights, SamplingConfig())
        assert server.bodies[-1]["prompt"] == [3, 5, *part.tokens]
        assert server.bodies[-1]["seed"] != 7  # not the numbers again that drew the beginning


def test_a_paused_engine_draws_nothing_and_continues_with_frozen_requests() -> None:
    async def frozen(engine: OpenAiEngine) -> tuple[int, int, Completion]:
        task = asyncio.create_task(engine.generate(request(tokens=30)))
        await asyncio.sleep(0.15)
        await engine.pause("keep")
        before = engine.stats()["generated_tokens"]
        late = asyncio.create_task(engine.generate(request("late", tokens=2)))
        await asyncio.sleep(0.2)
        between = engine.stats()["generated_tokens"]
        assert not task.done() and not late.done()
        await engine.resume()
        await late
        return int(before), int(between), await task

    with CompletionServer(seconds_per_token=0.01) as server:
        server.weights[:, END] = -100
        before, between, done = run(server, frozen)
    assert before == between
    assert len(done.tokens) == 30
    assert done.finish == "length"


def test_pause_wait_lets_requests_finish_and_pause_abort_ends_them() -> None:
    async def both(engine: OpenAiEngine) -> tuple[str, str]:
        ends = []
        for mode in ("wait", "abort"):
            task = asyncio.create_task(engine.generate(request(mode, tokens=20)))
            await asyncio.sleep(0.1)
            await engine.pause(mode)  # type: ignore[arg-type]
            ends.append((await asyncio.wait_for(task, 1)).finish)
            await engine.resume()
        return ends[0], ends[1]

    with CompletionServer(seconds_per_token=0.01) as server:
        server.weights[:, END] = -100
        assert run(server, both) == ("length", "aborted")


def test_a_pause_ends_whenever_a_request_that_it_cuts_is_cancelled() -> None:
    async def both(engine: OpenAiEngine) -> None:
        for num_steps in range(12):
            task = asyncio.create_task(engine.generate(request(str(num_steps), tokens=40)))
            await asyncio.sleep(0.05)
            pausing = asyncio.create_task(engine.pause("keep"))
            for _ in range(num_steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait_for(pausing, 2)
            await engine.resume()

    with CompletionServer(seconds_per_token=0.01) as server:
        server.weights[:, END] = -100
        run(server, both)


def test_an_abort_frees_a_request_that_waits_for_the_end_of_a_pause() -> None:
    async def stuck(engine: OpenAiEngine) -> Completion:
        await engine.pause()
        task = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0.05)
        await engine.abort()
        return await asyncio.wait_for(task, 1)

    with CompletionServer() as server:
        done = run(server, stuck)
    assert done.finish == "aborted"
    assert done.tokens == ()


def test_new_weights_reach_a_server_through_a_folder_and_every_token_bears_its_version(
    tmp_path: Path,
) -> None:
    pytest.importorskip("safetensors", reason="weights travel as a safetensors file")
    (tmp_path / "config.json").write_text("{}")
    new = table(5)
    new[:, END] = -100

    async def swapped(engine: OpenAiEngine) -> Completion:
        assert engine.capabilities.load_weights
        task = asyncio.create_task(engine.generate(request(tokens=40)))
        await asyncio.sleep(0.15)
        await engine.load_weights({"t": new}, 4)
        return await task

    with CompletionServer(kind="sglang", model=str(tmp_path), seconds_per_token=0.01) as server:
        server.weights[:, END] = -100
        old = server.weights
        done = run(server, swapped)
    count = done.version.count(-1)
    assert done.version == (-1,) * count + (4,) * (40 - count)
    assert 0 < count < 40
    last = 5
    for index, (token, logp) in enumerate(zip(done.tokens, done.logp, strict=True)):
        weights = old if index < count else new
        assert logp == pytest.approx(float(weights[last].log_softmax(-1)[token]), abs=1e-5)
        last = token


def test_a_server_that_refuses_weights_is_named_and_its_version_unknown(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="weights travel as a safetensors file")
    (tmp_path / "config.json").write_text("{}")

    async def swap_twice(engine: OpenAiEngine) -> None:
        await engine.load_weights({"t": table(1)}, 1)
        assert engine.version == 1
        server.refuses_weights = True
        with pytest.raises(EngineFailed, match=r"127\.0\.0\.1.*out of memory"):
            await engine.load_weights({"t": table(2)}, 2)
        assert engine.version == -1

    with CompletionServer(kind="sglang", model=str(tmp_path)) as server:
        run(server, swap_twice)


def test_a_plain_server_takes_no_weights_and_says_so() -> None:
    async def load(engine: OpenAiEngine) -> None:
        assert not engine.capabilities.load_weights
        await engine.load_weights({}, 1)

    with CompletionServer() as server, pytest.raises(UniRLError, match="takes no new weights"):
        run(server, load)


def test_engine_vllm_refuses_a_server_without_development_endpoints() -> None:
    async def start(url: str) -> None:
        config = EngineConfig(kind="vllm", url=url)
        await OpenAiEngine(ModelConfig(path="table"), config).start()

    with CompletionServer() as server, pytest.raises(UniRLError, match="development endpoints"):
        asyncio.run(start(server.url))


@pytest.mark.parametrize(
    ("server", "settings", "message"),
    [
        (CompletionServer(gives_ids=False), {}, "returns no token ids"),
        (CompletionServer(gives_logp=False), {}, "returns no log-probabilities"),
        (CompletionServer(), {"model": "other"}, "does not serve other.*it serves table"),
        (CompletionServer(key="secret"), {}, "asks for a key.*none was sent"),
    ],
    ids=["ids", "logp", "model", "key"],
)
def test_a_server_that_will_not_do_is_refused_at_the_start(
    server: CompletionServer, settings: dict[str, Any], message: str
) -> None:
    with server, pytest.raises(UniRLError, match=message):
        run(server, lambda engine: engine.generate(request()), **settings)


def test_raw_log_probabilities_are_refused_where_they_are_not_the_behaviours() -> None:
    with CompletionServer(processed=False) as server:
        done = run(server, lambda engine: engine.generate(request()))
        check_logp(done, server.weights, SamplingConfig())
        for how in ({"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.9}):
            with pytest.raises(UniRLError, match="processed_logprobs"):
                run(server, lambda engine, how=how: engine.generate(request(**how)))  # type: ignore[misc]


@pytest.mark.parametrize("likeliest", [4, 9])
def test_raw_log_probabilities_are_known_where_two_tokens_are_next_to_equally_likely(
    likeliest: int,
) -> None:
    weights = torch.zeros(32, 32)
    weights[:, [4, 9]] = 5.0
    weights[:, likeliest] += 1e-3  # even coldly, the other one is drawn nearly as often
    with (
        CompletionServer(processed=False, weights=weights) as server,
        pytest.raises(UniRLError, match="it reports raw ones"),
    ):
        run(server, lambda engine: engine.generate(request(temperature=0.7)))


def test_the_key_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with CompletionServer(key="secret") as server:
        with pytest.raises(UniRLError, match="KEY_OF_TEST"):
            run(server, lambda engine: engine.start(), api_key_variable="KEY_OF_TEST")
        monkeypatch.setenv("KEY_OF_TEST", "secret")
        assert run(
            server, lambda engine: engine.generate(request()), api_key_variable="KEY_OF_TEST"
        ).tokens
        monkeypatch.setenv("KEY_OF_TEST", "wrong")
        with pytest.raises(UniRLError, match="the one in KEY_OF_TEST is refused"):
            run(server, lambda engine: engine.start(), api_key_variable="KEY_OF_TEST")


def test_a_busy_server_is_asked_again() -> None:
    with CompletionServer(failures=2) as server:
        assert run(server, lambda engine: engine.generate(request())).tokens


def test_a_busy_server_is_asked_again_when_it_says_and_within_the_deadline() -> None:
    for asked, deadline, least, most in (("0.8", 5.0, 0.8, 5.0), ("1000", 0.5, 0.5, 5.0)):
        with CompletionServer(retry_after=asked) as server:

            async def later(engine: OpenAiEngine) -> float:
                server.failures = 1
                began = time.monotonic()
                await engine.generate(request())
                return time.monotonic() - began

            assert least <= run(server, later, timeout_seconds=deadline) < most


def test_a_request_has_as_many_attempts_as_there_are_pauses_or_as_long_as_it_is_given() -> None:
    body: dict[str, Any] = {"model": "table", "prompt": [[3, 5]], "echo": True}
    with CompletionServer() as server:

        def post(*, failures: int, patience: float) -> Any:
            server.failures = failures
            client = HttpClient(server.url, {}, seconds=5.0, pauses=PAUSES)
            return asyncio.run(client.post_json("/completions", body, patience=patience))

        assert post(failures=4, patience=0.0) and post(failures=9, patience=20.0)
        with pytest.raises(BadStatus, match="503"):
            post(failures=9, patience=0.0)
        assert server.failures == 9 - 5
        body["model"], asked = "other", len(server.bodies)
        with pytest.raises(BadStatus, match="404"):
            post(failures=0, patience=20.0)  # no patience fixes that
        assert len(server.bodies) == asked + 1


@pytest.mark.parametrize(("fault", "message"), [(500, "status|failed"), (0, "hung up")])
def test_an_order_that_may_have_arrived_is_not_repeated(fault: int, message: str) -> None:
    with (
        CompletionServer(kind="vllm", faults={"/init_weight_transfer_engine": fault}) as server,
        pytest.raises(EngineFailed, match=message),
    ):
        run(server, lambda engine: engine.load_weights({"t": table(1)}, 1), transfer="file")
    assert server.orders.count("/init_weight_transfer_engine") == 1


def test_an_order_that_cannot_have_arrived_is_repeated() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
    client = HttpClient(url, {}, pauses=PAUSES)
    with pytest.raises(UniRLError, match=r"cannot be reached.*5 attempts failed"):
        asyncio.run(client.post_json("/pause", once=True))


@pytest.mark.parametrize(
    "path", ["/pause", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"]
)
def test_a_swap_that_fails_leaves_the_server_running(path: str) -> None:
    async def swap(engine: OpenAiEngine) -> None:
        server.faults[path] = 500
        with pytest.raises(EngineFailed, match=f"failed at {path}"):
            await engine.load_weights({"t": table(1)}, 8)

    with CompletionServer(kind="vllm") as server:
        run(server, swap, transfer="file")
        assert server.orders[-1] == "/resume" and not server.paused and not server.updating
        # A server that did not pause must not be ordered to wait for weights: others draw tokens.
        assert ("/start_weight_update" in server.orders) == (path != "/pause")
        assert run(server, lambda engine: engine.generate(request())).tokens


def test_a_swap_that_is_cancelled_leaves_the_server_running() -> None:
    async def swap(engine: OpenAiEngine) -> None:
        server.faults["/update_weights"] = -1
        task = asyncio.create_task(engine.load_weights({"t": table(1)}, 8))
        while "/update_weights" not in server.orders:
            await asyncio.sleep(0.01)
        assert server.paused
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)

    with CompletionServer(kind="vllm") as server:
        run(server, swap, transfer="file")
        assert not server.paused


@pytest.mark.parametrize("updating", [False, True])
def test_a_server_that_a_killed_swap_left_paused_is_resumed(updating: bool) -> None:
    with CompletionServer(kind="vllm", paused=True, updating=updating) as server:
        assert run(server, lambda engine: engine.generate(request())).tokens
        assert not server.updating


def test_a_server_that_another_client_has_paused_is_waited_for() -> None:
    async def other() -> None:
        await asyncio.sleep(0.5)
        server.paused = False

    async def both() -> None:
        engine = engine_at(server)
        await asyncio.gather(other(), engine.start())
        await engine.close()

    with CompletionServer(kind="vllm", paused=True) as server:
        asyncio.run(both())
        assert server.orders == ["/collective_rpc"]


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"kind": "vllm", "faults": {"/is_paused": 500}}, EngineFailed),
        ({"kind": "vllm", "faults": {"/collective_rpc": 500}}, EngineFailed),
        ({"kind": "vllm", "faults": {"/collective_rpc": 0}}, EngineFailed),
        ({"kind": "sglang", "faults": {"/get_model_info": 503}}, EngineFailed),
        ({"kind": "vllm", "faults": {"/is_paused": 403}}, UniRLError),
    ],
    ids=str,
)
def test_a_server_that_fails_just_now_is_not_taken_for_one_without_endpoints(
    settings: dict[str, Any], kind: type[Exception]
) -> None:
    with CompletionServer(**settings) as server, pytest.raises(kind, match=r"status|hung up"):
        run(server, lambda engine: engine.generate(request()))


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "vllm", "has_extension": False},
        {"kind": "vllm", "faults": {"/is_paused": 405}},
        {"kind": "sglang", "faults": {"/get_model_info": 501}},
    ],
    ids=str,
)
def test_a_server_without_endpoints_for_weights_generates_all_the_same(
    settings: dict[str, Any],
) -> None:
    async def look(engine: OpenAiEngine) -> bool:
        await engine.generate(request())
        return engine.capabilities.load_weights

    with CompletionServer(**settings) as server:
        assert run(server, look) is False


@pytest.mark.parametrize(
    "url",
    [
        "http://me:pa55@127.0.0.1:9/v1",
        "http://pa55@127.0.0.1:9/v1",
        "me:pa55@127.0.0.1:9",
        "http://127.0.0.1:9/v1?key=pa55",
        "http://me:pa55@127.0.0.1:port/v1",
    ],
)
def test_a_url_that_holds_a_secret_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(UniRLError) as caught:
        require_url(url, "teacher.url", "teacher.api_key_variable")
    assert "teacher.url" in str(caught.value) and "pa55" not in str(caught.value)
    assert len(caught.value.parts) == 3


def test_a_broken_answer_is_asked_for_again_and_drawn_and_counted_once() -> None:
    async def many(engine: OpenAiEngine) -> tuple[list[Completion], dict[str, float]]:
        server.broken = list(broken)
        done = await asyncio.gather(
            *(
                engine.generate(Request(str(i), (3, 5), SamplingConfig(max_tokens=12), seed=i))
                for i in range(8)
            )
        )
        return done, dict(engine.stats())

    broken: list[str] = []
    with CompletionServer() as server:
        server.weights[:, END] = -100
        whole, sound = run(server, many)
        broken = ["json", "reset", "500", "429", "", "503", "end", "error", "json"]
        again, stats = run(server, many)
    assert again == whole
    assert sound["retries"] == 0 and stats["retries"] == 8
    for name in ("generated_tokens", "prompt_tokens"):
        assert stats[name] == sound[name]


@pytest.mark.parametrize(
    ("broken", "message"),
    [("json", "answers nonsense"), ("reset", "hung up"), ("end", "hung up"), ("429", "not now")],
)
def test_answers_that_keep_breaking_off_are_an_engine_that_failed(
    broken: str, message: str
) -> None:
    async def later(engine: OpenAiEngine) -> None:
        asked, server.broken = len(server.bodies), [broken] * 99
        with pytest.raises(EngineFailed, match=message):
            await engine.generate(request())
        assert len(server.bodies) == asked + 1 + len(PAUSES)

    with CompletionServer() as server:
        server.weights[:, END] = -100
        run(server, later)


def test_a_cut_between_two_attempts_keeps_nothing_of_the_broken_one() -> None:
    async def cut(engine: OpenAiEngine) -> Completion:
        server.broken, server.retry_after = ["reset", "503"], "5"
        task = asyncio.create_task(engine.generate(request()))
        while engine.stats()["retries"] < 2:
            await asyncio.sleep(0.01)
        await engine.abort()
        return await asyncio.wait_for(task, 2)

    with CompletionServer() as server:
        server.weights[:, END] = -100
        assert run(server, cut).tokens == ()


def test_a_server_that_keeps_failing_is_an_engine_that_failed() -> None:
    async def later(engine: OpenAiEngine) -> None:
        server.failures = 100
        await engine.generate(request())

    with CompletionServer() as server, pytest.raises(EngineFailed, match=r"503.*not yet"):
        run(server, later)


def test_a_server_that_is_not_there_is_named_with_its_address() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
    config = EngineConfig(kind="openai", url=url, timeout_seconds=1.0)
    with pytest.raises(EngineFailed, match=f"{url} cannot be reached"):
        asyncio.run(OpenAiEngine(ModelConfig(), config, pauses=PAUSES).start())


@pytest.mark.parametrize(
    ("fault", "message"),
    [({"silent_after": 3}, "silent"), ({"hangs_up_after": 3}, "hung up.*5 attempts failed")],
    ids=["silent", "hangs up"],
)
def test_a_stream_that_breaks_off_fails_within_the_deadline(
    fault: dict[str, int], message: str
) -> None:
    async def later(engine: OpenAiEngine) -> None:
        server.weights[:, END] = -100
        for name, value in fault.items():
            setattr(server, name, value)
        await asyncio.wait_for(engine.generate(request()), 3)

    with CompletionServer() as server, pytest.raises(EngineFailed, match=message):
        run(server, later, timeout_seconds=0.5)


def test_what_is_no_api_is_called_nonsense() -> None:
    import http.server
    import threading

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>hello</html>")

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    config = EngineConfig(kind="openai", url=f"http://127.0.0.1:{server.server_port}")
    try:
        with pytest.raises(EngineFailed, match="nonsense"):
            asyncio.run(OpenAiEngine(ModelConfig(), config).start())
    finally:
        server.shutdown()
        server.server_close()


def test_at_most_max_sequences_are_asked_for_at_a_time() -> None:
    async def many(engine: OpenAiEngine) -> None:
        await asyncio.gather(*(engine.generate(request(str(i), tokens=5)) for i in range(6)))

    with CompletionServer(seconds_per_token=0.01) as server:
        run(server, many, max_sequences=2)
        assert server.most_at_a_time == 2


def test_many_streams_do_not_wait_for_each_others_connections() -> None:
    async def many(engine: OpenAiEngine) -> None:
        await asyncio.gather(
            *(engine.generate(request(str(i), tokens=1)) for i in range(num_streams))
        )

    num_streams = 150  # httpx2 by itself opens 100 connections
    with CompletionServer(seconds_per_token=2.0) as server:
        run(server, many, max_sequences=num_streams, timeout_seconds=60.0)
        assert server.most_at_a_time > 100


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("way", ["left", "cancelled"])
def test_a_stream_that_is_left_or_cancelled_cuts_its_connection_at_once(way: str) -> None:
    body = {"model": "table", "prompt": [5], "max_tokens": 1000, "temperature": 1.0}
    body |= {"top_k": 0, "seed": 1}

    async def first_chunk(client: HttpClient, seen: asyncio.Event) -> None:
        async with client.events("/completions", body) as chunks:
            async for _ in chunks:
                seen.set()
                if way == "left":
                    break
        # The loop still runs: what is seen is not its end.
        assert await asyncio.to_thread(server.cut.wait, 5)

    async def main(client: HttpClient) -> None:
        seen = asyncio.Event()
        task = asyncio.create_task(first_chunk(client, seen))
        await seen.wait()
        if way == "cancelled":
            task.cancel()
            assert await asyncio.to_thread(server.cut.wait, 5)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with CompletionServer(seconds_per_token=0.02) as server:
        server.weights[:, END] = -100
        asyncio.run(main(HttpClient(server.url, {})))
    gc.collect()


@pytest.mark.filterwarnings("error")
def test_a_client_serves_one_event_loop_after_the_other() -> None:
    with CompletionServer() as server:
        client = HttpClient(server.url, {})
        for _ in range(2):
            assert asyncio.run(client.get_json("/models")) == {"data": [{"id": "table"}]}
    gc.collect()


def test_an_answer_that_ends_too_early_is_a_server_that_hung_up() -> None:
    async def main() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}")
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await HttpClient(f"http://127.0.0.1:{port}/v1", {}, pauses=(0.01,)).get_json("/models")

    with pytest.raises(UniRLError, match="hung up"):
        asyncio.run(main())


def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY_OF_TEST", "secret\nX-Other: 1")
    with pytest.raises(UniRLError, match="no line breaks") as caught:
        HttpClient("http://127.0.0.1:9/v1", bearer("KEY_OF_TEST", "engine.api_key_variable"))
    assert "secret" not in str(caught.value)


def letters(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


@pytest.mark.parametrize(
    ("part", "said", "tokens"),
    [
        ("bcdef", "", "bcdefgh"),  # the stop text is cut in two
        ("bcdef", "fg", "bcdef" + "fg" + "hijklm"),  # a tool said its beginning
        ("bcdefgh", "", "bcdefghijklm"),  # an earlier turn ended with it
        ("bc", "", "bcdefgh"),
    ],
)
def test_a_continued_completion_ends_where_a_stop_text_is_whole_in_its_turn(
    part: str, said: str, tokens: str
) -> None:
    drawn = letters(part)
    partial = Completion(drawn, (0.0,) * len(drawn), (-1,) * len(drawn), "aborted")
    if said:
        partial = partial.with_observation(letters(said))
    sampling = SamplingConfig(max_tokens=len(letters(part + said)) + 20, stop=("fgh", "m"))
    again = Request("a", letters("a"), sampling, 7, partial)
    with CompletionServer(model="tiny", decode=TOKENIZER.decode) as server:
        # Each letter is followed by the next one.
        server.weights = torch.eye(len(TOKENIZER)).roll(1, 1) * 99
        done = run(server, lambda engine: engine.generate(again))
    assert TOKENIZER.decode(done.tokens) == tokens
    assert done.finish == "stop" and len(done.logp) == len(done.tokens)


def test_a_pause_within_a_stop_text_does_not_hide_it() -> None:
    async def paused(engine: OpenAiEngine) -> Completion:
        sampling = SamplingConfig(max_tokens=20, stop=("fghijklm",))
        task = asyncio.create_task(engine.generate(Request("a", letters("a"), sampling, 7)))
        while len(server.streamed) < 9:  # b .. j
            await asyncio.sleep(0.002)
        await engine.pause()
        await engine.resume()
        return await task

    with CompletionServer(model="tiny", decode=TOKENIZER.decode, seconds_per_token=0.03) as server:
        server.weights = torch.eye(len(TOKENIZER)).roll(1, 1) * 99
        done = run(server, paused)
        assert len(server.bodies) > 2 and server.bodies[-1]["prompt"][1:] != []
    assert TOKENIZER.decode(done.tokens) == "bcdefghijklm"


def test_the_request_leaves_no_default_to_the_server() -> None:
    with CompletionServer() as server:
        run(server, lambda engine: engine.generate(request(stop=("\n",))))
        body = server.bodies[-1]
    assert {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"} <= set(body)
    assert body["include_stop_str_in_output"] is True
    assert json.dumps(body)
