"""Members on nodes that are processes of this machine: faults of every kind, and the books after
them.

UNIRL_SCHEDULES sets how many random schedules are tried.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.nodes import (
    Each,
    ProcessCluster,
    SeedTeller,
    check_books,
    descendants,
    make_plan,
    make_runner,
)
from tests.cluster.raylets import Faults, run_beside
from unirl.errors import ActorFailed, UniRLError
from unirl.run_events import event_of
from unirl.runners.loop import TrainLoop

NUM_SCHEDULES = int(os.environ.get("UNIRL_SCHEDULES", "16"))


class Watched:
    """A run on nodes that are processes; `faults` happen one after the other, each when the run has
    continued after the one before. What `recovered` holds: seconds from each fault to the first
    sample of a member that was started after it.
    """

    def __init__(self, plan: Any, faults: list[Callable[[Watched], None]], **settings: Any) -> None:
        self.cluster = ProcessCluster(**settings)
        self.runner = make_runner(plan, self.cluster)
        self.faults, self.recovered, self.longest = list(faults), [], 0.0
        self._since, self._known, self._last = 0.0, set(), 0.0
        self._settled = 0
        self.killed_on = ""
        """The node of the member that was killed."""

    def run(self) -> TrainLoop:
        self.runner.run([Each(self._after_update)])
        check_books(self.runner.loop)
        return self.runner.loop

    def _after_update(self, loop: TrainLoop) -> None:
        now, seeds = time.monotonic(), set(loop.learner.seeds)
        if self._last and self._since:
            self.longest = max(self.longest, now - self._last)
        self._last = now
        if self._since and seeds - self._known:
            self.recovered.append(now - self._since)
            self._since = 0.0
        if self._since:
            return
        self._settled += 1
        # Agents say both with their signs of life, twice a second.
        is_counted = self.runner.num_restarts == len(self.recovered)
        if self._settled < 40 or not is_counted or not self.runner.actor_pids():
            return
        self._settled = 0
        if not self.faults:
            loop.stop("enough")
            return
        self._known, self._since = seeds, time.monotonic()
        self.faults.pop(0)(self)


def kill_member(run: Watched) -> None:
    pid = run.runner.actor_pids()[0]
    run.killed_on = next(each.node for each in run.cluster.started if pid in each.tree())
    os.kill(pid, signal.SIGKILL)


def kill_agent(run: Watched) -> None:
    run.cluster.started[0].process.kill()


def silence(run: Watched) -> None:
    run.cluster.started[-1].signal_all(signal.SIGSTOP)


@pytest.mark.serial
def test_members_agents_and_silent_nodes_are_replaced_and_nothing_is_lost_or_learned_twice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    plan = make_plan(members=4, batch_size=2, max_staleness=3, silent_seconds=2.0, window=None)
    run = Watched(plan, [kill_member, kill_agent, silence])
    loop = run.run()
    member, agent, silent = run.recovered
    assert member < 2.0 and agent < 5.0 and silent < 10.0
    assert run.runner.num_restarts == 3
    events = [found for each in caplog.records if (found := event_of(each)) is not None]
    died = [found for found in events if found["event"] == "died"]
    assert ["killed by signal 9" in died[0]["cause"], died[0]["node"]] == [True, run.killed_on]
    assert [each.get("agent") for each in died[1:]] == [1, 3] and "silent" in died[2]["cause"]
    assert [each["event"] for each in events].count("restarted") >= 3
    assert {each["agent"] for each in events if "pid" in each} >= {1, 2, 3}
    # Each of the five that died held a slot at most, and one was on its way.
    assert loop.queue.stats().discarded["actor_died"] <= 10
    assert not [pid for pid in descendants(os.getpid()) if is_member(pid)]


@pytest.mark.serial
def test_members_of_a_silent_node_continue_elsewhere_in_time() -> None:
    """It has two agents, and no other node has room for both."""
    settings = {"batch_size": 2, "max_staleness": 5, "window": None, "silent_seconds": 1.0}
    cluster = ProcessCluster(num_nodes=4, cpus=3.0)
    runner = make_runner(make_plan(members=6, **settings), cluster)
    faults = Faults(None, runner, 6)

    def lose_a_node() -> None:
        faults.settle()
        cluster.started[0].process.kill()
        faults.settle()
        nodes = [share.node for share in runner.processes._shares]
        cluster.silence(node := max(nodes, key=nodes.count))
        assert nodes.count(node) == 2
        at = time.monotonic()
        faults.settle()
        assert time.monotonic() - at < 10.0

    run_beside(runner, lose_a_node)


@pytest.mark.slow
def test_an_agent_on_a_node_that_has_just_failed_is_given_up_as_soon_as_another_has_room(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    settings = {"batch_size": 1, "window": None, "silent_seconds": 1.0, "max_node_failures": 2}
    cluster = ProcessCluster(num_nodes=2, cpus=1.0)
    runner = make_runner(make_plan(members=2, **settings), cluster)
    faults = Faults(None, runner, 2)

    def lose_a_node() -> None:
        faults.settle()
        cluster.silence("1")
        faults.until(lambda: len(cluster.started) == 3, "no agent takes its place")
        assert cluster.started[-1].node == "1"
        cluster.num_nodes, at = 3, time.monotonic()
        faults.settle()
        assert time.monotonic() - at < 10.0

    run_beside(runner, lose_a_node)
    events = [found["event"] for each in caplog.records if (found := event_of(each)) is not None]
    assert events.count("died") == 2 and "left_out" not in events


def is_member(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().startswith("writer")
    except OSError:
        return False


def test_a_restart_of_which_its_agent_dies_at_once_is_counted() -> None:
    plan = make_plan(members=1, batch_size=1, max_staleness=1)
    cluster = ProcessCluster(num_nodes=1)
    runner = make_runner(plan, cluster)
    known: list[set[int]] = []

    def act(loop: TrainLoop) -> None:
        seeds = set(loop.learner.seeds)
        if not known:
            if loop.learner.version > 20 and (pids := runner.actor_pids()):
                known.append(seeds)
                os.kill(pids[0], signal.SIGKILL)
        elif seeds - known[-1]:
            known.append(seeds)
            if len(known) == 3:
                loop.stop("enough")
            else:
                cluster.started[0].process.kill()

    runner.run([Each(act)])
    assert runner.num_restarts == 2


def test_a_node_that_comes_back_is_refused_and_its_samples_are_counted_as_late() -> None:
    plan = make_plan(members=2, batch_size=1, max_staleness=1, silent_seconds=1.0, seconds=0.05)
    run = Watched(plan, [silence, lambda run: run.cluster.started[-2].signal_all(signal.SIGCONT)])
    run._settled = -20
    original = run._after_update

    def after_update(loop: TrainLoop) -> None:
        original(loop)
        if not run.faults and loop.queue.stats().late:
            loop.stop("late")

    run._after_update = after_update  # type: ignore[method-assign]
    loop = run.run()
    assert loop.queue.stats().late >= 1
    assert loop.queue.stats().discarded["actor_died"] >= 1


def test_random_schedules_of_faults_keep_the_books() -> None:
    rng, faults = random.Random(1), 0
    deadline = time.monotonic() + 40.0

    def act(loop: TrainLoop) -> None:
        nonlocal faults
        if faults >= NUM_SCHEDULES or time.monotonic() > deadline:
            loop.stop("enough")
        elif loop.learner.version % 12 == 0:
            faults += 1
            chance = rng.random()
            pids = [pid for pid in runner.actor_pids() if pid]
            alive = [each for each in cluster.started if each.process.is_alive()]
            if chance < 0.6 and pids:
                kill(rng.choice(pids), signal.SIGKILL)
            elif chance < 0.8:
                rng.choice(alive).process.kill()
            elif chance < 0.9:
                rng.choice(alive).signal_all(signal.SIGSTOP)
            else:
                for each in alive:
                    each.signal_all(signal.SIGCONT)

    def kill(pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, number)

    settings = {"silent_seconds": 1.0, "max_node_failures": 1000, "max_staleness": 2}
    cluster = ProcessCluster(num_nodes=3)
    runner = make_runner(make_plan(members=3, window=None, **settings), cluster)
    runner.run([Each(act)])
    check_books(runner.loop)
    assert faults > 3


@pytest.mark.serial
def test_members_of_another_agent_do_not_repeat_those_of_the_lost_one(tmp_path: Path) -> None:
    plan = make_plan(members=1).with_pool(make_actor=partial(SeedTeller, folder=tmp_path))
    cluster = ProcessCluster()
    runner = make_runner(plan, cluster)

    def lose_the_first() -> None:
        deadline = time.monotonic() + 60.0
        for number in (1, 2):
            while len([*tmp_path.glob("seed-*")]) < number and time.monotonic() < deadline:
                time.sleep(0.02)
            if number == 1:
                cluster.started[0].process.kill()
        (tmp_path / "go").touch()

    thread = threading.Thread(target=lose_the_first)
    thread.start()
    runner.run([Each(lambda loop: loop.stop("enough"))])
    thread.join()
    seeds = [path.read_text() for path in tmp_path.glob("seed-*")]
    assert len(seeds) == 2 and seeds[0] != seeds[1]


@pytest.mark.serial
def test_members_come_and_go_while_training_and_nothing_is_lost() -> None:
    plan = make_plan(members=1, most=6, batch_size=2, max_staleness=3)
    runner = make_runner(plan, ProcessCluster())
    sizes, seen, longest, last = [6, 1], [], [0.0], [0.0]

    def act(loop: TrainLoop) -> None:
        now = time.monotonic()
        longest[0] = max(longest[0], now - last[0]) if last[0] else 0.0
        last[0] = now
        members = len(loop.queue.members())
        if seen and members == seen[-1] and sizes:
            seen.append(sizes.pop(0))
            runner.resize(plan.pools[0], seen[-1])
        elif not seen:
            seen.append(1)
        elif not sizes and members == seen[-1]:
            loop.stop("enough")

    runner.run([Each(act)])
    check_books(runner.loop)
    assert seen == [1, 6, 1]
    assert sum(runner.loop.queue.stats().discarded.values()) == 0
    assert longest[0] < 1.0


def test_a_node_that_is_drained_is_left_in_good_order() -> None:
    plan, cluster = make_plan(members=2, batch_size=1, max_staleness=3), ProcessCluster()
    runner = make_runner(plan, cluster)

    def act(loop: TrainLoop) -> None:
        if len(loop.learner.first_at) == 2 and loop.learner.version > 40:
            cluster.drained.add("0")
        if len(loop.learner.first_at) == 3 and not cluster.started[0].process.is_alive():
            loop.stop("enough")

    runner.run([Each(act)])
    check_books(runner.loop)
    assert sum(runner.loop.queue.stats().discarded.values()) == 0
    assert {share.node for share in runner.processes._shares} == {"1"}
    assert runner.num_restarts == 0


def test_what_finds_no_place_is_said_beside_what_there_is() -> None:
    plan = make_plan(members=3, wait_seconds=0.2)
    runner = make_runner(plan, ProcessCluster(num_nodes=2, cpus=1.0))
    with pytest.raises(UniRLError, match=r"1 of 3 members find no place: writer 2 asks for 1 CPUs"):
        runner.run([])
    assert len(runner.processes.cluster.wanted) == 3  # an autoscaler hears of them


def test_an_error_of_a_member_that_no_restart_fixes_ends_the_run_with_its_three_parts() -> None:
    plan = make_plan(members=1).with_pool(make_actor=refuses)
    with pytest.raises(ActorFailed, match="the rule with both values"):
        make_runner(plan, ProcessCluster(num_nodes=1)).run([])


def refuses(context: Any) -> Any:
    raise UniRLError("what is wrong", "the rule with both values", "the remedy")
