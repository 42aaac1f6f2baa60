"""A pool that finds its size: the rates of IMPALA with fixed numbers of actors whose environments
take 5 ms a step, then what a run makes of them that may have between one and the most.

    python benchmarks/elastic_pools.py --write
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import measure

import unirl
from unirl.core.pool import Pool
from unirl.runners.loop import TrainLoop
from unirl.runners.make import make_runner
from unirl.runners.plan import Plan

ENVS, UNROLL, BATCH, LEARNER_MS = 4, 16, 2, 100.0


class Slowed:
    """The plan's learner, of which an update takes so much longer."""

    def __init__(self, context: unirl.LearnerContext, make: object, seconds: float) -> None:
        self._learner, self._seconds = make(context), seconds  # type: ignore[operator]

    def step(self, batch: unirl.Batch) -> unirl.Metrics:
        time.sleep(self._seconds)
        metrics: unirl.Metrics = self._learner.step(batch)
        return metrics

    def __getattr__(self, name: str) -> object:
        return getattr(self._learner, name)


@dataclass
class Watch:
    """A hook: steps per second of the second half of a time, and the pool's sizes on the way."""

    seconds: float
    pool: Pool
    sizes: list[tuple[float, int]] = field(default_factory=list)
    rate: float = 0.0
    _begun: tuple[float, int] | None = None
    _half: tuple[float, int] | None = None

    def after_update(self, loop: TrainLoop) -> None:
        now, steps = time.monotonic(), loop.learner.num_steps
        self._begun = self._begun or (now, steps)
        since = now - self._begun[0]
        if not self.sizes or since > self.sizes[-1][0] + 1.0:
            self.sizes.append((since, len(loop.queue.members())))
        if self._half is None and since > self.seconds / 2:
            self._half = (now, steps)
        if since > self.seconds and self._half is not None:
            self.rate = (steps - self._half[1]) / (now - self._half[0])
            loop.stop("measured")

    def at_end(self, loop: TrainLoop) -> None:
        pass


def plan_of(number: int, most: int, scale_seconds: float) -> Plan:
    plan = unirl.make_plan(
        "impala",
        **{
            "env.id": "unirl-bench/SlowCartPole-v0", "env.import_module": "sleepy_env",
            "env.engine": "sync", "runner.kind": "processes", "actor.num_actors": number,
            "actor.max_actors": most, "actor.num_envs": ENVS, "actor.unroll_length": UNROLL,
            "queue.batch_size": BATCH, "queue.max_staleness": 7, "policy.hidden": (32,),
            "run.total_steps": 10**9, "runner.scale_seconds": scale_seconds,
        },
    )  # fmt: skip
    return plan.with_learner(make=partial(Slowed, make=plan.learner.make, seconds=LEARNER_MS / 1e3))


def run(plan: Plan, seconds: float) -> Watch:
    watch = Watch(seconds, plan.pools[0])
    with tempfile.TemporaryDirectory() as folder:
        make_runner(plan, log_dir=Path(folder)).run([watch])
    return watch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fixed", default="1,2,4,8,12")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each fixed number")
    parser.add_argument("--auto-seconds", type=float, default=70.0)
    parser.add_argument("--scale-seconds", type=float, default=3.0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    rows: list[list[object]] = []
    rates = {}
    for number in map(int, options.fixed.split(",")):
        rates[number] = run(plan_of(number, 0, 10.0), options.seconds).rate
        rows.append([f"{number}", f"{rates[number]:,.0f}"])
    watch = run(plan_of(1, max(rates), options.scale_seconds), options.auto_seconds)
    way = [size for _, size in watch.sizes]
    changes = [
        f"{size} from {when:.0f} s"
        for (when, size), before in zip(watch.sizes, [None, *way], strict=False)
        if size != before
    ]
    rows.append([f"1 to {max(rates)}, by itself: {', '.join(changes)}", f"{watch.rate:,.0f}"])
    best = max(rates.values())
    text = measure.table(["actors", "env steps/s"], rows)
    text += (
        f"\n\nBy itself over the best fixed number: **{watch.rate / best:.2f}**, with {way[-1]}"
        f" actors at the end. {ENVS} environments of 5 ms a step each, unrolls of {UNROLL}, an"
        f" update of {BATCH} of them takes {LEARNER_MS:g} ms more than it would."
    )
    print(text)
    if options.write:
        measure.write_block("elastic-pools", text)


if __name__ == "__main__":
    main()
