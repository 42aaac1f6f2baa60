"""Pauses and losses of a run with runner processes that is given more members and fewer."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import unirl
from unirl import cli


def timed(make: Any, times: list[float], context: Any) -> Any:
    """The learner, with a note of when its updates were."""
    learner = make(context)
    step = learner.step

    def noted(batch: Any) -> Any:
        times.append(time.monotonic())
        return step(batch)

    learner.step = noted
    return learner


@pytest.mark.serial
def test_a_run_has_more_and_fewer_members_without_a_pause_and_nothing_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, times, codes = tmp_path / "run", list[float](), list[int]()
    plan = unirl.make_plan(
        "impala",
        **{
            "env.id": "CartPole-v1", "runner.kind": "processes", "actor.num_actors": 2,
            "actor.num_envs": 2, "actor.unroll_length": 8, "queue.batch_size": 2,
            "queue.max_staleness": 3, "policy.hidden": (8,), "run.total_steps": 10**9,
            "run.max_seconds": 60.0, "run.log_seconds": 0.5,
        },
    )  # fmt: skip
    plan = plan.with_learner(make=partial(timed, plan.learner.make, times))

    def said(what: str) -> bool:
        log = run / "log.txt"
        return log.exists() and what in log.read_text()

    def until(what: str) -> None:
        deadline = time.monotonic() + 30.0
        while not said(what) and time.monotonic() < deadline:
            time.sleep(0.05)

    def scale() -> None:
        while len(times) < 20:
            time.sleep(0.05)
        for words in (["actor", "6"], ["actor", "1"], ["actor", "9"], ["other", "2"]):
            codes.append(cli.main(["scale", str(run), *words]))
            time.sleep(1.0)
        until("actor 5 left")
        codes.append(cli.main(["scale", str(run), "actor", "auto"]))
        if not over:
            os.kill(os.getpid(), signal.SIGTERM)

    over: list[bool] = []
    thread = threading.Thread(target=scale)
    thread.start()
    ended = unirl.run(plan, run, console=False)
    over.append(True)
    thread.join()
    assert codes == [0, 0, 2, 2, 2] and ended.reason == "interrupted"
    pauses = [after - before for before, after in itertools.pairwise(times[20:])]
    assert max(pauses) < 1.0
    assert not any(name.startswith("queue/discarded") for name in ended.scalars)
    errors = capsys.readouterr().err
    assert "allows 1 to 8" in errors and "other" in errors and "--actor.max-actors" in errors
    assert said("actor 1 left") and said("actor 5 left") and not said("died")
    assert (run / "logs" / "actor-005.txt").exists()
