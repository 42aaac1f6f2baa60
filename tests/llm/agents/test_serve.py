"""`unirl serve`: a model behind HTTP, to the end of its process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("transformers", reason="language models need the extra llm")
pytest.importorskip("starlette", reason="the endpoint needs the extra agents")
pytest.importorskip("uvicorn", reason="the endpoint needs the extra agents")

import httpx2

from unirl.commands.serve import serve
from unirl.errors import UniRLError


@contextlib.contextmanager
def serving(*flags: str) -> Iterator[str]:
    """The line that it prints when it serves."""
    process = subprocess.Popen(
        [sys.executable, "-m", "unirl", "serve", "tiny", "--port", "0", *flags],
        env={**os.environ, "KEY": "secret"},
        stdout=subprocess.PIPE,
        text=True,
        # Where the tests run in the background, it is ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def test_a_model_is_served_with_a_key_until_it_is_interrupted() -> None:
    with serving("--key-variable", "KEY", "--max-tokens", "8") as line:
        found = re.search(r"OPENAI_BASE_URL=(\S+)", line)
        assert found is not None, line
        body = {"messages": [{"role": "user", "content": "2 and 3?"}], "temperature": 0.5}
        url = f"{found[1]}/chat/completions"
        assert httpx2.post(url, json=body, timeout=60).status_code == 401
        headers = {"authorization": "Bearer secret", "x-session-id": "one"}
        for _ in range(2):
            answer = httpx2.post(url, json=body, headers=headers, timeout=60)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] > 0
        assert "x-unirl-ignored" not in answer.headers
        assert answer.headers["x-unirl-turn"] == "1"


def test_an_engine_is_served_with_a_key_that_nobody_had_to_choose() -> None:
    with serving("--tokens") as line:
        found = re.search(r"engine.url=(\S+)  export UNIRL_ENGINE_KEY=(\S+)", line)
        assert found is not None, line
        assert httpx2.get(f"{found[1]}/models", timeout=60).status_code == 401
        key = {"authorization": f"Bearer {found[2]}"}
        answer = httpx2.get(f"{found[1]}/models", headers=key, timeout=60)
        assert answer.json()["data"][0]["id"] == "tiny"


def test_what_cannot_be_served_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEY", raising=False)
    for arguments, says in (
        ([], "a model's folder, or a run"),
        (["tiny", "--host", "0.0.0.0"], "needs a key"),
        (["tiny", "--key-variable", "KEY"], "is not set"),
        (["tiny", "--port", "70000"], "65535"),
    ):
        with pytest.raises(UniRLError, match=re.escape(says)):
            serve(arguments)
