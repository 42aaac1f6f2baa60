"""Asynchronous successive halving (arXiv 1810.05934, algorithm 2): a trial continues as soon as it
is among the best of those that have come to its rung so far, and nobody waits (decision 048).
"""

from __future__ import annotations

from collections.abc import Sequence

from unirl.sweep.config import HalvingConfig, ObjectiveConfig
from unirl.sweep.ranking import ranked
from unirl.sweep.trial import Trial


def promote(
    trials: Sequence[Trial], num_rungs: int, halving: HalvingConfig, objective: ObjectiveConfig
) -> Trial | None:
    """Send one trial to its next rung, from the highest rung where one may go; None: none may."""
    for rung in reversed(range(num_rungs - 1)):
        here = [trial for trial in trials if trial.rung >= rung and trial.reached() > rung]
        for trial in ranked(here, rung, objective)[: len(here) // halving.reduction]:
            if trial.status == "running" and trial.rung == rung:
                trial.rung += 1
                return trial
    return None


def settle(
    trials: Sequence[Trial], num_rungs: int, halving: HalvingConfig, objective: ObjectiveConfig
) -> bool:
    """When nothing trains and no trial is to come: one continues to the end at least, others stop.
    Whether anything was changed.
    """
    waiting = [trial for trial in trials if trial.status == "running"]
    if not waiting or any(trial.due() for trial in waiting):
        return False
    if promote(trials, num_rungs, halving, objective) is not None:
        return True
    if not any(trial.status == "finished" for trial in trials):
        # Fewer than `reduction` came so far. The paper's own sweep draws more for ever.
        rung = max(trial.rung for trial in waiting)
        highest = [trial for trial in waiting if trial.rung == rung]
        ranked(highest, rung, objective)[0].rung += 1
        return True
    for trial in waiting:
        trial.status = "stopped"
    return True
