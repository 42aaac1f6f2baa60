"""A trained run from Python: loaded, read, evaluated as `unirl eval` does it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unirl
from unirl import cli
from unirl.errors import UniRLError
from unirl.report.sinks import read_metrics

SETTINGS: dict[str, Any] = {
    "env.id": "CartPole-v1",
    "actor.num_envs": 4,
    "policy.hidden": (8,),
    "run.total_steps": 480,
    "run.checkpoint_steps": 200,
    "run.log_seconds": 0.0,
    "run.eval_steps": 240,
    "run.eval_episodes": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home") / "runs" / "cartpole"
    unirl.run(unirl.make_plan("impala", **SETTINGS), folder, console=False)
    return folder


LANGUAGE: dict[str, Any] = {
    "model.path": "tiny",
    "task.name": "reverse",
    "task.options": {"digits": "2"},
    "rollout.group_size": 2,
    "queue.batch_size": 2,
    "sampling.max_tokens": 4,
    "learner.optimizer.lr": 1e-3,
    "learner.optimizer.lr_schedule": "tests.schedules:warm_then_half",
    "algorithm.entropy_coef": 0.01,
    "algorithm.entropy_schedule": "cosine",
    "run.total_steps": 8,
    "run.callbacks": ["tests.callbacks:count"],
}


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language") / "run"
    unirl.run(unirl.make_plan("grpo", **LANGUAGE), folder, console=False)
    return folder


def test_a_run_is_found_by_folder_name_and_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parents[1])
    oldest = sorted((folder / "checkpoints").glob("step_*"))[0]
    newest, named, old = unirl.load(folder), unirl.load("cartpole"), unirl.load(oldest)
    assert newest.step == named.step >= 480 > old.step == int(oldest.name[5:])
    assert newest.recipe == "impala" and newest.config.actor.num_envs == 4
    assert repr(old).endswith("recipe='impala')")


def test_metrics_are_columns_of_equal_length_and_nan_where_a_row_has_none(folder: Path) -> None:
    columns, rows = unirl.load(folder).metrics(), read_metrics(folder)
    assert {len(column) for column in columns.values()} == {len(rows)}
    assert columns["step"].tolist() == [row["step"] for row in rows]
    returns = columns["eval/return_mean"]
    assert np.isnan(returns[0]) and np.isfinite(returns[-1]) and returns.dtype == np.float64


def test_events_tell_what_happened(folder: Path) -> None:
    assert [row["event"] for row in unirl.load(folder).events()] == ["started", "ended"]


def test_an_evaluation_is_that_of_the_command(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = unirl.load(folder)
    for options, given in ((["--deterministic"], {"deterministic": True}), ([], {})):
        words = ["eval", str(folder), "--episodes", "3", "--seed", "5", "--json", *options]
        assert cli.main(words) == 0
        printed = json.loads(capsys.readouterr().out)
        own = json.loads(Path(printed["file"]).read_text())
        result = run.evaluate(3, seed=5, **given)
        assert (result.returns, result.lengths) == (own["returns"], own["lengths"])
    short = run.evaluate(episodes=3, **{"env.max_episode_steps": 4})
    assert short.lengths == [4, 4, 4]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queue.batch_size": 3}, r"queue\.batch_size has no effect on an evaluation"),
        ({"run.seed": 3}, r"run\.seed has no effect on an evaluation.*use seed"),
        ({"env.max_episode_step": 3}, r"\"env\.max_episode_step\" is unknown.*max_episode_steps"),
        ({"env.id": "CartPol-v1"}, r"is unknown\. Did you mean"),
    ],
)
def test_changes_that_change_nothing_or_are_unknown_are_refused(
    changes: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(UniRLError, match=message):
        unirl.load(folder).evaluate(1, **changes)


def test_an_environment_that_cannot_be_made_as_asked_is_refused(folder: Path) -> None:
    run = unirl.load(folder)
    assert run.make_env("rgb_array", max_episode_steps=7).spec.max_episode_steps == 7
    for changes, message in (
        ({"kwargs": {"legs": 2}}, r"does not take these arguments: \['legs'\]"),
        ({"max_episode_step": 7}, r"did you mean max_episode_steps"),
        ({"id": "CartPol-v1"}, r'Did you mean "CartPole-v1"'),
    ):
        with pytest.raises(UniRLError, match=message):
            run.make_env(**changes)


def test_an_evaluation_of_no_episode_is_refused(folder: Path) -> None:
    with pytest.raises(UniRLError, match=r"evaluation of 0 episodes"):
        unirl.load(folder).evaluate(0)


def test_what_is_no_run_is_refused_in_three_parts(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    text = (folder / "config.toml").read_text()
    (unfinished / "config.toml").write_text(text)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.toml").write_text(text.replace("[actor]", "[actor]\nnum_legs = 2"))
    for where, message in (
        ("nowhere", r'run "nowhere" does not exist'),
        (tmp_path / "empty", r"is not a run folder"),
        (other, r'"actor\.num_legs" is unknown'),
    ):
        with pytest.raises(UniRLError, match=message) as error:
            unirl.load(where)
        assert len(error.value.parts) == 3
    run = unirl.load(unfinished)  # its config can be read before there is a checkpoint
    assert run.config.env.id == "CartPole-v1"
    for ask in (lambda: run.step, run.evaluate, run.policy, run.metrics):
        with pytest.raises(UniRLError) as error:
            ask()
        assert len(error.value.parts) == 3


def test_a_language_run_answers_as_it_was_trained_to(language: Path) -> None:
    run = unirl.load(language)
    answers = run.generate(["12>", "34>"], deterministic=True)
    assert len(answers) == 2 and answers == run.generate(["12>", "34>"], deterministic=True)
    assert run.generate(["12>"] * 3, seed=1) == unirl.load(language).generate(["12>"] * 3, seed=1)
    assert run.generate([]) == []
    assert run.generate(["1"], max_tokens=1, seed=2) != run.generate(["1"], max_tokens=4, seed=2)

    async def in_a_notebook() -> list[str]:
        return run.generate(["12>", "34>"], deterministic=True)

    assert asyncio.run(in_a_notebook()) == answers
    assert len(run.evaluate(4).returns) == 4


def test_a_language_run_has_schedules_and_callbacks_of_ones_own(language: Path) -> None:
    columns = unirl.load(language).metrics()
    assert columns["losses/learning_rate"][-1] == pytest.approx(0.5e-3)
    assert columns["mine/updates"][-1] == 2
    for key in ("learner.optimizer.lr_schedule", "algorithm.entropy_schedule"):
        with pytest.raises(UniRLError, match=rf"{key} tests\.schedules:negative returned"):
            unirl.make_plan("grpo", **{**LANGUAGE, key: "tests.schedules:negative"})
    with pytest.raises(UniRLError, match=r"entropy_schedule is liner.*constant, linear, cosine"):
        unirl.make_plan("grpo", **{**LANGUAGE, "algorithm.entropy_schedule": "liner"})


def test_the_model_of_a_language_run_has_the_weights_of_its_checkpoint(language: Path) -> None:
    run = unirl.load(language)
    saved = run.plan.learner.weights_in(run.checkpoint.model)
    found = dict(run.model().named_parameters())
    assert found and all(value.equal(saved[name]) for name, value in found.items())


def test_worlds_are_not_mixed_up(language: Path, folder: Path) -> None:
    run = unirl.load(language)
    for ask in (run.policy, run.make_env):
        with pytest.raises(UniRLError, match=r"trained no policy over an environment"):
            ask()
    for ask in (unirl.load(folder).model, lambda: unirl.load(folder).generate(["a"])):
        with pytest.raises(UniRLError, match=r"trained no language model"):
            ask()
    with pytest.raises(UniRLError, match=r"was given one text.*run\.generate\(\[prompt\]\)"):
        run.generate("12>")


def test_every_name_that_unirl_exports_is_there() -> None:
    exported = [name for name in dir(unirl) if not name.startswith("_")]
    assert {"load", "TrainedRun", "TrainedPolicy", "Training", "Callback"} <= set(exported)
    assert all(getattr(unirl, name) is not None for name in exported)
