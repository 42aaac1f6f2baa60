"""The queue's law, checked on both queues: in-process, and shared memory between processes."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unirl.core.queue import QueueConfig
from unirl.core.sample import Batch, Field, SampleSpec, Slot, collate
from unirl.core.slot_queue import LocalQueue, SlotQueue
from unirl.core.tree import tree_map
from unirl.errors import DeadlineExceeded, QueueClosed, UniRLError
from unirl.transports.shared import SharedQueue

SPEC = SampleSpec(
    {"obs/x": Field((3, 2), torch.int64), "state": Field((2,), torch.float32, batch_axis=0)}
)
MakeQueue = Callable[..., SlotQueue]


@pytest.fixture(params=["local", "shared", "shared, stores in any order"])
def make_queue(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeQueue:
    monkeypatch.setattr(
        "unirl.transports.shared._STORES_IN_ORDER", "any order" not in request.param
    )
    kind = LocalQueue if request.param == "local" else SharedQueue

    def make(num_actors: int = 2, **settings: Any) -> SlotQueue:
        queue: SlotQueue = kind(SPEC, QueueConfig(**settings), num_actors=num_actors)
        return queue

    return make


def fill(queue: SlotQueue, slot: Slot, version: int) -> None:
    slot.data["obs"]["x"].fill_(slot.ticket)
    slot.first_version = slot.last_version = version
    queue.commit(slot)


def produce(queue: SlotQueue, version: int, actor: int = 0) -> int:
    slot = queue.acquire(0.0, actor=actor)
    fill(queue, slot, version)
    return slot.ticket


def as_an_actor_sees_it(queue: SlotQueue) -> SlotQueue:
    """The same memory and locks, without what the learner's process alone has."""
    view = copy.copy(queue)
    view._backlog, view._partial, view._ready = [], [], {}
    return view


@pytest.mark.parametrize(("max_staleness", "batch_size"), [(0, 1), (0, 3), (1, 2), (4, 1)])
def test_no_more_slots_are_out_than_the_law_allows(
    make_queue: MakeQueue, max_staleness: int, batch_size: int
) -> None:
    queue = make_queue(max_staleness=max_staleness, batch_size=batch_size)
    places = (max_staleness + 1) * batch_size
    slots = [queue.acquire(0.0) for _ in range(places)]
    with pytest.raises(DeadlineExceeded):
        queue.acquire(0.0)
    for slot in slots:
        fill(queue, slot, 0)
    batch = queue.take(0)
    with pytest.raises(DeadlineExceeded):
        queue.acquire(0.0)  # taken is still out
    queue.release(batch)
    for _ in range(batch_size):
        queue.acquire(0.0)
    with pytest.raises(DeadlineExceeded):
        queue.acquire(0.0)


def test_a_learner_reads_what_an_actor_wrote_in_place(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0, batch_size=1)
    ticket = produce(queue, 0)
    batch = queue.take(0)
    data = collate(batch, SPEC)
    assert data["obs"]["x"].eq(ticket).all()
    assert data["obs"]["x"].data_ptr() == queue.place(0)["obs"]["x"].data_ptr()  # not a copy


def test_a_batch_of_several_slots_is_one_copy_along_the_batch_axes(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0, batch_size=2)
    produce(queue, 0)
    produce(queue, 0)
    out = SPEC.allocate(2)
    data = collate(queue.take(0), SPEC, out)
    assert data is out
    assert data["obs"]["x"].tolist() == [[0, 0, 1, 1]] * 3
    assert data["state"].shape == (4,)


def test_window_one_is_the_order_of_start(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=2, batch_size=1, window=1)
    first, second = queue.acquire(0.0), queue.acquire(0.0)
    fill(queue, second, 0)
    with pytest.raises(DeadlineExceeded):
        queue.take(0, timeout=0.0)
    fill(queue, first, 0)
    assert [queue.take(0).slots[0].ticket, queue.take(0).slots[0].ticket] == [0, 1]


def test_a_window_bounds_overtaking(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=3, batch_size=1, window=2)
    slots = [queue.acquire(0.0) for _ in range(3)]
    fill(queue, slots[2], 0)
    with pytest.raises(DeadlineExceeded):
        queue.take(0, timeout=0.0)  # third of three outstanding: outside the window of two
    fill(queue, slots[1], 0)
    assert queue.take(0).slots[0].ticket == 1
    assert queue.take(0).slots[0].ticket == 2  # the window moved on
    unbounded = make_queue(max_staleness=3, batch_size=1, window=None)
    late = [unbounded.acquire(0.0) for _ in range(4)][-1]
    fill(unbounded, late, 0)
    assert unbounded.take(0).slots[0].ticket == 3


