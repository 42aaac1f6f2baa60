"""Processes of a language run are killed, hang and refuse: it continues, no prompt is lost or
learned twice, and no process is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra llm")

import unirl
from tests import forked
from tests.system.grpo_faults import account, learned, make_refusing, session
from tests.system.grpo_rewards import FOLDER
from tests.system.grpo_settings import SMALL
from unirl import cli
from unirl.core.tree import flatten
from unirl.llm.models.tiny import make_tiny
from unirl.runners.loop import TrainLoop
from unirl.runners.processes import ProcessesRunner
from unirl.storage.checkpoint import load_checkpoint

REWARDS = "tests.system.grpo_rewards"
GROUP, BATCH = 4, 4
BASE: dict[str, Any] = {**SMALL, "rollout.group_size": GROUP, "queue.batch_size": BATCH}
DEADLINE_SECONDS = 240.0
"""Generous: what takes seconds may take minutes beside other work."""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("model") / "tiny", width=32, layers=2))


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where reward workers leave their ids; none of them is left when the test is over."""
    folder = tmp_path / "pids"
    folder.mkdir()
    monkeypatch.setenv(FOLDER, str(folder))
    yield folder
    until(lambda: not workers(folder), "reward workers are left")


def plan_of(model: str, *, updates: int, **overrides: Any) -> unirl.runners.plan.Plan:
    settings = {**BASE, "model.path": model, "run.total_steps": updates * BATCH * GROUP}
    return unirl.make_plan("grpo", **{**settings, **overrides})


def until(held: Callable[[], object], what: str) -> float:
    """Wait until it holds; how long that took."""
    started = time.monotonic()
    while not held():
        assert time.monotonic() - started < DEADLINE_SECONDS, what
        time.sleep(0.01)
    return time.monotonic() - started


def alive(pid: int | None) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def workers(pids: Path) -> list[int]:
    """Living reward workers that have judged."""
    found = [int(path.name.removeprefix("reward-")) for path in pids.glob("reward-*")]
    return [pid for pid in found if alive(pid)]


class UpdateCounter:
    """A hook that records how far the run is, and ends it on request."""

    def __init__(self) -> None:
        self.version, self.enough = 0, False

    def after_update(self, loop: TrainLoop) -> None:
        self.version = loop.learner.version
        if self.enough:
            loop.stop("enough")

    def at_end(self, loop: TrainLoop) -> None:
        pass


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_killed_actor_loses_no_prompt(model: str, kills: int, pids: Path) -> None:
    """With its engine and its reward workers, in the middle of whatever it does."""
    settings = {"mode": "async", "queue.window": 1, "run.total_steps": 10**9}
    reward = {"reward.weights": {f"{REWARDS}:known_worker": 1.0}}
    plan = plan_of(model, updates=1, **{**settings, **reward})
    tickets: list[int] = []
    plan = plan.with_learner(make=partial(noting, make=plan.learner.make, tickets=tickets))
    runner, counter, rng = ProcessesRunner(plan), UpdateCounter(), random.Random(0)
    killed: set[int | None] = set()

    def storm() -> None:
        try:
            for _ in range(kills):
                before = counter.version
                until(lambda: counter.version > before + 1, "it does not learn")  # noqa: B023
                time.sleep(rng.uniform(0.0, 0.2))
                pid = runner.actor_pids()[0]
                killed.update([pid, *workers(pids)])
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                until(lambda: runner.actor_pids()[0] != pid, "it is not replaced")  # noqa: B023
            before = counter.version
            until(lambda: counter.version > before + 1, "it does not learn any more")
        finally:
            counter.enough = True

    thread = threading.Thread(target=storm, daemon=True)
    thread.start()
    runner.run([counter])
    thread.join()
    assert runner.num_restarts == kills
    assert tickets == list(range(len(tickets)))  # in order, none lost, none twice
    until(lambda: not any(map(alive, killed)), "processes of dead actors are left")


def noting(context: Any, *, make: Callable[[Any], Any], tickets: list[int]) -> Any:
    """The learner; `tickets` receives each ticket that it learns."""
    learner = make(context)
    step = learner.step

    def noted(batch: Any) -> Any:
        tickets.extend(slot.ticket for slot in batch.slots)
        return step(batch)

    learner.step = noted
    return learner


def test_a_killed_reward_worker_costs_nothing(model: str, pids: Path, tmp_path: Path) -> None:
    plan = plan_of(model, updates=20, **{"reward.weights": {f"{REWARDS}:known_worker": 1.0}})
    killed: list[int] = []

    def storm() -> None:
        rng = random.Random(1)
        while len(killed) < 3:
            until(lambda: set(workers(pids)) - set(killed), "there is no worker")
            time.sleep(rng.uniform(0.0, 0.1))
            killed.extend([pid for pid in workers(pids) if pid not in killed][:1])
            with contextlib.suppress(ProcessLookupError):
                os.kill(killed[-1], signal.SIGKILL)

    thread = threading.Thread(target=storm, daemon=True)
    thread.start()
    result = unirl.run(plan, tmp_path / "run", console=False)
    assert result.version == 20 and killed
    there, missing = account(tmp_path / "run")
    assert len(there) == len(set(there)) == 20 * BATCH and not missing
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    # A worker that dies twice under the same completion costs that completion, and is counted.
    failed = sum(row.get(f"rewards/{REWARDS}:known_worker/failed", 0) for row in rows)
    assert failed <= len(killed) // 2


