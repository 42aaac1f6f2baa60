"""Actors as processes: faults end in a restart or a clear message, and no process is ever left
behind.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

import unirl
from tests import forked
from tests.toy_envs import FAULT
from unirl.errors import ActorFailed, UniRLError
from unirl.runners.config import RunnerConfig
from unirl.runners.loop import TrainLoop
from unirl.runners.processes import ProcessesRunner
from unirl.storage.checkpoint import load_checkpoint

SMALL: dict[str, Any] = {
    "env.id": "CartPole-v1",
    "actor.num_envs": 4,
    "actor.num_actors": 2,
    "actor.unroll_length": 8,
    "policy.hidden": (16,),
    "queue.batch_size": 2,
    "queue.max_staleness": 1,
    "runner.kind": "processes",
    "run.total_steps": 10_000_000,
}


class At:
    """A hook that does something once, after a number of updates."""

    def __init__(self, version: int, action: Callable[[TrainLoop], None]) -> None:
        self.version, self.action = version, action

    def after_update(self, loop: TrainLoop) -> None:
        if loop.learner.version == self.version:
            self.action(loop)

    def at_end(self, loop: TrainLoop) -> None:
        pass


def children(pid: int) -> list[int]:
    """Living descendants of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir() if Path(f"/proc/{pid}").exists() else []:
        for child in (task / "children").read_text().split():
            found += [int(child), *children(int(child))]
    return found


