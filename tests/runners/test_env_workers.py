"""Environment workers and policy workers under the processes runner: one that dies or hangs
is replaced, its samples are discarded with a reason, and all others continue.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unirl
from tests.toy_envs import FAULT
from unirl.errors import UniRLError
from unirl.runners.loop import TrainLoop
from unirl.runners.processes import ProcessesRunner

SMALL: dict[str, Any] = {
    "env.id": "CartPole-v1",
    "env.engine": "sync",
    "policy.hidden": (16,),
    "sampler.num_workers": 2,
    "sampler.num_groups": 2,
    "sampler.num_envs": 4,
    "sampler.unroll_length": 8,
    "queue.batch_size": 2,
    "queue.max_staleness": 3,
    "learner.minibatches": 2,
    "learner.epochs": 1,
    "run.total_steps": 10_000_000,
}


class Every:
    """A hook that acts after each of some updates, until the last, which ends the run."""

    def __init__(self, **actions: Any) -> None:
        self.actions = {int(name[1:]): action for name, action in actions.items()}

    def after_update(self, loop: TrainLoop) -> None:
        action = self.actions.pop(loop.learner.version, None)
        if action is not None:
            action()
        if not self.actions:
            loop.stop("test")

    def at_end(self, loop: TrainLoop) -> None:
        pass


def make(**settings: Any) -> ProcessesRunner:
    return ProcessesRunner(unirl.make_plan("appo", **{**SMALL, **settings}))


def balance(runner: ProcessesRunner) -> int:
    """Samples that are neither learned, nor discarded with a reason, nor in flight: must be 0."""
    stats = runner.loop.queue.stats()
    return stats.started - stats.learned - sum(stats.discarded.values()) - stats.out


def pid_of(runner: ProcessesRunner, role: str, index: int) -> int:
    pids = runner.helper_pids() if role == "environment worker" else runner.actor_pids()
    pid = pids[index]
    assert pid is not None
    return pid


class Script:
    """A hook that goes through steps, each tried after every update until it returns True."""

    def __init__(self, *steps: Callable[[], bool]) -> None:
        self.steps, self.deadline = list(steps), time.monotonic() + 120

    def after_update(self, loop: TrainLoop) -> None:
        assert time.monotonic() < self.deadline, f"{len(self.steps)} steps of the script are left"
        if loop.learner.version > 20 and self.steps[0]():
            self.steps.pop(0)
        if not self.steps:
            loop.stop("test")

    def at_end(self, loop: TrainLoop) -> None:
        pass


@pytest.mark.parametrize("role", ["environment worker", "actor"])
def test_a_killed_process_is_replaced_and_every_sample_accounted_for(role: str) -> None:
    runner = make()
    handshake: Any = runner.processes.pools[0].handshake
    dead: list[int] = []
    before: list[int] = []

    def steps() -> list[int]:
        return [handshake.group_totals(group)[1] for group in range(4)]

    def kill() -> bool:
        dead.append(pid_of(runner, role, 0))
        os.kill(dead[0], signal.SIGKILL)
        return True

    def replaced() -> bool:
        before[:] = steps()
        return pid_of(runner, role, 0) != dead[0]

    def all_groups_step() -> bool:
        return all(now > old + 20 for now, old in zip(steps(), before, strict=True))

    runner.run([Script(kill, replaced, all_groups_step)])
    assert runner.num_restarts == 1
    assert runner.loop.queue.stats().discarded["actor_died"] <= 4
    assert balance(runner) == 0
    assert not Path(f"/proc/{dead[0]}").exists()


def test_a_worker_that_owes_a_step_for_too_long_is_replaced_and_the_others_continue() -> None:
    runner = make(**{"env.step_timeout": 1.5})
    started = 0.0

    def stop() -> None:
        nonlocal started
        started = time.monotonic()
        os.kill(pid_of(runner, "environment worker", 1), signal.SIGSTOP)

    def wait() -> None:
        deadline = time.monotonic() + 60
        while not runner.loop.queue.stats().discarded["timeout"]:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    # Between the two the learner lives on what the other worker produces.
    runner.run([Every(_30=stop, _60=wait, _90=lambda: None)])
    assert 1 <= runner.loop.queue.stats().discarded["timeout"] <= 2
    assert runner.num_restarts == 1
    assert balance(runner) == 0


def test_a_worker_may_take_longer_to_reset_all_its_groups_than_for_one_step() -> None:
    runner = make(
        **{
            **FAULT,
            "env.kwargs": {"reset_seconds": 0.5},
            "env.step_timeout": 1.5,
            "sampler.num_workers": 1,
            "sampler.num_groups": 4,
            "sampler.num_envs": 2,
        }
    )
    runner.run([Every(_5=lambda: None)])
    assert runner.num_restarts == 0
    assert runner.loop.queue.stats().discarded["timeout"] == 0


def test_a_stopped_policy_worker_is_replaced() -> None:
    runner = make(**{"runner.hang_seconds": 1.5})
    runner.run(
        [
            Every(
                _30=lambda: os.kill(pid_of(runner, "actor", 0), signal.SIGSTOP),
                _60=lambda: None,
            )
        ]
    )
    assert runner.num_restarts == 1
    assert balance(runner) == 0


def test_an_environment_that_always_fails_ends_the_run_and_names_its_worker(
    tmp_path: Path,
) -> None:
    plan = unirl.make_plan(
        "appo",
        **{
            **SMALL,
            **FAULT,
            "env.kwargs": {"raise_at": 100},
            "runner.max_restarts": 1,
        },
    )
    with pytest.raises(UniRLError) as error:
        unirl.run(plan, tmp_path, console=False)
    assert "RuntimeError in toy_envs.py" in error.value.what
    assert error.value.what.startswith("environment worker")
    assert "restarted 1 of 1 times" in error.value.rule
    logs = "".join(path.read_text() for path in (tmp_path / "logs").iterdir())
    assert logs.count("RuntimeError: fault at step 100") >= 2


def test_a_broken_observation_ends_the_run_at_once(tmp_path: Path) -> None:
    plan = unirl.make_plan("appo", **{**SMALL, **FAULT, "env.kwargs": {"nan_at": 20}})
    with pytest.raises(UniRLError, match=r"(?i)nan") as error:
        unirl.run(plan, tmp_path, console=False)
    assert "toy/Fault-v0" in str(error.value)


def test_more_groups_than_slots_are_refused() -> None:
    with pytest.raises(UniRLError, match="4 groups of environments share 2 slots"):
        make(**{"queue.max_staleness": 0})


def test_the_same_recipe_runs_in_one_process(tmp_path: Path) -> None:
    # One row: how the losses are cut into rows depends on the clock.
    settings = {"runner.kind": "inline", "run.total_steps": 2_000, "run.log_seconds": 1000.0}
    plan = unirl.make_plan("appo", **{**SMALL, **settings})
    first = unirl.run(plan, tmp_path / "a", console=False)
    again = unirl.run(plan, tmp_path / "b", console=False)
    assert first.num_steps == again.num_steps >= 2_000
    assert first.scalars["losses/policy"] == again.scalars["losses/policy"]
