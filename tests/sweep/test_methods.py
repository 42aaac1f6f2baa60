"""What a sweep tries next: a function of the number and of what came out, kept nowhere else."""

from __future__ import annotations

import math
from typing import Any

import pytest

from unirl.errors import UniRLError
from unirl.search_space import Choices, Range
from unirl.sweep.config import SweepConfig
from unirl.sweep.methods import corners, num_trials, proposer
from unirl.sweep.trial import SeedRun, Trial

LR = Range(1e-5, 1e-1, log=True)
SPACE = {"lr": LR, "layers": Choices(([8], [8, 8]))}


def distance(lr: float) -> float:
    """From the best one, in powers of ten."""
    return abs(math.log10(lr / 1e-3))


def settings(config: SweepConfig, values: dict[int, float]) -> list[dict[str, Any]]:
    """Of 30 trials one after the other; values: what those before came to, by number."""
    propose, found = proposer(config, SPACE), []
    for number in range(30):
        trial = Trial(number, propose(number, found), [SeedRun(1)])
        found.append(trial)
        trial.runs[0].values.append(values.get(number, -distance(trial.settings["lr"])))
        trial.status = "finished"
    return [trial.settings for trial in found]


def test_a_grid_is_all_combinations() -> None:
    space = {"a": Choices((1, 2)), "b": Range(0, 1, step=0.5)}
    config = SweepConfig()
    points = [proposer(config, space)(i, ()) for i in range(num_trials(config, space))]
    assert points == [{"a": a, "b": b} for a in (1, 2) for b in (0.0, 0.5, 1.0)]
    with pytest.raises(UniRLError, match="range without a step"):
        num_trials(config, SPACE)
    with pytest.raises(UniRLError, match="the grid has 6 points"):
        num_trials(SweepConfig(trials=5), space)


@pytest.mark.parametrize("method", ["random", "optuna"])
def test_the_same_question_has_the_same_answer_and_another_seed_another(method: str) -> None:
    config = SweepConfig(method=method, trials=30)  # type: ignore[arg-type]
    again = SweepConfig(method=method, trials=30, search_seed=2)  # type: ignore[arg-type]
    assert settings(config, {}) == settings(config, {}) != settings(again, {})


def test_optuna_learns_from_results_and_random_does_not() -> None:
    def late(method: str) -> float:
        """How far later proposals are from the best, over three seeds."""
        found = []
        for seed in (1, 2, 3):
            config = SweepConfig(method=method, trials=30, search_seed=seed)  # type: ignore[arg-type]
            found += [distance(one["lr"]) for one in settings(config, {})[10:]]
        return sum(found) / len(found)

    assert late("optuna") < 0.8 * late("random")


def test_optuna_is_asked_beside_trials_that_train_stopped_and_failed() -> None:
    propose = proposer(SweepConfig(method="optuna", trials=9), SPACE)
    start = {"lr": 1e-3, "layers": [8, 8]}
    found = [Trial(i, dict(start), [SeedRun(1, [float(i)])]) for i in range(4)]
    found[1].status, found[2].status = "stopped", "finished"
    found[3].fail(found[3].runs[0], "diverged")
    proposed = propose(4, found)
    assert 1e-5 <= proposed["lr"] <= 1e-1 and proposed["layers"] in ([8], [8, 8])


def test_corners_have_every_choice_and_both_ends_of_every_range() -> None:
    found = corners(SPACE)
    assert {one["lr"] for one in found} == {1e-5, 1e-1}
    assert [8, 8] in [one["layers"] for one in found]
