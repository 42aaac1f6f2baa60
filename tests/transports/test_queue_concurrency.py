"""The queue and the weight store under real concurrency: threads and processes, random delays,
SIGKILL and SIGSTOP at any moment.

UNIRL_SCHEDULES sets how many random schedules of each kind are tried (a few by default;
benchmarks/RESULTS.md has thousands).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.transports.queues import TRANSPORTS, make
from unirl.core.queue import QueueClient, QueueConfig, QueueServer
from unirl.core.sample import Field, SampleSpec
from unirl.core.weights import Weights, WeightStore
from unirl.errors import DeadlineExceeded, LeaseExpired, LockHeld, QueueClosed
from unirl.transports.shared import SharedTransport

NUM_SCHEDULES = int(os.environ.get("UNIRL_SCHEDULES", "12"))
SPEC = SampleSpec(
    {"ticket": Field((64, 8), torch.int64), "version": Field((8,), torch.int64, batch_axis=0)}
)
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


class Holder:
    """A policy whose every weight is the version: a torn copy would hold two."""

    def __init__(self) -> None:
        self.value = torch.zeros(4096, dtype=torch.int64)

    def load_weights(self, weights: Weights) -> None:
        self.value.copy_(weights["w"])


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4096,), version, dtype=torch.int64)}


def act(client: QueueClient, weights: WeightStore, rng: random.Random) -> None:
    """An actor with random delays that writes its ticket and version all over each slot."""
    policy, version = Holder(), -1
    with contextlib.suppress(QueueClosed, LeaseExpired):
        while True:
            slot = client.acquire(30.0)
            version = weights.pull(policy, version)
            assert policy.value.eq(version).all(), "torn weights"
            slot.data["version"].fill_(version)
            for row in slot.data["ticket"]:
                row.fill_(slot.ticket)
                if rng.random() < 0.05:
                    time.sleep(rng.random() * 2e-4)
            slot.first_version = slot.last_version = version
            if rng.random() < 0.1:
                client.discard(slot, "filtered")
            else:
                client.commit(slot)


def learn(
    queue: QueueServer,
    weights: WeightStore,
    num_updates: int,
    rng: random.Random,
    chaos: Callable[[], None],
) -> list[int]:
    """A learner with random delays; checks every sample it learns and returns their tickets."""
    tickets: list[int] = []
    for version in range(num_updates):
        chaos()
        batch = queue.take(version, timeout=30.0)
        assert max(batch.staleness) <= queue.config.max_staleness
        for slot in batch.slots:
            assert slot.data["ticket"].eq(slot.ticket).all(), "torn sample"
            assert slot.data["version"].eq(slot.first_version).all()
            tickets.append(slot.ticket)
        if queue.config.max_staleness == 0:
            assert set(batch.staleness) == {0}  # exactly on-policy
        if rng.random() < 0.3:
            time.sleep(rng.random() * 3e-4)
        weights.publish(weights_of(version + 1), version + 1)
        queue.release(batch)
    return tickets


def check_books(queue: QueueServer, tickets: list[int]) -> None:
    """Every started sample was learned once, discarded with a reason, or is still out."""
    assert len(set(tickets)) == len(tickets)
    stats = queue.stats()
    assert stats.started == len(tickets) + sum(stats.discarded.values()) + stats.out
    if queue.config.window == 1:
        assert stats.discarded["stale"] == 0


def random_config(rng: random.Random) -> QueueConfig:
    return QueueConfig(
        batch_size=rng.randint(1, 3),
        max_staleness=rng.randint(0, 3),
        window=rng.choice([1, 1, 3, None]),
    )


class Setting:
    """A queue and a weight store with version 0."""

    def __init__(self, kind: str, config: QueueConfig) -> None:
        transport = TRANSPORTS[kind]()
        self.queue = transport.queue(SPEC, config)
        self.store = transport.weights(weights_of(0))
        self.store.publish(weights_of(0), 0)

    def fork(self, client: QueueClient, seed: object) -> int:
        """The id of a process that acts as this member."""
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            act(client, self.store, random.Random(str(seed)))
            code = 0
        finally:
            os._exit(code)


@pytest.mark.parametrize("kind", list(TRANSPORTS))
def test_random_schedules_of_threads_that_join_and_are_revoked(kind: str) -> None:
    num_revoked = 0
    for seed in range(NUM_SCHEDULES // 2):
        rng = random.Random(seed)
        setting = Setting(kind, random_config(rng))
        failures: list[BaseException] = []
        threads: list[threading.Thread] = []
        clients: list[QueueClient] = []

        def run(
            client: QueueClient,
            seed: str,
            setting: Setting = setting,
            failures: list[BaseException] = failures,
        ) -> None:
            try:
                act(client, setting.store, random.Random(seed))
            except BaseException as error:
                failures.append(error)
                setting.queue.close()

        def join(
            setting: Setting = setting,
            threads: list[threading.Thread] = threads,
            clients: list[QueueClient] = clients,
            run: Callable[[QueueClient, str], None] = run,
            seed: int = seed,
        ) -> None:
            clients.append(setting.queue.join())
            args = (clients[-1], f"{seed}/{len(threads)}")
            threads.append(threading.Thread(target=run, args=args))
            threads[-1].start()

        def chaos(
            rng: random.Random = rng,
            setting: Setting = setting,
            clients: list[QueueClient] = clients,
            join: Callable[[], None] = join,
        ) -> None:
            # A thread cannot be killed: a retired one finishes, and another joins.
            nonlocal num_revoked
            if rng.random() < 0.3:
                setting.queue.retire(clients.pop(rng.randrange(len(clients))).member)
                num_revoked += 1
                join()

        for _ in range(3):
            join()
        try:
            tickets = learn(setting.queue, setting.store, 12, rng, chaos)
        finally:
            setting.queue.close()
            for thread in threads:
                thread.join(10.0)
        assert not failures
        check_books(setting.queue, tickets)
    assert num_revoked > NUM_SCHEDULES // 2


@needs_fork
def test_random_schedules_of_processes_that_are_killed_at_any_moment() -> None:
    num_killed = num_zombies = num_late = 0
    for seed in range(NUM_SCHEDULES):
        rng = random.Random(seed)
        setting = Setting("shared", random_config(rng))
        queue = setting.queue
        members: list[tuple[QueueClient, int]] = []
        zombies: list[int] = []
        reaper: list[threading.Thread] = []

        def start(
            setting: Setting = setting,
            members: list[tuple[QueueClient, int]] = members,
            seed: int = seed,
        ) -> None:
            client = setting.queue.join()
            members.append((client, setting.fork(client, (seed, client.member))))

        def chaos(
            rng: random.Random = rng,
            queue: QueueServer = queue,
            members: list[tuple[QueueClient, int]] = members,
            zombies: list[int] = zombies,
            reaper: list[threading.Thread] = reaper,
            start: Callable[[], None] = start,
        ) -> None:
            nonlocal num_killed, num_zombies
            while reaper:
                reaper.pop().join()  # no process forks beside a thread
                start()
            chance = rng.random()
            if chance > 0.3:
                return
            time.sleep(rng.random() * 1e-3)
            client, pid = members.pop(rng.randrange(len(members)))
            if chance < 0.05 and not queue.stats().states["free"]:
                # Taken for dead, and it comes back: what it brings is refused. It is stopped where
                # it does not hold the lock, which the learner would miss.
                os.kill(pid, signal.SIGSTOP)
                if try_lock(queue):
                    zombies.append(pid)
                    num_zombies += 1
                else:
                    os.kill(pid, signal.SIGCONT)
                    members.append((client, pid))
                    return
            else:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                num_killed += 1
            # As in a runner: by another thread than the one that learns.
            reaper.append(threading.Thread(target=queue.revoke, args=(client.member,)))
            reaper[-1].start()

        for _ in range(3):
            start()
        try:
            tickets = learn(queue, setting.store, 12, rng, chaos)
        finally:
            while reaper:
                reaper.pop().join()
            queue.close()
            for pid in zombies:
                os.kill(pid, signal.SIGCONT)
            pids = [*(pid for _, pid in members), *zombies]
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert set(codes) <= {0}
        check_books(queue, tickets)
        num_late += queue.stats().late
    assert num_killed > NUM_SCHEDULES  # the schedules really were violent


def try_lock(queue: QueueServer) -> bool:
    """Whether a call gets through within a moment."""
    thread = threading.Thread(target=queue.snapshot, daemon=True)
    thread.start()
    thread.join(0.5)
    return not thread.is_alive()


@needs_fork
def test_a_stopped_process_that_comes_back_is_refused_and_its_sample_counted_once() -> None:
    setting = Setting("shared", QueueConfig(max_staleness=0))
    queue = setting.queue
    zombie, reader_writer = queue.join(), os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            slot = zombie.acquire(0.0)
            os.write(reader_writer[1], b"x")
            time.sleep(0.3)  # it is stopped here
            slot.first_version = slot.last_version = 0
            with contextlib.suppress(LeaseExpired):
                zombie.commit(slot)
                os._exit(2)
            code = 0
        finally:
            os._exit(code)
    os.read(reader_writer[0], 1)
    os.kill(pid, signal.SIGSTOP)
    assert queue.revoke(zombie.member) == 1
    other = queue.join()
    slot = other.acquire(0.0)
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    slot.first_version = slot.last_version = 0
    other.commit(slot)
    assert queue.take(0).slots[0].ticket == slot.ticket == 1
    stats = queue.stats()
    assert (stats.late, stats.discarded["actor_died"], stats.committed) == (1, 1, 1)


@pytest.fixture
def nobody_looks_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After a lost notification a sleeper would be found at the deadline."""
    monkeypatch.setattr("unirl.transports.events.LOOK_AGAIN_SECONDS", 20.0)
    monkeypatch.setattr("unirl.transports.shared.SharedQueueMemory.spin_seconds", 0.0)
    yield


