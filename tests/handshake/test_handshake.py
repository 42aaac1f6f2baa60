"""The table of turns: who owes, who is late, and what a death leaves."""

from __future__ import annotations

import time

from unirl.core.exchange import ACT, EMPTY, HELLO, LOST, OBS, TURN, Layout
from unirl.transports.shared import SharedExchange

LAYOUT = Layout(num_workers=2, num_groups=2, num_actors=2, num_policies=2)


def test_every_part_has_one_worker_and_one_actor() -> None:
    by_worker = [part for worker in range(2) for part in LAYOUT.parts_of_worker(worker)]
    by_actor = [part for actor in range(4) for part in LAYOUT.parts_of_actor(actor)]
    assert sorted(by_worker) == sorted(by_actor) == list(range(LAYOUT.num_parts)) == list(range(8))
    for worker in range(2):
        assert all(LAYOUT.worker_of(part) == worker for part in LAYOUT.parts_of_worker(worker))
        assert all(worker in LAYOUT.workers_of(actor) for actor in LAYOUT.actors_of(worker))


def test_a_worker_owes_a_step_when_all_its_policies_have_decided() -> None:
    exchange = SharedExchange(LAYOUT)
    for part in range(LAYOUT.num_parts):
        exchange.give_turn(part, OBS)
    first, second = LAYOUT.parts_of_group(0)
    exchange.give_turn(first, ACT)
    time.sleep(0.05)
    assert exchange.late_workers(0.01) == []
    exchange.give_turn(second, ACT)
    time.sleep(0.05)
    assert exchange.late_workers(0.01) == [0]


def test_the_successor_of_a_dead_worker_does_not_owe_what_that_left() -> None:
    exchange = SharedExchange(LAYOUT)
    for part in range(LAYOUT.num_parts):
        exchange.give_turn(part, ACT)
    exchange.worker_died(0, "timeout")
    time.sleep(0.05)
    assert exchange.late_workers(0.01) == [1]


def test_a_dead_actor_leaves_its_parts_empty_and_those_of_others_lost() -> None:
    exchange = SharedExchange(LAYOUT)
    for part in range(LAYOUT.num_parts):
        exchange.give_turn(part, HELLO)
    exchange.actor_died(0)  # the first policy's, who decides for worker 0
    for part in LAYOUT.parts_of_worker(0):
        own = part in LAYOUT.parts_of_actor(0)
        assert bool(exchange.words[exchange.row(part) + LOST]) is not own
        if own:
            assert exchange.words[exchange.row(part) + TURN] == EMPTY
    assert not any(exchange.words[exchange.row(p) + LOST] for p in LAYOUT.parts_of_worker(1))
