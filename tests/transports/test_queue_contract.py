"""The contract of a queue, checked on every transport."""

from __future__ import annotations

import time
from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from tests.transports.queues import SPEC, MakeQueue, fill, produce
from unirl.core.queue import QueueClient, QueueConfig, Ticket
from unirl.core.sample import Slot, collate
from unirl.core.tree import tree_map
from unirl.errors import DeadlineExceeded, LeaseExpired, QueueClosed, UniRLError
from unirl.transports.slot_table import MAX_MEMBERS
from unirl.transports.table_queue import TableClient


@pytest.mark.parametrize(("max_staleness", "batch_size"), [(0, 1), (0, 3), (1, 2), (4, 1)])
def test_no_more_slots_are_out_than_the_staleness_bound_allows(
    make_queue: MakeQueue, max_staleness: int, batch_size: int
) -> None:
    queue = make_queue(max_staleness=max_staleness, batch_size=batch_size)
    client = queue.join()
    slots = [client.acquire(0.0) for _ in range((max_staleness + 1) * batch_size)]
    with pytest.raises(DeadlineExceeded):
        client.acquire(0.0)
    for slot in slots:
        fill(client, slot, 0)
    batch = queue.take(0)
    assert client.try_acquire() is None  # taken is still out
    queue.release(batch)
    for _ in range(batch_size):
        client.acquire(0.0)
    assert client.try_acquire() is None


def test_a_learner_reads_what_an_actor_wrote_in_place(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0)
    ticket = produce(queue.join(), 0)
    data = collate(queue.take(0), SPEC)
    assert data["obs"]["x"].eq(ticket).all()
    assert data["obs"]["x"].data_ptr() == queue.buffers().buffer(0)["obs"]["x"].data_ptr()


def test_a_commit_says_how_much_of_a_slot_is_used(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=1)
    client = queue.join()
    slot = client.acquire(0.0)
    slot.data["token"][:3] = 7
    slot.used = 3
    fill(client, slot, 0)
    produce(client, 0)
    first, second = queue.take(0).slots[0], queue.take(0).slots[0]
    assert (first.used, second.used) == (3, None)
    assert SPEC.used_part(first.data, first.used)["token"].tolist() == [7, 7, 7]
    assert SPEC.used_part(first.data, first.used)["obs"]["x"].shape == (3, 2)
    assert len(SPEC.used_part(second.data, second.used)["token"]) == 8


def test_a_batch_of_several_slots_is_one_copy_along_the_batch_axes(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0, batch_size=2)
    client = queue.join()
    produce(client, 0)
    produce(client, 0)
    out = SPEC.allocate(2)
    spec = replace(SPEC, fields={n: f for n, f in SPEC.fields.items() if n != "token"})
    data = collate(queue.take(0), spec, out)
    assert data is out
    assert data["obs"]["x"].tolist() == [[0, 0, 1, 1]] * 3
    assert data["state"].shape == (4,)


def test_window_one_is_the_order_of_start(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=2, window=1)
    client = queue.join()
    first, second = client.acquire(0.0), client.acquire(0.0)
    fill(client, second, 0)
    with pytest.raises(DeadlineExceeded):
        queue.take(0, timeout=0.0)
    fill(client, first, 0)
    assert [queue.take(0).slots[0].ticket for _ in range(2)] == [0, 1]


def test_a_window_bounds_overtaking(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=3, window=2)
    client = queue.join()
    slots = [client.acquire(0.0) for _ in range(3)]
    fill(client, slots[2], 0)
    with pytest.raises(DeadlineExceeded):
        queue.take(0, timeout=0.0)  # third of three outstanding: outside the window of two
    fill(client, slots[1], 0)
    assert queue.take(0).slots[0].ticket == 1
    assert queue.take(0).slots[0].ticket == 2  # the window moved on
    unbounded = make_queue(max_staleness=3, window=None)
    client = unbounded.join()
    late = [client.acquire(0.0) for _ in range(4)][-1]
    fill(client, late, 0)
    assert unbounded.take(0).slots[0].ticket == 3


