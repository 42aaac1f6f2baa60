"""Callbacks: called after every update and at the end, with metrics of their own; one that raises
ends the run with a checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import unirl
from tests import callbacks as own
from tests.runners.test_policies import DUEL
from unirl import cli
from unirl.errors import UniRLError
from unirl.metrics.metrics import Metrics
from unirl.report.sinks import read_metrics
from unirl.storage.checkpoint import load_checkpoint

STEPS = 4 * 20  # of an update
SETTINGS: dict[str, Any] = {
    "env.id": "CartPole-v1",
    "actor.num_envs": 4,
    "policy.hidden": (8,),
    "run.total_steps": 10 * STEPS,
    "run.log_seconds": 0.0,
}


def run(folder: Path, *callbacks: Any, **settings: Any) -> unirl.RunResult:
    plan = unirl.make_plan("impala", **{**SETTINGS, **settings})
    return unirl.run(plan, folder, console=False, callbacks=callbacks)


def test_a_callback_is_called_after_every_update_and_once_at_the_end(tmp_path: Path) -> None:
    recorder = own.Recorder()
    result = run(tmp_path / "run", recorder)
    versions = [version for _, version, _, _ in recorder.calls]
    assert versions == [*range(1, result.version + 1), result.version]
    assert [reason for *_, reason in recorder.calls[:3]] == [None] * 3
    assert recorder.calls[-1] == ("learner", result.version, result.num_steps, "total_steps")
    last = recorder.trainings[-1]
    assert last.checkpoint == result.checkpoint and last.folder == tmp_path / "run"
    assert last.row["charts/updates"] == result.version and last.seconds > 0
    assert last.config.env.id == "CartPole-v1" and last.evaluation is None


def test_own_metrics_are_in_the_row_of_their_step_and_totals_continue_after_a_resume(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    plan = unirl.make_plan("impala", **{**SETTINGS, "run.callbacks": ["tests.callbacks:count"]})
    first = unirl.run(plan, folder, console=False)
    for row in read_metrics(folder)[:-1]:
        assert row["mine/step"] == row["step"]
        assert row["mine/updates"] == row["mine/version"] == row["charts/updates"]
    assert first.scalars["mine/updates"] == first.version
    longer = plan.config.run.total_steps * 2
    plan = unirl.make_plan(
        "impala",
        **{**SETTINGS, "run.callbacks": ["tests.callbacks:count"], "run.total_steps": longer},
    )
    second = unirl.run(plan, folder, console=False, resume=folder)
    assert second.scalars["mine/updates"] == second.version > first.version


def test_a_callback_ends_the_run_for_a_reason_of_its_own(tmp_path: Path) -> None:
    result = run(tmp_path / "run", own.stop_early)
    assert (result.reason, result.version) == ("good enough", 3)
    assert load_checkpoint(tmp_path / "run").step == result.num_steps
    with pytest.raises(UniRLError, match=r'training\.stop was called with reason ""'):
        run(tmp_path / "other", lambda training: training.stop(""))


def test_one_that_raises_ends_the_run_with_a_checkpoint_that_can_be_continued(
    tmp_path: Path,
) -> None:
    folder, recorder = tmp_path / "run", own.Recorder()
    with pytest.raises(UniRLError, match=r"callback tests\.callbacks:fail failed") as error:
        run(folder, own.fail, recorder)
    what, rule, remedy = error.value.parts
    assert "after update 2: ValueError in" in what and "this is no good" in what
    assert str(folder / "log.txt") in rule and f"unirl resume {folder}" in remedy
    assert "ValueError: this is no good" in (folder / "log.txt").read_text()
    assert load_checkpoint(folder).state["version"] == 2
    assert [version for _, version, _, _ in recorder.calls] == [1]  # and none after it
    plan = unirl.make_plan("impala", **SETTINGS)
    assert unirl.run(plan, folder, console=False, resume=folder).reason == "total_steps"


def test_one_that_raises_at_the_end_costs_neither_checkpoint_nor_metrics(tmp_path: Path) -> None:
    with pytest.raises(UniRLError, match=r"FailsAtTheEnd failed at the end: RuntimeError"):
        run(tmp_path / "run", own.FailsAtTheEnd())
    assert load_checkpoint(tmp_path / "run").step == read_metrics(tmp_path / "run")[-1]["step"]


def test_each_of_several_learners_has_a_training_of_its_own(tmp_path: Path) -> None:
    recorder = own.Recorder()
    plan = unirl.make_plan(
        "appo",
        **{**DUEL, "sampler.num_workers": 1, "runner.kind": "inline", "run.total_steps": 2000},
    )
    with pytest.raises(UniRLError, match=r"callback tests\.callbacks:fail failed"):
        unirl.run(plan, tmp_path / "run", console=False, callbacks=[recorder, own.fail])
    assert {name for name, *_ in recorder.calls} == {"policy-0", "policy-1"}
    for folder in (tmp_path / "run", tmp_path / "run" / "policies" / "1"):
        assert load_checkpoint(folder).state["version"] >= 1  # both are saved


def test_actors_in_processes_and_several_ranks_call_it_in_the_learners_process_once(
    tmp_path: Path,
) -> None:
    recorder = own.Recorder()
    result = run(
        tmp_path / "run",
        recorder,
        **{
            "runner.kind": "processes",
            "learner.ranks": 2,
            "queue.batch_size": 2,
            "run.total_steps": 3 * 2 * STEPS,
        },
    )
    versions = [version for _, version, _, _ in recorder.calls]
    assert versions == [*range(1, result.version + 1), result.version]


@pytest.mark.parametrize(
    ("callback", "message"),
    [
        (own.without_parameters, r"without_parameters cannot be called.*one parameter"),
        (own.Recorder, r"Recorder cannot be called.*Recorder\(\)"),
        (3, r"cannot be called.*this is a int"),
    ],
)
def test_what_cannot_be_called_is_refused_before_anything_is_written(
    callback: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UniRLError, match=message):
        run(tmp_path / "run", callback)
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stop_early", "run.callbacks has 'stop_early'"),
        ("tests.callbacks:stop_earl", 'did you mean "stop_early"?'),
        ("no_such_module:f", 'there is no module "no_such_module"'),
        ("tests.callbacks:number", "tests.callbacks:number cannot be called"),
        ("tests.callbacks:NeedsArguments", "could not be made"),
    ],
)
def test_bad_names_end_the_command_with_2_before_a_folder_is_deleted(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "run"
    old.mkdir()
    (old / "config.toml").write_text("recipe = 'impala'\n")
    words = ["train", "impala", "--run.callbacks", json.dumps([name]), "--name", "run"]
    code = cli.main([*words, "--runs-dir", str(tmp_path), "--overwrite"])
    lines = capsys.readouterr().err.splitlines()
    assert code == 2 and (old / "config.toml").exists()
    assert message in "\n".join(lines) and len(lines) == 3


def test_the_command_line_takes_callbacks_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "def stop(training):\n    training.stop('enough of it')\n"
        "def fail(training):\n    raise KeyError('oh')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = ["train", "impala", "--actor.num-envs", "4", "--runs-dir", str(tmp_path)]
    assert cli.main([*words, "--run.callbacks", '["mine:stop"]', "--name", "a"]) == 0
    assert "enough of it after" in capsys.readouterr().out
    assert cli.main([*words, "--run.callbacks", "mine:fail", "--name", "b"]) == 2
    assert "error: callback mine:fail failed after update 1: KeyError" in capsys.readouterr().err
    sys.modules.pop("mine")


def test_a_metric_may_not_be_called_as_a_row_says_when_it_was_written() -> None:
    with pytest.raises(UniRLError, match=r"metric 'step' has the name of a row's own number"):
        Metrics().last("step", 1)


def test_metrics_can_be_read_without_starting_them_again() -> None:
    metrics = Metrics()
    metrics.mean("a", 1)
    metrics.total("b", 2)
    assert metrics.values() == metrics.values() == {"a": 1.0, "b": 2.0} == metrics.flush()
