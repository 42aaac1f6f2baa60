"""Alerts: a real server gets them, nobody reads their URLs, and a run never waits for them."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import unirl
from unirl import cli
from unirl.report import alerts
from unirl.report.alerts import Alerts, RewardFall
from unirl.run_events import read_events
from unirl.runners.config import RunConfig

pytest.importorskip("apprise")
SECRET = "s3cret-word"
SMALL = {
    "env.id": "CartPole-v1",
    "actor.num_envs": 4,
    "policy.hidden": (8,),
    "run.total_steps": 300,
    "runner.learner_threads": 1,
}


class Server(ThreadingHTTPServer):
    """Keeps what it is sent; answers with `status`, after `seconds`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: list[dict[str, str]] = []
        self.status, self.seconds = 200, 0.0

    @property
    def url(self) -> str:
        return f"json://user:{SECRET}@127.0.0.1:{self.server_port}/hook"

    @property
    def said(self) -> list[str]:
        return [line for one in self.got for line in one["message"].splitlines()]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.server.seconds)
        self.server.got.append(body)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def test_a_run_says_that_it_ended_and_no_file_of_it_holds_the_url(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "impala", "--runs-dir", str(tmp_path), "--name", "a", "--no-console"]
    for key, value in SMALL.items():
        words += [f"--{key.replace('_', '-')}", "8" if key == "policy.hidden" else str(value)]
    assert cli.main([*words, "--run.alerts", json.dumps([server.url])]) == 0
    assert server.got[-1]["title"] == "unirl a: ended"
    assert server.said[-1].startswith("ended: total_steps after 3")
    files = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    holders = [path for path in files if SECRET.encode() in path.read_bytes()]
    assert len(files) > 5 and not holders
    assert SECRET not in "".join(capsys.readouterr())
    assert "json://(not stored)" in (tmp_path / "a" / "config.toml").read_text()
    assert "--run.alerts '[\"json://(not stored)\"]'" in (tmp_path / "a/command.txt").read_text()

    more = ["resume", str(tmp_path / "a"), "--run.total-steps", "600", "--no-console"]
    assert cli.main(more) == 0
    assert "not stored with the run" in (tmp_path / "a" / "log.txt").read_text()
    assert len(server.got) == 1


def test_what_dies_and_a_run_that_gives_up_are_said(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_ALERTS", server.url)
    fault = {"env.id": "toy/Fault-v0", "env.import_module": "tests.toy_envs"}
    settings = {**SMALL, **fault, "env.kwargs": {"raise_at": 20}, "run.alerts": ("env:MY_ALERTS",)}
    plan = unirl.make_plan("impala", **settings, **{"runner.max_restarts": 1})
    with pytest.raises(unirl.UniRLError):
        unirl.run(plan, tmp_path / "b", console=False)
    kinds = [line.partition(":")[0] for line in server.said]
    assert kinds.count("died") >= 2 and "restarted" in kinds and kinds[-1] == "gave up"
    events = [(row["event"], row["member"]) for row in read_events(tmp_path / "b")]
    actor = [("died", "actor 0"), ("restarted", "actor 0"), ("died", "actor 0")]
    assert events == [("started", "run"), *actor, ("gave_up", "run")]
    assert "env:MY_ALERTS" in (tmp_path / "b" / "config.toml").read_text()


@pytest.mark.parametrize(
    ("alert", "said"),
    [
        (f"nonsense://{SECRET}", "it begins with nonsense://"),
        (SECRET, "has the form SERVICE://"),
        ("env:NO_SUCH_VARIABLE", "NO_SUCH_VARIABLE, is not set"),
    ],
)
def test_a_bad_url_ends_the_run_before_it_starts(
    alert: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "impala", "--env.id", "CartPole-v1", "--runs-dir", str(tmp_path)]
    assert cli.main([*words, "--run.alerts", json.dumps([alert])]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 3 and said in error and SECRET not in error
    assert not list(tmp_path.iterdir())


def test_a_server_that_refuses_is_one_warning(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.status = 500
    with caplog.at_level(logging.WARNING), Alerts(RunConfig(alerts=(server.url,)), "c") as sent:
        for number in range(20):
            sent.send("died", f"actor {number}")
            time.sleep(0.01)
    assert len(server.got) > 1
    ours = [record.message for record in caplog.records if record.name.startswith("unirl")]
    assert [text.partition(":")[0] for text in ours] == ["alerts are not delivered"]
    assert SECRET not in caplog.text


def test_a_slow_server_delays_neither_the_run_nor_its_end_for_long(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(alerts, "END_SECONDS", 0.3)
    server.seconds = 1.5
    started = time.monotonic()
    with Alerts(RunConfig(alerts=(server.url,)), "d") as sent:
        for _ in range(1_000):
            sent.send("died", "actor 0")
        assert time.monotonic() - started < 0.3
    assert time.monotonic() - started < 1.2
    assert "longer than the end of a run waits" in caplog.text


def test_a_fall_is_said_once_and_again_after_a_recovery() -> None:
    fall = RewardFall(drop=0.5, window_seconds=10)
    said = []
    # Up to 100, down to 30, up again to 90, down to 0; ten seconds at each height.
    for now, reward in enumerate([*range(101), *[30] * 20, *[90] * 20, *[0] * 20]):
        said += [text] if (text := fall.look(float(reward), float(now))) else []
    assert len(said) == 2 and said[0].startswith("fell from 95 to ")


def test_noise_is_no_fall() -> None:
    fall = RewardFall(drop=0.5, window_seconds=10)
    noise = [(-1.0) ** number * (number * 7 % 5) for number in range(500)]
    assert not [now for now, reward in enumerate(noise) if fall.look(reward, float(now))]
    off = RewardFall(drop=0.0, window_seconds=1)
    assert not [now for now in range(50) if off.look(float(50 - now), float(now))]
