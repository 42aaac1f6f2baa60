"""Faults under load: processes are killed, stopped and made to fail at random moments of a run.

Every few seconds one environment worker or policy worker gets SIGKILL, SIGSTOP or an exception in
the middle of whatever it does. Measured: how long until it works again (a stopped one must first be
noticed: env.step_timeout and runner.hang_seconds are 0.5 s here), whether every sample was learned
once or discarded with a reason, and what is left when the run is over.

    python benchmarks/faults.py
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import measure

import unirl
from unirl.core.learner import Learner, LearnerContext
from unirl.core.sample import Batch
from unirl.handshake.handshake import Handshake
from unirl.metrics.metrics import Metrics
from unirl.runners.processes import ProcessesRunner

FAULTS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "exception": signal.SIGUSR1}
NUM_WORKERS, NUM_GROUPS, DEADLINE_SECONDS = 2, 2, 30.0


class TicketRecorder:
    """A learner that remembers which tickets it learned; everything else is the real one's."""

    def __init__(self, learner: Learner, tickets: list[int]) -> None:
        self._learner, self._tickets = learner, tickets

    def step(self, batch: Batch) -> Metrics:
        self._tickets += [slot.ticket for slot in batch.slots]
        return self._learner.step(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)


def make_recorder(
    context: LearnerContext, *, make: Callable[[LearnerContext], Learner], tickets: list[int]
) -> TicketRecorder:
    return TicketRecorder(make(context), tickets)


def make_runner(tickets: list[int]) -> ProcessesRunner:
    plan = unirl.make_plan(
        "appo",
        **{
            "env.id": "unirl-bench/Sleepy-v0",
            "env.engine": "sync",
            "env.import_module": "sleepy_env",
            "env.kwargs": {"step_seconds": 0.0005},
            "env.step_timeout": 0.5,
            "sampler.num_workers": NUM_WORKERS,
            "sampler.num_groups": NUM_GROUPS,
            "sampler.num_envs": 8,
            "sampler.unroll_length": 10,
            "sampler.num_policy_workers": 2,
            "queue.batch_size": 2,
            "queue.max_staleness": 3,
            "learner.minibatches": 2,
            "learner.epochs": 1,
            "runner.max_restarts": 10**6,
            "runner.hang_seconds": 0.5,
            "run.total_steps": 10**12,
        },
    )
    plan = plan.with_learner(make=partial(make_recorder, make=plan.learner.make, tickets=tickets))
    return ProcessesRunner(plan)


def handshake_of(runner: ProcessesRunner) -> Handshake:
    handshake = runner.processes.pools[0].handshake
    assert isinstance(handshake, Handshake)
    return handshake


def group_steps(runner: ProcessesRunner, workers: range | list[int]) -> list[int]:
    handshake = handshake_of(runner)
    return [
        handshake.group_totals(group)[1]
        for worker in workers
        for group in handshake.layout.groups_of(worker)
    ]


def seconds_to_recover(runner: ProcessesRunner, role: str, index: int, number: int) -> float:
    """Until a new process has replaced it and all groups that need it have been stepped."""
    is_actor = role == "policy worker"
    members = runner.actor_pids if is_actor else runner.helper_pids
    workers = handshake_of(runner).layout.workers_of(index) if is_actor else [index]
    pid = members()[index]
    assert pid is not None
    started = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    while members()[index] == pid:
        require(time.monotonic() - started < DEADLINE_SECONDS, f"{role} {index} was not replaced")
        time.sleep(0.005)
    before = group_steps(runner, workers)
    while any(a <= b for a, b in zip(group_steps(runner, workers), before, strict=True)):
        require(time.monotonic() - started < DEADLINE_SECONDS, f"{role} {index} does not step")
        time.sleep(0.005)
    return time.monotonic() - started


def require(held: bool, what: str) -> None:
    if not held:
        raise RuntimeError(what)


def storm(
    runner: ProcessesRunner, seconds: float, seed: int, found: dict[tuple[str, str], list[float]]
) -> None:
    rng = random.Random(seed)
    try:
        while min(group_steps(runner, range(NUM_WORKERS))) < 10:
            time.sleep(0.1)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(rng.uniform(0.2, 2.0))
            role = rng.choice(["environment worker", "policy worker"])
            fault = rng.choice(list(FAULTS))
            took = seconds_to_recover(runner, role, rng.randrange(2), FAULTS[fault])
            found[role, fault].append(took)
        time.sleep(1.0)
    finally:
        runner.loop.stop("measured")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    flags = parser.parse_args()
    segments = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    tickets: list[int] = []
    runner = make_runner(tickets)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    thread = threading.Thread(
        target=storm, args=(runner, flags.seconds, flags.seed, found), daemon=True
    )
    thread.start()
    runner.run([])
    thread.join()
    queue = runner.loop.queue
    stats = queue.stats()
    out = stats.out
    lost = stats.started - stats.learned - sum(stats.discarded.values()) - out
    twice = sum(count - 1 for count in Counter(tickets).values())
    pids = [*runner.actor_pids(), *runner.helper_pids()]
    left = sum(pid is not None and Path(f"/proc/{pid}").exists() for pid in pids)
    left_segments = len(set(os.listdir("/dev/shm")) - segments) if segments else 0
    rows = [
        [role, fault, len(times), f"{statistics.median(times):.2f}", f"{max(times):.2f}"]
        for (role, fault), times in sorted(found.items())
    ]
    columns = ["process", "fault", "count", "seconds to recover, median", "longest"]
    discarded = stats.discarded
    reasons = ", ".join(f"{number} {reason}" for reason, number in discarded.items() if number)
    text = measure.table(columns, rows) + (
        f"\n\n{stats.started} samples begun: {stats.learned} learned ({twice} of them"
        f" twice), {sum(discarded.values())} discarded ({reasons}), {out} in flight at the end,"
        f" {lost} lost. Left afterwards: {left} processes, {left_segments} segments in /dev/shm."
    )
    print(text)
    require(lost == 0 and twice == 0 and left == 0 and left_segments == 0, "see above")
    if not flags.no_write:
        measure.write_block("faults", text)


if __name__ == "__main__":
    main()
