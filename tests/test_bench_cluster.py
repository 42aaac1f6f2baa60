"""The simulated cluster: its queue is the real one, and its accounts are in order."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from unirl import cli
from unirl.bench import server_costs
from unirl.bench.cluster_shape import ClusterShape
from unirl.bench.server_costs import CallCost, ServerCosts
from unirl.bench.simulation import Simulation

SHAPE = ClusterShape(members=200, updates=6, silent_nodes=6, seed=3)
IDEAL = ClusterShape(
    members=1, members_per_node=1, batch_size=1, unroll_spread=0.0, slot_kb=0.0, weights_mb=0.0,
    lease_seconds=0.0, learner_ms_per_slot=0.0, updates=30,
)  # fmt: skip
FREE = ServerCosts(*[CallCost(0.0, 0.0)] * 5)


@pytest.mark.parametrize("window", [1, 50, None])
def test_with_200_actors_and_silent_nodes_every_ticket_is_accounted_for(
    window: int | None,
) -> None:
    simulation = Simulation(replace(SHAPE, window=window), ServerCosts())
    found = simulation.run()
    stats = simulation.server.stats()
    assert stats.started == stats.learned + sum(stats.discarded.values()) + stats.out
    assert stats.learned == 8 * 100  # a third of the updates more were the warm-up
    assert stats.discarded["actor_died"] > 0 and stats.late > 0
    assert stats.out <= found.num_slots == 300
    assert found.staleness_max <= SHAPE.max_staleness


def test_leases_wait_for_weights_that_travel_slowly_and_nothing_goes_stale_by_that() -> None:
    slow = replace(SHAPE, silent_nodes=0, window=1, weights_mb=400.0, updates=3)
    found = Simulation(slow, ServerCosts()).run()
    assert found.weights_wait_seconds > 0.5 and found.shares["network out"] > 0.5
    assert found.stats.discarded["stale"] == 0


def test_what_was_overtaken_for_too_long_is_discarded() -> None:
    uneven = replace(SHAPE, silent_nodes=0, window=None, unroll_spread=1.5, max_staleness=1)
    found = Simulation(uneven, ServerCosts()).run()
    assert found.stats.discarded["stale"] > 0 and found.staleness_max <= 1


def test_equal_seeds_give_equal_results() -> None:
    first, again = (Simulation(replace(SHAPE, updates=4), ServerCosts()).run() for _ in range(2))
    assert first == again
    assert Simulation(replace(SHAPE, updates=4, seed=4), ServerCosts()).run() != first


def test_rates_are_those_that_can_be_computed_by_hand() -> None:
    # One actor, strictly in turns: a second of unroll, then half a second of learning.
    turns = Simulation(replace(IDEAL, max_staleness=0, learner_seconds=0.5), FREE).run()
    assert turns.slots_per_second == pytest.approx(1 / 1.5)
    # One ahead: the learner's half second is hidden.
    ahead = Simulation(replace(IDEAL, max_staleness=1, learner_seconds=0.5), FREE).run()
    assert ahead.slots_per_second == pytest.approx(1.0, rel=0.02) and ahead.limit == "actors"
    # Many actors, and a learner of four updates a second.
    many = replace(IDEAL, members=8, max_staleness=16, learner_seconds=0.25)
    found = Simulation(many, FREE).run()
    assert found.slots_per_second == pytest.approx(4.0, rel=0.01) and found.limit == "learner"
    # A server that needs half a second for each slot that is taken.
    costs = replace(FREE, take=CallCost(0.5e6, 0.0))
    found = Simulation(replace(many, learner_seconds=0.0), costs).run()
    assert found.slots_per_second == pytest.approx(2.0, rel=0.01)
    assert found.limit == "queue server"


def test_costs_are_measured_on_the_real_server() -> None:
    measured = server_costs.measure([16, 256], num_calls=8)
    assert all(value > 0 for one in measured.values() for value in one.values())
    fitted = ServerCosts.fit(measured)
    assert fitted.take.seconds(256) * 1e6 == pytest.approx(measured[256]["take"], rel=0.01)


def test_the_command_simulates_and_says_what_limits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "cluster", "--simulate", "--members", "32", "--updates", "3"]
    assert cli.main(words) == 0
    assert "32 actors on 2 nodes, 48 slots" in capsys.readouterr().out
    assert cli.main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["limit"] == "actors"
    assert cli.main(["bench", "cluster", "--help"]) == 0
    assert "--members-per-node  an integer" in capsys.readouterr().out
    for wrong in (words[:2], [*words, "--members-per-node", "0"], [*words, "more"]):
        assert cli.main(wrong) == 2
        assert len(capsys.readouterr().err.splitlines()) == 3
