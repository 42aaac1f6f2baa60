"""The table of turns: who owes, who is late, and what a death leaves."""

from __future__ import annotations

import time

from unirl.handshake.handshake import ACT, EMPTY, HELLO, LOST, OBS, TURN, Handshake
from unirl.handshake.layout import HandshakeLayout
from unirl.transports.shared import SharedTransport

LAYOUT = HandshakeLayout(num_workers=2, num_groups=2, num_actors=2, num_policies=2)


def test_every_split_has_one_worker_and_one_actor() -> None:
    by_worker = [split for worker in range(2) for split in LAYOUT.splits_of_worker(worker)]
    by_actor = [split for actor in range(4) for split in LAYOUT.splits_of_actor(actor)]
    assert sorted(by_worker) == sorted(by_actor) == list(range(LAYOUT.num_splits)) == list(range(8))
    for worker in range(2):
        assert all(LAYOUT.worker_of(split) == worker for split in LAYOUT.splits_of_worker(worker))
        assert all(worker in LAYOUT.workers_of(actor) for actor in LAYOUT.actors_of(worker))


def test_a_worker_owes_a_step_when_all_its_policies_have_decided() -> None:
    handshake = Handshake(LAYOUT, SharedTransport())
    for split in range(LAYOUT.num_splits):
        handshake.give_turn(split, OBS)
    first, second = LAYOUT.splits_of_group(0)
    handshake.give_turn(first, ACT)
    time.sleep(0.05)
    assert handshake.late_workers(0.01) == []
    handshake.give_turn(second, ACT)
    time.sleep(0.05)
    assert handshake.late_workers(0.01) == [0]


def test_the_successor_of_a_dead_worker_does_not_owe_what_that_left() -> None:
    handshake = Handshake(LAYOUT, SharedTransport())
    for split in range(LAYOUT.num_splits):
        handshake.give_turn(split, ACT)
    handshake.worker_died(0, "timeout")
    time.sleep(0.05)
    assert handshake.late_workers(0.01) == [1]


def test_a_dead_actor_leaves_its_splits_empty_and_those_of_others_lost() -> None:
    handshake = Handshake(LAYOUT, SharedTransport())
    for split in range(LAYOUT.num_splits):
        handshake.give_turn(split, HELLO)
    handshake.actor_died(0)  # the first policy's, who decides for worker 0
    for split in LAYOUT.splits_of_worker(0):
        own = split in LAYOUT.splits_of_actor(0)
        assert bool(handshake.cells[handshake.row(split) + LOST]) is not own
        if own:
            assert handshake.cells[handshake.row(split) + TURN] == EMPTY
    assert not any(handshake.cells[handshake.row(p) + LOST] for p in LAYOUT.splits_of_worker(1))