def test_a_reward_that_hangs_costs_its_completions_alone(
    model: str, pids: Path, tmp_path: Path
) -> None:
    name = f"{REWARDS}:hangs_now_and_then"
    settings = {"reward.weights": {name: 1.0}, "reward.timeout_seconds": 0.2, "reward.workers": 4}
    started = time.monotonic()
    unirl.run(plan_of(model, updates=4, **settings), tmp_path / "run", console=False)
    assert time.monotonic() - started < DEADLINE_SECONDS
    samples = [json.loads(line) for line in (tmp_path / "run/samples/samples.jsonl").open()]
    assert {row["outcome"][0] for row in samples if not row["prompt"].startswith("7")} == {0}
    # A group of which nothing could be judged is discarded: another prompt takes its place.
    assert not any(row["prompt"].startswith("7") for row in samples)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    there, missing = account(tmp_path / "run")
    assert len(missing) == rows[-1].get("queue/discarded/reward_failed", 0) > 0
    assert len(there) == len(set(there)) == 4 * BATCH


@pytest.fixture(scope="module")
def whole(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six updates in which nothing fails."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    unirl.run(plan_of(model, updates=6), run_dir, console=False)
    return run_dir


@pytest.mark.parametrize("version", [0, 3])
def test_an_engine_that_refuses_weights_is_replaced(
    model: str, version: int, whole: Path, tmp_path: Path
) -> None:
    plan, refused, run_dir = plan_of(model, updates=6), tmp_path / "refused", tmp_path / "broken"
    make_actor = partial(make_refusing, config=plan.config, version=version, refused=refused)
    unirl.run(plan.with_pool(make_actor=make_actor), run_dir, console=False)
    assert refused.exists()
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    assert max(row.get("faults/actor_restarts", 0) for row in rows) == 1
    # A completion depends on its ticket and the weights alone: nothing is different.
    assert_same_model(run_dir, whole)
    assert learned(run_dir) == learned(whole)


def test_an_engine_that_refuses_weights_in_a_process_is_replaced(
    model: str, tmp_path: Path
) -> None:
    plan = plan_of(model, updates=8, **{"mode": "async", "queue.window": 1})
    refused = tmp_path / "refused"
    make_actor = partial(make_refusing, config=plan.config, version=2, refused=refused)
    unirl.run(plan.with_pool(make_actor=make_actor), tmp_path / "run", console=False)
    assert refused.exists()
    there, missing = account(tmp_path / "run")
    assert len(there) == len(set(there)) and not missing
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "the engine refuses weights" in log and "issued again" in log


def assert_same_model(one: Path, other: Path) -> None:
    first, second = (flatten(load_checkpoint(run_dir).model) for run_dir in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize(
    ("mode", "kills"),
    [
        ("sync", 1),
        ("async", 1),
        pytest.param("sync", 3, marks=pytest.mark.slow),
        pytest.param("async", 3, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_continues_from_its_checkpoint(
    model: str,
    mode: str,
    kills: int,
    pids: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Learner, actor and reward workers at once, in the middle of whatever they do."""
    updates = 20 + 20 * kills
    settings = {
        **BASE,
        "mode": mode,
        "model.path": model,
        "reward.weights": {f"{REWARDS}:known_worker": 1.0},
        "queue.window": 1 if mode == "async" else None,
        "run.checkpoint_steps": 3 * BATCH * GROUP,
        "run.total_steps": updates * BATCH * GROUP,
    }
    config, run_dir = tmp_path / "config.toml", tmp_path / "runs" / "killed"
    plan = unirl.make_plan("grpo", **settings)
    config.write_text(unirl.config.to_toml(plan.config, recipe="grpo"))
    rng, words = random.Random(2), ("train", "grpo", f"@{config}", "--name", "killed")
    output = tmp_path / "output.txt"
    monkeypatch.chdir(tmp_path)
    for _ in range(kills):
        process = forked.start(cli.main, [*words, "--no-console"], output=output)
        before = newest(run_dir)
        until(lambda: newest(run_dir) > before or not process.is_alive(), "no checkpoint")  # noqa: B023
        time.sleep(rng.uniform(0.0, 0.3))
        assert process.is_alive(), output.read_text()
        process.kill()
        process.join()
        until(lambda: not session(process), "processes outlive their learner")  # noqa: B023
        until(lambda: not workers(pids), "reward workers outlive their learner")
        words = ("resume", str(run_dir))
    process = forked.start(cli.main, [*words, "--no-console"], output=output)
    process.join(DEADLINE_SECONDS)
    assert process.exitcode == 0, output.read_text()
    until(lambda: not session(process), "processes are left")
    there, missing = account(run_dir)
    assert len(there) == len(set(there)) and not missing
    assert load_checkpoint(run_dir).state["version"] == updates
    if mode == "sync":
        unirl.run(plan, tmp_path / "whole", console=False)
        assert_same_model(run_dir, tmp_path / "whole")
        assert learned(run_dir) == learned(tmp_path / "whole")


def newest(run_dir: Path) -> int:
    """Steps of the newest checkpoint."""
    found = [path.name.removeprefix("step_") for path in (run_dir / "checkpoints").glob("step_*")]
    return max((int(name) for name in found if name.isdecimal()), default=0)
