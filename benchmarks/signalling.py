"""What waking a sleeping process costs, by the means that Python has without a build step.

Two processes wake each other in turn. Once idle cores are all there is (latency), once with a third
process that computes on every core, as the learner does (under load).

    python benchmarks/signalling.py
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import multiprocessing
import os
import select
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import measure

FUTEX = 202  # the system call's number on x86-64
WAIT, WAKE = 0, 1


class Signal(Protocol):
    def notify(self) -> None: ...
    def wait(self) -> None: ...


class Pipe:
    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()
        self.poll = select.poll()
        self.poll.register(self.reader, select.POLLIN)

    def notify(self) -> None:
        os.write(self.writer, b"\0")

    def wait(self) -> None:
        self.poll.poll(1000)
        os.read(self.reader, 4096)


class EventFd:
    def __init__(self) -> None:
        self.fd = os.eventfd(0)
        self.poll = select.poll()
        self.poll.register(self.fd, select.POLLIN)

    def notify(self) -> None:
        os.eventfd_write(self.fd, 1)

    def wait(self) -> None:
        self.poll.poll(1000)
        os.eventfd_read(self.fd)


class Futex:
    def __init__(self) -> None:
        self.buffer = mmap.mmap(-1, 4096)
        self.word = ctypes.c_uint32.from_buffer(self.buffer)
        self.address = ctypes.c_void_p(ctypes.addressof(self.word))
        self.call = ctypes.CDLL(None).syscall

    def notify(self) -> None:
        self.word.value = 1
        self.call(FUTEX, self.address, WAKE, 1, None, None, 0)

    def wait(self) -> None:
        while self.word.value == 0:
            self.call(FUTEX, self.address, WAIT, 0, None, None, 0)
        self.word.value = 0


class Semaphore:
    def __init__(self) -> None:
        self.semaphore = multiprocessing.get_context("fork").Semaphore(0)

    def notify(self) -> None:
        self.semaphore.release()

    def wait(self) -> None:
        self.semaphore.acquire(True, 1.0)


SIGNALS: dict[str, Callable[[], Signal]] = {
    "pipe + poll": Pipe,
    "eventfd + poll": EventFd,
    "futex (ctypes)": Futex,
    "POSIX semaphore": Semaphore,
}


def answer(here: Signal, there: Signal, num_rounds: int) -> None:
    for _ in range(num_rounds):
        here.wait()
        there.notify()


def compute() -> None:
    while True:
        sum(range(10_000))


def one_way_micros(make: Callable[[], Signal], num_rounds: int) -> float:
    """Half of the median time of a notification and its answer."""
    there, here = make(), make()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=answer, args=(there, here, num_rounds))
    process.start()
    times = []
    for _ in range(num_rounds):
        started = time.perf_counter_ns()
        there.notify()
        here.wait()
        times.append((time.perf_counter_ns() - started) / 2e3)
    process.join()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    flags = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in SIGNALS}
    load: list[Any] = []
    for loaded in (False, True):
        if loaded:
            context = multiprocessing.get_context("fork")
            load = [context.Process(target=compute, daemon=True) for _ in os.sched_getaffinity(0)]
            for process in load:
                process.start()
        for name, make in SIGNALS.items():
            found[name].append(one_way_micros(make, flags.rounds))
    for process in load:
        process.kill()
    rows = [[name, *(f"{value:.1f}" for value in values)] for name, values in found.items()]
    text = measure.table(["signal", "idle, microseconds", "under load, microseconds"], rows)
    print(text)
    if not flags.no_write:
        measure.write_block("signalling", text)


if __name__ == "__main__":
    main()
