"""What dies while agents act: nothing is lost, nothing hangs, and no program is left."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="language models need the extra llm")
pytest.importorskip("uvicorn", reason="the endpoint needs the extra agents")

import unirl
from unirl.llm.models.tiny import make_tiny
from unirl.runners.loop import TrainLoop
from unirl.runners.processes import ProcessesRunner

PROGRAM = """
import json, os, pathlib, time, urllib.request
pathlib.Path({folder!r}, str(os.getpid())).touch()
task = json.loads(os.environ["UNIRL_TASK"])
body = json.dumps({{"model": "any", "messages": task["messages"]}}).encode()
key = os.environ["OPENAI_API_KEY"]
headers = {{"Content-Type": "application/json", "Authorization": "Bearer " + key}}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60))
time.sleep(0.5)
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class KillOnce:
    """A hook: after the first update the actor is killed, with its engine and its endpoint."""

    def __init__(self, runner: ProcessesRunner, started: Path) -> None:
        self.runner, self.started, self.killed, self.had = runner, started, 0, 0

    def after_update(self, loop: TrainLoop) -> None:
        deadline = time.monotonic() + 30
        while not self.killed and time.monotonic() < deadline:
            self.had = sum(is_alive(int(path.name)) for path in self.started.iterdir())
            pid = self.runner.actor_pids()[0]
            if self.had and pid is not None:
                os.kill(pid, signal.SIGKILL)
                self.killed = pid
            time.sleep(0.01)
        if loop.learner.version == 3:
            loop.stop("enough")

    def at_end(self, loop: TrainLoop) -> None:
        pass


def test_an_actor_that_is_killed_takes_its_programs_along_and_loses_no_ticket(
    tmp_path: Path,
) -> None:
    started = tmp_path / "started"
    started.mkdir()
    (tmp_path / "agent.py").write_text(PROGRAM.format(folder=str(started)))
    plan = unirl.make_plan(
        "agent",
        **{
            "model.path": str(make_tiny(tmp_path / "tiny", width=32, layers=1)),
            "task.name": "products",
            "task.max_prompt": 16,
            "mode": "async",
            "agent.command": f"{sys.executable} {tmp_path / 'agent.py'}",
            "agent.max_episode_tokens": 32,
            "reward.weights": {"characters": 1.0},
            "rollout.group_size": 2,
            "sampling.max_tokens": 4,
            "queue.batch_size": 2,
            "queue.max_staleness": 1,
            "runner.learner_threads": 1,
        },
    )
    runner = ProcessesRunner(plan, log_dir=tmp_path / "logs")
    hook = KillOnce(runner, started)
    runner.run([hook])
    assert hook.killed and hook.had and runner.num_restarts == 1
    stats = runner.loop.queue.stats()
    assert stats.learned == 6 and stats.late == 0
    assert stats.started == stats.learned + sum(stats.discarded.values()) + stats.out
    assert {reason for reason, count in stats.discarded.items() if count} <= {"shutdown"}
    time.sleep(0.5)
    assert not [path.name for path in started.iterdir() if is_alive(int(path.name))]


class Restarts:
    """A hook that counts them, and ends after an update."""

    def __init__(self, runner: ProcessesRunner) -> None:
        self.runner, self.found = runner, list[tuple[int, dict[str, int]]]()

    def after_update(self, loop: TrainLoop) -> None:
        self.found.append((self.runner.num_restarts, dict(loop.queue.stats().discarded)))
        loop.stop("enough")

    def at_end(self, loop: TrainLoop) -> None:
        pass


def test_an_engine_that_waits_for_slow_tools_is_not_taken_for_stuck(tmp_path: Path) -> None:
    plan = unirl.make_plan(
        "agent",
        **{
            "model.path": str(make_tiny(tmp_path / "tiny", width=32, layers=1)),
            "task.name": "products",
            "task.max_prompt": 16,
            "mode": "async",
            "agent.function": "tests.llm.agents.agent_code:waits",
            "agent.max_episode_tokens": 32,
            "rollout.group_size": 2,
            "sampling.max_tokens": 4,
            "queue.batch_size": 1,
            "runner.hang_seconds": 3.0,
            "runner.learner_threads": 1,
            "run.eval_steps": 0,
        },
    )
    runner = ProcessesRunner(plan, log_dir=tmp_path)
    seen = Restarts(runner)
    runner.run([seen])
    [(restarts, discarded)] = seen.found
    assert restarts == 0 and not any(discarded.values())