def test_a_batch_larger_than_the_window_does_not_deadlock(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0, batch_size=4, window=1)
    client = queue.join()
    slots = [client.acquire(0.0) for _ in range(4)]
    for slot in reversed(slots):
        fill(client, slot, 0)
    assert [slot.ticket for slot in queue.take(0).slots] == [0, 1, 2, 3]


def test_take_discards_what_is_too_old_and_counts_it(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=1, window=None)
    client = queue.join()
    produce(client, 0)
    produce(client, 1)
    batch = queue.take(2)
    assert [slot.ticket for slot in batch.slots] == [1]
    assert queue.stats().discarded["stale"] == 1
    assert client.try_acquire() is not None  # its slot came free


def test_a_sample_is_as_old_as_the_oldest_weights_that_acted_in_it(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=2, window=None)
    client = queue.join()
    slot = client.acquire(0.0)
    slot.first_version, slot.last_version = 3, 5
    client.commit(slot)
    assert queue.take(5).staleness == [2]


def test_ages_count_from_the_version_that_a_slot_began_with(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=3)
    client = queue.join()
    produce(client, 0)
    client.acquire(0.0)
    queue.release(queue.take(0))  # the learner is at version 1 now
    client.acquire(0.0)
    produce(client, 1)
    running, ready = queue.ages(1)
    assert (sorted(running), ready) == ([0, 1], [0])


def test_a_take_that_met_its_deadline_loses_nothing(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0, batch_size=2)
    client = queue.join()
    produce(client, 0)
    with pytest.raises(DeadlineExceeded):
        queue.take(0, timeout=0.0)
    produce(client, 0)
    assert [slot.ticket for slot in queue.take(0).slots] == [0, 1]


def test_discards_are_counted_by_reason_and_give_the_slot_back(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0)
    client = queue.join()
    client.discard(client.acquire(0.0), "filtered")
    client.discard(client.acquire(0.0), "timeout")
    discarded = queue.stats().discarded
    assert (discarded["filtered"], discarded["timeout"], sum(discarded.values())) == (1, 1, 2)
    with pytest.raises(UniRLError, match="bored"):
        client.discard(client.acquire(0.0), "bored")


def test_a_slot_is_given_back_exactly_once(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=1)
    client = queue.join()
    slot = client.acquire(0.0)
    fill(client, slot, 0)
    with pytest.raises(UniRLError, match="is not running"):
        client.commit(slot)
    with pytest.raises(UniRLError, match="exactly once"):
        client.discard(slot, "filtered")
    batch = queue.take(0)
    queue.release(batch)
    with pytest.raises(UniRLError, match="exactly once"):
        queue.release(batch)
    assert queue.stats().late == 0


def test_a_slot_without_versions_is_refused(make_queue: MakeQueue) -> None:
    client = make_queue().join()
    with pytest.raises(UniRLError, match=r"versions -1\.\.-1"):
        client.commit(client.acquire(0.0))


def test_every_deadline_says_what_is_waited_for(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0)
    client = queue.join(name="actor 7")
    client.acquire(0.0)
    with pytest.raises(DeadlineExceeded, match="1 running; member 1 has held ticket 0"):
        client.acquire(0.0)
    with pytest.raises(DeadlineExceeded, match="1 running; actor 7 has held ticket 0"):
        queue.take(0, timeout=0.0)


# -- members ---------------------------------------------------------------------------------------


def test_a_member_that_joins_late_is_like_the_others(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=2)
    produce(queue.join(), 0)
    assert produce(queue.join(), 0) == 1
    assert len(queue.members()) == 2


def test_a_member_that_leaves_gives_back_what_it_holds(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0)
    client = queue.join()
    slot = client.acquire(0.0)
    client.leave()
    client.leave()  # idempotent
    assert queue.members() == []
    assert queue.stats().discarded["shutdown"] == 1
    with pytest.raises(LeaseExpired):
        client.acquire(0.0)
    assert produce(queue.join(), 0) == 1
    with pytest.raises(LeaseExpired):
        client.commit(replace(slot, first_version=0, last_version=0))


