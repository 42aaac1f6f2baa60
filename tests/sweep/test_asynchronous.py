"""Asynchronous successive halving against algorithm 2 of the paper, written out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from unirl.sweep.asynchronous import promote
from unirl.sweep.config import HalvingConfig, ObjectiveConfig
from unirl.sweep.halving import decide
from unirl.sweep.trial import SeedRun, Trial

Loss = Callable[[int, int], float]


@dataclass
class PaperAsha:
    """arXiv 1810.05934, algorithm 2: get_job, with rungs as they are and r = 1, s = 0."""

    eta: int
    top_rung: int
    """floor(log_eta(R / r)) - s."""
    rungs: dict[int, dict[int, float]] = field(default_factory=dict)
    promoted: dict[int, set[int]] = field(default_factory=dict)
    drawn: int = 0

    def get_job(self) -> tuple[int, int]:
        for k in range(self.top_rung - 1, -1, -1):
            rung = self.rungs.get(k, {})
            number = len(rung) // self.eta
            candidates = sorted(rung, key=lambda theta: (rung[theta], theta))[:number]
            promotable = [t for t in candidates if t not in self.promoted.get(k, set())]
            if promotable:
                self.promoted.setdefault(k, set()).add(promotable[0])
                return promotable[0], k + 1
        self.drawn += 1
        return self.drawn - 1, 0

    def report(self, theta: int, k: int, loss: float) -> None:
        self.rungs.setdefault(k, {})[theta] = loss


@dataclass
class OurAsha:
    """The same, of records of trials."""

    halving: HalvingConfig
    num_rungs: int
    trials: list[Trial] = field(default_factory=list)
    objective: ObjectiveConfig = field(default_factory=lambda: ObjectiveConfig(mode="min"))

    def get_job(self) -> tuple[int, int]:
        found = promote(self.trials, self.num_rungs, self.halving, self.objective)
        if found is None:
            found = Trial(len(self.trials), {}, [SeedRun(1)])
            self.trials.append(found)
        return found.number, found.rung

    def report(self, theta: int, k: int, loss: float) -> None:
        self.trials[theta].runs[0].values.append(loss)


def jobs(asha: PaperAsha | OurAsha, loss: Loss, seed: int, num_jobs: int) -> list[tuple[int, int]]:
    """Which jobs some workers are given, of which a random one is ready next."""
    rng = random.Random(seed)
    working: list[tuple[int, int]] = []
    given: list[tuple[int, int]] = []
    while len(given) < num_jobs:
        while len(working) < 1 + seed % 5:
            working.append(asha.get_job())
            given.append(working[-1])
        theta, k = working.pop(rng.randrange(len(working)))
        asha.report(theta, k, loss(theta, k))
    return given


@pytest.mark.parametrize("eta", [2, 3, 4])
@pytest.mark.parametrize("seed", range(20))
def test_workers_get_the_jobs_of_the_papers_algorithm(eta: int, seed: int) -> None:
    def loss(theta: int, k: int) -> float:  # curves that cross, and values that are equal
        rng = random.Random(1000 * seed + theta)
        return round(rng.random() * 0.7**k + rng.random(), 1 + seed % 3)

    num_rungs = 2 + seed % 4
    paper = jobs(PaperAsha(eta, num_rungs - 1), loss, seed, 300)
    halving = HalvingConfig(first_steps=1, reduction=eta, asynchronous=True)
    assert jobs(OurAsha(halving, num_rungs), loss, seed, 300) == paper
    assert max(k for _, k in paper) >= 1


HALVING = HalvingConfig(first_steps=1, reduction=3, asynchronous=True)


def run_all(num_trials: int, num_rungs: int = 3, *, fails: int = -1) -> list[Trial]:
    """A sweep in which trial N has the value N; one may fail on its way to the second rung."""
    objective = ObjectiveConfig()
    trials = [Trial(i, {}, [SeedRun(1)]) for i in range(num_trials)]
    while any(trial.status == "running" for trial in trials):
        due = [trial for trial in trials if trial.due()]
        if due:
            trial = due[0]
            if trial.number == fails and trial.rung == 1:
                trial.fail(trial.runs[0], "diverged")
            else:
                trial.runs[0].values.append(float(trial.number))
        assert decide(trials, num_trials, num_rungs, HALVING, objective) or due
        promote(trials, num_rungs, HALVING, objective)
    return trials


@pytest.mark.parametrize("num_trials", [1, 2, 4, 9, 20])
def test_the_best_is_trained_to_the_end_however_few_there_are(num_trials: int) -> None:
    trials = run_all(num_trials)
    assert {trial.status for trial in trials} <= {"stopped", "finished"}
    assert trials[-1].status == "finished"


def test_another_one_takes_the_place_of_a_trial_that_failed() -> None:
    trials = run_all(4, fails=3)
    assert trials[3].status == "failed"
    assert [trial.number for trial in trials if trial.status == "finished"] == [2]


def test_a_trial_that_has_come_to_its_end_early_is_not_waited_for() -> None:
    trials = [Trial(i, {}, [SeedRun(1, [float(i)])]) for i in range(3)]
    trials[2].runs[0].values *= 3  # at its target: worth the same at later rungs
    for _ in range(4):
        decide(trials, 3, 3, HALVING, ObjectiveConfig())
    assert [trial.status for trial in trials] == ["stopped", "stopped", "finished"]
