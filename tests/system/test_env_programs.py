"""Programs that environments start end with what started them, whatever ends it; and environments
that hang while they are made, or end the process, are named.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unirl
from tests import forked
from tests.runners.test_processes import At, wait_until
from unirl.errors import ActorFailed, UniRLError
from unirl.runners.loop import TrainLoop
from unirl.runners.processes import ProcessesRunner

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="marks are Linux's")
ENV = """
import os, subprocess, sys, time
import gymnasium
from tests.toy_envs import Fault


class Starts(Fault):
    # One program in a session of its own, one that is nobody's child, both without our environment.
    def __init__(self, token, hang_unless=0, **faults):
        super().__init__(**faults)
        if hang_unless and os.getpid() != hang_unless:
            while True:
                try:
                    time.sleep(600)
                except Exception:
                    pass
        program = f"(sleep {token} &) ; exec sleep {token}"
        subprocess.Popen(["setsid", "sh", "-c", program], env={"PATH": os.environ["PATH"]})

    def step(self, action):
        if self._raise_at and self._step + 1 >= self._raise_at:
            sys.exit(0)
        return super().step(action)


gymnasium.register("test/Starts-v0", Starts)
"""
_tokens = itertools.count()


def settings(recipe: str, token: float, **kwargs: Any) -> dict[str, Any]:
    shared = {
        "env.id": "test/Starts-v0",
        "env.import_module": "starting_envs_for_test",
        "env.kwargs": {"token": token, **kwargs},
        "policy.hidden": (8,),
        "queue.max_staleness": 3,
        "runner.kind": "processes",
        "run.total_steps": 10_000_000,
        "run.log_seconds": 0.0,
    }
    if recipe == "appo":
        return shared | {"sampler.num_envs": 2, "sampler.num_groups": 1, "learner.minibatches": 1}
    return shared | {"actor.num_envs": 2, "actor.num_actors": 2, "queue.batch_size": 2}


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """How long the programs of this test sleep: nothing else sleeps as long."""
    (tmp_path / "starting_envs_for_test.py").write_text(ENV)
    monkeypatch.syspath_prepend(str(tmp_path))
    return 9_000_000.0 + os.getpid() + next(_tokens) / 100


def programs(token: float) -> list[int]:
    found, wanted = [], f"sleep\0{token}\0".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes() == wanted:
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_programs_end_with_an_actor_that_hangs_and_with_the_run(
    token: float, tmp_path: Path
) -> None:
    others = subprocess.Popen(["sleep", "300"], start_new_session=True)
    unirl.make_plan("impala", by_kind=True, **settings("impala", token))
    assert not programs(token), "left by the environment whose steps were timed"
    plan = unirl.make_plan("impala", **settings("impala", token), **{"runner.hang_seconds": 1.0})
    assert not programs(token), "left by the environment that was asked for its spaces"
    runner = ProcessesRunner(plan, log_dir=tmp_path)
    first: list[int] = []

    def stop_one(loop: TrainLoop) -> None:
        assert wait_until(lambda: len(programs(token)) == 8, 30.0)
        first.extend(programs(token))
        pid = runner.actor_pids()[0]
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)

    class UntilReplaced:
        def after_update(self, loop: TrainLoop) -> None:
            if runner.num_restarts:
                assert wait_until(lambda: len(programs(token)) == 8, 30.0)
                assert len(set(first) & set(programs(token))) == 4  # the other actor's
                loop.stop("replaced")

        def at_end(self, loop: TrainLoop) -> None:
            pass

    try:
        runner.run([At(3, stop_one), UntilReplaced()])
        assert runner.num_restarts == 1
        assert not programs(token)
        assert others.poll() is None, "it is not ours"
    finally:
        others.kill()
        others.wait()


def children(pid: int, word: str) -> list[int]:
    """Those of a process whose command line holds this."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in path.read_text().split():
            if word in Path(f"/proc/{child}/cmdline").read_text():
                found.append(int(child))
    return found


@pytest.mark.parametrize(
    ("recipe", "number", "first"),
    [
        ("impala", signal.SIGKILL, "kill the keepers"),
        ("impala inline", signal.SIGKILL, ""),
        ("appo", signal.SIGINT, "stop the fork server"),
        pytest.param("appo", signal.SIGKILL, "", marks=pytest.mark.slow),
    ],
)
def test_programs_end_with_the_learner(
    recipe: str, number: signal.Signals, first: str, token: float, tmp_path: Path
) -> None:
    output = tmp_path / "output.txt"
    learner = forked.start(train, recipe, token, tmp_path / "run", output=output)
    assert learner.pid is not None
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        assert wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0, 60.0)
        assert programs(token)  # of some; the other process may still be starting its own
        if first == "stop the fork server":
            for pid in children(learner.pid, "forkserver"):
                os.kill(pid, signal.SIGSTOP)
        if first == "kill the keepers":
            keepers = set(children(learner.pid, "descendants.py"))
            for pid in keepers:
                os.kill(pid, signal.SIGKILL)
            assert wait_until(
                lambda: bool(set(children(learner.pid, "descendants.py")) - keepers), 10.0
            )
            time.sleep(0.5)  # the new one must be there to wait
        os.kill(learner.pid, number)
        started = time.monotonic()
        learner.join(60.0)
        assert learner.exitcode == (0 if number == signal.SIGINT else -number), output.read_text()
        assert time.monotonic() - started < 30.0
        assert wait_until(lambda: not programs(token), 30.0)
    finally:
        learner.kill()


def train(recipe: str, token: float, run_dir: Path) -> None:
    recipe, _, kind = recipe.partition(" ")
    found = settings(recipe, token) | {"runner.kind": kind or "processes"}
    unirl.run(unirl.make_plan(recipe, **found), run_dir, console=False)


def run_of(recipe: str, token: float, tmp_path: Path, **changes: Any) -> Callable[[], Any]:
    kwargs = changes.pop("kwargs")
    plan = unirl.make_plan(recipe, **{**settings(recipe, token, **kwargs), **changes})
    return lambda: unirl.run(plan, tmp_path / "run", console=False)


@pytest.mark.parametrize("recipe", ["appo", pytest.param("impala", marks=pytest.mark.slow)])
def test_an_environment_that_hangs_while_it_is_made_is_named(
    recipe: str, token: float, tmp_path: Path
) -> None:
    late = {"env.make_timeout": 1.0, "runner.max_restarts": 0}
    # Here it can be made, in the run's other processes it cannot.
    run = run_of(recipe, token, tmp_path, kwargs={"hang_unless": os.getpid()}, **late)
    with pytest.raises(ActorFailed, match=r'"test/Starts-v0" was not made within 1 s: it hung in'):
        run()
    # Nor here.
    with pytest.raises(UniRLError, match=r"env\.make_timeout, 1 s") as error:
        run_of(recipe, token, tmp_path, kwargs={"hang_unless": 1}, **late)
    assert len(error.value.parts) == 3
    assert not programs(token)


@pytest.mark.parametrize("kind", ["inline", pytest.param("processes", marks=pytest.mark.slow)])
def test_an_environment_that_calls_exit_is_named(kind: str, token: float, tmp_path: Path) -> None:
    once = {"runner.kind": kind, "runner.max_restarts": 0}
    with pytest.raises(ActorFailed, match=r'"test/Starts-v0" called sys.exit in a step') as error:
        run_of("impala", token, tmp_path, kwargs={"raise_at": 30}, **once)()
    assert len(error.value.parts) == 3
