"""Settings by Optuna's tree-structured Parzen estimator: the study is made of the sweep's own
records for each question, so there is no second store that could disagree with them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unirl.core.seeding import derive_seed
from unirl.errors import UniRLError
from unirl.search_space import Choices, Dimension, SearchSpace
from unirl.sweep.config import SweepConfig
from unirl.sweep.trial import Trial

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


def require_optuna() -> None:
    """Raise UniRLError where it is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise UniRLError(
            "method is optuna, and Optuna is not installed",
            "package optuna is an extra of its own",
            "pip install 'unirl[sweep]', or set method to random",
        )


def propose_by_tpe(
    config: SweepConfig, space: SearchSpace, number: int, trials: Sequence[Trial]
) -> dict[str, Any]:
    """Settings of trial `number`, from what came out of those before."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    distributions = {key: _distribution(dimension) for key, dimension in space.items()}
    sampler = optuna.samplers.TPESampler(
        seed=derive_seed(config.search_seed, "trial", number) % 2**32,
        # What trains now counts as bad until it is known: two jobs must not try the same.
        constant_liar=True,
    )
    directions = optuna.study.StudyDirection
    direction = directions.MAXIMIZE if config.objective.mode == "max" else directions.MINIMIZE
    study = optuna.create_study(direction=direction, sampler=sampler)
    for trial in trials:
        study.add_trial(_frozen(trial, space, distributions))
    found = study.ask(distributions).params
    return {
        key: dimension.values[found[key]] if isinstance(dimension, Choices) else found[key]
        for key, dimension in space.items()
    }


def _distribution(dimension: Dimension) -> BaseDistribution:
    from optuna import distributions

    if isinstance(dimension, Choices):  # by index: a choice may be a list
        return distributions.CategoricalDistribution(range(len(dimension.values)))
    low, high, step, log = dimension.low, dimension.high, dimension.step, dimension.log
    if dimension.whole:
        return distributions.IntDistribution(int(low), int(high), log=log, step=int(step or 1))
    return distributions.FloatDistribution(low, high, log=log, step=step)


def _frozen(
    trial: Trial, space: SearchSpace, distributions: dict[str, BaseDistribution]
) -> FrozenTrial:
    """A trial as Optuna knows it: one that stopped at a rung is pruned there."""
    from optuna.trial import TrialState, create_trial

    params = {
        key: dimension.values.index(trial.settings[key])
        if isinstance(dimension, Choices)
        else trial.settings[key]
        for key, dimension in space.items()
    }
    reached = trial.reached()
    state = {
        "finished": TrialState.COMPLETE,
        "stopped": TrialState.PRUNED,
        "failed": TrialState.FAIL,
        "running": TrialState.RUNNING,
    }[trial.status]
    return create_trial(
        state=state,
        value=trial.mean(reached - 1) if trial.status == "finished" else None,
        params=params,
        distributions=distributions,
        intermediate_values={rung: trial.mean(rung) for rung in range(reached)},
    )
