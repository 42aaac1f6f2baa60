"""A language model trained in two processes continues where each of them was: no prompt is asked
twice, none is skipped, though one has discarded more than the other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="language models need the extra llm")

import unirl
from tests.forked import in_two_ranks
from tests.system.grpo_settings import SMALL
from unirl.errors import UniRLError
from unirl.learners.parallel import Ranks
from unirl.llm.engine import Completion
from unirl.llm.models.tiny import make_tiny
from unirl.llm.outcome import Score
from unirl.llm.tasks.prompts import Prompt
from unirl.storage.checkpoint import load_checkpoint

GROUP, BATCH = 4, 2
STEPS = 2 * GROUP * BATCH
"""Of one update of both."""
SETTINGS: dict[str, Any] = {
    **SMALL,
    "rollout.group_size": GROUP,
    "rollout.filter": "tests.system.test_grpo_ranks:three_of_four",
    "queue.batch_size": BATCH,
    "run.checkpoint_steps": 3 * STEPS,
}


def three_of_four(
    prompt: Prompt, completions: Sequence[Completion], scores: Sequence[Sequence[Score]]
) -> bool:
    """Prompts of the first process have even numbers: only the second one discards some."""
    return prompt.ticket % 4 != 1


def plan_of(model: str, updates: int) -> unirl.runners.plan.Plan:
    settings = {**SETTINGS, "model.path": model, "run.total_steps": updates * STEPS}
    return unirl.make_plan("grpo", **settings)


def work(model: str, out: Path) -> None:
    """What each process does: a whole run, and one in two parts; what it learned goes to `out`."""
    rank, asked = os.environ["RANK"], {}
    for name, updates, resume in (("whole", 6, False), ("parts", 3, False), ("parts", 6, True)):
        plan, tickets = plan_of(model, updates), asked.setdefault(name, [])
        plan = plan.with_learner(make=partial(noting, plan.learner.make, tickets))
        run_dir = out / name
        unirl.run(plan, run_dir, resume=run_dir if resume else None, console=False)
    (out / f"asked-{rank}.json").write_text(json.dumps(asked))


def noting(
    make: Callable[..., Any], tickets: list[int], context: Any, ranks: Ranks | None = None
) -> Any:
    """The learner of a plan, which appends each ticket that it learns to `tickets`."""
    learner = make(context, ranks=ranks)
    step = learner.step

    def noted(batch: Any) -> Any:
        tickets.extend(slot.ticket for slot in batch.slots)
        return step(batch)

    learner.step = noted
    return learner


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of both runs, with a model beside them."""
    out = tmp_path_factory.mktemp("trained")
    model = make_tiny(out / "model", width=32, layers=1)
    in_two_ranks(work, str(model), out)
    return out


def test_each_process_continues_with_its_own_tickets(trained: Path) -> None:
    asked = [json.loads((trained / f"asked-{rank}.json").read_text()) for rank in (0, 1)]
    assert asked[0]["whole"] == asked[0]["parts"] == list(range(12))
    # Of the second's tickets, 0 2 4 ... name the prompts 1 5 9 ... and are discarded.
    assert asked[1]["whole"] == asked[1]["parts"] == list(range(1, 25, 2))
    state = load_checkpoint(trained / "whole").state
    assert state["next_ticket"] == 12
    assert [other["next_ticket"] for other in state["other_ranks"]] == [24]


def test_the_resumed_training_equals_the_whole_one_bit_for_bit(trained: Path) -> None:
    whole, parts = (load_checkpoint(trained / name).model for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())


@pytest.mark.parametrize("rank", [None, 0, 2])
def test_another_number_of_processes_is_refused(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int | None
) -> None:
    if rank is not None:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "WORLD_SIZE": "3"}
        for name, value in {**address, "RANK": str(rank), "LOCAL_RANK": str(rank)}.items():
            monkeypatch.setenv(name, value)
    plan = plan_of(str(trained / "model"), 9)
    with pytest.raises(UniRLError, match="of a training in 2 processes") as error:
        unirl.run(plan, tmp_path / "run", resume=trained / "parts", console=False)
    wanted = "1 process would repeat" if rank is None else "3 processes would repeat"
    assert wanted in error.value.parts[1] and "--nproc-per-node 2" in error.value.parts[2]
    assert not (tmp_path / "run").exists()
