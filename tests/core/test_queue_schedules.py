"""The queue and the weight store under real concurrency: threads and processes, random delays,
SIGKILL at any moment.

UNIRL_SCHEDULES sets how many random schedules of each kind are tried (a few by default;
benchmarks/RESULTS.md has thousands).
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from unirl.core.queue import QueueConfig
from unirl.core.sample import Field, SampleSpec
from unirl.core.slot_queue import LocalQueue, SlotQueue
from unirl.core.weights import LocalWeightStore, Weights, WeightStore
from unirl.errors import DeadlineExceeded, LockHeld, QueueClosed
from unirl.transports import shared
from unirl.transports.shared import SharedQueue, SharedWeightStore

NUM_SCHEDULES = int(os.environ.get("UNIRL_SCHEDULES", "60"))
SPEC = SampleSpec(
    {"ticket": Field((64, 8), torch.int64), "version": Field((8,), torch.int64, batch_axis=0)}
)


class Holder:
    """A policy whose every weight is the version: a torn copy would hold two."""

    def __init__(self) -> None:
        self.value = torch.zeros(4096, dtype=torch.int64)

    def load_weights(self, weights: Weights) -> None:
        self.value.copy_(weights["w"])


def weights_of(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4096,), version, dtype=torch.int64)}


def act(queue: SlotQueue, weights: WeightStore, actor: int, rng: random.Random) -> None:
    """An actor with random delays that writes its ticket and version all over each slot."""
    policy, version = Holder(), -1
    while True:
        try:
            slot = queue.acquire(30.0, actor=actor)
        except QueueClosed:
            return
        version = weights.pull(policy, version)
        assert policy.value.eq(version).all(), "torn weights"
        slot.data["version"].fill_(version)
        for row in slot.data["ticket"]:
            row.fill_(slot.ticket)
            if rng.random() < 0.05:
                time.sleep(rng.random() * 2e-4)
        slot.first_version = slot.last_version = version
        try:
            if rng.random() < 0.1:
                queue.discard(slot, "filtered")
            else:
                queue.commit(slot)
        except QueueClosed:
            return


def learn(
    queue: SlotQueue,
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


def check_books(queue: SlotQueue, tickets: list[int]) -> None:
    """Every started sample was learned once, discarded with a reason, or is still out."""
    assert len(set(tickets)) == len(tickets)
    counts, discarded = queue.counts(), queue.discarded()
    out = sum(counts.values()) - counts["free"]
    assert queue.totals()["started"] == len(tickets) + sum(discarded.values()) + out
    if queue.config.window == 1:
        assert discarded["stale"] == 0


def random_config(rng: random.Random) -> QueueConfig:
    return QueueConfig(
        batch_size=rng.randint(1, 3),
        max_staleness=rng.randint(0, 3),
        window=rng.choice([1, 1, 3, None]),
    )


@pytest.mark.parametrize("shared", [False, True], ids=["local", "shared"])
def test_random_schedules_of_threads(shared: bool) -> None:
    for seed in range(NUM_SCHEDULES // 2):
        rng = random.Random(seed)
        config = random_config(rng)
        queue: SlotQueue = (SharedQueue if shared else LocalQueue)(SPEC, config, num_actors=3)
        store: WeightStore = SharedWeightStore(weights_of(0)) if shared else LocalWeightStore()
        store.publish(weights_of(0), 0)
        failures: list[BaseException] = []

        def run(
            index: int,
            seed: int,
            queue: SlotQueue = queue,
            store: WeightStore = store,
            failures: list[BaseException] = failures,
        ) -> None:
            try:
                act(queue, store, index, random.Random(seed))
            except BaseException as error:
                failures.append(error)
                queue.close()

        threads = [threading.Thread(target=run, args=(i, 1000 * seed + i)) for i in range(3)]
        for thread in threads:
            thread.start()
        tickets = learn(queue, store, 12, rng, lambda: None)
        queue.close()
        for thread in threads:
            thread.join(10.0)
        assert not failures
        check_books(queue, tickets)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("in_order", [True, False], ids=["stores in order", "in any order"])
def test_random_schedules_of_processes_that_are_killed_at_any_moment(
    in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_order and not shared._STORES_IN_ORDER:
        pytest.skip("this machine's stores are seen in any order")
    monkeypatch.setattr("unirl.transports.shared._STORES_IN_ORDER", in_order)
    num_killed = num_reclaims = 0
    for seed in range(NUM_SCHEDULES):
        rng = random.Random(seed)
        queue = SharedQueue(SPEC, random_config(rng), num_actors=3)
        store = SharedWeightStore(weights_of(0))
        store.publish(weights_of(0), 0)
        pids: list[int] = []

        def start(
            index: int,
            incarnation: int,
            queue: SharedQueue = queue,
            store: SharedWeightStore = store,
            seed: int = seed,
        ) -> int:
            pid = os.fork()
            if pid:
                return pid
            code = 1
            try:
                act(queue, store, index, random.Random(f"{seed}/{index}/{incarnation}"))
                code = 0
            finally:
                os._exit(code)

        pids = [start(index, 0) for index in range(3)]
        mourning: list[tuple[int, threading.Thread]] = []
        num_reclaimed: list[int] = []

        def replace_the_dead(
            pids: list[int] = pids,
            start: Callable[[int, int], int] = start,
            mourning: list[tuple[int, threading.Thread]] = mourning,
        ) -> None:
            while mourning:
                victim, thread = mourning.pop()
                thread.join()  # nobody forks beside a thread
                pids[victim] = start(victim, num_killed)

        def chaos(
            pids: list[int] = pids,
            rng: random.Random = rng,
            queue: SharedQueue = queue,
            replace_the_dead: Callable[[], None] = replace_the_dead,
            mourning: list[tuple[int, threading.Thread]] = mourning,
            num_reclaimed: list[int] = num_reclaimed,
        ) -> None:
            nonlocal num_killed
            replace_the_dead()
            if rng.random() < 0.25:
                time.sleep(rng.random() * 1e-3)
                victim = rng.randrange(3)
                os.kill(pids[victim], signal.SIGKILL)
                os.waitpid(pids[victim], 0)
                num_killed += 1
                # As in a runner: by another thread than the one that learns.
                thread = threading.Thread(
                    target=lambda: num_reclaimed.append(queue.reclaim(victim))
                )
                thread.start()
                mourning.append((victim, thread))

        try:
            tickets = learn(queue, store, 12, rng, chaos)
        finally:
            replace_the_dead()
            queue.close()
            codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        assert codes == [0, 0, 0]
        check_books(queue, tickets)
        num_reclaims += len(num_reclaimed)
    assert num_reclaims == num_killed
    assert num_killed > NUM_SCHEDULES  # the schedules really were violent


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_no_process_sleeps_on_when_there_is_work(
    max_staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody looks again by himself, and all sleep at once instead of watching.
    monkeypatch.setattr("unirl.core.waiters.LOOK_AGAIN_SECONDS", 20.0)
    monkeypatch.setattr("unirl.core.waiters._WATCH_SECONDS", 0.0)
    queue = SharedQueue(SPEC, QueueConfig(max_staleness=max_staleness), num_actors=3)
    store = SharedWeightStore(weights_of(0))
    store.publish(weights_of(0), 0)
    pids = []
    for index in range(3):
        pids.append(os.fork())
        if pids[-1] == 0:
            code = 1
            try:
                act(queue, store, index, random.Random(index))
                code = 0
            finally:
                os._exit(code)
    longest = 0.0
    try:
        for version in range(500):
            batch = queue.take(version, timeout=30.0)
            longest = max(longest, batch.wait_seconds)
            store.publish(weights_of(version + 1), version + 1)
            queue.release(batch)
    finally:
        queue.close()
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert codes == [0, 0, 0]
    assert longest < 10.0


def test_a_shared_queue_leaves_no_name_in_the_file_system() -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    queue = SharedQueue(SPEC, QueueConfig(), num_actors=1)
    store = SharedWeightStore(weights_of(0))
    after = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    assert not {name for name in after - before if "unirl" in name}
    assert queue.next_ticket == 0
    assert store.version == -1


def test_a_stopped_holder_of_the_lock_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unirl.transports.shared._LOCK_SECONDS", 0.3)
    queue = SharedQueue(SPEC, QueueConfig(), num_actors=1)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        queue._guard.__enter__()
        os.write(writer, b"x")
        time.sleep(30)
        os._exit(0)
    os.read(reader, 1)
    try:
        with pytest.raises(DeadlineExceeded, match=str(pid)):
            queue.acquire(0.0)
        with pytest.raises(LockHeld) as held:  # a runner then kills whoever holds it
            queue.take(0, timeout=5.0)
        assert held.value.pid == pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert queue.acquire(0.0).ticket == 0  # the kernel freed the lock with its holder
