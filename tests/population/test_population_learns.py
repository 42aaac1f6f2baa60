"""Population-based training is worth it: against settings that stay, from a bad start."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import unirl

LR = "learner.optimizer.lr"
BAD, LOW, HIGH = 1e-6, 1e-6, 1e-1
SIDES: dict[str, Any] = {
    "env.id": "toy/Sides-v0",
    "env.import_module": "tests.population.sides",
    "actor.num_envs": 64,
    "actor.unroll_length": 16,
    "policy.hidden": (16,),
    "learner.optimizer.lr": BAD,
    "queue.max_staleness": 0,
    "runner.learner_threads": 1,
    "run.log_seconds": 1e6,
    "run.target_window": 64,
    "run.total_steps": 80_000,
    "population.size": 4,
    "population.every_steps": 4_000,
    "population.resample": 0.5,
    "population.vary": {LR: {"low": LOW, "high": HIGH, "log": True}},
}
SANE = (1e-3, 1e-1)
"""Step sizes with which one run of this config learns."""
GUESSING = 4.0
"""The return of a policy that knows nothing; the largest is 8."""


def standing(run_dir: Path, seed: int, **changes: Any) -> list[Any]:
    settings = {**SIDES, "run.seed": seed, **changes}
    unirl.run(unirl.make_plan("impala", **settings), run_dir, console=False)
    rows: list[Any] = json.loads((run_dir / "population.json").read_text())
    return rows


def mean(rows: list[Any]) -> float:
    """Over all learners: those that have just copied have no score of their own."""
    scores = [row["score"] for row in rows if row["score"] is not None]
    return math.fsum(scores) / len(scores)


def compare(folder: Path, seed: int) -> dict[str, float]:
    """Mean returns of learners with drawn step sizes that they keep, and of those that begin with
    the same ones in a population; and what becomes of a population that begins with 1e-6.
    """
    kept = standing(folder / "kept", seed, **{"population.every_steps": 10**9})
    drawn = standing(folder / "drawn", seed)
    bad = standing(folder / "bad", seed, **{"population.start": "config"})
    return {
        "kept": mean(kept),
        "population": mean(drawn),
        "from 1e-6": mean(bad),
        "lr": bad[0]["settings"][LR],
    }


def test_a_population_beats_settings_that_stay_and_leaves_a_bad_start(tmp_path: Path) -> None:
    found = compare(tmp_path, 1)
    assert found["population"] > found["kept"] + 0.5, found
    assert SANE[0] < found["lr"] < SANE[1] and found["from 1e-6"] > GUESSING + 1, found


@pytest.mark.slow
def test_a_population_beats_settings_that_stay_with_other_seeds(tmp_path: Path) -> None:
    found = {seed: compare(tmp_path / str(seed), seed) for seed in (1, 2, 3, 4, 5)}
    print(json.dumps(found, indent=1))
    assert all(one["population"] > one["kept"] for one in found.values()), found
