"""Random schedules of one queue, each step checked against a model: members join, leave, retire and
die, and their late calls come in between. HYPOTHESIS_PROFILE=search tries 2 000 of each transport.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.transports.queues import TRANSPORTS, fill, make
from unirl.core.queue import QueueClient
from unirl.core.sample import Batch, Slot
from unirl.errors import DeadlineExceeded, LeaseExpired
from unirl.transports.table_server import TableServer


class Model:
    """Everything that happened to a queue, kept apart from the queue."""

    def __init__(self, queue: TableServer, num_pools: int) -> None:
        self.queue, self.num_pools, self.version = queue, num_pools, 0
        self.clients: list[QueueClient] = []
        self.pools: dict[int, int] = {}
        self.ended: list[QueueClient] = []
        self.running: list[tuple[QueueClient, Slot, int]] = []
        self.late: list[tuple[QueueClient, Slot]] = []
        self.num_late = 0
        self.taken: Batch | None = None
        self.learned: list[int] = []
        self.tickets: set[int] = set()
        self.discarded = 0

    def join(self, choice: int) -> None:
        client = self.queue.join(choice % self.num_pools)
        assert client.member not in self.pools
        self.pools[client.member] = choice % self.num_pools
        self.clients.append(client)

    def acquire(self, choice: int) -> None:
        if not self.clients:
            return
        client = self.clients[choice % len(self.clients)]
        slot = client.try_acquire()
        if slot is None:
            assert self.queue.next_pool() != self.pools[client.member]
            return
        assert slot.pool == self.pools[client.member]
        if self.queue.config.max_staleness == 0:
            assert len(self.running) < self.queue.config.batch_size
        self.tickets.add(slot.ticket)
        self.running.append((client, slot, self.version))

    def commit(self, choice: int) -> None:
        if self.running:
            client, slot, version = self.running.pop(choice % len(self.running))
            fill(client, slot, version)

    def discard(self, choice: int) -> None:
        if self.running:
            client, slot, _ = self.running.pop(choice % len(self.running))
            client.discard(slot, "filtered")
            self.discarded += 1

    def reissue(self, choice: int) -> None:
        if self.running:
            client, slot, _ = self.running.pop(choice % len(self.running))
            client.reissue(slot)

    def _end(self, choice: int) -> tuple[QueueClient, list[Slot]] | None:
        """A member that ends, and what it leaves running."""
        if not self.clients:
            return None
        client = self.clients.pop(choice % len(self.clients))
        self.ended.append(client)
        left = [slot for owner, slot, _ in self.running if owner is client]
        self.running = [each for each in self.running if each[0] is not client]
        self.late += [(client, slot) for slot in left]
        return client, left

    def leave(self, choice: int) -> None:
        if (found := self._end(choice)) is not None:
            found[0].leave()
            self.discarded += len(found[1])

    def die(self, choice: int) -> None:
        if (found := self._end(choice)) is not None:
            assert self.queue.revoke(found[0].member) == len(found[1])
            self.discarded += len(found[1])

    def die_and_reissue(self, choice: int) -> None:
        if (found := self._end(choice)) is not None:
            assert self.queue.revoke(found[0].member, reissue=True) == len(found[1])

    def retire(self, choice: int) -> None:
        """It keeps what it runs."""
        if self.clients:
            client = self.clients.pop(choice % len(self.clients))
            self.ended.append(client)
            self.queue.retire(client.member)

    def come_late(self, choice: int) -> None:
        """A member that has ended acquires, or brings what it held."""
        if self.late and choice % 2:
            client, slot = self.late[choice % len(self.late)]
            with pytest.raises(LeaseExpired):
                fill(client, slot, self.version)
            # Memory cannot refuse what a zombie writes: a real one wrote before it was revoked.
            restore(self, slot)
        elif self.ended:
            with pytest.raises(LeaseExpired):
                self.ended[choice % len(self.ended)].try_acquire()
        else:
            return
        self.num_late += 1

    def take(self, choice: int) -> None:
        if self.taken is None:
            try:
                self.taken = self.queue.take(self.version, timeout=0.0)
            except DeadlineExceeded:
                return
            for slot in self.taken.slots:
                assert slot.data["obs"]["x"].eq(slot.ticket).all()

    def learn(self, choice: int) -> None:
        if self.taken is not None:
            assert max(self.taken.staleness) <= self.queue.config.max_staleness
            self.learned += [slot.ticket for slot in self.taken.slots]
            self.version += 1  # published, then released
            self.queue.release(self.taken)
            self.taken = None

    def check(self) -> None:
        assert len(set(self.learned)) == len(self.learned)
        stats = self.queue.stats()
        assert stats.states["running"] == len(self.running)
        assert stats.late == self.num_late
        assert sum(stats.states.values()) == self.queue.config.num_slots
        unfinished = [ticket.number for ticket in self.queue.snapshot().unfinished]
        assert {slot.ticket for _, slot, _ in self.running} <= set(unfinished)
        stale = stats.discarded["stale"]
        assert sum(stats.discarded.values()) == self.discarded + stale
        assert stats.started == len(self.learned) + self.discarded + stale + stats.out
        assert self.tickets <= set(range(stats.started))
        if self.queue.config.window == 1:
            assert stale == 0  # in order of start nothing is ever produced in vain
            assert self.learned == sorted(self.learned)
        if self.num_pools > 1:  # what is issued never strays from the shares by a ticket or two
            counts = [pool.issued - pool.discarded for pool in stats.pools]
            assert abs(counts[0] - 3 * counts[1]) <= 4 + 4 * stale + 4 * self.discarded


def restore(model: Model, slot: Slot) -> None:
    """Undo what a late writer did to a buffer that others hold by now."""
    taken = model.taken.slots if model.taken is not None else ()
    for other in (*(each[1] for each in model.running), *taken, *model.queue.snapshot().ready):
        if other.index == slot.index:
            other.data["obs"]["x"].fill_(other.ticket)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["acquire"] * 4
            + ["commit"] * 4
            + ["take", "learn"] * 2
            + ["join", "join", "leave", "retire", "die", "die_and_reissue", "discard", "reissue"]
            + ["come_late"]
        ),
        st.integers(0, 7),
    ),
    max_size=80,
)


@pytest.mark.parametrize("kind", list(TRANSPORTS))
@given(
    steps=STEPS,
    max_staleness=st.integers(0, 3),
    batch_size=st.integers(1, 3),
    window=st.sampled_from([1, 2, 5, None]),
    num_pools=st.sampled_from([1, 1, 2]),
)
def test_under_any_schedule_nothing_is_lost_learned_twice_or_too_old(
    kind: str,
    steps: list[tuple[str, int]],
    max_staleness: int,
    batch_size: int,
    window: int | None,
    num_pools: int,
) -> None:
    shares = (3.0, 1.0)[:num_pools]
    bound = {"batch_size": batch_size, "max_staleness": max_staleness, "window": window}
    model = Model(make(kind, shares, **bound), num_pools)
    for pool in range(num_pools):
        model.join(pool)
    for name, choice in steps:
        getattr(model, name)(choice)
        model.check()