def test_a_batch_larger_than_the_window_does_not_deadlock(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0, batch_size=4, window=1)
    slots = [queue.acquire(0.0) for _ in range(4)]
    for slot in reversed(slots):
        fill(queue, slot, 0)
    assert [slot.ticket for slot in queue.take(0, timeout=1.0).slots] == [0, 1, 2, 3]


def test_take_discards_what_is_too_old_and_counts_it(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=1, batch_size=1, window=None)
    produce(queue, 0)
    fresh = queue.acquire(0.0)
    fill(queue, fresh, 4)
    batch = queue.take(5)
    assert (batch.slots[0].ticket, batch.staleness) == (1, [1])
    assert queue.discarded()["stale"] == 1


def test_a_sample_is_as_old_as_the_oldest_weights_that_acted_in_it(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=1, batch_size=1, window=None)
    for first, last in ((0, 2), (1, 2)):
        slot = queue.acquire(0.0)
        slot.first_version, slot.last_version = first, last
        queue.commit(slot)
    batch = queue.take(2)
    assert (batch.slots[0].ticket, batch.staleness) == (1, [1])
    assert queue.discarded()["stale"] == 1


def test_ages_count_from_the_version_that_a_slot_began_with(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=2, batch_size=1)
    produce(queue, 0)
    queue.release(queue.take(0))  # the learner goes on to version 1
    queue.acquire(0.0)
    assert queue.ages(1) == ([0], [])
    produce(queue, 1)
    assert queue.ages(3) == ([2], [2])


def test_a_take_that_met_its_deadline_loses_nothing(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0, batch_size=2)
    produce(queue, 0)
    with pytest.raises(DeadlineExceeded):
        queue.take(0, timeout=0.0)
    produce(queue, 0)
    assert [slot.ticket for slot in queue.take(0, timeout=0.0).slots] == [0, 1]


def test_discards_are_counted_by_reason_and_give_the_place_back(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0, batch_size=1)
    queue.discard(queue.acquire(0.0), "zero_variance")
    queue.discard(queue.acquire(0.0), "zero_variance")
    with pytest.raises(UniRLError, match="tired"):
        queue.discard(queue.acquire(0.0), "tired")
    assert queue.discarded()["zero_variance"] == 2


def test_a_slot_is_given_back_exactly_once(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0, batch_size=1)
    slot = queue.acquire(0.0)
    fill(queue, slot, 0)
    with pytest.raises(UniRLError, match="exactly once"):
        queue.commit(slot)
    with pytest.raises(UniRLError, match="exactly once"):
        queue.discard(slot, "filtered")
    batch = queue.take(0)
    queue.release(batch)
    with pytest.raises(UniRLError, match="exactly once"):
        queue.release(batch)


def test_a_slot_without_versions_is_refused(make_queue: MakeQueue) -> None:
    queue = make_queue()
    with pytest.raises(UniRLError, match="first_version"):
        queue.commit(queue.acquire(0.0))


def test_every_deadline_says_who_is_waited_for(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0, batch_size=1)
    queue.acquire(0.0, actor=1)
    with pytest.raises(DeadlineExceeded, match="actor 1 has held ticket 0"):
        queue.take(0, timeout=0.05)
    with pytest.raises(DeadlineExceeded, match=r"actor 0 waited .* 1 running"):
        queue.acquire(0.05, actor=0)
    assert (queue.oldest_running() or ())[:2] == (0, 1)