def test_a_retired_member_finishes_what_it_holds_and_gets_no_more(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=1)
    client = queue.join()
    slot = client.acquire(0.0)
    queue.retire(client.member)
    with pytest.raises(LeaseExpired):
        client.try_acquire()
    fill(client, slot, 0)
    assert queue.take(0).slots[0].ticket == slot.ticket
    assert sum(queue.stats().discarded.values()) == 0


@pytest.mark.parametrize("reissue", [False, True], ids=["discarded", "issued again"])
def test_what_comes_late_from_a_revoked_member_is_refused_and_counted(
    make_queue: MakeQueue, reissue: bool
) -> None:
    queue = make_queue(max_staleness=0)
    zombie, other = queue.join(), queue.join()
    slot = zombie.acquire(0.0)
    assert queue.revoke(zombie.member, reissue=reissue) == 1
    again = other.acquire(0.0)
    assert (again.index, again.ticket) == (slot.index, slot.ticket + (not reissue))
    for late in (
        lambda: fill(zombie, slot, 0),
        lambda: zombie.discard(slot, "filtered"),
        lambda: zombie.reissue(slot),
        lambda: zombie.acquire(0.0),
    ):
        with pytest.raises(LeaseExpired):
            late()
    assert queue.stats().late == 4
    slot.data["obs"]["x"].fill_(99)  # memory does not stop a zombie, accounting does
    fill(other, again, 0)
    assert queue.take(0).slots[0].ticket == again.ticket
    assert queue.stats().discarded["actor_died"] == (not reissue)


def test_revoking_somebody_twice_or_nobody_changes_nothing(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0)
    client = queue.join()
    client.acquire(0.0)
    assert queue.revoke(client.member) == 1
    assert queue.revoke(client.member) == 0
    assert queue.revoke(1000 + client.member) == 0
    assert queue.stats().discarded["actor_died"] == 1


def test_members_are_judged_by_their_signs_of_life(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=2)
    silent, alive = queue.join(), queue.join()
    silent.acquire(0.0)
    slot = alive.acquire(0.0)
    time.sleep(0.05)
    slot.progress()
    status = {each.member: each for each in queue.members()}
    assert status[silent.member].idle_seconds >= 0.05 > status[alive.member].idle_seconds
    assert [each.num_running for each in status.values()] == [1, 1]


def test_a_member_too_many_is_refused(make_queue: MakeQueue) -> None:
    queue = make_queue()
    clients = [queue.new_member(0, "") for _ in range(MAX_MEMBERS)]
    with pytest.raises(UniRLError, match=f"{MAX_MEMBERS} already"):
        queue.join()
    clients[3].leave()
    assert queue.join().member not in {client.member for client in clients}


def test_an_unknown_pool_is_refused(make_queue: MakeQueue) -> None:
    with pytest.raises(UniRLError, match="pools 0 to 1"):
        make_queue(shares=(1, 1)).join(2)


# -- pools -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, None])
def test_pools_are_learned_from_in_proportion_to_their_shares(
    make_queue: MakeQueue, window: int | None
) -> None:
    queue = make_queue(shares=(3, 1), max_staleness=1, batch_size=2, window=window)
    clients = [queue.join(0), queue.join(1)]
    for version in range(40):
        while (pool := queue.next_pool()) is not None:
            produce(clients[pool], version)
        queue.release(queue.take(version))
    assert [counts.learned for counts in queue.stats().pools] == [60, 20]