@needs_fork
@pytest.mark.usefixtures("nobody_looks_again")
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_no_process_sleeps_on_when_there_is_work(max_staleness: int) -> None:
    setting = Setting("shared", QueueConfig(max_staleness=max_staleness))
    queue = setting.queue
    pids = [setting.fork(queue.join(), index) for index in range(3)]
    longest = 0.0
    try:
        for version in range(400):
            batch = queue.take(version, timeout=30.0)
            longest = max(longest, batch.wait_seconds)
            setting.store.publish(weights_of(version + 1), version + 1)
            queue.release(batch)
    finally:
        queue.close()
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0, 0, 0]
    assert longest < 10.0


@pytest.mark.usefixtures("nobody_looks_again")
@pytest.mark.parametrize("kind", list(TRANSPORTS))
@pytest.mark.parametrize(
    "change", ["release", "discard", "reissue", "revoke", "leave", "refill", "close"]
)
def test_a_waiting_member_hears_of_a_free_slot_at_once(kind: str, change: str) -> None:
    queue = make(kind, max_staleness=0)
    if change == "refill":
        from unirl.core.queue import Ticket

        queue.restore([], 4, due=[Ticket(i, 0, i) for i in (1, 2, 3)])
    holder, waiter = queue.join(), queue.join()
    held = holder.acquire(0.0)
    held.first_version = held.last_version = 0
    if change == "release":
        holder.commit(held)
        batch = queue.take(0)
    if change == "refill":
        holder.discard(held, "filtered")  # free, but for ticket 2: a member cannot give it out
    found: list[object] = []

    def wait() -> None:
        try:
            found.append(waiter.acquire(30.0).index)
        except QueueClosed:
            found.append("closed")

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    started = time.monotonic()
    if change == "release":
        queue.release(batch)
    elif change == "discard":
        holder.discard(held, "filtered")
    elif change == "reissue":
        holder.reissue(held)
    elif change == "revoke":
        queue.revoke(holder.member)
    elif change == "leave":
        holder.leave()
    elif change == "close":
        queue.close()
    else:
        with pytest.raises(DeadlineExceeded):
            queue.take(0, timeout=0.0)
    thread.join(15.0)
    assert found == ["closed" if change == "close" else held.index]
    assert time.monotonic() - started < 15.0


