"""Task folders of Harbor in boxes of this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.llm import podman
from tests.llm.boxes import config_for
from unirl.errors import UniRLError
from unirl.llm.agents.tool_calls import ToolCall
from unirl.llm.agents.worlds.make import make_world
from unirl.llm.agents.worlds.world import Judging, Observation, WorldFailed
from unirl.llm.sandbox.box import SandboxFailed
from unirl.llm.sandbox.config import SandboxConfig

TOML = """\
version = "1.0"

[metadata]
difficulty = "easy"

[verifier]
timeout_sec = 5.0

[agent]
timeout_sec = 120.0

[environment]
cpus = 1
memory_mb = 2048
"""
DOCKERFILE = "# no programs\nFROM ubuntu:24.04\n\nWORKDIR /app\nCOPY data /app/data\n"
TESTS = """\
#!/bin/bash
if python3 /tests/check.py; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
"""
CHECK = """\
import pathlib, sys
found = pathlib.Path("/app/hello.txt")
sys.exit(not (found.exists() and found.read_text().strip() == "Hello, world!"))
"""


def write(root: Path, name: str = "hello", **others: str) -> Path:
    files = {
        "task.toml": TOML,
        "instruction.md": "Create hello.txt with Hello, world!",
        "environment/Dockerfile": DOCKERFILE,
        "environment/data/greeting.txt": "Hello, world!\n",
        "tests/test.sh": TESTS,
        "tests/check.py": CHECK,
    }
    for path, text in (files | others).items():
        (root / name / path).parent.mkdir(parents=True, exist_ok=True)
        (root / name / path).write_text(text)
    return root / name


def bash(command: str) -> ToolCall:
    return ToolCall("c", "bash", {"command": command})


def played(
    folder: Path,
    actions: Sequence[Any],
    judged: bool = False,
    sandbox: SandboxConfig = SandboxConfig(level="bwrap"),  # noqa: B008
) -> list[Any]:
    async def play() -> list[Any]:
        world = make_world(f"harbor:{folder}", {}, sandbox=sandbox)
        (task,) = world.tasks("train") or ()
        client = world()
        try:
            await client.reset({"messages": task.messages, "info": task.info}, 0)
            seen: list[Any] = [await client.step(action) for action in actions]
            if judged:
                assert isinstance(client, Judging)
                seen.append(await client.judge())
            return seen
        finally:
            await client.close()

    return asyncio.run(play())


def text(seen: Observation) -> str:
    return str(seen.messages[0]["content"])


def test_a_task_is_worked_on_and_then_judged_by_its_own_tests(tmp_path: Path) -> None:
    folder = write(tmp_path)
    seen = played(
        folder, [bash("pwd; ls; ls /tests"), bash("cp data/greeting.txt hello.txt"), "Done."]
    )
    assert text(seen[0]) == "/app\ndata\n", "the tests are not there yet"
    assert (seen[-1].reward, seen[-1].terminated) == (1.0, True)
    (wrong,) = played(folder, ["I have done nothing."])
    assert wrong.reward == 0.0 and wrong.info["exit_code"] == 0


def test_what_it_did_is_judged_when_its_budget_is_used_up(tmp_path: Path) -> None:
    command = bash("echo 'Hello, world!' > hello.txt; exit 3")
    seen, judged = played(write(tmp_path), [command], judged=True)
    assert text(seen) == "\n[exit code 3]" and judged == 1.0


def test_invalid_calls_are_answered(tmp_path: Path) -> None:
    (seen,) = played(write(tmp_path), [ToolCall("c", "shell", {})])
    assert seen.is_invalid and "one tool, bash" in text(seen)


def test_tests_that_do_not_end_are_worth_nothing_and_those_that_say_nothing_fail(
    tmp_path: Path,
) -> None:
    quick = TOML.replace("5.0", "0.5")
    slow = write(tmp_path, "slow", **{"tests/test.sh": "sleep 60"})
    (slow / "task.toml").write_text(quick)
    (seen,) = played(slow, ["Done."])
    assert seen.reward == 0.0 and seen.info["killed"] == "time"
    silent = write(tmp_path, "silent", **{"tests/test.sh": "true"})
    with pytest.raises(WorldFailed, match="failed at step 1"):
        played(silent, ["Done."])


def test_a_reward_may_be_json(tmp_path: Path) -> None:
    script = 'echo \'{"reward": 0.25, "speed": 3}\' > /logs/verifier/reward.json'
    (seen,) = played(write(tmp_path, **{"tests/test.sh": script}), ["Done."])
    assert seen.reward == 0.25


@pytest.mark.parametrize(
    ("file", "content", "why"),
    [
        ("task.toml", "[environment", "cannot be read"),
        ("task.toml", '[environment]\ndocker_image = "a/b"', "needs a container: image a/b"),
        ("environment/Dockerfile", "FROM a\nRUN apt-get \\\n install b", "Dockerfile has RUN"),
        ("environment/docker-compose.yaml", "services: {}", "compose"),
    ],
)
def test_what_needs_a_container_is_refused(
    tmp_path: Path, file: str, content: str, why: str
) -> None:
    folder = write(tmp_path, **{file: content})
    with pytest.raises(UniRLError, match=why):
        make_world(f"harbor:{folder}", {})
    if file != "task.toml" or "docker_image" in content:
        make_world(f"harbor:{folder}", {"ignore_image": "true"})


def test_with_containers_a_task_is_worked_on_in_its_image(tmp_path: Path) -> None:
    config = config_for("container", slots=1)
    dockerfile = f"FROM {podman.IMAGE}\nWORKDIR /app\nCOPY data /app/data\nRUN cp data/* /built\n"
    folder = write(tmp_path, **{"environment/Dockerfile": dockerfile})
    with pytest.raises(UniRLError, match="Dockerfile has RUN"):
        make_world(f"harbor:{folder}", {})
    for _ in range(2):  # the second time the image is there
        seen = played(
            folder,
            [bash("pwd; ls; cat /built; ls /tests"), bash("cp /built hello.txt"), "Done."],
            sandbox=config,
        )
        assert text(seen[0]) == "/app\ndata\nHello, world!\n"
        assert (seen[-1].reward, seen[-1].terminated) == (1.0, True)
    (folder / "environment/Dockerfile").write_text(f"FROM {podman.IMAGE}\nRUN no-such-program\n")
    with pytest.raises(SandboxFailed, match="cannot be built"):
        played(folder, [], sandbox=config)
    (folder / "task.toml").write_text(f'{TOML}docker_image = "{podman.IMAGE}"\n')
    (seen,) = played(folder, [bash("pwd; ls -d app")], sandbox=config)
    assert text(seen).startswith("/\n")


def test_a_folder_of_tasks_holds_one_in_ten_out(tmp_path: Path) -> None:
    for i in range(11):
        write(tmp_path, f"task{i:02}")
    world = make_world(f"harbor:{tmp_path}", {})
    assert [len(world.tasks(split) or ()) for split in ("train", "held_out")] == [10, 1]
    with pytest.raises(UniRLError, match="has no task of Harbor"):
        make_world(f"harbor:{tmp_path / 'none'}", {})
