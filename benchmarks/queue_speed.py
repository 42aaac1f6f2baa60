"""What moving one sample from an actor to the learner costs, beside one memcpy of the same bytes.

An actor process writes 564 KB (20 steps of 84 x 84 x 4 pixels) into a slot in shared memory, the
learner copies it out. Measured in one run: the memcpy alone, within one process; the stream (time
per slot when both work all the time, both copies included); the same stream without a queue, over
as many buffers, each side spinning on the other's count: what the two copies cost at the least
between these two cores; the queue alone, with slots that nobody writes; and the hand-over of such a
slot to a sleeping learner.

    python benchmarks/queue_speed.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time

import measure
import torch

from unirl.core.queue import QueueClient, QueueConfig
from unirl.core.sample import Field, SampleSpec
from unirl.transports.memory import SharedBlock
from unirl.transports.shared import SharedTransport

NUM_BYTES = 20 * 84 * 84 * 4
BARE = "the same without a queue: "
SPEC = SampleSpec(
    {
        "obs": Field((NUM_BYTES,), torch.uint8, batch_axis=0),
        "sent_ns": Field((1,), torch.int64, batch_axis=0),
    }
)


def act(
    client: QueueClient, max_staleness: int, num_slots: int, pause_seconds: float, num_bytes: int
) -> None:
    """Fill slots from memory of this process; with a pause the learner has fallen asleep before."""
    torch.set_num_threads(1)
    source = torch.randint(0, 255, (NUM_BYTES,), dtype=torch.uint8)
    for version in range(num_slots):
        slot = client.acquire(30.0)
        if pause_seconds:
            time.sleep(pause_seconds)
            slot.data["sent_ns"][0] = time.perf_counter_ns()
        if num_bytes:
            slot.data["obs"].copy_(source)
        slot.first_version = slot.last_version = max(0, version - max_staleness)
        client.commit(slot)


def move(max_staleness: int, num_slots: int, pause_seconds: float, num_bytes: int) -> list[float]:
    """Microseconds per slot (stream), or from the actor's write to the learner's copy (pause)."""
    queue = SharedTransport().queue(SPEC, QueueConfig(max_staleness=max_staleness))
    out = torch.empty(NUM_BYTES, dtype=torch.uint8)
    process = multiprocessing.get_context("spawn").Process(
        target=act, args=(queue.join(), max_staleness, num_slots, pause_seconds, num_bytes)
    )
    process.start()
    micros, last = [], 0
    for version in range(num_slots):
        batch = queue.take(version, 30.0)
        data = batch.slots[0].data
        if num_bytes:
            out.copy_(data["obs"])
        now = time.perf_counter_ns()
        micros.append((now - (int(data["sent_ns"][0]) if pause_seconds else last)) / 1e3)
        queue.release(batch)
        last = now
    process.join()
    return micros[num_slots // 10 :]


def spin_until(cells: memoryview, index: int, least: int) -> None:
    """Until the cell is at least that; TimeoutError after a minute."""
    deadline = time.monotonic() + 60.0
    while cells[index] < least:
        if time.monotonic() > deadline:
            raise TimeoutError("the other process stands still")


class BareRing:
    """Buffers in shared memory between one writer and one reader that never sleep. It has no lock:
    for machines that keep the order of stores (x86).
    """

    def __init__(self, num_buffers: int) -> None:
        self._block = SharedBlock(4096 + num_buffers * NUM_BYTES, "unirl-bare")
        self._num_buffers = num_buffers

    def _view(self) -> tuple[memoryview, list[torch.Tensor]]:
        buffers = [
            self._block.tensor(4096 + i * NUM_BYTES, (NUM_BYTES,), torch.uint8)
            for i in range(self._num_buffers)
        ]
        # The counts are in cache lines of their own: cells 0 (written) and 64 (read).
        return memoryview(self._block.buffer)[:4096].cast("q"), buffers

    def write(self, num_slots: int) -> None:
        """Write so many slots, from memory of this process."""
        torch.set_num_threads(1)
        counts, buffers = self._view()
        source = torch.randint(0, 255, (NUM_BYTES,), dtype=torch.uint8)
        for number in range(num_slots):
            spin_until(counts, 64, number - self._num_buffers + 1)
            buffers[number % self._num_buffers].copy_(source)
            counts[0] = number + 1

    def read(self, num_slots: int) -> list[float]:
        """Microseconds per slot."""
        counts, buffers = self._view()
        out = torch.empty(NUM_BYTES, dtype=torch.uint8)
        micros, last = [], 0
        for number in range(num_slots):
            spin_until(counts, 0, number + 1)
            out.copy_(buffers[number % self._num_buffers])
            now = time.perf_counter_ns()
            micros.append((now - last) / 1e3)
            counts[64] = number + 1
            last = now
        return micros[num_slots // 10 :]


def move_bare(max_staleness: int, num_slots: int) -> list[float]:
    """Microseconds per slot of the stream without a queue."""
    ring = BareRing(max_staleness + 1)
    process = multiprocessing.get_context("spawn").Process(
        target=ring.write, args=(num_slots,), daemon=True
    )
    process.start()
    micros = ring.read(num_slots)
    process.join()
    return micros


def memcpy_micros(num_copies: int = 2000) -> float:
    """Median time of one copy between two buffers of this process."""
    source = torch.randint(0, 255, (NUM_BYTES,), dtype=torch.uint8)
    into = torch.empty_like(source)
    times = []
    for _ in range(num_copies):
        started = time.perf_counter_ns()
        into.copy_(source)
        times.append((time.perf_counter_ns() - started) / 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--slots", type=int, default=4000)
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {}

    def found(what: str, micros: float) -> None:
        times.setdefault(what, []).append(micros)

    for _ in range(flags.rounds):
        found("one memcpy", memcpy_micros())
        for age in (1, 3):
            stream = move(age, flags.slots, 0.0, NUM_BYTES)
            found(f"stream, max_staleness {age}, mean", statistics.mean(stream))
            bare = move_bare(age, flags.slots)
            found(f"{BARE}stream, max_staleness {age}, mean", statistics.mean(bare))
        empty = move(1, flags.slots, 0.0, 0)
        found("empty slots, max_staleness 1, mean", statistics.mean(empty))
        found("waking a sleeping learner", statistics.median(move(1, 400, 1e-3, 0)))
    rows = []
    for what, micros in times.items():
        each = statistics.median(micros)
        bare = times.get(f"{BARE}{what}")
        more = f"{each - statistics.median(bare):+.1f}" if bare else ""
        rows.append([what, f"{each:.1f}", f"{min(micros):.1f} - {max(micros):.1f}", more])
    text = measure.table(
        ["", "microseconds, median of the rounds", "their range", "more than the two copies"], rows
    )
    print(text)
    if not flags.no_write:
        measure.write_block("queue-speed", text)


if __name__ == "__main__":
    main()