@pytest.mark.usefixtures("nobody_looks_again")
@pytest.mark.parametrize("kind", list(TRANSPORTS))
def test_one_event_wakes_all_members_that_have_something_to_do(kind: str) -> None:
    queue = make(kind, max_staleness=0, batch_size=4)
    holder = queue.join()
    slots = [holder.acquire(0.0) for _ in range(4)]
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(queue.join().acquire(30.0).index))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    started = time.monotonic()
    for slot in slots:
        slot.first_version = slot.last_version = 0
        holder.commit(slot)
    queue.release(queue.take(0))  # one notification for four slots
    for thread in threads:
        thread.join(15.0)
    assert sorted(found) == [0, 1, 2, 3]
    assert time.monotonic() - started < 15.0


@pytest.mark.usefixtures("nobody_looks_again")
@pytest.mark.parametrize("kind", list(TRANSPORTS))
@pytest.mark.parametrize("change", ["commit", "discard the oldest", "close"])
def test_a_waiting_learner_hears_at_once(kind: str, change: str) -> None:
    queue = make(kind, max_staleness=1)
    client = queue.join()
    first, second = client.acquire(0.0), client.acquire(0.0)
    for slot in (first, second):
        slot.first_version = slot.last_version = 0
    found: list[object] = []

    def wait() -> None:
        try:
            found.append(queue.take(0, timeout=30.0).slots[0].ticket)
        except QueueClosed:
            found.append("closed")

    thread = threading.Thread(target=wait)
    if change == "discard the oldest":
        client.commit(second)  # not the oldest: strict order waits for the first
    thread.start()
    time.sleep(0.05)
    started = time.monotonic()
    if change == "commit":
        client.commit(first)
    elif change == "close":
        queue.close()
    else:
        client.discard(first, "filtered")
    thread.join(15.0)
    assert found == [{"commit": 0, "discard the oldest": 1, "close": "closed"}[change]]
    assert time.monotonic() - started < 15.0


def test_a_shared_queue_leaves_no_name_in_the_file_system() -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    setting = Setting("shared", QueueConfig())
    after = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    assert not {name for name in after - before if "unirl" in name}
    assert setting.queue.stats().started == 0
    assert setting.store.version == 0


@needs_fork
def test_a_stopped_holder_of_the_lock_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unirl.transports.locks.LOCK_SECONDS", 0.3)
    transport = SharedTransport()
    queue = transport.queue(SPEC, QueueConfig())
    client = queue.join()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        with queue.memory.lock:
            os.write(writer, b"x")
            time.sleep(30)
        os._exit(0)
    os.read(reader, 1)
    try:
        with pytest.raises(DeadlineExceeded, match=str(pid)):
            client.acquire(0.0)
        with pytest.raises(LockHeld) as held:  # a runner then kills the process that holds it
            queue.snapshot()
        assert held.value.pid == pid
        ended: list[int] = []

        def end(held: LockHeld) -> bool:
            ended.append(held.pid)
            os.kill(held.pid, signal.SIGKILL)
            return True

        transport.end_lock_holders_by(end)
        assert queue.snapshot().next_ticket == 0
        assert ended == [pid]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert client.acquire(0.0).ticket == 0  # the kernel freed the lock with its holder
