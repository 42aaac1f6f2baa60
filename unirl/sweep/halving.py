"""Successive halving: who continues from a rung, once all who come to it have (decision 040)."""

from __future__ import annotations

from collections.abc import Sequence

from unirl.sweep.asynchronous import settle
from unirl.sweep.config import HalvingConfig, ObjectiveConfig
from unirl.sweep.ranking import ranked
from unirl.sweep.trial import Trial


def decide(
    trials: Sequence[Trial],
    num_trials: int,
    num_rungs: int,
    halving: HalvingConfig,
    objective: ObjectiveConfig,
) -> bool:
    """Send trials further, stop or finish them, as far as that is known. Whether any was.

    num_trials: of the whole sweep, those that do not exist yet included.
    """
    changed = False
    for trial in trials:
        if trial.status == "running" and trial.rung == num_rungs - 1 and not trial.due():
            trial.status, changed = "finished", True
    if halving.asynchronous:
        is_all = len(trials) == num_trials
        return (is_all and settle(trials, num_rungs, halving, objective)) or changed
    for rung in range(num_rungs - 1):
        here = [trial for trial in trials if trial.status == "running" and trial.rung <= rung]
        if len(trials) < num_trials or any(t.rung < rung or t.due() for t in here):
            return changed
        for trial in ranked(here, rung, objective)[max(1, len(here) // halving.reduction) :]:
            trial.status, changed = "stopped", True
        for trial in here:
            if trial.status == "running":
                trial.rung, changed = rung + 1, True
    return changed