def test_a_pool_waits_for_its_turn_and_numbers_its_own_tickets(make_queue: MakeQueue) -> None:
    queue = make_queue(shares=(1, 1), max_staleness=3)
    first, second = queue.join(0), queue.join(1)
    mine = [first.acquire(0.0), first.acquire(0.0)]
    assert first.try_acquire() is None  # the other slots are the other pool's
    theirs = [second.acquire(0.0), second.acquire(0.0)]
    assert [slot.ticket for slot in mine] == [0, 2] and [slot.ticket for slot in theirs] == [1, 3]
    assert [slot.pool_ticket for slot in (*mine, *theirs)] == [0, 1, 0, 1]
    assert {slot.pool for slot in theirs} == {1}


def test_a_pool_makes_up_for_what_it_discards(make_queue: MakeQueue) -> None:
    queue = make_queue(shares=(1, 1), max_staleness=0, batch_size=2, window=None)
    clients = [queue.join(0), queue.join(1)]
    for version in range(20):
        number = 0
        while (pool := queue.next_pool()) is not None:
            slot = clients[pool].acquire(0.0)
            number += 1
            if pool == 0 and number % 2:
                clients[0].discard(slot, "filtered")
            else:
                fill(clients[pool], slot, version)
        queue.release(queue.take(version))
    counts = [each.learned for each in queue.stats().pools]
    assert sum(counts) == 40 and abs(counts[0] - counts[1]) <= 2


# -- tickets ---------------------------------------------------------------------------------------


def test_a_ticket_that_is_reissued_is_handed_out_again_before_new_ones(
    make_queue: MakeQueue,
) -> None:
    queue = make_queue(max_staleness=2)
    client = queue.join()
    first, second, third = (client.acquire(0.0) for _ in range(3))
    client.reissue(second)
    client.reissue(first)
    assert queue.stats().states["due"] == 2
    assert [ticket.number for ticket in queue.snapshot().unfinished] == [0, 1, 2]
    fill(client, third, 0)
    with pytest.raises(DeadlineExceeded, match="2 due"):
        queue.take(0, timeout=0.0)  # strict order waits for the tickets that are due
    assert [produce(client, 0), produce(client, 0)] == [0, 1]
    assert [queue.take(0).slots[0].ticket for _ in range(3)] == [0, 1, 2]
    assert sum(queue.stats().discarded.values()) == 0


def test_of_due_tickets_the_lowest_comes_first_whichever_slot_it_is_in(
    make_queue: MakeQueue,
) -> None:
    queue = make_queue(max_staleness=1)
    client = queue.join()
    first, second = client.acquire(0.0), client.acquire(0.0)
    fill(client, first, 0)
    queue.release(queue.take(0))
    third = client.acquire(0.0)
    assert (third.ticket, third.index) == (2, first.index)  # a slot before the second's
    client.reissue(third)
    client.reissue(second)
    assert [client.acquire(0.0).ticket for _ in range(2)] == [1, 2]


def test_a_batch_that_its_learner_failed_on_is_in_the_snapshot(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=1)
    client = queue.join()
    produce(client, 0)
    produce(client, 0)
    batch = queue.take(0)
    assert [slot.ticket for slot in queue.snapshot().ready] == [0, 1]
    queue.release(batch)
    assert [slot.ticket for slot in queue.snapshot().ready] == [1]


def test_unfinished_tickets_are_issued_first_in_another_queue(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=2)
    client = queue.join()
    client.acquire(0.0)
    produce(client, 0)
    client.acquire(0.0)
    found = queue.snapshot()
    again = make_queue(max_staleness=2)
    ready = [replace(slot, index=i) for i, slot in enumerate(found.ready)]
    again.restore(ready, found.next_ticket, due=found.unfinished, issued=found.issued)
    other = again.join()
    slots = [other.acquire(0.0) for _ in range(2)]
    assert [slot.ticket for slot in slots] == [0, 2]
    other.discard(slots[0], "filtered")
    assert other.acquire(0.0).ticket == 3
    assert again.revoke(other.member) == 2
    assert again.stats().discarded["actor_died"] == 2  # every ticket is accounted for


