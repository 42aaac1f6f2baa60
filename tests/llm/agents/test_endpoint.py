"""The endpoint by raw HTTP: three dialects, retries, swaps of weights, and what strangers send."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="language models need the extra llm")
pytest.importorskip("starlette", reason="the endpoint needs the extra agents")
pytest.importorskip("uvicorn", reason="the endpoint needs the extra agents")
pytest.importorskip("httpx2", reason="the endpoint's tests need the extra llm")

import httpx2

from tests.llm.agents.fuzz import bodies, raw, statuses
from tests.llm.agents.hosted import Hosted, hosted, scripted
from unirl.llm.agents.config import AgentConfig
from unirl.llm.agents.episode import ROOT
from unirl.llm.agents.session import Session
from unirl.llm.engine import Completion, Request

USER = [{"role": "user", "content": "what is 12 and 30?"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
CALL = 'ok <tool_call>{"name": "add", "arguments": {"a": 12}}</tool_call>'
THOUGHT = "<think>hm</think>\n\n" + "a long answer of many words. " * 3


@pytest.fixture(scope="module")
def host() -> Iterator[Hosted]:
    with hosted() as one:
        yield one


def post(host: Hosted, key: str, path: str, body: Any, **headers: str) -> Any:
    sent = {"authorization": f"Bearer {key}", **headers}
    url = f"{host.endpoint.root}/v1/{path}"
    if sent.get("content-type") == "":  # as of a body whose kind nobody knows
        return httpx2.post(
            url, content=json.dumps(body), headers={"authorization": f"Bearer {key}"}
        )
    return httpx2.post(url, json=body, headers=sent, timeout=60)


def events(answer: Any) -> list[Any]:
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def extends(session: Session) -> None:
    for number, turn in enumerate(session.episode.turns):
        path = session.episode.tokens(turn.parent) if turn.parent != ROOT else ()
        assert session.prompt_tokens(number) == path + turn.given


def test_chat_completions_answer_whole_and_in_a_stream(host: Hosted) -> None:
    for stream in (False, True):
        _, key = host.open(scripted(THOUGHT, CALL))
        body = {"model": "x", "messages": USER, "tools": [TOOL], "stream": stream, "foo": 1}
        body |= {"stream_options": {"include_usage": True}} if stream else {}
        for text, calls in ((THOUGHT.partition("\n\n")[2], 0), ("ok", 1)):
            answer = post(host, key, "chat/completions", body)
            assert answer.status_code == 200
            if not stream:
                message = answer.json()["choices"][0]["message"]
                usage = answer.json()["usage"]
            else:
                *chunks, last = events(answer)
                usage = last["usage"]
                message = {"content": "", "tool_calls": []}
                for chunk in chunks:
                    delta = chunk["choices"][0]["delta"]
                    message["content"] += delta.get("content", "")
                    for part in delta.get("tool_calls", ()):
                        if "id" in part:
                            message["tool_calls"].append(part)
                        else:
                            own = message["tool_calls"][part["index"]]["function"]
                            own["arguments"] += part["function"]["arguments"]
                assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls" if calls else 1
            assert message["content"] == text
            assert len(message.get("tool_calls", ())) == calls
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 12}


def test_responses_answer_whole_and_in_a_stream(host: Hosted) -> None:
    for stream in (False, True):
        session, key = host.open(scripted(CALL, "42."))
        tool = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}
        items: list[Any] = [*USER]
        for turn in range(2):
            body = {"input": items, "instructions": "be brief", "tools": [tool], "stream": stream}
            answer = post(host, key, "responses", body)
            found = events(answer)[-1]["response"] if stream else answer.json()
            assert found["status"] == "completed"
            items += found["output"]
            if turn == 0:
                call = found["output"][-1]
                assert (call["type"], call["name"]) == ("function_call", "add")
                output = {"call_id": call["call_id"], "output": "42"}
                items.append({"type": "function_call_output", **output})
        assert found["output"][0]["content"][0]["text"] == "42."
        assert [turn.origin for turn in session.episode.turns] == ["prompt", "extended"]
        extends(session)


def test_messages_answer_whole_and_in_a_stream(host: Hosted) -> None:
    for stream in (False, True):
        session, key = host.open(scripted(CALL, "42."))
        tool = {"name": "add", "input_schema": PARAMETERS}
        said: list[Any] = [*USER]
        body = {"system": [{"type": "text", "text": "be brief"}], "tools": [tool]}
        for _ in range(2):
            sent = {**body, "messages": said, "stream": stream, "max_tokens": 100}
            answer = httpx2.post(f"{host.endpoint.root}/s/{key}/v1/messages", json=sent, timeout=60)
            found = answer.json() if not stream else _anthropic(events(answer))
            said.append({"role": "assistant", "content": found["content"]})
            block = found["content"][-1]
            if block["type"] == "tool_use":
                assert block["input"] == {"a": 12} and found["stop_reason"] == "tool_use"
                result = {"type": "tool_result", "tool_use_id": block["id"], "content": "42"}
                said.append({"role": "user", "content": [result]})
        assert block["text"] == "42." and found["stop_reason"] == "end_turn"
        assert [turn.origin for turn in session.episode.turns] == ["prompt", "extended"]
        extends(session)
        counted = post(host, key, "messages/count_tokens", {**body, "messages": USER})
        assert counted.json()["input_tokens"] == len(session.prompt_tokens(0))


def _anthropic(found: list[Any]) -> dict[str, Any]:
    """A message put together from its events, as the API's own client does it."""
    message: dict[str, Any] = {}
    for event in found:
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            message["content"].append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            block["json"] += delta.get("partial_json", "")
            block["text"] = block.get("text", "") + delta.get("text", "")
        elif event["type"] == "message_delta":
            message |= event["delta"]
    for block in message["content"]:
        written = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
            del block["text"]
    return message


