"""Bad input to `unirl train grpo`: what is wrong, the rule with both values and the remedy, before
anything has started; no user sees a traceback.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="language models need the extra llm")

import unirl
from unirl import cli
from unirl.llm.models.tiny import make_tiny

TRAIN = ("train", "grpo", "--no-console", "--name", "run")
REVERSE = ("--model", "tiny", "--task", "reverse", "--sampling.max-tokens", "4")
SHORT = ("--rollout.group-size", "4", "--queue.batch-size", "2", "--run.total-steps", "8")
SLEEPY = ("--mode", "colocated", "--dry-run")


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refused(capfd: pytest.CaptureFixture[str], words: Sequence[str]) -> str:
    """What a command says that must be refused in three parts; it leaves no run behind."""
    capfd.readouterr()  # transformers shows how it writes and loads models
    code = cli.main(list(words))
    captured = capfd.readouterr()
    assert code == 2, captured
    assert "Traceback" not in captured.err + captured.out
    lines = captured.err.splitlines()
    assert len(lines) == 3 and lines[0].startswith("error: "), captured.err
    return captured.err


CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a model folder that is not there": (
        ("--model", "./nowhere", "--task", "reverse"),
        ("./nowhere does not exist", "folder, an id of the hub", "unirl model smollm2"),
    ),
    "a task that is not there": (
        ("--model", "tiny", "--task", "revers"),
        ("revers", "reverse, copy", 'did you mean "reverse"?'),
    ),
    "a file of questions that is not there": (
        ("--model", "tiny", "--task", "jsonl:nowhere.jsonl"),
        ("nowhere.jsonl",),
    ),
    "a preset that is not there": (
        (*REVERSE, "--algorithm", "verl:grp"),
        ("verl:grp", 'did you mean "verl:grpo"?'),
    ),
    "a reward that is not there": (
        (*REVERSE, "--reward.weights.exakt", "1"),
        ("exakt", 'did you mean "exact"?'),
    ),
    "own code that is not there": (
        (*REVERSE, "--rollout.filter", "nowhere:keep"),
        ("rollout.filter nowhere:keep", "nowhere", "PYTHONPATH"),
    ),
    "an engine that is not there": (
        (*REVERSE, "--engine", "sglang"),
        ("sglang", "hf", "vllm", "openai"),
    ),
    "a prompt longer than allowed": (
        (*REVERSE, "--task.max-prompt", "3"),
        ("is too long", "task.max_prompt is 3, it has 5 tokens", "raise task.max_prompt to 5"),
    ),
    "a prompt longer than the context that was asked for": (
        (*REVERSE, "--engine.max-context", "8"),
        ("is too long", "5 + 4 > 8", "lower sampling.max_tokens"),
    ),
    "a completion longer than the model's own context": (
        ("--model", "tiny", "--task", "reverse", "--sampling.max-tokens", "510"),
        ("is too long", "5 + 510 > 512", "lower sampling.max_tokens"),
    ),
    "a group of one without a baseline": (
        (*REVERSE, "--rollout.group-size", "1"),
        ("group_size is 1", "at least 2", "openrlhf:reinforce++"),
    ),
    "no group at all": (
        (*REVERSE, "--rollout.group-size", "0"),
        ("rollout.group_size is 0", "must be >= 1"),
    ),
    "no minibatch": (
        (*REVERSE, "--learner.minibatches", "0"),
        ("learner.minibatches is 0", "learner.minibatches >= 1 must hold"),
    ),
    "more minibatches than groups": (
        (*REVERSE, "--learner.minibatches", "5", "--queue.batch-size", "4"),
        ("learner.minibatches is 5", "queue.batch_size is 4"),
    ),
    "temperature 0": (
        (*REVERSE, "--sampling.temperature", "0"),
        ("sampling.temperature is 0", "> 0 in training", "run.eval_deterministic"),
    ),
    "no tokens": (
        ("--model", "tiny", "--task", "reverse", "--sampling.max-tokens", "0"),
        ("sampling.max_tokens is 0", "must be >= 1"),
    ),
    "an unknown mode": (
        (*REVERSE, "--mode", "asinc"),
        ("asinc", "one-step-off"),
    ),
    "async without staleness": (
        (*REVERSE, "--mode", "async", "--queue.max-staleness", "0"),
        ("queue.max_staleness 0", "at least 1 update old", "mode to sync"),
    ),
    "a staleness that sync has not": (
        (*REVERSE, "--queue.max-staleness", "1"),
        (
            "mode sync with queue.max_staleness 1",
            "in this mode it is 0",
            'to "none", or mode to async',
        ),
    ),
    "a staleness that one-step-off has not": (
        (*REVERSE, "--mode", "one-step-off", "--queue.max-staleness", "0"),
        ("mode one-step-off with queue.max_staleness 0", "in this mode it is 1"),
    ),
    "a window that one-step-off has not": (
        (*REVERSE, "--mode", "one-step-off", "--queue.window", "4"),
        ("mode one-step-off with queue.window 4", "a window of 1", "leave queue.window out"),
    ),
    "a window that partial has not": (
        (*REVERSE, "--mode", "partial", "--queue.window", "1"),
        ("mode partial with queue.window 1", "finished first", "leave queue.window out"),
    ),
    "an engine elsewhere that shall be interrupted": (
        (*REVERSE, "--mode", "partial", "--runner.kind", "processes"),
        ("mode partial with runner.kind processes", "not interrupted", "mode to async"),
    ),
    "one process that generates while it learns": (
        (*REVERSE, "--mode", "async", "--runner.kind", "inline"),
        ("mode async with runner.kind inline", "one process", "leave runner.kind out"),
    ),
    "a server that shall sleep": (
        (*REVERSE, *SLEEPY, "--engine", "openai", "--engine.url", "http://[::1]:9/v1"),
        ("colocated with engine openai behind a server", "cannot sleep", "set mode to sync"),
    ),
    "a choice of attention, which packs do not leave": (
        (*REVERSE, "--model.attention", "eager"),
        ("--model.attention is unknown",),
    ),
    "groups discarded for rewards that do not teach": (
        (*REVERSE, "--teacher", "tiny", "--teacher.alone", "--rollout.zero-variance", "discard"),
        ("zero_variance is discard", "teacher.alone", "leave rollout.zero_variance out"),
    ),
    "openai without a server": (
        (*REVERSE, "--engine", "openai"),
        ("has no server", "engine.url", "http://127.0.0.1:8000/v1"),
    ),
    "no reward that counts": (
        (*REVERSE, "--reward.weights.exact", "0"),
        ("no reward counts",),
    ),
    "a misspelt key": (
        (*REVERSE, "--sampling.max-token", "4"),
        ("--sampling.max-token is unknown", "did you mean --sampling.max-tokens?"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_in_three_parts(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    words, parts = CASES[case]
    said = refused(capfd, [*TRAIN, *words])
    for part in parts:
        assert part in said, said
    assert not Path("runs").exists()


def test_a_question_needs_a_chat_template(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny(tmp_path / "mute", width=32, layers=1)
    (folder / "chat_template.jinja").unlink()
    said = refused(capfd, [*TRAIN, "--model", str(folder), "--task", "digits"])
    assert "no chat template" in said and 'task.template to "off"' in said


def test_the_error_for_a_folder_without_a_model_is_not_that_for_one_that_is_not_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    said = refused(capfd, [*TRAIN, "--model", "./empty", "--task", "reverse"])
    assert "holds no model" in said and "config.json" in said


def test_a_model_without_weights_is_found_before_anything_is_learned(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = make_tiny(tmp_path / "hollow", width=32, layers=1)
    (folder / "model.safetensors").unlink()
    said = refused(capfd, [*TRAIN, "--model", str(folder), "--task", "reverse"])
    assert "cannot be loaded" in said and "model.safetensors" in said


def test_a_file_of_questions_needs_a_reward(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    row = {"prompt": "12", "answer": "21"}
    (tmp_path / "asked.jsonl").write_text("\n".join(json.dumps(row) for _ in range(20)))
    said = refused(capfd, [*TRAIN, "--model", "tiny", "--task", "jsonl:asked.jsonl"])
    assert "has no reward of its own" in said and "reward.weights.exact" in said


def test_evaluations_need_held_out_prompts(capfd: pytest.CaptureFixture[str]) -> None:
    words = (*REVERSE, "--task.num-eval", "0", "--run.eval-steps", "8")
    said = refused(capfd, [*TRAIN, *words])
    assert "no held-out prompts" in said and "run.eval_steps to 0" in said
    assert not Path("runs").exists()


def test_without_vllm_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("vllm") is not None:
        monkeypatch.setitem(sys.modules, "vllm", None)
    said = refused(capfd, [*TRAIN, *REVERSE, *SHORT, "--engine", "vllm"])
    assert "vllm" in said and "install" in said


def test_vllm_without_its_sleep_mode_is_not_colocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if importlib.util.find_spec("vllm") is None:
        (tmp_path / "vllm").mkdir()
        (tmp_path / "vllm" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
    words = [*TRAIN, *REVERSE, *SLEEPY, "--engine", "vllm"]
    said = refused(capfd, words)
    assert "cannot sleep" in said and "engine.options.enable_sleep_mode to true" in said
    words += ["--engine.options.enable_sleep_mode", "true"]
    assert cli.main(words) == 0
    # What adapters are written to is made when there is one.
    lora = ["--engine.transfer", "lora", "--model.lora-rank", "2", "--engine.folder", "adapters"]
    assert cli.main([*words, *lora]) == 0 and not Path("adapters").exists()


def test_rollouts_under_torchrun_are_refused_for_what_they_are(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", **address}.items():
        monkeypatch.setenv(name, value)
    said = refused(capfd, [*TRAIN, *REVERSE, *SHORT, "--only", "rollout"])
    assert "only = rollout was started in 2 processes" in said and "nothing is learned" in said


def test_a_shipped_config_rolls_out_to_its_last_step() -> None:
    """Its target of a return is a goal for learning."""
    words = ("@reverse", "--only", "rollout", "--no-console", "--name", "run", *SHORT[:-1], "24")
    assert cli.main(["train", *words]) == 0
    assert len(list(Path("runs/run/samples/groups").glob("*.json"))) == 3


@pytest.mark.parametrize(
    ("mode", "staleness", "window", "kind"),
    [
        ("sync", 0, None, "inline"),
        ("colocated", 0, None, "inline"),
        ("partial", 1, None, "inline"),
        ("one-step-off", 1, 1, "processes"),
        ("async", 1, None, "processes"),
    ],
)
def test_what_was_left_open_is_as_the_mode_has_it(
    mode: str, staleness: int, window: int | None, kind: str
) -> None:
    plan = unirl.make_plan("grpo", **{"model.path": "tiny", "task.name": "reverse", "mode": mode})
    found = (plan.learner.queue.max_staleness, plan.learner.queue.window, plan.runner.kind)
    assert found == (staleness, window, kind)


class Server(BaseHTTPRequestHandler):
    """A server with OpenAI's API as most have it: texts without log-probabilities. Paths under
    /ids return token ids.
    """

    def do_GET(self) -> None:
        if self.path.endswith("/models"):
            self._answer({"object": "list", "data": [{"id": "tiny", "object": "model"}]})
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.path.endswith("/completions"):
            self.send_error(404)
            return
        ids = {"token_ids": [8]} if self.path.startswith("/ids/") else {}
        choice = {"index": 0, "text": "4", "finish_reason": "length", "logprobs": None, **ids}
        document = {"id": "c", "object": "text_completion", "model": "tiny", "choices": [choice]}
        if not asked.get("stream"):
            self._answer(document)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(f"data: {json.dumps(document)}\n\ndata: [DONE]\n\n".encode())

    def _answer(self, document: object) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet: what the command says is looked at."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{http.server_address[1]}"
        http.shutdown()


@pytest.mark.parametrize(
    ("path", "lacks"),
    [("/v1", "returns no token ids"), ("/ids/v1", "returns no log-probabilities")],
)
def test_a_server_without_ids_or_log_probabilities_is_no_engine(
    server: str, path: str, lacks: str, capfd: pytest.CaptureFixture[str]
) -> None:
    url = ("--engine", "openai", "--engine.url", server + path)
    assert lacks in refused(capfd, [*TRAIN, *REVERSE, *SHORT, *url])


def test_resuming_with_another_model_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folders = [make_tiny(tmp_path / name, width=32, layers=1) for name in ("one", "two")]
    words = ("--task", "reverse", "--sampling.max-tokens", "4", *SHORT)
    assert cli.main([*TRAIN, "--model", str(folders[0]), *words]) == 0
    said = refused(capfd, ["resume", "runs/run", "--model.path", str(folders[1])])
    assert "another model" in said and str(folders[0]) in said and str(folders[1]) in said
    said = refused(capfd, ["resume", "runs/run", "--task.name", "copy"])
    assert "another task" in said