def test_tickets_of_several_pools_continue_in_another_queue(make_queue: MakeQueue) -> None:
    shape = {"shares": (1, 1), "max_staleness": 3}
    queue = make_queue(**shape)
    clients = [queue.join(0), queue.join(1)]
    for client in (*clients, clients[0]):
        client.acquire(0.0)
    found = queue.snapshot()
    again = make_queue(**shape)
    again.restore([], found.next_ticket, due=found.unfinished, issued=found.issued)
    clients = [again.join(0), again.join(1)]
    slots = [clients[i].acquire(0.0) for i in (0, 0, 1, 1)]
    assert [(slot.ticket, slot.pool_ticket) for slot in slots] == [(0, 0), (2, 1), (1, 0), (3, 1)]


def test_tickets_without_a_slot_come_before_new_ones(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=1)
    queue.restore([], 6, due=[Ticket(i, 0, i) for i in (1, 3, 4, 5)])
    client = queue.join()
    first, second = client.acquire(0.0), client.acquire(0.0)
    assert (first.ticket, second.ticket) == (1, 3)
    client.discard(first, "filtered")
    assert client.try_acquire() is None  # the slot is for ticket 4, which the learner gives out
    with pytest.raises(DeadlineExceeded, match="1 due"):
        queue.take(0, timeout=0.0)
    for wanted in (4, 5, 6):
        slot = client.acquire(0.0)
        assert slot.ticket == wanted
        client.discard(slot, "filtered")
        with pytest.raises(DeadlineExceeded):
            queue.take(0, timeout=0.0)


def test_acknowledged_samples_survive_in_another_queue(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=2)
    client = queue.join()
    for version in (0, 0, 1):
        produce(client, version)
    found = queue.snapshot()
    assert [slot.ticket for slot in found.ready] == [0, 1, 2]
    again = make_queue(max_staleness=2)
    for slot in found.ready:
        into = again.buffers().buffer(slot.index)
        tree_map(lambda leaf, value: leaf.copy_(value), into, slot.data)
    again.restore(found.ready, found.next_ticket)
    batches = [again.take(2) for _ in range(3)]
    learned = [(batch.slots[0].ticket, batch.staleness[0]) for batch in batches]
    assert learned == [(0, 2), (1, 2), (2, 1)]
    assert batches[1].slots[0].data["obs"]["x"].eq(1).all()
    for batch in batches:
        again.release(batch)
    assert again.join().acquire(0.0).ticket == 3


# -- deaths ----------------------------------------------------------------------------------------


class Killed(Exception):
    pass


class MortalCells:
    """The table of a process that is killed before its store number `num_stores`."""

    def __init__(self, cells: memoryview, num_stores: int) -> None:
        self._cells, self._left = cells, num_stores

    def __getitem__(self, index: Any) -> Any:
        return self._cells[index]

    def __setitem__(self, index: int, value: int) -> None:
        if self._left == 0:
            raise Killed
        self._left -= 1
        self._cells[index] = value


def mortal(client: TableClient, num_stores: int) -> TableClient:
    """The same member in a process that will be killed."""
    memory: Any = copy(client.memory)
    memory.cells = MortalCells(client.memory.cells, num_stores)
    return TableClient(memory, client.member, 0)


