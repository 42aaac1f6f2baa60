"""How long learner and actors wait for each other: errors name all, and no wait is for ever."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import unirl
from tests.runners.test_async_actors import KINDS, Holder, Noter, Sleeper, make
from unirl.core.actor import ActorContext
from unirl.core.learner import LearnerContext
from unirl.core.sample import Batch, Slot
from unirl.errors import ActorFailed, DiscardSlot
from unirl.metrics.metrics import Metrics
from unirl.report.console import limiting_rate, waiting_share
from unirl.runners.loop import TrainLoop
from unirl.runners.plan import Plan
from unirl.runners.processes import ProcessesRunner
from unirl.storage.checkpoint import load_checkpoint


class OneByOne:
    """Fills a slot at a time; pauses at one ticket, and discards all from another one on."""

    def __init__(self, context: ActorContext, *, pause_at: int = -1, dry_from: int = 1000) -> None:
        self.weights, self.pause_at, self.dry_from = context.weights, pause_at, dry_from

    def produce(self, slot: Slot) -> None:
        if slot.ticket >= self.dry_from:
            time.sleep(0.01)
            raise DiscardSlot("filtered")
        if slot.ticket == self.pause_at:
            time.sleep(1.2)
        slot.data["ticket"][0] = slot.ticket
        slot.first_version = slot.last_version = self.weights.pull(Holder(), -1)

    def close(self) -> None:
        pass


class Slow(Sleeper):
    async def produce(self, slot: Slot) -> None:
        await asyncio.sleep(0.3)
        await super().produce(slot)


class SlowNoter(Noter):
    def __init__(self, context: LearnerContext, *, seconds: float) -> None:
        super().__init__(context)
        self.seconds = seconds

    def step(self, batch: Batch) -> Metrics:
        time.sleep(self.seconds)
        return super().step(batch)


class Rows:
    """Keeps what each update adds to the metrics, and ends the run."""

    def __init__(self, num_updates: int) -> None:
        self.num_updates = num_updates
        self.rows: list[dict[str, float]] = []

    def after_update(self, loop: TrainLoop) -> None:
        self.rows.append(loop.metrics.flush())
        if len(self.rows) == self.num_updates:
            loop.stop("test")

    def at_end(self, loop: TrainLoop) -> None:
        pass


def rows(plan: Plan, num_updates: int) -> list[dict[str, float]]:
    hook = Rows(num_updates)
    ProcessesRunner(plan).run([hook])
    return hook.rows


@KINDS
def test_a_deadline_of_the_learner_ends_the_run_with_a_checkpoint(
    kind: str, tmp_path: Path
) -> None:
    plan = make(kind, tmp_path, timeout_seconds=0.7)
    plan = plan.with_pool(make_actor=partial(OneByOne, dry_from=12))
    plan = replace(plan, run=replace(plan.run, checkpoint_steps=1_000_000))
    with pytest.raises(ActorFailed, match="raise queue"):
        unirl.run(plan, tmp_path / "run", console=False)
    # Inline fills all slots before each update: a batch is left there, and saved as well.
    assert load_checkpoint(tmp_path / "run").state["version"] == (3 if kind == "processes" else 2)


def test_the_learner_is_said_to_wait_from_when_it_began_to(tmp_path: Path) -> None:
    plan = make("processes", tmp_path, batch_size=1, max_staleness=0)
    found = rows(plan.with_pool(make_actor=partial(OneByOne, pause_at=1)), 3)
    # It looks for hung actors meanwhile, several times a second.
    assert found[1]["time/learner/wait"] > 1.1
    assert found[2]["time/learner/wait"] < 1.1


@pytest.mark.parametrize(
    ("seconds", "limit"), [(0.5, "consumption"), (0.0, "production")], ids=["learner", "actor"]
)
def test_actors_that_fill_many_slots_at_once_wait_too(
    tmp_path: Path, seconds: float, limit: str
) -> None:
    plan = make("processes", tmp_path)
    plan = plan.with_pool(make_actor=partial(Slow, fault="", marks=tmp_path))
    plan = plan.with_learner(make=partial(SlowNoter, seconds=seconds))
    # The first updates fill the slots, and wait for the process to start.
    for row in rows(plan, 6)[3:]:
        assert limiting_rate(row) == limit
        wait = waiting_share("actor", row)
        assert wait is not None
        # Of two updates' time a slot is filled for 0.3 s and waits for the rest.
        assert (wait > 0.3) == (limit == "consumption")
