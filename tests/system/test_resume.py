"""What a resumed run continues with besides its weights: totals of the queue, samples on record."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import unirl
from unirl.errors import DiscardSlot
from unirl.runners.hooks import SamplesHook
from unirl.runners.plan import Plan
from unirl.storage.checkpoint import load_checkpoint, save_checkpoint

BATCH = 4
FILTERED = "queue/discarded/filtered"
SMALL: dict[str, Any] = {
    "env.id": "CartPole-v1",
    "actor.num_envs": 2,
    "actor.unroll_length": 8,
    "policy.hidden": (8,),
    "queue.batch_size": BATCH,
    "queue.max_staleness": 1,
    "runner.learner_threads": 1,
    "run.checkpoint_steps": 2 * BATCH * 16,
    "run.log_seconds": 1e6,  # checkpoints are between rows
}


def picky(context: Any, *, make: Any) -> Any:
    """The actor, which gives up every third ticket."""
    actor = make(context)
    produce = actor.produce

    def sometimes(slot: Any) -> None:
        if slot.ticket % 3 == 1:
            raise DiscardSlot("filtered")
        produce(slot)

    actor.produce = sometimes
    return actor


def plan_of(kind: str, updates: int) -> Plan:
    steps = {"run.total_steps": updates * BATCH * 16, "runner.kind": kind}
    plan = unirl.make_plan("impala", **{**SMALL, **steps})
    make_actor = partial(picky, make=plan.pools[0].make_actor)
    return plan.with_pool(make_actor=make_actor).with_learner(reissue=True)


def totals(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = load_checkpoint(path).state["metrics"]["totals"]
    return found


def num_lost(path: Path) -> int:
    """Tickets that were drawn by this checkpoint, and neither learned nor to be learned."""
    state = load_checkpoint(path).state
    learned = state["version"] * BATCH
    return int(state["next_ticket"] - learned - len(state["ready"]) - len(state["due"]))


@pytest.mark.parametrize("kind", ["inline", "processes"])
def test_discards_are_counted_since_the_run_began(kind: str, tmp_path: Path) -> None:
    totals_shown = []
    for updates in (5, 10):
        resume = tmp_path if totals_shown else None
        result = unirl.run(plan_of(kind, updates), tmp_path, resume=resume, console=False)
        totals_shown.append(result.scalars[FILTERED])
    checkpoints = sorted((tmp_path / "checkpoints").glob("step_*"))
    counted = [totals(path)[FILTERED] for path in checkpoints]
    assert len(counted) > 2 and counted == [num_lost(path) for path in checkpoints]
    # Actors in processes continue between the last row and the last checkpoint.
    assert 0 < totals_shown[0] < totals_shown[1] <= counted[-1]
    assert kind == "processes" or totals_shown[1] == counted[-1]


def test_a_checkpoint_of_an_older_version_has_no_counts_and_is_continued(tmp_path: Path) -> None:
    unirl.run(plan_of("inline", 5), tmp_path, console=False)
    before, saved = num_lost(tmp_path), load_checkpoint(tmp_path)
    totals_then = {name: n for name, n in totals(tmp_path).items() if name != FILTERED}
    save_checkpoint(
        tmp_path,
        saved.step,
        model=saved.model,
        optimizer=saved.optimizer,
        samples=saved.samples,
        state={**saved.state, "metrics": {"totals": totals_then}},
    )
    result = unirl.run(plan_of("inline", 10), tmp_path, resume=tmp_path, console=False)
    assert 0 < result.scalars[FILTERED] == num_lost(tmp_path) - before


def test_rows_of_updates_that_are_made_again_are_cut_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "samples" / "samples.jsonl"
    path.parent.mkdir()
    old, learned, later = ({"update": 1}, {"step": 8, "update": 2}, {"step": 16, "update": 3})
    lines = [json.dumps(row) for row in (old, learned, later)]

    def left(text: str) -> list[Any]:
        path.write_text(text)
        SamplesHook(tmp_path, 0.0, resume_step=8)
        assert path.read_text().endswith("\n")
        return [json.loads(line) for line in path.open()]

    whole = "\n".join(lines) + "\n"
    assert left(whole) == [old, learned]  # older versions wrote rows without their step
    # A run was killed while it wrote.
    assert left(whole + lines[0][:-3]) == left(whole + lines[1][:-3]) == [old, learned]
    assert left(whole + lines[1]) == [old, learned, learned]
