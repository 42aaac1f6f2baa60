"""What moving one sample from an actor to the learner costs, beside one memcpy of the same bytes.

An actor process writes 564 KB (20 steps of 84 x 84 x 4 pixels) into a slot in shared memory, the
learner copies it out. Measured in one run: the memcpy alone, the stream (time per slot when both
work all the time, both copies included), and the hand-over of an empty slot to a sleeping learner.

    python benchmarks/queue_speed.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time

import measure
import torch

from unirl.core.queue import QueueConfig
from unirl.core.sample import Field, SampleSpec
from unirl.transports.shared import SharedQueue

NUM_BYTES = 20 * 84 * 84 * 4
SPEC = SampleSpec(
    {
        "obs": Field((NUM_BYTES,), torch.uint8, batch_axis=0),
        "sent_ns": Field((1,), torch.int64, batch_axis=0),
    }
)


def act(queue: SharedQueue, num_slots: int, pause_seconds: float, num_bytes: int) -> None:
    """Fill slots from memory of this process; with a pause the learner has fallen asleep before."""
    torch.set_num_threads(1)
    source = torch.randint(0, 255, (NUM_BYTES,), dtype=torch.uint8)
    for version in range(num_slots):
        slot = queue.acquire(30.0)
        if pause_seconds:
            time.sleep(pause_seconds)
            slot.data["sent_ns"][0] = time.perf_counter_ns()
        if num_bytes:
            slot.data["obs"].copy_(source)
        slot.first_version = slot.last_version = max(0, version - queue.config.max_staleness)
        queue.commit(slot)


def move(max_staleness: int, num_slots: int, pause_seconds: float, num_bytes: int) -> list[float]:
    """Microseconds per slot (stream), or from the actor's write to the learner's copy (pause)."""
    queue = SharedQueue(SPEC, QueueConfig(max_staleness=max_staleness), num_actors=1)
    out = torch.empty(NUM_BYTES, dtype=torch.uint8)
    process = multiprocessing.get_context("spawn").Process(
        target=act, args=(queue, num_slots, pause_seconds, num_bytes)
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
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=4000)
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    copies, streams, sleepers = [], {1: [], 3: []}, []  # type: ignore[var-annotated]
    for _ in range(flags.rounds):
        copies.append(memcpy_micros())
        for max_staleness, found in streams.items():
            micros = move(max_staleness, flags.slots, 0.0, NUM_BYTES)
            found.append(sum(micros) / len(micros))
        sleepers.append(statistics.median(move(1, 400, 1e-3, 0)))
    memcpy = statistics.median(copies)
    limit = 2 * memcpy + 30
    rows = [["one memcpy", f"{memcpy:.1f}", ""]]
    for max_staleness, found in streams.items():
        each = statistics.median(found)
        rows.append(
            [f"stream, max_staleness {max_staleness}", f"{each:.1f}", f"{each / limit:.2f}"]
        )
    rows.append(
        ["waking a sleeping learner (no payload)", f"{statistics.median(sleepers):.1f}", ""]
    )
    text = measure.table(["", "microseconds, median", "of 2 memcpy + 30 us"], rows)
    print(text)
    if not flags.no_write:
        measure.write_block("queue-speed", text)


if __name__ == "__main__":
    main()
