"""What an actor finds when a slot comes free."""

from __future__ import annotations

import pytest

import unirl
from unirl.core.sample import Batch
from unirl.runners.inline import InlineRunner


def test_slots_come_free_after_the_newer_weights_are_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"policy.hidden": (8,), "actor.num_envs": 2, "actor.unroll_length": 4}
    plan = unirl.make_plan("impala", **settings, **{"queue.batch_size": 1, "run.total_steps": 50})
    runner = InlineRunner(plan)
    loop, ahead = runner.loop, []
    release = loop.queue.release

    def watched(batch: Batch) -> None:
        # Between processes an actor begins at this moment.
        ahead.append(loop.weights.version - batch.version)
        release(batch)

    monkeypatch.setattr(loop.queue, "release", watched)
    runner.run([])
    assert len(ahead) > 1 and set(ahead) == {1}
