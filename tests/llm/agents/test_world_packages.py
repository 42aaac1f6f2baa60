"""Round trips with the real packages, each in an environment of its own.

    python3.12 -m venv V/NAME && V/NAME/bin/pip install PACKAGE
    UNIRL_TEST_VENVS=V pytest -m slow tests/llm/agents/test_world_packages.py

NAME and PACKAGE: openenv010 openenv==0.10.0, openenv03 openenv-core==0.3.0, nemo nemo-gym, skyrl
skyrl-gym, verifiers verifiers, mcp mcp. All but openenv010 and nemo take Python 3.11, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from unirl.errors import UniRLError
from unirl.llm.agents.tool_calls import ToolCall
from unirl.llm.agents.tools.make import make_tools
from unirl.llm.agents.worlds.make import make_world
from unirl.llm.agents.worlds.world import Observation, WorldFailed

pytestmark = pytest.mark.slow
SERVERS = Path(__file__).parent / "servers"


def python_of(name: str) -> str:
    found = Path(os.environ.get("UNIRL_TEST_VENVS", "")) / name / "bin" / "python"
    if not found.is_file():
        pytest.skip(f"no environment {name} in UNIRL_TEST_VENVS: see the file's first lines")
    return str(found)


@contextlib.contextmanager
def served(name: str, script: str) -> Iterator[int]:
    """The port of a server that answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = subprocess.Popen([python_of(name), str(SERVERS / script), str(port)])
    try:
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        yield port
    finally:
        process.kill()
        process.wait()


def played(
    spec: str, *actions: Any, task: Any = None, seconds: float = 10.0, **options: str
) -> Any:
    async def play() -> list[Observation]:
        client = make_world(spec, options, seconds=seconds)()
        try:
            seen = [await client.reset(task or {}, 5)]
            return seen + [await client.step(action) for action in actions]
        finally:
            await client.close()

    return asyncio.run(play())


@pytest.mark.parametrize("name", ["openenv010", "openenv03"])
def test_openenv(name: str) -> None:
    with served(name, "openenv_guess.py") as port:
        url = f"openenv:ws://127.0.0.1:{port}"
        first, *rest = played(url, *map(str, range(1, 10)))
        assert first.messages[0]["content"] == "Guess a number from 1 to 9."
        assert [each.terminated for each in rest].count(True) == 1
        assert sum(each.reward for each in rest) == 1.0
        tasks = make_world(url, {}).tasks("held_out")
        assert tasks is None if name == "openenv03" else tasks is not None and len(tasks) == 3
        for action, kind in (("boom", "EXECUTION_ERROR"), ("hang", "hung"), ("die", "connection")):
            with pytest.raises(WorldFailed) as failed:
                played(url, action, seconds=1.0)
            assert failed.value.kind == kind


def test_nemo_gym() -> None:
    with served("nemo", "nemo_sums.py") as port:
        for by, reward in ((2, 0.0), (3, 1.0)):
            calls = [ToolCall("a", "add", {"by": 2}), ToolCall("b", "add", {"by": by})]
            _, wrong, *seen, last = played(
                f"nemo:http://127.0.0.1:{port}", ToolCall("c", "add", {"by": "x"}), *calls, "Done."
            )
            assert wrong.is_invalid and seen[0].messages[0]["content"] == '{"total":2}'
            assert last.terminated and last.reward == reward


def test_skyrl_gym() -> None:
    task = {"messages": ({"role": "user", "content": "2+2?"},), "answer": "4", "info": {}}
    for text, reward in (("#### 4", 1.0), ("#### 5", 0.0)):
        _, last = played("skyrl:gsm8k", text, task=task, python=python_of("skyrl"))
        assert last.terminated and last.reward == reward


def test_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SERVERS))
    python = python_of("verifiers")
    world = make_world("verifiers:verifiers_sums", {"python": python})
    train, held_out = (world.tasks(split) or () for split in ("train", "held_out"))
    assert [len(train), len(held_out)] == [18, 2]
    task = {"messages": train[3].messages, "info": train[3].info, "answer": ""}
    assert [each["content"] for each in train[3].messages] == ["Count.", "What is 3 + 1?"]
    for text, reward in (("4", 1.5), ("five", 0.0), ("5", 0.5)):
        _, last = played("verifiers:verifiers_sums", text, task=task, python=python)
        assert last.terminated and last.reward == reward
        assert last.info["metrics"] == {"length": len(text)}
    with pytest.raises(WorldFailed, match="boom"):
        played("verifiers:verifiers_sums", "boom", task=task, python=python)
    with pytest.raises(UniRLError, match="needs tools"):
        make_world("verifiers:verifiers_tools", {"python": python})


@pytest.mark.parametrize("is_http", [False, True])
def test_mcp(is_http: bool) -> None:
    async def call(where: str) -> list[str]:
        tools = make_tools([f"mcp:{where}"], {}, seconds=20, max_chars=200)
        box = await tools.open({})
        try:
            results = await box.call_all(
                [ToolCall("1", "add", {"a": 1, "b": 2}), ToolCall("2", "bad", {})]
            )
        finally:
            await box.close()
        return [each.ended + " " + each.text for each in results]

    if is_http:
        with served("mcp", "mcp_sums.py") as port:
            seen = asyncio.run(call(f"http://127.0.0.1:{port}/mcp"))
    else:
        seen = asyncio.run(call(f"{python_of('mcp')} {SERVERS / 'mcp_sums.py'}"))
    assert seen[0] == "ok 3" and seen[1].startswith("error Error: ")