# Members on other machines never touch the table.
@pytest.mark.parametrize("make_queue", ["local", "shared"], indirect=True)
@pytest.mark.parametrize("meanwhile", ["nothing", "a checkpoint", "another acquires"])
@pytest.mark.parametrize("reissue", [False, True], ids=["discarded", "issued again"])
@pytest.mark.parametrize("call", ["acquire", "commit", "discard", "reissue"])
def test_every_ticket_is_accounted_for_after_a_kill_before_any_store(
    make_queue: MakeQueue, call: str, reissue: bool, meanwhile: str
) -> None:
    num_kills = 0
    for num_stores in range(25):
        queue = make_queue(max_staleness=2)
        other, client = queue.join(), queue.join()
        produce(other, 0)
        slot = client.acquire(0.0) if call != "acquire" else None
        victim = mortal(client, num_stores)
        try:
            if slot is None:
                victim.acquire(0.0)
            elif call == "commit":
                fill(victim, slot, 0)
            elif call == "discard":
                victim.discard(slot, "filtered")
            else:
                victim.reissue(slot)
        except Killed:
            num_kills += 1
        if meanwhile == "a checkpoint":
            early = queue.snapshot()
            assert max((t.number for t in early.unfinished), default=0) < early.next_ticket
        early_tickets = [other.acquire(0.0).ticket] if meanwhile == "another acquires" else []
        queue.revoke(client.member, reissue=reissue)
        found = queue.snapshot()
        ready = [slot.ticket for slot in found.ready]
        known = [*ready, *(ticket.number for ticket in found.unfinished)]
        assert len(set(known)) == len(known) == found.next_ticket - sum(found.discarded.values())
        assert min(found.discarded.values()) >= 0
        later = [slot.ticket for slot in iter(other.try_acquire, None)]
        assert later == sorted(set(later)) and max(later, default=0) < found.next_ticket + len(
            later
        )
        if reissue and call != "discard":
            assert sorted([*ready, *early_tickets, *later]) == [0, 1, 2]
    assert num_kills > 0


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"max_staleness": -1}, {"window": 0}, {"timeout_seconds": 0.0}]
)
def test_settings_that_break_a_rule_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UniRLError) as error:
        QueueConfig(**wrong)
    assert len(error.value.parts) == 3


def test_closing_is_final(make_queue: MakeQueue) -> None:
    queue = make_queue()
    client = queue.join()
    queue.close()
    queue.close()
    assert client.closed
    for call in (client.acquire, client.try_acquire, lambda: queue.take(0)):
        with pytest.raises(QueueClosed):
            call()


def test_what_was_saved_comes_with_its_ticket_to_the_next_holder(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=1)
    first, second = queue.join(), queue.join()
    slot = first.acquire(0.0)
    assert not slot.is_saved

    def write() -> int:
        slot.data["token"][:3] = 7
        return 3

    first.save(slot, write)
    assert slot.is_saved
    queue.revoke(first.member, reissue=True)
    again = second.acquire(0.0)
    assert (again.ticket, again.is_saved, again.used) == (slot.ticket, True, 3)
    assert again.data["token"][:3].tolist() == [7, 7, 7]
    with pytest.raises(LeaseExpired):
        first.save(slot, write)  # late
    fill(second, again, 0)
    queue.release(queue.take(0))
    others = [second.acquire(0.0) for _ in range(2)]  # one of them in the same slot
    assert again.index in {other.index for other in others}
    assert not any(other.is_saved for other in others)


def test_what_is_half_written_or_was_forgotten_is_not_handed_over(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=1)
    client = queue.join()

    def write(slot: Slot, fails: bool = False) -> int | None:
        slot.data["token"].fill_(8 if fails else 7)
        if fails:
            raise ValueError("in the middle of it")
        return None

    slot = client.acquire(0.0)
    client.save(slot, lambda: write(slot))
    with pytest.raises(ValueError):
        client.save(slot, lambda: write(slot, fails=True))
    client.reissue(slot)
    again = client.acquire(0.0)
    # On another machine there still is what came whole.
    assert not again.is_saved or again.data["token"].tolist() == [7] * 8
    client.save(again, lambda: write(again))
    again.save(None)
    client.reissue(again)
    assert not client.acquire(0.0).is_saved


def test_a_member_that_asks_fairly_leaves_others_their_part(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=1, batch_size=3)
    first, second = queue.join(), queue.join()

    def take_all(client: QueueClient) -> list[Slot]:
        return list(iter(lambda: client.try_acquire(is_fair=True), None))

    held = take_all(first)
    assert len(held) == 3 and len(take_all(second)) == 3
    fill(first, held[0], 0)
    assert take_all(first) == []  # none is free
    queue.revoke(second.member, reissue=True)
    assert len(take_all(first)) == 3  # alone, it may have all
