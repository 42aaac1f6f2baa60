"""Trainings in two processes: one run folder, one end, and no process waits for a dead one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

import unirl
from tests.forked import in_two_ranks, two_ranks
from unirl import cli
from unirl.errors import UniRLError
from unirl.learners.parallel import Ranks

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {
    "env.id": "torch/Cartpole",
    "sim.num_envs": 32,
    "sim.unroll_length": 8,
    "sim.device": "cpu",
    "policy.hidden": [16],
    "policy.normalize_obs": True,
    "learner.epochs": 2,
    "learner.minibatches": 2,
    "runner.learner_threads": 1,
    "run.total_steps": 8 * 512,
    "run.checkpoint_steps": 4 * 512,
    "run.log_seconds": 0.0,
}
CARTPOLE: dict[str, Any] = {
    **SMALL,
    "sim.num_envs": 256,
    "sim.unroll_length": 16,
    "policy.hidden": [32, 32],
    "learner.epochs": 8,
    "learner.minibatches": 1,
    "learner.reward_scale": 0.1,
    "learner.optimizer.target_kl": 0.008,
    "run.total_steps": 400_000,
    "run.checkpoint_steps": 400_000,
    "run.target_return": 150.0,
}
ENDLESS = {
    **SMALL,
    "queue.max_staleness": 1,
    "run.total_steps": 10**9,
    "run.checkpoint_steps": 10**9,
}


def work(jobs: list[dict[str, Any]], out: Path) -> None:
    """What each process does: one training after the other; their ends and weights go to `out`."""
    rank = os.environ["RANK"]
    for job in jobs:
        plan, learners = unirl.make_plan("ondevice", **job["settings"]), []
        plan = plan.with_learner(make=partial(keeping, plan.learner.make, learners))
        resume = Path(job["run"]) if job.get("resume") else None
        result = unirl.run(plan, job["run"], resume=resume, console=False)
        end = {"reason": result.reason, "steps": result.num_steps, "updates": result.version}
        (out / f"{job['name']}-{rank}.json").write_text(json.dumps(end))
        torch.save(dict(learners[0].weights()), out / f"{job['name']}-{rank}.pt")


def keeping(
    make: Callable[..., Any], learners: list[Any], context: Any, ranks: Ranks | None = None
) -> Any:
    """The learner of a plan, also put into `learners`."""
    learners.append(make(context, ranks=ranks))
    return learners[0]


# -- trainings that end by themselves --------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of four trainings: ends and weights of both ranks, and the runs."""
    out = tmp_path_factory.mktemp("trained")
    runs = out / "runs"
    half = {**SMALL, "run.total_steps": 4 * 512}
    jobs = [
        {"name": "learned", "run": str(runs / "learned"), "settings": CARTPOLE},
        {"name": "whole", "run": str(runs / "whole"), "settings": SMALL},
        {"name": "half", "run": str(runs / "parts"), "settings": half},
        {"name": "parts", "run": str(runs / "parts"), "settings": SMALL, "resume": True},
    ]
    in_two_ranks(work, jobs, out)
    return out


def end_of(out: Path, name: str, rank: int) -> Any:
    return json.loads((out / f"{name}-{rank}.json").read_text())


def test_two_processes_learn_cartpole_and_stop_at_the_target_together(trained: Path) -> None:
    mine, theirs = (end_of(trained, "learned", rank) for rank in (0, 1))
    assert mine["reason"] == theirs["reason"] == "target_return"
    assert mine["updates"] == theirs["updates"]
    assert mine["steps"] == theirs["steps"] == mine["updates"] * 2 * 256 * 16


