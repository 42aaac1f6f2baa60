"""A plan for each learner of a population, and one plan of them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from unirl import config as configs
from unirl.core.seeding import derive_seed
from unirl.errors import UniRLError
from unirl.learners.config import TUNABLE
from unirl.population.config import PopulationConfig
from unirl.population.hook import Peer, PopulationHook
from unirl.runners.loop import TrainLoop
from unirl.runners.plan import Plan
from unirl.search_space import Choices, SearchSpace, read_space
from unirl.storage import disk


def with_population(config: Any, plan_one: Callable[[Any], Plan]) -> Plan:
    """The plan of a recipe's config: `plan_one`'s own, or one of as many learners as the
    population has.
    """
    population: PopulationConfig = config.population
    if population.size == 1:
        return plan_one(config)
    space = read_space(type(config), population.vary, "in population.vary")
    _check(config, space)
    own = [_config_of(config, space, index) for index in range(population.size)]
    plans = [plan_one(each) for each in own]
    first = plans[0]
    if len(first.learners) > 1:
        raise UniRLError(
            f"a learner of the population has {len(first.learners)} policies",
            "learners of a population have one policy each",
            "leave population out, or sampler.agent_policies",
        )
    names = [f"learner-{index}" for index in range(population.size)]
    return replace(
        first,
        pools=tuple(
            replace(pool, name=f"{name}-{pool.name}", learners=(name,))
            for name, plan in zip(names, plans, strict=True)
            for pool in plan.pools
        ),
        learners=tuple(
            replace(plan.learner, name=name) for name, plan in zip(names, plans, strict=True)
        ),
        config=replace(first.config, population=population, learner=config.learner),
        notes=(
            f"population {population.size} learners, compared every {population.every_steps:,} "
            f"steps: {', '.join(space)}",
            *first.notes,
        ),
        make_hooks=partial(
            _make_hooks, population, space, config.run, first.recipe, [p.config for p in plans]
        ),
    )


def _config_of(config: Any, space: SearchSpace, index: int) -> Any:
    """The config of one learner alone: what its folder holds."""
    alone = replace(config, population=PopulationConfig())
    if config.population.start == "config":
        return alone
    random = Random(derive_seed(config.run.seed, "population", index))
    return configs.override(alone, {key: each.draw(random) for key, each in space.items()})


def _check(config: Any, space: SearchSpace) -> None:
    """Raise UniRLError for a setting that cannot change while a learner trains."""
    for key, dimension in space.items():
        if key not in TUNABLE:
            raise UniRLError(
                f"{key} is in population.vary",
                f"what can change while a learner trains is {', '.join(TUNABLE)}",
                configs.suggestion(key, TUNABLE) or "a sweep tries other settings: unirl sweep",
            )
        if _value(config, key) is None:
            raise UniRLError(
                f"{key} is in population.vary, and none in the config",
                "whether there is such a bound at all cannot change while a learner trains",
                f"set {configs.flag_of(key)} to a number",
            )
        if isinstance(dimension, Choices):
            for value in dimension.values:
                if not isinstance(value, int | float) or isinstance(value, bool):
                    raise UniRLError(
                        f"population.vary has {key} = {value!r}",
                        "learners vary numbers",
                        "write { low = a, high = b }, or numbers",
                    )
        for value in dimension.ends():
            configs.override(config, {key: value})
    if "learner.optimizer.lr" in space and config.learner.optimizer.lr_schedule == "adaptive":
        raise UniRLError(
            "learner.optimizer.lr is in population.vary, and lr_schedule is adaptive",
            "an adaptive step size follows the KL, whatever it began with",
            "set learner.optimizer.lr_schedule to constant or linear",
        )


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name, None)
    return config


def _make_hooks(
    population: PopulationConfig,
    space: SearchSpace,
    run: Any,
    recipe: str,
    own: Sequence[Any],
    loops: Sequence[TrainLoop],
    folders: Sequence[Path],
) -> list[PopulationHook]:
    """One for each learner, whose folder becomes that of a run: eval and play read it."""
    for folder, config in list(zip(folders, own, strict=True))[1:]:
        folder.mkdir(parents=True, exist_ok=True)
        disk.replace_text(folder / "config.toml", configs.to_toml(config, recipe=recipe))
    episodes = min(population.episodes, run.target_window)
    peers = [Peer(loop, folder, episodes) for loop, folder in zip(loops, folders, strict=True)]
    return [
        PopulationHook(peers, index, population, space, run.seed) for index in range(len(peers))
    ]