def test_token_ids_and_logprobs_are_those_that_were_drawn(host: Hosted) -> None:
    session, key = host.open()
    body = {"messages": USER, "logprobs": True, "return_token_ids": True, "temperature": 0.1}
    answer = post(host, key, "chat/completions", body)
    found, (turn,) = answer.json(), session.episode.turns
    assert tuple(found["prompt_token_ids"]) == turn.given
    (choice,) = found["choices"]
    assert tuple(choice["token_ids"]) == turn.completion.tokens
    logp = tuple(entry["logprob"] for entry in choice["logprobs"]["content"])
    assert logp == turn.completion.logp
    assert answer.headers["x-unirl-ignored"] == "temperature"
    assert host.requests[-1].sampling.temperature == 1.0


def test_a_conversation_with_the_engine_extends_its_path_to_the_token(host: Hosted) -> None:
    session, key = host.open()
    said: list[Any] = [*USER]
    for turn in range(4):
        answer = post(host, key, "chat/completions", {"messages": said}).json()
        said.append(answer["choices"][0]["message"])
        said.append({"role": "user", "content": f"and {turn}?"})
    extends(session)
    host.run(asyncio.sleep(0))  # it has heard that the last answer was read
    assert session.counts == {"prompt": 1, "extended": 3}
    assert sum(sum(each.mask) for each in session.episode.segments()) == session.episode.num_drawn


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("chat/completions", {"messages": USER, "n": 2}, 400, "n must be 1"),
        ("chat/completions", {"messages": USER, "logit_bias": {"1": 1}}, 400, "logit_bias"),
        ("chat/completions", {"messages": []}, 400, "one message"),
        ("chat/completions", {"messages": [{"role": "x"}]}, 400, "messages[0].role"),
        ("chat/completions", {"messages": USER, "max_tokens": -1}, 400, "at least 1"),
        ("chat/completions", [], 400, "must be an object"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "reads text alone",
        ),
        ("responses", {"input": "x", "previous_response_id": "y"}, 400, "whole input"),
        ("responses", {"input": "x", "tools": [{"type": "web_search"}]}, 400, "only functions"),
        ("messages", {"messages": USER, "system": 3}, 400, "system"),
        ("nowhere", {}, 404, "is not served"),
    ],
)
def test_bad_input_is_answered_with_a_sentence(
    host: Hosted, path: str, body: Any, status: int, says: str
) -> None:
    answer = post(host, host.open()[1], path, body)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


def test_a_key_of_nobody_and_an_ended_episode_are_refused(host: Hosted) -> None:
    assert post(host, "nobody", "chat/completions", {"messages": USER}).status_code == 401
    session, key = host.open()
    host.loop.call_soon_threadsafe(session.close)
    time.sleep(0.05)
    assert post(host, key, "chat/completions", {"messages": USER}).status_code == 410
    host.endpoint.forget(key)
    assert post(host, key, "chat/completions", {"messages": USER}).status_code == 401
    _, key = host.open(config=AgentConfig(max_turns=1))
    assert post(host, key, "chat/completions", {"messages": USER}).status_code == 200
    answer = post(host, key, "chat/completions", {"messages": USER})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "max_turns")


def test_only_answers_and_4xx_come_of_whatever_is_sent(
    host: Hosted, caplog: pytest.LogCaptureFixture
) -> None:
    session, key = host.open(_end_at_once)
    address = ("127.0.0.1", int(host.endpoint.root.rpartition(":")[2]))
    with httpx2.Client(timeout=60) as client:
        for path, body, headers in bodies(seed=0, count=400):
            sent = {"authorization": f"Bearer {key}", **headers}
            answer = client.post(f"{host.endpoint.root}/v1/{path}", content=body, headers=sent)
            assert answer.status_code < 500, (path, body[:300], answer.text)
            assert answer.status_code < 300 or "error" in answer.json()
    for kind, data, must in raw(seed=0, count=100, key=key):
        found = statuses(address, data, kind)
        assert all(each < 500 for each in found) and (found or not must), (kind, data[:300])
    extends(session)
    gc.collect()  # tasks that nobody has waited for complain when they are collected
    assert not caplog.records


async def _end_at_once(request: Request) -> Completion:
    return Completion((2,), (0.0,), (0,), "stop")