def test_closing_wakes_everyone(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0, batch_size=1)
    queue.acquire(0.0)
    ended: list[str] = []

    def wait(call: Callable[[], object], name: str) -> None:
        with pytest.raises(QueueClosed):
            call()
        ended.append(name)

    threads = [
        threading.Thread(target=wait, args=(lambda: queue.acquire(30.0, actor=1), "actor")),
        threading.Thread(target=wait, args=(lambda: queue.take(0, timeout=30.0), "learner")),
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    started = time.monotonic()
    queue.close()
    for thread in threads:
        thread.join(5.0)
    assert sorted(ended) == ["actor", "learner"]
    assert time.monotonic() - started < 1.0


@pytest.mark.parametrize("moment", ["while it watches", "before it falls asleep", "asleep"])
def test_a_waiting_learner_learns_of_a_commit_at_once(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody looks again by himself: after a lost wake-up it would be found at the deadline.
    monkeypatch.setattr("unirl.core.waiters.LOOK_AGAIN_SECONDS", 60.0)
    queue = SharedQueue(SPEC, QueueConfig(max_staleness=0), num_actors=1)
    slot, watch, sleep = queue.acquire(0.0), queue._waiters._watch, queue._guard.wait
    saw: list[bool] = []
    slept: list[float] = []

    def watches(look: Callable[[bool], Slot | None], until: float | None) -> Slot | None:
        def looks(sure: bool) -> Slot | None:
            found = look(sure)
            if moment == "while it watches" and found is None:
                fill(queue, slot, 0)
            return found

        found = watch(looks, until)
        saw.append(found is not None)
        if moment == "before it falls asleep" and not found:
            fill(queue, slot, 0)
        return found

    def sleeps(bell: int, seconds: float) -> None:
        slept.append(seconds)
        if moment == "asleep":
            fill(queue, slot, 0)
        sleep(bell, seconds)

    monkeypatch.setattr(queue._waiters, "_watch", watches)
    monkeypatch.setattr(queue._guard, "wait", sleeps)
    batch = queue.take(0, timeout=5.0)
    assert batch.slots[0].ticket == slot.ticket and batch.wait_seconds < 1.0
    assert (
        saw
        == {
            "while it watches": [True],
            "before it falls asleep": [False],
            "asleep": [False, True],
        }[moment]
    )
    assert len(slept) == (moment == "asleep")


def test_an_actor_that_found_no_place_hears_of_the_next_one(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=0, batch_size=1)
    produce(queue, 0)
    assert queue.try_acquire(1) is None
    queue.release(queue.take(0))
    started = time.monotonic()
    queue.wait_as_actor(1, 5.0)
    assert time.monotonic() - started < 1.0
    assert queue.try_acquire(1) is not None


@pytest.mark.parametrize("moment", ["before it says that it waits", "before it sleeps"])
@pytest.mark.parametrize("change", ["release", "discard", "reissue", "reclaim", "refill", "close"])
def test_a_waiting_actor_learns_of_a_place_at_once(
    change: str, moment: str, make_queue: MakeQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody looks again by himself: after a lost wake-up it would be found at the deadline.
    monkeypatch.setattr("unirl.core.waiters.LOOK_AGAIN_SECONDS", 60.0)
    queue = make_queue(max_staleness=0, batch_size=1)
    if change == "refill":
        queue.restore([], 4, due=[1, 2, 3])
    actor = as_an_actor_sees_it(queue)
    held = actor.acquire(0.0, actor=0)
    if change == "release":
        fill(actor, held, 0)
        batch = queue.take(0)
    if change == "refill":
        actor.discard(held, "filtered")  # free, but for ticket 2: an actor cannot give it out
    done: list[bool] = []

    def change_something() -> None:
        if done:
            return
        done.append(True)
        if change == "release":
            queue.release(batch)
        elif change == "discard":
            actor.discard(held, "filtered")
        elif change == "reissue":
            actor.reissue(held)
        elif change == "reclaim":
            queue.reclaim(0)
        elif change == "close":
            queue.close()
        else:
            with pytest.raises(DeadlineExceeded):
                queue.take(0, timeout=0.0)

    mark, sleep = actor._waiters.mark, actor._guard.wait

    def marks(bell: int, waits: bool = True) -> None:
        if moment == "before it says that it waits":
            change_something()
        mark(bell, waits)

    def sleeps(bell: int, seconds: float) -> None:
        if moment == "before it sleeps":
            change_something()
        sleep(bell, seconds)

    monkeypatch.setattr(actor._waiters, "mark", marks)
    monkeypatch.setattr(actor._guard, "wait", sleeps)
    started = time.monotonic()
    if change == "close":
        with pytest.raises(QueueClosed):
            actor.acquire(5.0, actor=1)
    else:
        assert actor.acquire(5.0, actor=1).index == held.index
    assert time.monotonic() - started < 2.0 and done


class Meddler:
    """The states of all places, of which the others are read only after `meddle` was called."""

    def __init__(self, states: memoryview, meddle: Callable[[], None]) -> None:
        self._states, self._meddle = states, meddle

    def tolist(self) -> list[int]:
        first = self._states[0]
        self._meddle()
        return [first, *self._states.tolist()[1:]]


def test_order_holds_for_what_is_started_and_finished_while_the_learner_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = SharedQueue(SPEC, QueueConfig(max_staleness=1), num_actors=2)
    started: list[Slot] = []

    def meddle() -> None:
        if not started:
            started.extend(queue.acquire(0.0, actor=i) for i in range(2))
            fill(queue, started[1], 0)

    states = queue._states
    monkeypatch.setattr(queue, "_states", Meddler(states, meddle))
    monkeypatch.setattr(queue, "_acquirable", lambda: states.tolist().index(0))
    # The learner has seen place 0 free, where ticket 0 runs by now, and place 1 ready.
    assert queue._next_ready() is None
    assert [slot.ticket for slot in started] == [0, 1]
    fill(queue, started[0], 0)
    assert [queue.take(0).slots[0].ticket for _ in range(2)] == [0, 1]


def test_what_a_dead_actor_held_is_issued_again(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=1, batch_size=1)
    queue.acquire(0.0, actor=1)
    survivor = queue.acquire(0.0, actor=0)
    assert queue.reclaim(1) == 1
    assert queue.discarded()["actor_died"] == 1
    fill(queue, survivor, 0)
    assert (
        queue.take(0, timeout=1.0).slots[0].ticket == 1
    )  # strict order no longer waits for ticket 0
    assert queue.acquire(0.0, actor=1).ticket == 2


def test_a_ticket_that_is_reissued_is_handed_out_again_before_new_ones(
    make_queue: MakeQueue,
) -> None:
    queue = make_queue(max_staleness=2, batch_size=1)
    first, second, third = (queue.acquire(0.0, actor=i % 2) for i in range(3))
    queue.reissue(second)
    queue.reissue(first)
    assert (queue.counts()["due"], queue.num_free) == (2, 2)
    assert queue.snapshot().unfinished == [0, 1, 2]
    fill(queue, third, 0)
    with pytest.raises(DeadlineExceeded, match="2 due"):
        queue.take(0, timeout=0.0)  # strict order waits for the tickets that are due
    for wanted in (0, 1):
        slot = queue.acquire(0.0)
        assert slot.ticket == wanted
        fill(queue, slot, 0)
    assert [queue.take(0).slots[0].ticket for _ in range(3)] == [0, 1, 2]
    assert sum(queue.discarded().values()) == 0


def test_of_tickets_that_are_due_the_lowest_comes_first_wherever_its_place_lies(
    make_queue: MakeQueue,
) -> None:
    queue = make_queue(max_staleness=1, batch_size=1)
    first, second = queue.acquire(0.0), queue.acquire(0.0)
    fill(queue, first, 0)
    queue.release(queue.take(0))
    third = queue.acquire(0.0)
    assert (third.ticket, third.index) == (2, first.index)  # a place before the second's
    queue.reissue(third)
    queue.reissue(second)
    assert [queue.acquire(0.0).ticket for _ in range(2)] == [1, 2]


def test_tickets_of_a_dead_actor_can_be_issued_again(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=1, batch_size=1)
    queue.acquire(0.0, actor=1)
    queue.acquire(0.0, actor=0)
    assert queue.reclaim(1, reissue=True) == 1
    assert sum(queue.discarded().values()) == 0
    assert queue.acquire(0.0, actor=0).ticket == 0


def test_a_batch_that_its_learner_failed_on_is_in_the_snapshot(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=1, batch_size=1)
    produce(queue, 0)
    produce(queue, 0)
    batch = queue.take(0)
    assert [slot.ticket for slot in queue.snapshot().ready] == [0, 1]
    queue.release(batch)
    assert [slot.ticket for slot in queue.snapshot().ready] == [1]


def test_unfinished_tickets_are_issued_first_in_another_queue(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=2, batch_size=1)
    queue.acquire(0.0)
    produce(queue, 0)
    queue.acquire(0.0)
    ready, due, *_ = queue.snapshot()
    again = make_queue(max_staleness=2, batch_size=1)
    again.restore(
        [replace(slot, index=i) for i, slot in enumerate(ready)], queue.next_ticket, due=due
    )
    slots = [again.acquire(0.0) for _ in range(2)]
    assert [slot.ticket for slot in slots] == [0, 2]
    again.discard(slots[0], "filtered")
    assert again.acquire(0.0).ticket == 3
    assert again.reclaim(0) == 2
    assert again.discarded()["actor_died"] == 2  # every ticket is accounted for


def test_tickets_without_a_place_come_before_new_ones_whoever_gives_a_place_back(
    make_queue: MakeQueue,
) -> None:
    queue = make_queue(max_staleness=1, batch_size=1)
    queue.restore([], 6, due=[1, 3, 4, 5])
    actor = as_an_actor_sees_it(queue)
    first, second = actor.acquire(0.0), actor.acquire(0.0)
    assert (first.ticket, second.ticket) == (1, 3)
    actor.discard(first, "filtered")
    assert actor.try_acquire() is None  # the place is for ticket 4, which the learner gives out
    with pytest.raises(DeadlineExceeded, match="1 due"):
        queue.take(0, timeout=0.0)
    for wanted in (4, 5, 6):
        slot = actor.acquire(0.0)
        assert slot.ticket == wanted
        actor.discard(slot, "filtered")
        with pytest.raises(DeadlineExceeded):
            queue.take(0, timeout=0.0)


class Killed(Exception):
    pass


class MortalWords:
    """The words of a process that is killed before its store number `num_stores`."""

    def __init__(self, words: memoryview, num_stores: int) -> None:
        self._words, self._left = words, num_stores

    def __getitem__(self, index: int) -> int:
        return int(self._words[index])

    def __setitem__(self, index: int, value: int) -> None:
        if self._left == 0:
            raise Killed
        self._left -= 1
        self._words[index] = value


@pytest.mark.parametrize("meanwhile", ["nothing", "a checkpoint", "another acquires"])
@pytest.mark.parametrize("reissue", [False, True], ids=["discarded", "issued again"])
@pytest.mark.parametrize("call", ["acquire", "commit", "discard", "reissue"])
def test_every_ticket_is_accounted_for_after_a_kill_before_any_store(
    make_queue: MakeQueue, call: str, reissue: bool, meanwhile: str
) -> None:
    num_kills = 0
    for num_stores in range(20):
        queue = make_queue(max_staleness=2, batch_size=1)
        produce(queue, 0, actor=0)
        victim = as_an_actor_sees_it(queue)
        slot = victim.acquire(0.0, actor=1) if call != "acquire" else None
        victim._words = MortalWords(queue._words, num_stores)  # type: ignore[assignment]
        try:
            if slot is None:
                victim.acquire(0.0, actor=1)
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
            assert max(early.unfinished, default=0) < early.next_ticket
        early_tickets = []
        if meanwhile == "another acquires":
            early_tickets = [as_an_actor_sees_it(queue).acquire(0.0, actor=0).ticket]
        queue.reclaim(1, reissue=reissue)
        ready, unfinished, next_ticket, discarded = queue.snapshot()
        known = [*(slot.ticket for slot in ready), *unfinished]
        assert len(set(known)) == len(known) == next_ticket - sum(discarded.values())
        assert min(discarded.values()) >= 0
        later = [queue.acquire(0.0).ticket for _ in range(queue.num_free)]
        assert later == sorted(set(later)) and max(later, default=0) < next_ticket + len(later)
        if reissue and call != "discard":
            ready_tickets = [slot.ticket for slot in ready]
            assert sorted([*ready_tickets, *early_tickets, *later]) == [0, 1, 2]
    assert num_kills > 0


def test_acknowledged_samples_survive_in_another_queue(make_queue: MakeQueue) -> None:
    queue = make_queue(max_staleness=2, batch_size=1)
    for version in (0, 0, 1):
        produce(queue, version)
    ready = queue.snapshot().ready
    assert [slot.ticket for slot in ready] == [0, 1, 2]
    again = make_queue(max_staleness=2, batch_size=1)
    for slot in ready:
        tree_map(lambda into, value: into.copy_(value), again.place(slot.index), slot.data)
    again.restore(ready, queue.next_ticket)
    batches = [again.take(2) for _ in range(3)]
    assert [(batch.slots[0].ticket, batch.staleness[0]) for batch in batches] == [
        (0, 2),
        (1, 2),
        (2, 1),
    ]
    assert batches[1].slots[0].data["obs"]["x"].eq(1).all()
    for batch in batches:
        again.release(batch)
    assert again.acquire(0.0).ticket == 3


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"max_staleness": -1}, {"window": 0}, {"timeout_seconds": 0.0}]
)
def test_settings_that_break_a_rule_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UniRLError) as error:
        QueueConfig(**wrong)
    assert len(error.value.parts) == 3


