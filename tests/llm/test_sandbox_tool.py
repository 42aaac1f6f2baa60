"""A sandbox as a tool of a model: what counts as a program's time."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator

import pytest

from tests.llm.boxes import Held, hold
from unirl.llm.agents.tool_calls import ToolCall
from unirl.llm.agents.tools import interpreter
from unirl.llm.agents.tools.tool import Toolbox
from unirl.llm.sandbox.box import SandboxFailed, boxed
from unirl.llm.sandbox.tool import PythonTool


@pytest.fixture
def held() -> Iterator[Held]:
    yield from hold("none", slots=1)


def test_waiting_for_a_box_is_not_a_tools_time(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = interpreter._Opened(PythonTool(held.sandboxes), 5.0)
    toolbox = Toolbox([interpreter._SPEC], [tool], seconds=2.0, max_chars=1000)
    code = "import time; time.sleep(0.8); print('slept')"

    async def check() -> list[str]:
        calls = [ToolCall(str(i), "python", {"code": code}) for i in range(4)]
        texts = [result.text for result in await toolbox.call_all(calls)]
        monkeypatch.setattr("unirl.llm.sandbox.tool._WAIT_SECONDS", 0.1)
        async with boxed(held.sandboxes):
            with pytest.raises(SandboxFailed, match="no sandbox is free"):
                await toolbox.call(calls[0])
        return texts

    assert held.run(check()) == ["slept"] * 4


def test_starts_refusals_and_seconds_are_counted(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxes, counts = held.sandboxes, held.sandboxes.counts
    tool = PythonTool(boxes, counts)
    assert counts.starts == 1 and counts.refusals == 0
    seconds = counts.seconds
    assert held.run(tool.run("import time; time.sleep(0.3); print(1)", 5.0)) == "1"
    assert 0.3 <= counts.seconds - seconds < 5.0

    async def in_vain() -> None:
        async with boxed(boxes):
            with pytest.raises(SandboxFailed):
                await tool.run("print(1)", 5.0)

    with monkeypatch.context() as patched:
        patched.setattr("unirl.llm.sandbox.tool._WAIT_SECONDS", 0.05)
        held.run(in_vain())
    assert counts.refusals == 1 and counts.starts == 1
    kill(boxes.pids[0])
    assert held.run(tool.run("print(2)", 5.0)) == "2"
    assert counts.starts == 2


def kill(pid: int) -> None:
    """It is dead when this returns: a pool that looks sees it."""
    descriptor = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert select.select([descriptor], [], [], 10.0)[0]
    finally:
        os.close(descriptor)
