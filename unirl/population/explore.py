"""New settings from those of a learner that does well."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from unirl.population.config import PopulationConfig
from unirl.search_space import Choices, Dimension, SearchSpace


def explored(
    settings: Mapping[str, float], space: SearchSpace, config: PopulationConfig, random: Random
) -> dict[str, float]:
    """Each setting drawn from all of its values, or moved a little."""
    return {
        key: space[key].draw(random)
        if random.random() < config.resample
        else _moved(value, space[key], config, random)
        for key, value in settings.items()
    }


def _moved(value: float, dimension: Dimension, config: PopulationConfig, random: Random) -> float:
    if isinstance(dimension, Choices):
        values = sorted(dimension.values)
        nearest = min(range(len(values)), key=lambda index: abs(values[index] - value))
        index = nearest + random.choice((-1, 1))
        return float(values[min(max(index, 0), len(values) - 1)])
    return dimension.nearest(value * random.choice(config.factors))