class Model:
    """Everything that happened to a queue, kept apart from the queue, for random schedules."""

    def __init__(self, queue: SlotQueue) -> None:
        self.queue, self.version = queue, 0
        self.running: list[tuple[Slot, int]] = []
        self.taken: Batch | None = None
        self.learned: list[int] = []
        self.due: set[int] = set()
        self.discarded = 0
        self.started = 0

    def acquire(self, actor: int) -> None:
        try:
            slot = self.queue.acquire(0.0, actor=actor)
        except DeadlineExceeded:
            return
        if self.due:
            assert slot.ticket == min(self.due)
            self.due.remove(slot.ticket)
        else:
            assert slot.ticket == self.started
            self.started += 1
        self.running.append((slot, self.version))

    def commit(self, choice: int) -> None:
        if self.running:
            fill(self.queue, *self.running.pop(choice % len(self.running)))

    def discard(self, choice: int) -> None:
        if self.running:
            self.queue.discard(self.running.pop(choice % len(self.running))[0], "filtered")
            self.discarded += 1

    def reissue(self, choice: int) -> None:
        if self.running:
            slot, _ = self.running.pop(choice % len(self.running))
            self.queue.reissue(slot)
            self.due.add(slot.ticket)

    def die(self, actor: int, *, reissue: bool = False) -> None:
        dead = [slot for slot, _ in self.running if slot.actor == actor]
        self.running = [(slot, version) for slot, version in self.running if slot.actor != actor]
        assert self.queue.reclaim(actor, reissue=reissue) == len(dead)
        if reissue:
            self.due |= {slot.ticket for slot in dead}
        else:
            self.discarded += len(dead)

    def die_and_reissue(self, actor: int) -> None:
        self.die(actor, reissue=True)

    def take(self) -> None:
        if self.taken is None:
            try:
                self.taken = self.queue.take(self.version, timeout=0.0)
            except DeadlineExceeded:
                return
            for slot in self.taken.slots:
                assert slot.data["obs"]["x"].eq(slot.ticket).all()

    def learn(self) -> None:
        if self.taken is not None:
            assert max(self.taken.staleness) <= self.queue.config.max_staleness
            self.learned += [slot.ticket for slot in self.taken.slots]
            self.version += 1  # published, then released
            self.queue.release(self.taken)
            self.taken = None

    def check(self) -> None:
        assert len(set(self.learned)) == len(self.learned)
        counts = self.queue.counts()
        assert counts["running"] == len(self.running)
        held = {slot.ticket for slot, _ in self.running}
        assert counts["due"] == len(self.due)
        assert self.queue.snapshot().unfinished == sorted(held | self.due)
        stale = self.queue.discarded()["stale"]
        accounted = (
            len(self.learned)
            + self.discarded
            + stale
            + sum(counts[s] for s in ("running", "ready", "taken", "due"))
        )
        assert accounted == self.started
        if self.queue.config.window == 1:
            assert stale == 0  # in order of start nothing is ever produced in vain
            assert self.learned == sorted(self.learned)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ["acquire"] * 3
            + ["commit"] * 3
            + ["discard", "reissue", "die", "die_and_reissue", "take", "learn"]
        ),
        st.integers(0, 7),
    ),
    max_size=60,
)


@settings(max_examples=1500)
@given(
    operations=OPERATIONS,
    max_staleness=st.integers(0, 3),
    batch_size=st.integers(1, 3),
    window=st.sampled_from([1, 2, 5, None]),
    shared=st.booleans(),
)
def test_under_any_schedule_nothing_is_lost_learned_twice_or_too_old(
    operations: list[tuple[str, int]],
    max_staleness: int,
    batch_size: int,
    window: int | None,
    shared: bool,
) -> None:
    kind = SharedQueue if shared else LocalQueue
    queue = kind(SPEC, QueueConfig(batch_size, max_staleness, window), num_actors=3)
    model = Model(queue)
    for name, choice in operations:
        if name in ("acquire", "die", "die_and_reissue"):
            getattr(model, name)(choice % 3)
        elif name in ("commit", "discard", "reissue"):
            getattr(model, name)(choice)
        else:
            getattr(model, name)()
        model.check()