@pytest.mark.parametrize("name", ["learned", "whole", "parts"])
def test_both_processes_end_with_the_same_weights(trained: Path, name: str) -> None:
    mine, theirs = (torch.load(trained / f"{name}-{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(value, theirs[key]) for key, value in mine.items())


def test_only_one_process_writes_the_run_folder(trained: Path) -> None:
    assert sorted(path.name for path in (trained / "runs").iterdir()) == [
        "learned",
        "parts",
        "whole",
    ]
    rows = (trained / "runs" / "whole" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(row)["step"] for row in rows]
    assert steps == sorted(set(steps))
    assert steps[-1] == 8 * 512
    assert len(list((trained / "runs" / "whole" / "tb").iterdir())) == 1


def test_a_resumed_training_equals_the_uninterrupted_one_bit_for_bit(trained: Path) -> None:
    assert end_of(trained, "half", 1)["updates"] == 4
    assert end_of(trained, "parts", 1)["updates"] == 8
    for rank in (0, 1):
        whole, parts = (torch.load(trained / f"{name}-{rank}.pt") for name in ("whole", "parts"))
        assert all(torch.equal(value, parts[key]) for key, value in whole.items())


def test_the_command_line_trains_and_resumes_in_one_folder(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    small = ["--env.id", "torch/Cartpole", "--sim.num-envs", "32", "--sim.device", "cpu"]
    folder = ["--runs-dir", str(tmp_path), "--name", "cli"]
    words = ["train", "ondevice", *small, *folder, "--run.total-steps", "2048", "--no-console"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    unirl_command = [sys.executable, *torchrun, "-m", "unirl", *words]
    done = subprocess.run(
        unirl_command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.count("total_steps after") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["cli"]
    words = ["resume", str(tmp_path / "cli"), "--run.total-steps", "4096", "--no-console"]
    output = tmp_path_factory.mktemp("output")
    in_two_ranks(cli.main, words, output=output)
    said = [(output / f"{rank}.txt").read_text() for rank in (0, 1)]
    assert [text.count("total_steps after") for text in said] == [1, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["cli"]
    assert len((tmp_path / "cli" / "command.txt").read_text().splitlines()) == 2
    assert (tmp_path / "cli" / "checkpoints" / "step_00004096").is_dir()


# -- unplanned ends --------------------------------------------------------------------------------


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[BaseProcess]]:
    """Two processes of an endless training."""
    settings = {**ENDLESS, "queue.timeout_seconds": 6.0}
    job = {"name": "run", "run": str(tmp_path / "run"), "settings": settings}
    with two_ranks(refusable, [job], tmp_path, output=tmp_path) as processes:
        metrics, ends = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
        while not (metrics.exists() and metrics.stat().st_size):
            assert time.monotonic() < ends
            assert [process.exitcode for process in processes] == [None, None]
            time.sleep(0.1)
        yield processes


def refusable(jobs: list[dict[str, Any]], out: Path) -> int:
    """`work`, with the exit code of an error that is explained."""
    try:
        work(jobs, out)
    except UniRLError as failed:
        print(f"error: {failed}", file=sys.stderr)
        return 2
    return 0


def signal_to(process: BaseProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "hung"])
def test_a_lost_rank_ends_the_other_by_the_deadline_with_an_error_that_names_it(
    pair: list[BaseProcess], tmp_path: Path, number: signal.Signals
) -> None:
    signal_to(pair[1], number)
    pair[0].join(90)
    errors = (tmp_path / "0.txt").read_text()
    assert pair[0].exitcode == 2
    assert "error: rank 1 of 2 is gone or does not answer" in errors
    assert "within 6 s (queue.timeout_seconds)" in errors
    assert "Traceback" not in errors
    # What was learned is not lost with it.
    assert (tmp_path / "run" / "checkpoints" / "latest" / "state.json").is_file()


def test_an_interrupt_of_any_rank_ends_all_at_one_update_with_a_checkpoint(
    pair: list[BaseProcess], tmp_path: Path
) -> None:
    signal_to(pair[1], signal.SIGINT)
    for rank, process in enumerate(pair):
        process.join(90)
        assert process.exitcode == 0, (tmp_path / f"{rank}.txt").read_text()
    mine, theirs = (end_of(tmp_path, "run", rank) for rank in (0, 1))
    assert mine == theirs
    assert mine["reason"] == "interrupted"
    assert (tmp_path / "run" / "checkpoints" / f"step_{mine['steps']:08d}").is_dir()


# -- what cannot be trained together ---------------------------------------------------------------


@pytest.fixture
def second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("RANK", "1"),
        ("LOCAL_RANK", "1"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)


def test_actors_in_processes_are_refused(second_of_two: None, tmp_path: Path) -> None:
    settings = {"env.id": "CartPole-v1", "runner.kind": "processes"}
    with pytest.raises(UniRLError, match=r"need runner\.kind inline"):
        unirl.run(unirl.make_plan("impala", **settings), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_learner_that_cannot_sum_over_processes_is_refused(
    second_of_two: None, tmp_path: Path
) -> None:
    plan = unirl.make_plan("impala", **{"env.id": "CartPole-v1"})
    with pytest.raises(UniRLError, match="does not sum over processes"):
        unirl.run(plan.with_learner(make=lambda context: None), tmp_path / "run")  # type: ignore[arg-type, return-value]
