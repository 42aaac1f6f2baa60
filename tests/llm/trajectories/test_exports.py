"""What is exported is what is stored, in formats that others read."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.llm.trajectories.stored_episodes import group, record, straight, tree
from unirl.cli import main
from unirl.errors import UniRLError
from unirl.llm.agents.episode import Episode
from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.exports.atif import from_atif, to_atif
from unirl.llm.trajectories.exports.atif_schema import problems
from unirl.llm.trajectories.exports.otlp import post, to_otlp
from unirl.llm.trajectories.exports.verifiers import to_verifiers
from unirl.llm.trajectories.store import open_store
from unirl.llm.trajectories.view import printable

FOREIGN: dict[str, Any] = {
    "schema_version": "ATIF-v1.6",
    "session_id": "s1",
    "agent": {"name": "terminus", "version": "2", "model_name": "m", "extra": {"a": 1}},
    "notes": "as it was",
    "steps": [
        {"step_id": 1, "source": "system", "message": "be brief",
         "timestamp": "2026-01-01T00:00:00Z"},
        {"step_id": 2, "source": "user", "message": [{"type": "text", "text": "list"}]},
        {
            "step_id": 3,
            "source": "agent",
            "message": "",
            "reasoning_content": "hm",
            "tool_calls": [
                {"tool_call_id": "a", "function_name": "ls", "arguments": {"at": "/"}},
                {"tool_call_id": "b", "function_name": "pwd", "arguments": {}, "extra": {"n": 1}},
            ],
            "observation": {
                "results": [
                    {"source_call_id": "a", "content": "bin"},
                    {"source_call_id": "b", "content": "/", "extra": {"score": 1}},
                    {"content": "no call"},
                ]
            },
            "metrics": {
                "prompt_tokens": 2, "completion_tokens": 2, "cost_usd": 0.5,
                "prompt_token_ids": [1, 2], "completion_token_ids": [3, 4],
                "logprobs": [-0.5, -0.25],
            },
        },
        {"step_id": 4, "source": "agent", "message": "copied", "is_copied_context": True},
        {
            "step_id": 5,
            "source": "agent",
            "message": "done",
            "metrics": {
                "prompt_token_ids": [1, 2, 3, 4, 5], "completion_token_ids": [6],
                "logprobs": [-1.0],
            },
        },
    ],
    "final_metrics": {"total_cost_usd": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("episode", [tree(), straight(turns=5), straight(turns=1), Episode([])])
def test_an_episode_comes_back_from_atif_as_it_was(episode: Episode) -> None:
    given = record(episode)
    document = json.loads(json.dumps(to_atif(given)))
    assert problems(document) == []
    assert from_atif(document) == given
    assert to_atif(from_atif(document)) == document


def test_a_foreign_document_comes_back_as_it_was() -> None:
    assert problems(FOREIGN) == []
    read = from_atif(FOREIGN)
    first, second = read.episode.turns
    assert first.given == (1, 2) and first.completion.tokens == (3, 4)
    assert first.completion.logp == (-0.5, -0.25) and first.answer["tool_calls"][0]["id"] == "a"
    assert (second.parent, second.given, second.completion.tokens) == (0, (5,), (6,))
    assert [each["role"] for each in second.messages] == ["tool"] * 3 + ["assistant"]
    assert to_atif(read) == {**FOREIGN, "extra": to_atif(read)["extra"],
                             "trajectory_id": to_atif(read)["trajectory_id"]}  # fmt: skip


def broken(change: str) -> dict[str, Any]:
    document = copy.deepcopy(FOREIGN)
    step = document["steps"][2]
    changes: dict[str, Any] = {
        "no agent": lambda: document.pop("agent"),
        "no steps": lambda: document.update(steps=[]),
        "unknown field": lambda: document.update(other=1),
        "unknown version": lambda: document.update(schema_version="ATIF-v9"),
        "wrong number": lambda: step.update(step_id=7),
        "wrong source": lambda: step.update(source="robot"),
        "metrics of a user": lambda: document["steps"][0].update(metrics={}),
        "no such call": lambda: step["observation"]["results"][0].update(source_call_id="z"),
        "text for ids": lambda: step["metrics"].update(prompt_token_ids=["a"]),
        "no time": lambda: step.update(timestamp="yesterday"),
        "calls without a model": lambda: step.update(llm_call_count=0),
        "image without source": lambda: step.update(message=[{"type": "image"}]),
        "arguments as text": lambda: step["tool_calls"][0].update(arguments="{}"),
    }
    changes[change]()
    return document


BREACHES = (
    "no agent", "no steps", "unknown field", "unknown version", "wrong number", "wrong source",
    "metrics of a user", "no such call", "text for ids", "no time", "calls without a model",
    "image without source", "arguments as text",
)  # fmt: skip


@pytest.mark.parametrize("change", BREACHES)
def test_what_is_not_atif_is_refused(change: str) -> None:
    with pytest.raises(UniRLError, match="not a trajectory in ATIF"):
        from_atif(broken(change))


def test_harbors_own_validator_agrees() -> None:
    trajectories = pytest.importorskip(
        "harbor.models.trajectories", reason="Harbor's models are not installed: pip install harbor"
    )
    for good in (FOREIGN, to_atif(record()), to_atif(record(Episode([])))):
        trajectories.Trajectory.model_validate(good)
    for change in BREACHES:
        with pytest.raises(ValueError):
            trajectories.Trajectory.model_validate(broken(change))


@pytest.fixture
def collector() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server of OTLP that takes what has the attributes that the conventions ask for."""
    taken: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            spans = [
                span
                for resource in request["resourceSpans"]
                for scope in resource["scopeSpans"]
                for span in scope["spans"]
            ]
            needed = {
                "invoke_agent": {"gen_ai.agent.name", "gen_ai.conversation.id"},
                "chat": {"gen_ai.request.model", "gen_ai.usage.input_tokens"},
                "execute_tool": {"gen_ai.tool.name", "gen_ai.tool.call.id"},
            }
            is_sound = self.path == "/v1/traces" and bool(spans)
            for span in spans:
                names = {each["key"]: each["value"] for each in span["attributes"]}
                operation = names["gen_ai.operation.name"]["stringValue"]
                is_sound &= needed[operation] <= names.keys()
                is_sound &= span["name"].startswith(operation)
                is_sound &= len(span["traceId"]) == 32 and len(span["spanId"]) == 16
                is_sound &= int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
            taken.extend(spans)
            self.send_response(200 if is_sound else 400)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", taken
        server.shutdown()