def state_of(pid: int) -> str:
    """As in /proc: Z is a zombie, T is stopped; empty: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def alive(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def actor_pids(runner: ProcessesRunner) -> list[int]:
    return [pid for pid in runner.actor_pids() if pid is not None]


def test_a_killed_actor_is_restarted_its_slot_discarded_and_training_continues(
    tmp_path: Path,
) -> None:
    runner = ProcessesRunner(unirl.make_plan("impala", **SMALL), log_dir=tmp_path)
    seen: list[int] = []

    def kill(loop: TrainLoop) -> None:
        seen.extend(actor_pids(runner))
        if sys.platform == "linux":
            assert Path(f"/proc/{seen[0]}/comm").read_text() == "actor 0\n"  # in top and ps
        os.kill(seen[0], signal.SIGKILL)

    class UntilTheSuccessorIsNeeded:
        """Or a minute is over. One actor of two cannot fill all slots in strict order for long."""

        end = 1_000_000

        def after_update(self, loop: TrainLoop) -> None:
            pids = runner.actor_pids()
            if len(seen) == 2 and None not in pids and pids[0] != seen[0]:
                producing = [status.num_running for status in loop.queue.members()]
                if len(producing) == 2 and all(producing):
                    seen.extend(actor_pids(runner))
                    self.end = loop.learner.version + 20
            if loop.learner.version >= self.end or loop.seconds > 60.0:
                loop.stop("test")

        def at_end(self, loop: TrainLoop) -> None:
            pass

    runner.run([At(50, kill), UntilTheSuccessorIsNeeded()])
    assert len(seen) == 4 and seen[2] != seen[0]
    assert runner.loop.metrics.flush()["faults/actor_restarts"] == 1
    assert runner.loop.queue.stats().discarded["actor_died"] <= 1
    assert not any(alive(pid) for pid in seen)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says who holds a record lock")
def test_an_actor_that_is_stopped_with_the_lock_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unirl.transports.locks.STOPPED_SECONDS", 0.5)
    plan = unirl.make_plan("impala", **{**SMALL, "actor.unroll_length": 1})
    runner = ProcessesRunner(plan, log_dir=tmp_path)
    lock: Any = runner.loop.queue.memory.lock  # type: ignore[attr-defined]
    stopped: list[int] = []

    def stop_one_with_the_lock() -> None:
        """And kill the other: cleaning up after it needs the lock."""
        first, second = actor_pids(runner)
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            os.kill(second, signal.SIGSTOP)
            while state_of(second) not in ("T", "Z", ""):
                pass
            if lock.holder() == second:
                stopped.append(second)
                os.kill(first, signal.SIGKILL)
                return
            os.kill(second, signal.SIGCONT)
            time.sleep(2e-4 * random.random())

    thread = threading.Thread(target=stop_one_with_the_lock)

    class UntilBothAreReplaced:
        def after_update(self, loop: TrainLoop) -> None:
            if runner.num_restarts == 2 or loop.seconds > 90.0:
                loop.stop("test")

        def at_end(self, loop: TrainLoop) -> None:
            pass

    runner.run([At(50, lambda loop: thread.start()), UntilBothAreReplaced()])
    thread.join()
    assert stopped and not alive(stopped[0])
    assert runner.num_restarts == 2


@pytest.mark.parametrize("recipe", ["impala", "appo"])
def test_actors_and_environment_workers_give_way_to_the_learner(
    recipe: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"env.id": "CartPole-v1", "runner.actor_niceness": 3}
    if recipe == "impala":
        settings |= {"runner.kind": "processes"}
    plan = unirl.make_plan(recipe, **settings)
    runner = ProcessesRunner(plan, log_dir=tmp_path)

    def nice(pid: int | None) -> int:
        assert pid is not None
        return os.getpriority(os.PRIO_PROCESS, pid)

    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert own < 19, "nobody can give way to a learner of niceness 19"
    wanted, first = min(own + 3, 19), list[int]()

    def look(loop: TrainLoop) -> None:
        pids = [*runner.actor_pids(), *runner.helper_pids()]
        helpers = plan.pools[0].helpers
        assert len(pids) == plan.pools[0].bounds[0] + (helpers.count if helpers else 0)
        # One that was not waited for yet may still be starting.
        assert wait_until(lambda: {nice(pid) for pid in pids} == {wanted}, 30.0)
        first.extend(actor_pids(runner))
        os.kill(first[0], signal.SIGKILL)

    def look_again(loop: TrainLoop) -> None:
        assert wait_until(lambda: actor_pids(runner)[0] != first[0], 30.0)
        assert wait_until(lambda: nice(actor_pids(runner)[0]) == wanted, 30.0)  # not twice as much
        loop.stop("seen")

    runner.run([At(2, look), At(10, look_again)])


@pytest.mark.parametrize("niceness", [-1, 20])
def test_a_niceness_that_nice_does_not_know_is_refused(niceness: int) -> None:
    with pytest.raises(UniRLError, match=r"0 <= runner.actor_niceness <= 19 must hold"):
        RunnerConfig(actor_niceness=niceness)


def test_an_environment_that_always_fails_stops_the_run_with_its_trace_in_the_log(
    tmp_path: Path,
) -> None:
    plan = unirl.make_plan(
        "impala",
        **{
            **SMALL,
            **FAULT,
            "env.kwargs": {"raise_at": 200},
            "runner.max_restarts": 1,
        },
    )
    with pytest.raises(UniRLError) as error:
        unirl.run(plan, tmp_path, console=False)
    assert len(error.value.parts) == 3
    assert "RuntimeError in toy_envs.py" in error.value.what
    assert "restarted 1 of 1 times" in error.value.rule
    assert "actor-00" in error.value.remedy
    # What was learned before is saved: the remedy, to resume, can be followed.
    assert load_checkpoint(tmp_path).state["version"] > 0
    logs = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert logs.count("RuntimeError: fault at step 200") >= 2


def test_a_nan_observation_stops_the_run_at_once_and_names_itself(tmp_path: Path) -> None:
    plan = unirl.make_plan("impala", **{**SMALL, **FAULT, "env.kwargs": {"nan_at": 20}})
    with pytest.raises(UniRLError, match=r"(?i)nan") as error:
        unirl.run(plan, tmp_path, console=False)
    assert len(error.value.parts) == 3
    assert "toy/Fault-v0" in str(error.value)


@pytest.mark.parametrize("timeout_seconds", [1.0, 300.0], ids=["equal deadlines", "default"])
def test_a_hung_environment_is_killed_once_and_restarted(
    tmp_path: Path, timeout_seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    kwargs = {"sleep_at": 500, "sleep_seconds": 600.0}
    plan = unirl.make_plan(
        "impala",
        **{**SMALL, **FAULT, "env.kwargs": kwargs, "runner.hang_seconds": 1.0},
    )
    runner = ProcessesRunner(plan, log_dir=tmp_path)

    class UntilRestart:
        def after_update(self, loop: TrainLoop) -> None:
            if loop.queue.stats().discarded["actor_died"]:
                loop.stop("restarted")

        def at_end(self, loop: TrainLoop) -> None:
            pass

    with caplog.at_level(logging.WARNING):
        runner.run([UntilRestart()])
    assert runner.loop.reason == "restarted"
    assert 1 <= sum("hangs, killed" in record.message for record in caplog.records) <= 2


def test_an_actor_that_hangs_for_good_ends_with_the_setting_that_killed_it(tmp_path: Path) -> None:
    plan = unirl.make_plan(
        "impala",
        **{
            **SMALL,
            **FAULT,
            "env.kwargs": {"sleep_at": 20, "sleep_seconds": 600.0},
            "runner.hang_seconds": 1.5,
            "runner.max_restarts": 0,
        },
    )
    with pytest.raises(ActorFailed, match=r"runner\.hang_seconds, 1\.5 s") as error:
        ProcessesRunner(plan, log_dir=tmp_path).run([])
    assert "was killed: it held a slot" in error.value.what
    assert "raise runner.hang_seconds" in error.value.remedy
    assert "signal" not in str(error.value)


def train(run_dir: Path, checkpoint_steps: int, resume: bool) -> None:
    """An endless training."""
    more = {"run.log_seconds": 0.1, "run.checkpoint_steps": checkpoint_steps}
    plan = unirl.make_plan("impala", **{**SMALL, **more})
    unirl.run(plan, run_dir, resume=run_dir if resume else None, console=False)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., BaseProcess]]:
    """Starts trainings in processes of their own; none is left when the test is over."""
    started: list[BaseProcess] = []

    def one(checkpoint_steps: int = 10_000_000, *, resume: bool = False) -> BaseProcess:
        """Returns when it has trained for a moment."""
        known, run_dir, output = rows(tmp_path / "run"), tmp_path / "run", tmp_path / "output.txt"
        started.append(forked.start(train, run_dir, checkpoint_steps, resume, output=output))
        assert wait_until(lambda: rows(run_dir) > known + 1, 60), output.read_text()
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.join()


def rows(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_kill_9_of_the_main_process_leaves_no_process_and_no_shared_memory(
    start: Callable[..., BaseProcess],
) -> None:
    before = set(os.listdir("/dev/shm"))
    main = start()
    assert main.pid is not None
    family = children(main.pid)
    assert len(family) >= 2
    main.kill()
    main.join()
    assert wait_until(lambda: not any(alive(pid) for pid in family), 60)
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "unirl" in name]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_one_signal_ends_the_run_with_a_checkpoint_and_exit_code_0(
    start: Callable[..., BaseProcess], tmp_path: Path, number: signal.Signals
) -> None:
    main = start()
    assert main.pid is not None
    family = children(main.pid)
    os.kill(main.pid, number)
    main.join(60)
    assert main.exitcode == 0
    assert load_checkpoint(tmp_path / "run").step > 0
    assert wait_until(lambda: not any(alive(pid) for pid in family), 60)


def test_kill_9_of_the_learner_at_random_moments_never_costs_a_checkpoint(
    start: Callable[..., BaseProcess], tmp_path: Path
) -> None:
    """UNIRL_KILLS sets how often; every few updates there is a checkpoint, so most kills fall into
    one.
    """
    rng, steps = random.Random(0), 0
    for attempt in range(int(os.environ.get("UNIRL_KILLS", "4"))):
        main = start(200, resume=attempt > 0)
        time.sleep(rng.random())
        assert main.pid is not None
        family = children(main.pid)
        main.kill()
        main.join()
        assert wait_until(lambda family=family: not any(alive(pid) for pid in family), 60)
        checkpoint = load_checkpoint(tmp_path / "run")
        assert checkpoint.step > steps  # the resumed run went on from where the last one was
        steps = checkpoint.step
