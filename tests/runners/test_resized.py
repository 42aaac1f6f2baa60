"""A run continues with other sizes, or after an update that was cut short: where tickets must not
be lost, each is learned exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import unirl
from unirl.core.queue import QueueConfig, Ticket
from unirl.core.sample import Field, SampleSpec
from unirl.core.transport import Transport
from unirl.learners.parallel import RankLost
from unirl.runners.plan import Plan
from unirl.storage.checkpoint import load_checkpoint
from unirl.transports.local import LocalTransport
from unirl.transports.shared import SharedTransport

SPEC = SampleSpec({"x": Field((1,), torch.float32, batch_axis=None)})
SMALL: dict[str, Any] = {
    "env.id": "CartPole-v1",
    "actor.num_envs": 2,
    "actor.unroll_length": 8,
    "policy.hidden": (8,),
    "queue.batch_size": 4,
    "queue.max_staleness": 1,
    "runner.learner_threads": 1,
}


def noting(make: Callable[[Any], Any], tickets: list[int], lost_at: int, context: Any) -> Any:
    """The learner, with a note of each ticket that it learns; at one version others are lost."""
    learner = make(context)
    step = learner.step

    def noted(batch: Any) -> Any:
        if learner.version == lost_at:
            raise RankLost("rank 1 of 2 is gone", "all must meet", "resume")
        tickets.extend(slot.ticket for slot in batch.slots)
        return step(batch)

    learner.step = noted
    return learner


def plan_of(tickets: list[int], *, reissue: bool = True, lost_at: int = -1, **more: Any) -> Plan:
    plan = unirl.make_plan("impala", **{**SMALL, **more})
    make = partial(noting, plan.learner.make, tickets, lost_at)
    return plan.with_learner(make=make, reissue=reissue)


@pytest.mark.parametrize("batch_size", [4, 1], ids=["with slots for all", "with fewer slots"])
def test_samples_that_no_longer_fit_are_made_again(batch_size: int, tmp_path: Path) -> None:
    tickets: list[int] = []
    unirl.run(plan_of(tickets, **{"run.total_steps": 192}), tmp_path / "run", console=False)
    waiting = [note["ticket"] for note in load_checkpoint(tmp_path / "run").state["ready"]]
    assert len(waiting) == 4 and not set(waiting) & set(tickets)
    sizes = {"actor.unroll_length": 4, "queue.batch_size": batch_size, "run.total_steps": 320}
    resumed = plan_of(tickets, **sizes)
    result = unirl.run(resumed, tmp_path / "run", resume=tmp_path / "run", console=False)
    assert tickets == list(range(len(tickets))) and set(waiting) < set(tickets)
    assert not any(name.startswith("queue/discarded") for name in result.scalars)


def test_samples_that_no_longer_fit_are_counted_where_tickets_may_be_lost(tmp_path: Path) -> None:
    tickets: list[int] = []
    first = plan_of(tickets, reissue=False, **{"run.total_steps": 192})
    unirl.run(first, tmp_path / "run", console=False)
    more = {"actor.unroll_length": 4, "run.total_steps": 320}
    resumed = plan_of(tickets, reissue=False, **more)
    result = unirl.run(resumed, tmp_path / "run", resume=tmp_path / "run", console=False)
    assert result.scalars["queue/discarded/resized"] == 4


def test_the_batch_of_an_update_that_was_cut_short_is_learned_after_all(tmp_path: Path) -> None:
    tickets: list[int] = []
    with pytest.raises(RankLost):
        unirl.run(plan_of(tickets, lost_at=2), tmp_path / "run", console=False)
    assert load_checkpoint(tmp_path / "run").state["version"] == 2
    resumed = plan_of(tickets, **{"run.total_steps": 320})
    unirl.run(resumed, tmp_path / "run", resume=tmp_path / "run", console=False)
    assert sorted(tickets) == list(range(len(tickets)))


@pytest.mark.parametrize("make", [LocalTransport, SharedTransport])
def test_tickets_without_a_slot_get_the_next_that_comes_free(
    make: Callable[[], Transport],
) -> None:
    queue = make().queue(SPEC, QueueConfig(batch_size=1))
    queue.restore([], 9, 3, due=[Ticket(i, 0, i) for i in (7, 1, 8, 4, 5)])
    assert [ticket.number for ticket in queue.snapshot().unfinished] == [1, 4, 5, 7, 8]
    dead, client = queue.join(), queue.join()
    assert dead.acquire(0.0).ticket == 1 and queue.revoke(dead.member) == 1
    # Its slot went to the next one at once; the tickets that wait are not lost.
    assert queue.stats().discarded["actor_died"] == 1
    learned = []
    for version in range(3, 9):
        slot = client.acquire(0.0)
        slot.first_version = slot.last_version = version
        client.commit(slot)
        batch = queue.take(version, 0.0)
        learned.append(batch.slots[0].ticket)
        queue.release(batch)
    assert learned == [4, 5, 7, 8, 9, 10]
