"""A judge behind HTTP: a real server, slow, broken or talkative."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.llm.test_rewards import DONE, TASK, prompt
from unirl.errors import UniRLError
from unirl.llm.outcome import FAILED, SCORE, TIMED_OUT, Score
from unirl.llm.rewards.config import JudgeConfig, RewardConfig
from unirl.llm.rewards.rewards import Rewarder

pytest.importorskip("httpx2", reason="judges are asked through it")

Answer = Callable[[dict[str, Any], int], tuple[int, Any]]
"""Of a request and how many came before it: a status and what is sent."""


class Judge:
    """A server of OpenAI's chat completions; what it says is a function."""

    def __init__(self, answer: Answer, chunked: bool = False) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.most_at_a_time = self._at_a_time = 0
        self.over = threading.Event()
        self.retry_after = "0.5"
        """What comes with status 429."""
        judge, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(judge.requests)
                    judge.requests.append(body)
                    judge.headers.append(dict(self.headers))
                    judge.paths.append(self.path)
                    judge._at_a_time += 1
                    judge.most_at_a_time = max(judge.most_at_a_time, judge._at_a_time)
                try:
                    status, said = answer(body, number)
                finally:
                    with lock:
                        judge._at_a_time -= 1
                data = said if isinstance(said, bytes) else json.dumps(said).encode()
                self.send_response(status)
                if status == 429:
                    self.send_header("Retry-After", judge.retry_after)
                if status == 302:
                    self.send_header("Location", "/v1/elsewhere")
                if chunked:
                    self.send_header("Transfer-Encoding", "chunked")
                    self.end_headers()
                    for begin in range(0, len(data), 7):
                        part = data[begin : begin + 7]
                        self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                    self.wfile.write(b"0\r\n\r\n")
                else:
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def handle(self) -> None:
                with contextlib.suppress(OSError):  # who asks may have gone
                    super().handle()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def asked(self, number: int = 0) -> str:
        content: str = self.requests[number]["messages"][0]["content"]
        return content

    def close(self) -> None:
        self.over.set()
        self.server.shutdown()
        self.server.server_close()


@contextlib.contextmanager
def judge(answer: Answer, chunked: bool = False) -> Iterator[Judge]:
    made = Judge(answer, chunked)
    try:
        yield made
    finally:
        made.close()


def says(text: str, finish: str = "stop") -> tuple[int, Any]:
    message = {"role": "assistant", "content": text}
    return 200, {"choices": [{"message": message, "finish_reason": finish}]}


def judged(url: str, texts: list[str], **settings: Any) -> list[Score]:
    asks = {name: settings.pop(name) for name in list(settings) if name in ASKS}
    config = RewardConfig(
        weights={"judge": 1.0},
        judge=JudgeConfig(url=url, model="wise", **asks),
        **{"timeout_seconds": 5.0, **settings},
    )
    rewarder = Rewarder(config, [TASK])
    rows = asyncio.run(rewarder.score_group(prompt(), texts, [DONE] * len(texts)))
    rewarder.close()
    return [row[0] for row in rows]


ASKS = ("key_variable", "question", "scale", "max_tokens", "retries")


@pytest.mark.parametrize("chunked", [False, True])
def test_ratings_become_values_whatever_way_they_are_sent(chunked: bool) -> None:
    ratings = {"bad": "0", "good": "7.5", "best": "10/10", "thought": "<think>1 2 3</think> 5"}
    with judge(lambda body, _: says(ratings[body["messages"][0]["content"]]), chunked) as server:
        scores = judged(server.url, list(ratings), question="{text}")
    assert scores == [Score(0.0), Score(0.75), Score(1.0), Score(0.5)]
    assert {body["temperature"] for body in server.requests} == {0}
    assert {body["model"] for body in server.requests} == {"wise"}
    assert set(server.paths) == {"/v1/chat/completions"}


def test_the_judge_sees_question_reference_and_answer_as_they_are() -> None:
    with judge(lambda body, _: says("5")) as server:
        judged(server.url, ["it is {answer} ünd so"])
    asked = server.asked()
    assert "3 + 4?" in asked and "it is {answer} ünd so" in asked
    assert "<reference>\n7\n</reference>" in asked


def test_the_key_comes_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    with judge(lambda body, _: says("5")) as server:
        judged(server.url, ["a"], key_variable="JUDGE_KEY")
        judged(server.url, ["a"])
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert "Authorization" not in server.headers[1]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(UniRLError, match="JUDGE_KEY is empty or not set"):
        judged(server.url, ["a"], key_variable="JUDGE_KEY")


@pytest.mark.parametrize(
    "reply", ["", "good", "7 or 8", "11", "-1", "Step 1: it is 7", "I rate it ten"]
)
def test_unclear_ratings_are_failures(reply: str) -> None:
    with judge(lambda body, _: says(reply)) as server:
        score = judged(server.url, ["a"])[0]
    assert score.outcome == FAILED and "the judge" in score.why
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("reply", "finish", "why"),
    [
        ("<think>\nOkay, the question has 2 parts and the", "length", "max_tokens is 16"),
        ("7", "length", "max_tokens is 16"),
        ("<think>\nOkay, the question has 2 parts", "stop", "thoughts have no end"),
        ("<think>a</think> <think>2", "stop", "thoughts have no end"),
        ("Out of 10, I would give this", "stop", "a scale without a rating"),
        ("It is worth ... /10", "stop", "a scale without a rating"),
        ("Out of 10, I would give this 8", "stop", "2 numbers"),
    ],
)
def test_what_is_cut_off_or_names_but_the_scale_is_no_rating(
    reply: str, finish: str, why: str
) -> None:
    with judge(lambda body, _: says(reply, finish)) as server:
        score = judged(server.url, ["a"])[0]
    assert score.outcome == FAILED and why in score.why
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("reply", "scale", "value"),
    [
        ("2 / 2.5", 2.5, 0.8),
        ("1 2x5", 2.5, None),  # a dot of the scale is a dot
        ("1/2x5", 2.5, None),
        ("**8**/10", 10.0, 0.8),
        ("8 Out of 10.0.", 10.0, 0.8),
        ("I had 3 ideas</think>\n\n7", 10.0, 0.7),
        (".5", 1.0, 0.5),
        ("5/100", 10.0, None),
        ("5/10.5", 10.0, None),
    ],
)
def test_ratings_are_read_with_their_scale_as_it_is(
    reply: str, scale: float, value: float | None
) -> None:
    with judge(lambda body, _: says(reply)) as server:
        score = judged(server.url, ["a"], scale=scale)[0]
    assert (score.value if score.outcome == SCORE else None) == value


