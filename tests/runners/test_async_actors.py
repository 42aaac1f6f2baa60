"""Actors that fill many slots at once, in both runners: nothing is lost, whatever fails."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import unirl
from unirl.core.actor import ActorContext
from unirl.core.learner import LearnerContext, LearnerState
from unirl.core.pool import Pool
from unirl.core.queue import QueueConfig
from unirl.core.sample import Batch, Field, SampleSpec, Slot
from unirl.core.weights import Weights
from unirl.errors import ActorFailed, DiscardSlot, ReissueSlot
from unirl.metrics.metrics import Metrics
from unirl.runners.config import RunConfig, RunnerConfig
from unirl.runners.plan import LearnerPlan, Plan
from unirl.storage.checkpoint import load_checkpoint

SPEC = SampleSpec({"ticket": Field((1,), torch.int64, None), "pid": Field((1,), torch.int64, None)})


class Holder:
    def load_weights(self, weights: Weights) -> None:
        pass


class Sleeper:
    """Takes longer for some tickets than for others; `fault` says what goes wrong, once or so."""

    def __init__(self, context: ActorContext, *, fault: str, marks: Path) -> None:
        self.weights, self.fault, self.marks = context.weights, fault, marks
        self.in_flight = self.most_in_flight = 0
        self.interrupted = asyncio.Event()

    async def produce(self, slot: Slot) -> None:
        version = self.weights.pull(Holder(), -1)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self.fault == "tail" and slot.ticket % 4 == 3:
                await asyncio.wait_for(self.interrupted.wait(), 0.5 if slot.ticket < 4 else 20.0)
                raise ReissueSlot
            await asyncio.sleep(0.001 * (slot.ticket % 5))
            if slot.ticket == 6 and self._once("six"):
                if self.fault == "error":
                    raise RuntimeError("fault at ticket 6")
                if self.fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "discard" and slot.ticket % 3 == 0:
                raise DiscardSlot("zero_variance")
        finally:
            self.in_flight -= 1
        slot.data["ticket"][0], slot.data["pid"][0] = slot.ticket, os.getpid()
        slot.first_version = slot.last_version = version

    async def interrupt(self) -> None:
        self.interrupted.set()
        await asyncio.sleep(0)
        self.interrupted = asyncio.Event()

    async def close(self) -> None:
        self._once("closed")

    def _once(self, name: str) -> bool:
        mark = self.marks / name
        first = not mark.exists()
        mark.touch()
        return first


class Noter:
    """Notes which tickets it learned."""

    def __init__(self, context: LearnerContext) -> None:
        self.version = self.num_steps = 0
        self.tickets: list[int] = []

    def step(self, batch: Batch) -> Metrics:
        assert max(batch.staleness) <= 1
        self.tickets += [int(slot.data["ticket"]) for slot in batch.slots]
        self.version, self.num_steps = self.version + 1, self.num_steps + len(batch.slots)
        return Metrics()

    def weights(self) -> Weights:
        return {"x": torch.zeros(1)}

    def state_dict(self) -> LearnerState:
        return LearnerState({"x": torch.zeros(1)}, {}, {"tickets": self.tickets})

    def load_state_dict(self, state: LearnerState) -> None:
        self.tickets = list(state.counters["tickets"])


def make(kind: str, marks: Path, fault: str = "", *, total: int = 24, **queue: Any) -> Plan:
    settings = {"batch_size": 4, "max_staleness": 1, "timeout_seconds": 20.0, **queue}
    return Plan(
        "test",
        pools=(Pool(partial(Sleeper, fault=fault, marks=marks)),),
        learners=(LearnerPlan(Noter, SPEC, QueueConfig(**settings), reissue=True),),
        runner=RunnerConfig(kind=kind),  # type: ignore[arg-type]
        run=RunConfig(total_steps=total, checkpoint_steps=8),
    )


def learned(plan: Plan, run_dir: Path, resume: Path | None = None) -> list[int]:
    result = unirl.run(plan, run_dir, resume=resume, console=False)
    assert result.checkpoint is not None
    tickets: list[int] = load_checkpoint(result.checkpoint).state["counters"]["tickets"]
    return tickets


KINDS = pytest.mark.parametrize("kind", ["inline", "processes"])


@KINDS
def test_every_ticket_is_learned_once_and_in_order(kind: str, tmp_path: Path) -> None:
    assert learned(make(kind, tmp_path), tmp_path / "run") == list(range(24))
    assert (tmp_path / "closed").exists()


@pytest.mark.parametrize(
    ("kind", "fault"), [("inline", "error"), ("processes", "error"), ("processes", "kill")]
)
def test_no_ticket_is_lost_when_the_actor_fails(kind: str, fault: str, tmp_path: Path) -> None:
    tickets = learned(make(kind, tmp_path, fault), tmp_path / "run")
    assert tickets == list(range(24))
    assert (tmp_path / "six").exists()


@KINDS
def test_discarded_tickets_are_replaced_by_new_ones(kind: str, tmp_path: Path) -> None:
    tickets = learned(make(kind, tmp_path, "discard"), tmp_path / "run")
    assert tickets == [ticket for ticket in range(36) if ticket % 3][:24]


def test_inline_the_tail_is_interrupted_and_its_tickets_come_again(tmp_path: Path) -> None:
    """Every fourth ticket never ends; a batch of four is enough, so the learner does not wait for
    them.
    """
    tickets = learned(make("inline", tmp_path, "tail", window=None, total=12), tmp_path / "run")
    assert tickets == [ticket for ticket in range(16) if ticket % 4 != 3]


def test_inline_slots_that_never_come_free_end_the_run(tmp_path: Path) -> None:
    plan = make("inline", tmp_path, "tail", window=None, total=24)
    with pytest.raises(ActorFailed, match="TimeoutError"):
        # Tickets 3, 7, 11 and so on never end: in the end too few slots are left for a batch.
        unirl.run(plan, tmp_path / "run", console=False)
    tickets = load_checkpoint(tmp_path / "run").state["counters"]["tickets"]
    assert len(tickets) == len(set(tickets)) and not any(ticket % 4 == 3 for ticket in tickets)


@KINDS
def test_a_resumed_run_issues_again_what_was_in_flight(kind: str, tmp_path: Path) -> None:
    first = learned(make(kind, tmp_path, total=12), tmp_path / "run")
    assert first == list(range(12))
    again = learned(make(kind, tmp_path, total=24), tmp_path / "run", resume=tmp_path / "run")
    assert again == list(range(24))


def test_an_actor_that_fails_again_and_again_ends_the_run(tmp_path: Path) -> None:
    class Broken(Sleeper):
        def _once(self, name: str) -> bool:
            return name == "six"

    plan = make("inline", tmp_path, "error")
    broken = plan.with_pool(make_actor=partial(Broken, fault="error", marks=tmp_path))
    with pytest.raises(ActorFailed, match="3 of 3 times"):
        unirl.run(broken, tmp_path / "run", console=False)