def test_a_collector_takes_the_spans(collector: tuple[str, list[dict[str, Any]]]) -> None:
    url, taken = collector
    post(to_otlp([(1, record())]), f"{url}/v1/traces")
    assert len(taken) == 1 + 4 + 1
    root = {each["key"]: each["value"] for each in taken[0]["attributes"]}
    assert root["unirl.reward.exact"] == {"doubleValue": 0.5}
    assert {span.get("parentSpanId") for span in taken[1:]} <= {each["spanId"] for each in taken}
    assert "token" not in json.dumps([each["key"] for each in taken[0]["attributes"]])
    with pytest.raises(UniRLError, match="not accepted"):
        post(to_otlp([(1, record())]), f"{url}/elsewhere")


def test_a_trace_of_verifiers_has_each_drawn_token_once() -> None:
    (trace,) = to_verifiers(record(), 1)["traces"]
    sampled = [node for node in trace["nodes"] if node["sampled"]]
    assert [node["token_ids"] for node in sampled] == [
        list(turn.completion.tokens) for turn in tree().turns
    ]
    assert sum(map(sum, (node["mask"] for node in trace["nodes"]))) == 4 + 2
    given = [node["token_ids"] for node in trace["nodes"] if not node["sampled"]]
    assert [ids for ids in given if ids] == [[1, 2, 3], [11, 12], [13], [1, 5]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "stored"
    folder.mkdir()
    (folder / "config.toml").write_text('recipe = "agent"\n')
    with closing(open_store(StoreConfig(), folder)) as store:
        store.put(record())
        for ticket in range(5, 8):
            for each in group(ticket):
                store.put(each)
    return folder


def test_the_table_is_filtered(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trajectories", str(run), "--ending", "time"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "sums" in lines[1] and " time " in lines[1]
    assert main(["trajectories", str(run), "--limit", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 of 7 episodes")
    assert main(["trajectories", str(run), "--json", "--ticket", "6"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["ticket"] for row in rows] == [6, 6]


def test_an_episode_is_shown_as_text_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trajectories", str(run), "--episode", "1"]) == 0
    text = capsys.readouterr().out
    assert "\\x1b[2J out of time" in text and "\x1b" not in text
    assert "< user: 1+1" in text and '> calls calculator({"expression": "1+1"})' in text
    assert "context alone" in text and "reward 0.75 (exact 0.5, format 0.25)" in text
    assert main(["trajectories", str(run), "--episode", "1", "--step", "1"]) == 0
    text = capsys.readouterr().out
    assert "given ids: 11 12" in text and "7:-0.500 (8) 9:-0.250" in text
    assert printable("a\x1b]0;x\x07\u202e\nb") == "a\\x1b]0;x\\x07\\u202e\nb"


@pytest.mark.parametrize("kind", ["atif", "verifiers", "otlp"])
def test_episodes_are_written_to_a_file(
    run: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    assert main(["trajectories", str(run), "--export", kind, "--out", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == (1 if kind == "otlp" else 7) and out.stat().st_mode & 0o077 == 0
    if kind == "atif":
        assert from_atif(lines[0]) == record()


@pytest.mark.parametrize("query", ["endings", "passes", "tools", "forks", "updates"])
def test_summaries_are_tables(run: Path, query: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trajectories", str(run), "--query", query]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--episode", "99"], "there is no episode 99"),
        (["--step", "1"], "--step names no turn"),
        (["--episode", "1", "--step", "9"], "has no turn 9"),
        (["--export", "parquet"], "parquet"),
        (["--export", "atif", "--out", "http://127.0.0.1:9/"], "only otlp"),
        (["--export", "otlp", "--out", "http://127.0.0.1:9/v1/traces"], "not accepted"),
        (["--limit", "0"], "--limit"),
    ],
)
def test_bad_input_is_explained(
    run: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trajectories", str(run), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_run_without_trajectories_is_said_to_be_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text('recipe = "impala"\n')
    assert main(["trajectories", str(tmp_path)]) == 2
    assert "has no stored trajectories" in capsys.readouterr().err