@pytest.mark.parametrize("status", [500, 503, 429])
def test_passing_errors_are_tried_again(status: int) -> None:
    with judge(lambda _, number: says("10") if number == 2 else (status, b"busy")) as server:
        began = time.monotonic()
        assert judged(server.url, ["a"]) == [Score(1.0)]
        took = time.monotonic() - began
    assert len(server.requests) == 3
    # Pauses of 0.25 and 0.5 s, or what the server asks for.
    assert took >= (1.0 if status == 429 else 0.75)


@pytest.mark.parametrize("after", ["Wed, 21 Oct 2099 07:28:00 GMT", "-5", "soon"])
def test_a_date_or_nonsense_in_retry_after_leaves_the_usual_pause(after: str) -> None:
    with judge(lambda _, number: says("10") if number else (429, b"busy")) as server:
        server.retry_after = after
        assert judged(server.url, ["a"]) == [Score(1.0)]


def test_errors_that_stay_are_failures_with_their_reason() -> None:
    with judge(lambda *_: (500, b"out of memory")) as server:
        score = judged(server.url, ["a"], retries=1)[0]
        assert score.outcome == FAILED and "status 500: out of memory" in score.why
        assert len(server.requests) == 2
    with judge(lambda *_: (401, b"who are you?")) as server:
        score = judged(server.url, ["a"])[0]
        assert score.outcome == FAILED and "status 401" in score.why
        assert len(server.requests) == 1  # asking again would not help


def test_garbage_is_a_failure() -> None:
    for said in (b"<html>", {"error": "no"}, {"choices": []}, b""):
        with judge(lambda *_, said=said: (200, said)) as server:
            score = judged(server.url, ["a"], retries=0)[0]
        assert score.outcome == FAILED and score.why


def test_an_answer_of_more_than_8_mib_is_a_failure() -> None:
    with judge(lambda *_: says("5" + " " * (8 << 20))) as server:
        score = judged(server.url, ["a"], retries=0)[0]
    assert score.outcome == FAILED and "too long" in score.why


def test_redirects_are_not_followed() -> None:
    with judge(lambda *_: (302, b"look there")) as server:
        score = judged(server.url, ["a"])[0]
    assert score.outcome == FAILED and "status 302" in score.why
    assert server.paths == ["/v1/chat/completions"]


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with judge(lambda *_: says("10")) as server:
        assert judged(server.url, ["a"], retries=0) == [Score(1.0)]


def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret\r\nX-Other: 1")
    with pytest.raises(UniRLError, match="no line breaks") as caught:
        judged("http://127.0.0.1:9/v1", ["a"], key_variable="JUDGE_KEY")
    assert "secret" not in str(caught.value)


def test_a_judge_that_is_not_there_is_a_failure() -> None:
    with judge(lambda *_: says("5")) as server:
        pass
    score = judged(server.url, ["a"], retries=1)[0]
    assert score.outcome == FAILED and "no connection" in score.why


def test_a_judge_that_hangs_loses_its_own_sample_alone() -> None:
    def answer(body: dict[str, Any], _: int) -> tuple[int, Any]:
        if body["messages"][0]["content"] == "hang":
            server.over.wait(30)
        return says("10")

    with judge(answer) as server:
        began = time.monotonic()
        scores = judged(server.url, ["a", "hang", "b"], question="{text}", timeout_seconds=0.7)
        took = time.monotonic() - began
    assert [score.outcome for score in scores] == [SCORE, TIMED_OUT, SCORE]
    assert took < 15


def test_a_deadline_during_repetitions_tells_what_was_wrong() -> None:
    with judge(lambda *_: (503, b"busy")) as server:
        score = judged(server.url, ["a"], retries=50, timeout_seconds=1.2)[0]
    assert score.outcome == TIMED_OUT and "status 503" in score.why
    assert 2 <= len(server.requests) <= 4


def test_calls_run_side_by_side_up_to_the_limit() -> None:
    def answer(*_: Any) -> tuple[int, Any]:
        time.sleep(0.1)
        return says("10")

    with judge(answer) as server:
        scores = judged(server.url, ["a"] * 12, concurrency=4)
    assert scores == [Score(1.0)] * 12
    assert 2 <= server.most_at_a_time <= 4


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"url": "127.0.0.1:8000"}, "begin with http://"),
        ({"url": "http://me:word@127.0.0.1:8000/v1"}, "names a user or a password"),
        ({"scale": 0.0}, "scale is 0"),
        ({"retries": -1}, "retries is -1"),
        ({"question": "How good is it?"}, "does not show the completion"),
    ],
)
def test_what_cannot_be_is_refused_in_three_parts(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(UniRLError, match=what) as caught:
        JudgeConfig(**settings)
    assert len(caught.value.parts) == 3