def test_a_retry_storm_draws_each_request_once(host: Hosted) -> None:
    session, key = host.open()
    host.requests.clear()

    def ask(number: int) -> None:
        body = {"messages": [{"role": "user", "content": f"question {number}"}]}
        url = f"{host.endpoint.root}/v1/chat/completions"
        for attempt in range(3):
            headers = {
                "authorization": f"Bearer {key}",
                "x-stainless-retry-count": str(attempt),
            }
            # The first attempts give up at once: the answer is still being drawn.
            wait = 0.01 * (number % 3) + 0.005 if attempt < 2 else 60.0
            try:
                answer = httpx2.post(url, json=body, headers=headers, timeout=wait)
                assert answer.status_code == 200
                return
            except httpx2.TimeoutException:
                continue
        raise AssertionError("no attempt was answered")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(24)))
    assert len(session.episode.turns) == 24
    assert len({request.prompt for request in host.requests}) == len(host.requests) == 24
    assert all(turn.trained for turn in session.episode.turns)


def test_a_client_that_leaves_for_good_ends_its_request_or_leaves_a_turn_of_nobody() -> None:
    cancelled = threading.Event()

    async def draw(request: Request) -> Completion:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError

    async def slow(request: Request) -> Completion:
        await asyncio.sleep(0.4)
        return await _end_at_once(request)

    with hosted(retry_seconds=0.5) as host:
        (never, first), (late, second) = host.open(draw), host.open(slow)
        for key in (first, second):
            url = f"{host.endpoint.url(key)}/chat/completions"
            with pytest.raises(httpx2.TimeoutException):
                httpx2.post(url, json={"messages": USER}, timeout=0.2)
        assert cancelled.wait(10)
        assert never.episode.turns == []
        deadline = time.monotonic() + 10
        while not late.episode.turns:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert not late.episode.turns[0].trained
        retry = {"x-stainless-retry-count": "1"}
        answer = post(host, second, "chat/completions", {"messages": USER}, **retry)
        assert answer.headers["x-unirl-origin"] == "replayed"
        host.run(asyncio.sleep(0))
        assert [turn.trained for turn in late.episode.turns] == [True]


def test_an_answer_that_was_not_read_to_its_end_is_learned_once_a_retry_has_read_it(
    host: Hosted,
) -> None:
    session, key = host.open(scripted("a long answer of many words. " * 8_000))
    body = json.dumps({"messages": USER, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", int(host.endpoint.root.rpartition(":")[2]))) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        head = [f"POST /s/{key}/v1/chat/completions HTTP/1.1", "Host: localhost"]
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
        one.sendall("\r\n".join(head).encode() + body)
        assert b"200 OK" in one.recv(4096)
    time.sleep(0.3)
    assert [turn.trained for turn in session.episode.turns] == [False]
    retry = {"x-stainless-retry-count": "1"}
    answer = post(host, key, "chat/completions", {"messages": USER, "stream": True}, **retry)
    assert answer.headers["x-unirl-origin"] == "replayed"
    host.run(asyncio.sleep(0))
    assert [turn.trained for turn in session.episode.turns] == [True]


def test_requests_are_held_while_weights_are_swapped(host: Hosted) -> None:
    from unirl.llm.models.model import flat_weights

    session, key = host.open()
    version, done = 0, threading.Event()

    async def swap() -> None:
        nonlocal version
        await host.engine.start()
        assert host.engine.generation is not None
        weights = {
            name: value.clone()
            for name, value in flat_weights(host.engine.generation.model).items()
        }
        while not done.is_set():
            await host.engine.pause("keep")
            version += 1
            await host.engine.load_weights(weights, version)
            await host.engine.resume()
            await asyncio.sleep(0.002)

    swaps = asyncio.run_coroutine_threadsafe(swap(), host.loop)

    def ask(number: int) -> int:
        body = {"messages": [{"role": "user", "content": f"swap {number}"}]}
        return int(post(host, key, "chat/completions", body).status_code)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(ask, range(16))) == {200}
    done.set()
    swaps.result(30)
    versions = [turn.completion.version for turn in session.episode.turns]
    assert version > 10 and any(len(set(each)) > 1 for each in versions)
    assert all(each == tuple(sorted(each)) for each in versions)


def test_closing_answers_what_is_in_flight(caplog: pytest.LogCaptureFixture) -> None:
    begun = threading.Event()

    async def never(request: Request) -> Completion:
        begun.set()
        await asyncio.sleep(60)
        raise AssertionError

    with hosted() as host, ThreadPoolExecutor(1) as pool:
        session, key = host.open(never)
        asked = pool.submit(post, host, key, "chat/completions", {"messages": USER})
        assert begun.wait(10)
        host.endpoint.close()
        assert asked.result(10).status_code == 410
    gc.collect()
    assert not session.episode.turns and not caplog.records


def test_a_unix_socket_is_served_to_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "endpoint"
    with hosted(unix_socket=path) as host:
        _, key = host.open(scripted("yes"))
        assert path.stat().st_mode & 0o777 == 0o600
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path))) as client:
            answer = client.post(f"http://x/s/{key}/v1/chat/completions", json={"messages": USER})
        assert answer.json()["choices"][0]["message"]["content"] == "yes"
    assert not path.exists()
