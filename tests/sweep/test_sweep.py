"""`unirl sweep` from file to best config: killed, interrupted and continued on the way."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from unirl import cli
from unirl.config import load_toml

ROOT = Path(cli.__file__).resolve().parent.parent
FILE = """
recipe = "impala"
seeds = [1, 2]
jobs = 2

[space]
learner.optimizer.lr = [1e-4, 3e-3]

[halving]
first_steps = 4_000
reduction = 2

[env]
id = "CartPole-v1"

[actor]
num_envs = 16
unroll_length = 16

[run]
total_steps = 8_000
log_seconds = 0.1
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def record(sweep: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((sweep / "sweep.json").read_text())
    return found


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def holder(lock: Path) -> bool:
    """Whether the process that wrote it lives."""
    try:
        pid = json.loads(lock.read_text())["pid"]
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, ValueError, KeyError):
        return False


def ended_early(number: signal.Signals, sweep: Path, when: Callable[[], bool]) -> int:
    """A sweep that gets a signal; returns its exit code."""
    words = [sys.executable, "-m", "unirl", "sweep", "lr.toml"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_for(lambda: sweep.exists() and when())
        process.send_signal(number)
        return process.wait(timeout=120)
    finally:
        process.kill()


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A sweep that was killed after its first result, interrupted when it trained again, and then
    continued by its folder.
    """
    folder = tmp_path_factory.mktemp("swept")
    (folder / "lr.toml").write_text(FILE)
    sweep = folder / "runs" / "lr"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(ROOT))

        def has_result() -> bool:
            path = sweep / "sweep.json"
            return path.exists() and any(
                run["values"] for trial in record(sweep)["trials"] for run in trial["runs"]
            )

        def trains() -> bool:
            """A run that is killed early leaves its lock, which nobody holds any more."""
            return any(holder(path) for path in sweep.glob("trial-*/.lock"))

        assert ended_early(signal.SIGKILL, sweep, has_result) == -signal.SIGKILL
        wait_for(lambda: not trains())  # its runs end with it
        assert ended_early(signal.SIGINT, sweep, trains) == 0
        assert not trains()
        assert cli.main(["sweep", "runs/lr"]) == 0
        yield sweep


def test_the_best_trial_is_trained_to_the_end_and_others_stop_at_their_rung(swept: Path) -> None:
    trials = record(swept)["trials"]
    assert [trial["status"] for trial in trials] == ["stopped", "finished"]
    assert [[len(run["values"]) for run in each["runs"]] for each in trials] == [[1, 1], [2, 2]]
    steps = [run["steps"] for trial in trials for run in trial["runs"]]
    assert all(4_000 <= s < 4_800 for s in steps[:2]) and all(s >= 8_000 for s in steps[2:])


def test_nothing_is_trained_twice(swept: Path) -> None:
    for trial in (0, 1):
        for seed in (1, 2):
            run = swept / f"trial-{trial:03d}-seed-{seed}"
            rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
            steps = [row["step"] for row in rows]
            assert steps == sorted(set(steps))
            config = load_toml(run / "config.toml")["run"]
            assert config["seed"] == seed
            assert config["total_steps"] == 8_000  # what schedules fall to, also of a paused one
            assert config.get("pause_steps") == (4_000 if trial == 0 else None)


def test_the_best_config_is_one_to_train(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = load_toml(swept / "best.toml")
    assert best["learner"]["optimizer"]["lr"] == 3e-3
    assert cli.main(["train", f"@{swept / 'best.toml'}", "--dry-run"]) == 0
    results = json.loads((swept / "results.json").read_text())
    assert [row["trial"] for row in results["trials"]] == [1, 0]
    assert results["trials"][0]["std"] > 0


def test_a_finished_sweep_shows_its_table_again(
    swept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (swept / "sweep.json").stat().st_size
    assert cli.main(["sweep", str(swept)]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = next(i for i, line in enumerate(lines) if line.startswith("trial "))
    assert lines[table + 1].split()[:2] == ["1", "0.003"] and "finished" in lines[table + 1]
    assert abs((swept / "sweep.json").stat().st_size - before) < 5


def test_runs_of_a_sweep_are_ordinary_runs(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(swept / "trial-000-seed-1")
    assert cli.main(["resume", run, "--no-console"]) == 2
    assert "has reached its pause" in capsys.readouterr().err
    assert cli.main(["resume", run, "--run.pause-steps", "5000", "--no-console"]) == 0
    assert "--run.pause-steps none" in capsys.readouterr().out


def test_a_dry_run_shows_trials_and_cost(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lr.toml").write_text(FILE)
    assert cli.main(["sweep", "lr.toml", "--dry-run", "--run.total-steps", "16000"]) == 0
    out = capsys.readouterr().out
    assert "2 trials x 2 seed(s), at most 40,000 steps (2 to 4,000, 1 to 8,000, 1 to 16,000)" in out
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("change", "flags", "words"),
    [
        (("", ""), ["nothing.toml"], '"nothing.toml" does not exist'),
        (('"impala"', '"impalla"'), [], 'did you mean "impala"?'),
        (("jobs = 2", 'method = "girt"'), [], '"grid", "random" or "optuna"'),
        (("jobs = 2", "jobs = 0"), [], "jobs >= 1"),
        (("", ""), ["--jobs", "0"], "jobs >= 1"),
        (("learner.optimizer.lr = [1e-4, 3e-3]", ""), [], "the space is empty"),
        (("learner.optimizer.lr", "learner.optimizer.rl"), [], "learner.optimizer.lr"),
        (("3e-3", "-1.0"), [], "learner.optimizer.lr = -1.0 is not allowed"),
        (("3e-3", '"fast"'), [], "learner.optimizer.lr"),
        (("learner.optimizer.lr", "run.seed"), [], "seeds = [1, 2, 3]"),
        (("seeds = [1, 2]", "seeds = [1, 1]"), [], "seeds"),
        (("jobs = 2", 'objective.metric = "eval/return_mean"'), [], "run.eval_steps is 0"),
        (("jobs = 2", 'method = "random"'), [], "trials is not set"),
        (("jobs = 2", 'on = "ray"'), ["--runner.kind", "ray"], "and so is runner.kind"),
        (("jobs = 2", 'on = "rya"'), [], '"machine" or "ray"'),
        (("first_steps = 4_000", "asynchronous = true"), [], "first_steps is not set"),
        (('recipe = "impala"', ""), [], "neither base nor recipe"),
        (('recipe = "impala"', 'base = "@cartpoel"'), [], 'did you mean "cartpole"?'),
        (("[env]", "[envv]"), [], "env"),
        (("", ""), ["--halving.reduction", "1"], "halving.reduction >= 2"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(
    change: tuple[str, str], flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("lr.toml").write_text(FILE.replace(*change))
    named = [] if flags and flags[0].endswith(".toml") else ["lr.toml"]
    assert cli.main(["sweep", *named, *flags]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 3, error
    assert not Path("runs").exists()


def test_a_folder_of_another_sweep_is_refused(
    swept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("lr.toml").write_text(FILE.replace("1e-4", "2e-4"))
    words = ["sweep", "lr.toml", "--runs-dir", str(swept.parent)]
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert "holds another sweep" in error and "0.0002" in error and "--overwrite" in error
    Path("mine").mkdir()
    Path("mine/notes.txt").touch()
    assert cli.main(["sweep", "lr.toml", "--runs-dir", ".", "--name", "mine"]) == 2
    assert cli.main(["sweep", "lr.toml", "--runs-dir", ".", "--name", "mine", "--overwrite"]) == 2
    assert Path("mine/notes.txt").exists()


def test_a_trial_that_failed_has_a_reason_and_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lr.toml").write_text(FILE.replace("[1, 2]", "[1]").replace("1e-4, 3e-3", "1e30"))
    assert cli.main(["sweep", "lr.toml"]) == 2
    assert "all 1 trials" in (error := capsys.readouterr().err) and "diverged" in error
    (row,) = csv.DictReader(Path("runs/lr/results.csv").read_text().splitlines())
    assert row["mean"] == "" and row["status"] == "failed" and "diverged" in row["reason"]
    assert not Path("runs/lr/best.toml").exists()


def test_an_objective_that_no_run_writes_ends_the_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    text = FILE.replace("[1, 2]", "[1]").replace("1e-4, ", "").replace("8_000", "4_000")
    Path("lr.toml").write_text(text)
    assert cli.main(["sweep", "lr.toml", "--objective.metric", "charts/episodic_retrun"]) == 2
    assert 'did you mean "charts/episodic_return"?' in capsys.readouterr().err
    assert not any(Path("runs/lr").glob("trial-*/.lock"))
