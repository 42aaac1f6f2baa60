"""Recipes with members of other kinds than impala's, on two raylets: environment workers beside
their policy workers, and simulators that feed one learner.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.nodes import Each
from tests.cluster.test_ray import Raylets
from tests.cluster.test_same_samples import freeze, plan_of, samples
from unirl.runners.loop import TrainLoop
from unirl.runners.make import make_runner
from unirl.runners.processes import ProcessesRunner


@pytest.fixture(scope="module")
def raylets() -> Iterator[Raylets]:
    found = Raylets()
    yield found
    found.close()


def names_by_node(runner: Any) -> dict[str, list[str]]:
    """What runs on each node, as its agent said last."""
    members = runner.processes
    return {
        share.node: sorted(members._hub.status(share.agent).get("pids", {}))
        for share in members._shares
    }


def test_appo_trains_with_environment_and_policy_workers_on_two_nodes(raylets: Raylets) -> None:
    runner: Any = make_runner(plan_of("appo", **{"ray.address": raylets.address}))
    learned: set[int] = set()
    found: list[dict[str, list[str]]] = []

    def act(loop: TrainLoop) -> None:
        found[:] = [names_by_node(runner)]
        if loop.learner.version >= 60 and all(found[0].values()):
            loop.stop("enough")

    step = runner.loop.learner.step

    def counted(batch: Any) -> Any:
        learned.update(slot.member for slot in batch.slots)
        return step(batch)

    runner.loop.learner.step = counted
    runner.run([Each(act)])
    workers = [["actor 0", "environment worker 0"], ["actor 1", "environment worker 1"]]
    assert sorted(found[0].values()) == workers
    assert len(learned) == 2 and runner.num_restarts == 0
    stats = runner.loop.queue.stats()
    assert stats.learned == 2 * runner.loop.learner.version
    assert stats.started == stats.learned + sum(stats.discarded.values()) + stats.out


def test_simulators_of_two_nodes_feed_one_learner(raylets: Raylets) -> None:
    plan = freeze(plan_of("ondevice", **{"ray.address": raylets.address}))
    runner: Any = make_runner(plan)
    there = samples(runner)
    assert len({share.node for share in runner.processes._shares}) == 2
    assert there == samples(ProcessesRunner(plan)) and there[0] != there[1]
