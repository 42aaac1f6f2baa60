"""Random schedules of faults on real raylets, and how long it takes until a run has recovered.

UNIRL_RAYLET_SCHEDULES sets how many schedules are tried, UNIRL_SEED which.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator

import pytest

from tests.cluster.nodes import check_books, make_plan
from tests.cluster.raylets import Faults, Raylets, run_beside
from unirl.runners.make import make_runner

pytest.importorskip("ray", reason="needs the extra ray")
NUM_SCHEDULES = int(os.environ.get("UNIRL_RAYLET_SCHEDULES", "1"))
SEED = int(os.environ.get("UNIRL_SEED", "1"))
KINDS = {"member": 8, "stop_member": 3, "agent": 3, "silence": 4, "raylet": 1}


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    found = Raylets()
    yield found
    found.close()


def faults_of(raylets: Raylets, *, members: int = 3, seed: int = 1, **settings: object) -> Faults:
    raylets.have(2)
    settings = {"batch_size": 2, "max_staleness": 3, "window": None, **settings}
    settings |= {"max_node_failures": 10**6, "address": raylets.address}
    runner = make_runner(make_plan(members=members, **settings))
    return Faults(raylets, runner, members, random.Random(seed))


@pytest.mark.serial
def test_random_schedules_keep_the_books_and_zombies_are_refused(raylets: Raylets) -> None:
    faults = faults_of(raylets, silent_seconds=1.0, seed=SEED)
    rng, kinds = faults.rng, [*KINDS]

    def try_out(names: list[str]) -> None:
        for name in names:
            faults.bring(name)
            if name == "silence":
                time.sleep(rng.uniform(0.1, 2.5))
                faults.bring("wake")
            time.sleep(rng.uniform(0.0, 0.3))
        raylets.have(2)
        faults.settle()
        check_books(faults.loop)

    def all_of_them() -> None:
        faults.settle()
        faults.bring("silence")
        time.sleep(1.6)  # now its leases have ended, and it does not know
        faults.bring("wake")
        faults.until(lambda: faults.loop.queue.stats().late > 0, "no zombie was refused")
        faults.settle()
        for number in range(NUM_SCHEDULES):
            names = rng.choices(kinds, [*KINDS.values()], k=rng.randint(1, 3))
            try_out(names)
            if number % 10 == 9:
                print(f"{number + 1} schedules", faults.counts, faults.loop.queue.stats())

    run_beside(faults.runner, all_of_them)
    print(f"{NUM_SCHEDULES} schedules: {faults.counts}; {faults.loop.queue.stats()}")


@pytest.mark.slow
@pytest.mark.serial
def test_a_run_recovers_in_time_with_the_default_settings(raylets: Raylets) -> None:
    faults, seconds = faults_of(raylets, members=4), {}

    def one_after_the_other() -> None:
        for name in ("member", "agent", "silence", "raylet"):
            raylets.have(2)
            faults.settle()
            time.sleep(1.0)
            seconds[name] = faults.recover(name)
            faults.wake_dead()

    run_beside(faults.runner, one_after_the_other)
    print(seconds)
    assert seconds["member"] < 2.0 and seconds["agent"] < 5.0
    assert seconds["silence"] <= 10.0 and seconds["raylet"] < 15.0


@pytest.mark.slow
@pytest.mark.serial
def test_six_silent_nodes_in_a_row_are_replaced_in_time(raylets: Raylets) -> None:
    """Every other one with two agents, whose members no other node has room for as a whole."""
    raylets.have(3)
    faults, seconds = faults_of(raylets, members=6), []

    def one_after_the_other() -> None:
        for number in range(6):
            raylets.have(3)
            faults.settle()
            if number % 2:
                faults.bring("agent")
                faults.settle()
            shares = [share.node for share in faults.runner.processes._shares]
            faults.silence(max(shares, key=shares.count))
            at = time.monotonic()
            faults.settle()
            seconds.append((shares.count(faults.silent[-1]), round(time.monotonic() - at, 1)))
            time.sleep(max(0.0, at + 12.0 - time.monotonic()))
            faults.wake_dead()

    run_beside(faults.runner, one_after_the_other)
    print(seconds)
    assert all(one <= 10.0 for _, one in seconds), seconds


@pytest.mark.serial
def test_members_come_and_go_without_a_pause_and_leave_a_node_that_is_drained(
    raylets: Raylets,
) -> None:
    faults = faults_of(raylets, members=2)
    plan, loop = faults.runner.loop.plan, faults.loop
    longest = [0.0]

    def watch(seconds: float, size: int) -> None:
        """Until so many produce; the longest pause meanwhile."""
        last, version = time.monotonic(), -1
        deadline = last + seconds
        while faults.num_producing() != size or time.monotonic() < deadline:
            now = time.monotonic()
            assert now < deadline + 30.0, loop.queue.describe()
            if loop.learner.version != version:
                last, version = now, loop.learner.version
            longest[0] = max(longest[0], now - last)
            time.sleep(0.002)

    def scale() -> None:
        faults.settle()
        for size in (6, 1, 2):
            faults.runner.resize(plan.pools[0], size)
            watch(1.0, size)
        assert longest[0] < 1.0
        assert loop.queue.stats().discarded["actor_died"] == 0
        at = faults.bring("drain")
        faults.until(lambda: faults.newest() > at and faults.num_producing() == 2, "not elsewhere")
        assert loop.queue.stats().discarded["actor_died"] == 0

    run_beside(faults.runner, scale)
    assert faults.runner.num_restarts == 0
