"""Which values are tried: what a table means, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from unirl.errors import UniRLError
from unirl.search_space import Choices, Range, read_space


@dataclass(frozen=True)
class Inner:
    lr: float = 1e-3
    layers: int = 2


@dataclass(frozen=True)
class Config:
    opt: Inner = field(default_factory=Inner)
    seed_value: int = 1
    table: dict[str, Any] = field(default_factory=dict)


def space(**table: Any) -> dict[str, Any]:
    return read_space(Config, table, "here")


def test_nested_tables_and_dotted_keys_mean_the_same() -> None:
    lr = {"low": 1e-4, "high": 1e-2, "log": True}
    wanted = {"opt.lr": Range(1e-4, 1e-2, log=True), "seed_value": Choices((1, 2))}
    nested = {"opt": {"lr": lr}, "seed-value": [1, 2]}
    assert space(**nested) == space(**{"opt.lr": lr, "seed_value": [1, 2]}) == wanted
    assert space(**{"table.size": [1]}) == {"table.size": Choices((1,))}


@pytest.mark.parametrize("log", [True, False])
def test_draws_stay_in_the_range_and_integers_reach_both_ends(log: bool) -> None:
    layers = space(**{"opt.layers": {"low": 1, "high": 4, "log": log}})["opt.layers"]
    assert {layers.draw(Random(seed)) for seed in range(200)} == {1, 2, 3, 4}
    lr = space(**{"opt.lr": {"low": 1e-4, "high": 1e-2, "log": log}})["opt.lr"]
    drawn = sorted(lr.draw(Random(seed)) for seed in range(201))
    assert drawn[0] >= 1e-4 and drawn[-1] <= 1e-2
    median = drawn[100]
    assert (5e-4 < median < 2e-3) if log else (4e-3 < median < 6e-3)


def test_a_step_gives_a_grid_that_draws_and_moves_stay_on() -> None:
    lr = space(**{"opt.lr": {"low": 0.1, "high": 0.45, "step": 0.1}})["opt.lr"]
    assert lr.grid() == (0.1, 0.2, 0.3, 0.4)
    assert {lr.draw(Random(seed)) for seed in range(50)} == set(lr.grid())
    assert lr.nearest(0.26) == 0.3 and lr.nearest(-1) == 0.1
    assert space(**{"opt.lr": {"low": 0.1, "high": 0.4}})["opt.lr"].grid() is None


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"opt.rl": [1]}, ('"opt.rl" is unknown', "opt.lr")),
        ({"opt.lr": 3}, ("opt.lr is 3", "[3]")),
        ({"opt.lr": []}, ("opt.lr is []",)),
        ({"opt.lr": {"low": 1, "hgih": 2}}, ('"hgih"', 'did you mean "high"')),
        ({"opt.lr": {"low": 1}}, ("from 1 to None",)),
        ({"opt.lr": {"low": 2, "high": 1}}, ("low < high",)),
        ({"opt.lr": {"low": 0, "high": 1, "log": True}}, ("low > 0",)),
        ({"opt.lr": {"low": 0, "high": 1, "step": 2}}, ("step 2",)),
        ({"opt.lr": {"low": 0, "high": float("inf")}}, ("finite",)),
        ({"opt.layers": {"low": 1, "high": 2.5}}, ("integer",)),
    ],
)
def test_what_is_no_space_is_refused_with_a_remedy(
    table: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(UniRLError) as refused:
        space(**table)
    assert all(word in str(refused.value) for word in words), refused.value
    assert len(refused.value.parts) == 3 and "here" in refused.value.what


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("{low = 1e-4, high = 1e-2, log = true}", {"low": 1e-4, "high": 1e-2, "log": True}),
        ('{"low": 1e-4, "high": 1e-2, "log": true}', {"low": 1e-4, "high": 1e-2, "log": True}),
        ("[1e-4, 1e-3]", [1e-4, 1e-3]),
    ],
)
def test_a_flag_says_what_a_file_would(text: str, table: Any) -> None:
    assert space(opt={"lr": text}) == space(opt={"lr": table})
