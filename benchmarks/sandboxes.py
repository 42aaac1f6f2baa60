"""What a program in a sandbox costs, beside a plain start of Python in the same run, and how soon
one is gone at its deadline.

    python -m benchmarks.sandboxes                       # the best level that this machine has
    python -m benchmarks.sandboxes --kinds zygote landlock --runs 300
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

from unirl.llm.sandbox.box import SandboxFailed
from unirl.llm.sandbox.config import SandboxConfig
from unirl.llm.sandbox.levels import make_sandboxes

PROGRAM = "print(1)"
SECONDS = 0.3


def plain() -> None:
    command = [sys.executable, "-I", "-S", "-c", PROGRAM]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"1\n"


async def costs(kind: str, runs: int, python: str) -> dict[str, float]:
    """In milliseconds; plain starts and programs in a sandbox by turns."""
    config = SandboxConfig(kind=kind, slots=2, python=python)  # type: ignore[arg-type]
    sandboxes = await make_sandboxes(config)
    try:
        await sandboxes.warm()

        async def one() -> None:
            ran = await sandboxes.run(PROGRAM)
            assert ran.output == b"1\n", ran

        bare, boxed = [], []
        for _ in range(runs):
            began = time.perf_counter()
            plain()
            bare.append(time.perf_counter() - began)
            began = time.perf_counter()
            await one()
            boxed.append(time.perf_counter() - began)

        async def start() -> None:
            await asyncio.to_thread(plain)

        ratios, plain_ratios = [], []
        for _ in range(5):
            for what, found in ((one, ratios), (start, plain_ratios)):
                single = await rate(what, 1, runs // 5)
                found.append(await rate(what, 2, runs // 5) / single)
        late, replaced = [], []
        for _ in range(10):
            ran = await sandboxes.run("while True: pass", seconds=SECONDS)
            assert ran.killed == "time", ran
            late.append(ran.us / 1e6 - SECONDS)
        for _ in range(5):
            began = time.perf_counter()
            os.kill(sandboxes.pids[0], signal.SIGKILL)
            while True:
                with contextlib.suppress(SandboxFailed, AssertionError):
                    await one()
                    break
            replaced.append(time.perf_counter() - began)
        return {
            "plain_p50_ms": 1e3 * quantile(bare, 50),
            "plain_p95_ms": 1e3 * quantile(bare, 95),
            "sandbox_p50_ms": 1e3 * quantile(boxed, 50),
            "sandbox_p95_ms": 1e3 * quantile(boxed, 95),
            "p50_of_plain": quantile(boxed, 50) / quantile(bare, 50),
            "p95_of_plain": quantile(boxed, 95) / quantile(bare, 95),
            "two_slots_of_one": statistics.median(ratios),
            "two_plain_of_one": statistics.median(plain_ratios),
            "late_ms": 1e3 * max(late),
            "replaced_ms": 1e3 * max(replaced),
        }
    finally:
        await sandboxes.close()


async def rate(one: Callable[[], Awaitable[None]], slots: int, runs: int) -> float:
    """Programs per second, so many at a time."""

    async def some() -> None:
        for _ in range(runs):
            await one()

    began = time.perf_counter()
    await asyncio.gather(*(some() for _ in range(slots)))
    return slots * runs / (time.perf_counter() - began)


def quantile(values: list[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", default=["auto"])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--python", default="", help="as sandbox.python")
    given = parser.parse_args()
    for kind in given.kinds:
        found = asyncio.run(costs(kind, given.runs, given.python))
        print(json.dumps({"kind": kind} | {name: round(v, 2) for name, v in found.items()}))


if __name__ == "__main__":
    main()
