"""A run is exported and pushed as a user does it, and what comes out acts without UniRL."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import unirl
from unirl import cli

pytest.importorskip("onnxruntime", reason="pip install 'unirl[export]'")
pytest.importorskip("onnxscript", reason="pip install 'unirl[export]'")
hub = pytest.importorskip("huggingface_hub", reason="pip install 'unirl[export]'")
constants = pytest.importorskip("huggingface_hub.constants")
TOKEN = "hf_s3cret"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CartPole with a memory, trained for a second."""
    folder = tmp_path_factory.mktemp("runs") / "cart"
    plan = unirl.make_plan(
        "impala",
        **{"env.id": "CartPole-v1", "actor.num_envs": 4, "policy.hidden": (8,)},
        **{"policy.core": "gru", "policy.core_size": 8, "policy.normalize_obs": True},
        **{"run.total_steps": 2000, "run.eval_steps": 2000, "run.eval_episodes": 3},
    )
    unirl.run(plan, folder, console=False)
    return folder


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    folder = run.parent / "out"
    assert cli.main(["export", str(run), str(folder)]) == 0
    return folder


def blocks(folder: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)


def test_the_blocks_of_its_readme_act_without_unirl(exported: Path) -> None:
    names = {path.name for path in exported.iterdir()}
    weights = {"policy.onnx", "policy.pt", "policy.safetensors"}
    assert names == {"README.md", "policy.json", *weights}
    first, second = blocks(exported)
    unknown = "import sys; sys.modules['unirl'] = None\n"
    for block in (first, second + "print(float(action[0]))"):
        done = subprocess.run(
            [sys.executable, "-I", "-c", unknown + block],
            cwd=exported,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert float(done.stdout) >= (5 if block == first else 0)


def test_what_does_not_fit_is_refused_and_nothing_is_left(
    run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, says in (
        ([str(run), str(exported)], "is there already"),
        ([str(run), str(tmp_path / "x"), "--format", "hf"], "is for language models"),
        ([str(run), str(tmp_path / "x"), "--format", "tflite"], "expected"),
        ([str(run), str(tmp_path / "x"), "--policy", "1"], "0 <= --policy < 1"),
        (["nothing", str(tmp_path / "x")], "does not exist"),
        ([str(run)], "the folder to write to"),
    ):
        assert cli.main(["export", *words]) == 2
        error = capsys.readouterr().err
        assert says in error and len(error.splitlines()) == 3
    assert not list(tmp_path.iterdir())


class Hub(ThreadingHTTPServer):
    """What of the hub a push asks: a repository, what is to be sent how, a commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.repos: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()
        self.summary = ""
        self.status = 200


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        hub, here = self.server, f"http://127.0.0.1:{self.server.server_port}"
        hub.tokens.add(self.headers["Authorization"])
        answer: dict[str, Any] = {"errors": [], "warnings": []}  # of /api/validate-yaml
        if hub.status != 200:
            answer = {"error": "you may not write here"}
        elif self.path == "/api/repos/create":
            hub.repos.append(json.loads(body))
            answer = {"url": f"{here}/me/cart"}
        elif self.path.startswith("/api/models/me/cart/preupload/main"):
            paths = [file["path"] for file in json.loads(body)["files"]]
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            answer = {"files": [{"path": path, **modes} for path in paths]}
        elif self.path.startswith("/api/models/me/cart/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    hub.summary = line["value"]["summary"]
                else:
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {"commitUrl": f"{here}/me/cart/commit/1", "commitOid": "1"}
        self.send_response(hub.status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as one:
        thread = threading.Thread(target=one.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        # Its client reads both when it is imported, long ago here.
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{one.server_port}")
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield one
        one.shutdown()
        thread.join()


def test_a_run_is_pushed_with_its_card_and_config(
    run: Path, server: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["push", str(run), "me/cart", "--private", "--format", "safetensors,torchscript"]
    assert cli.main(words) == 0
    printed = "".join(capsys.readouterr())
    assert "/me/cart" in printed and TOKEN not in printed
    assert server.tokens == {f"Bearer {TOKEN}"}
    assert server.repos[0]["name"] == "cart" and server.summary.startswith("cart, checkpoint of")
    assert server.repos[0].get("private") or server.repos[0].get("visibility") == "private"
    assert server.files.keys() == {
        "README.md", "config.toml", "policy.json", "policy.pt", "policy.safetensors",
    }  # fmt: skip
    assert server.files["config.toml"] == (run / "config.toml").read_bytes()
    card = hub.ModelCard(server.files["README.md"].decode())
    assert card.data.library_name == "unirl"
    assert "CartPole-v1" in card.data.tags
    assert card.data.eval_results[0].metric_type == "mean_reward"
    assert "# IMPALA on CartPole-v1" in card.text and "torch.jit.load" in card.text
    assert TOKEN.encode() not in b"".join(server.files.values())


def test_a_push_that_cannot_succeed_says_so(
    run: Path, server: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*words: str) -> str:
        assert cli.main(["push", *words, "--format", "safetensors"]) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 3 and TOKEN not in error
        return error

    assert "does not exist" in refused("nothing", "me/cart")
    assert "no name of a repository" in refused(str(run), "me/cart/x")
    server.status = 403
    assert "you may not write here" in refused(str(run), "me/cart")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "cannot be reached" in refused(str(run), "me/cart")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(run / "no-token"))
    assert "nobody is logged in" in refused(str(run), "me/cart")
