"""What the log says: rates over the time they are of, evaluations in the row of their step."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import unirl
from unirl.core.evaluator import EvalResult
from unirl.errors import ActorFailed, UniRLError
from unirl.runners.hooks import LogHook
from unirl.runners.inline import InlineRunner
from unirl.runners.loop import TrainLoop
from unirl.storage.checkpoint import load_checkpoint

SMALL: dict[str, Any] = {
    "env.id": "CartPole-v1",
    "actor.num_envs": 4,
    "actor.num_actors": 1,
    "actor.unroll_length": 8,
    "policy.hidden": (16,),
    "queue.batch_size": 1,
    "run.eval_episodes": 1,
}
_PAUSE_SECONDS = 0.1


class Rows:
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self.rows.append(dict(scalars))


class Pause:
    """Makes each update take a while, and notes when it was over."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def after_update(self, loop: TrainLoop) -> None:
        time.sleep(0.1)
        self.times.append(time.monotonic())

    def at_end(self, loop: TrainLoop) -> None:
        pass


def logged(num_updates: int, log_seconds: float) -> tuple[list[dict[str, float]], list[float]]:
    """The rows of a run of so many updates, and when each of these was over."""
    rows, pause = Rows(), Pause()
    plan = unirl.make_plan("impala", **{**SMALL, "run.total_steps": 32 * num_updates})
    InlineRunner(plan).run([pause, LogHook([rows], log_seconds)])
    return rows.rows, pause.times


def test_the_first_row_counts_the_updates_of_its_time_alone() -> None:
    rows, times = logged(num_updates=4, log_seconds=0.05)
    assert rows[0]["charts/updates"] == 2
    # The first update began when nobody looked at the clock: counted, it would double this.
    assert rows[0]["perf/updates_per_second"] < 1.5 / (times[1] - times[0])


def test_a_row_of_no_time_has_no_rates() -> None:
    (row,), _ = logged(num_updates=1, log_seconds=1000.0)
    assert row["charts/updates"] == 1
    assert not [name for name in row if name.startswith("perf/")]


def evaluated(run_dir: Path, log_seconds: float) -> tuple[dict[int, float], dict[int, Any]]:
    """Mean returns by step: as evaluated, and as the rows of the log have them."""
    settings = {**SMALL, "run.eval_steps": 128, "run.total_steps": 384}
    plan = unirl.make_plan("impala", **settings, **{"run.log_seconds": log_seconds})
    unirl.run(plan, run_dir, console=False)
    documents = [json.loads(path.read_text()) for path in (run_dir / "eval").glob("*.json")]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    return (
        {document["step"]: document["return_mean"] for document in documents},
        {row["step"]: row.get("eval/return_mean") for row in rows},
    )


def test_an_evaluation_is_in_the_row_of_its_step_however_rare_rows_are(tmp_path: Path) -> None:
    for name, log_seconds in (("often", 0.0), ("seldom", 1000.0)):
        found, logged = evaluated(tmp_path / name, log_seconds)
        assert len(found) >= 2 and max(found) == max(logged)  # the last update is evaluated too
        assert {step: logged[step] for step in found} == found


class BrokenEvaluator:
    """Fails as environments do: with an error that is explained already, or with any other."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def evaluate(
        self, weights: Any, num_episodes: int, *, deterministic: bool = False
    ) -> EvalResult:
        raise self._error

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("boom"), r"evaluation after \d+ steps failed: ValueError in .*: boom"),
        (UniRLError("no boom", "none was heard", "listen"), r"no boom\. none was heard\. listen"),
    ],
)
def test_an_evaluation_that_fails_ends_the_run_with_a_checkpoint(
    tmp_path: Path, error: Exception, said: str
) -> None:
    settings = {**SMALL, "run.eval_steps": 128, "run.total_steps": 384}
    plan = unirl.make_plan("impala", **settings)
    plan = plan.with_learner(make_evaluator=lambda seed: BrokenEvaluator(error))
    with pytest.raises(ActorFailed, match=said) as caught:
        unirl.run(plan, tmp_path / "run", console=False)
    assert len(caught.value.parts) == 3
    assert 128 <= load_checkpoint(tmp_path / "run").step < 384, "what it learned is kept"
