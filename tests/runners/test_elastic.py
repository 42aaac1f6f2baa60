"""Pools between their fewest and most members: the rule alone, in worlds that can be computed."""

from __future__ import annotations

import itertools
import random

import pytest

from unirl.runners.elastic import Rates, SizeRule


def world(
    members: int, *, needed: float, cores: float = 1e9, noise: float = 0.0, rng: random.Random
) -> Rates:
    """What is seen with so many members, of whom the learner can use `needed`, and the machine
    can run `cores` at full speed.
    """
    produced = min(members, cores) * (1 + rng.uniform(-noise, noise))
    learned = min(produced, needed * (1 + rng.uniform(-noise, noise)))
    busy = min(members, cores) / members  # one that gets no core is slower, and does not wait
    waits = max(0.0, 1 - learned / produced)
    return Rates(members, learned, max(0.0, 1 - learned / needed), waits * min(1.0, busy + 0.5))


def sizes(start: int, high: int, stretches: int = 80, **what: float) -> list[int]:
    rng, rule, found = random.Random(1), SizeRule(1, high), [start]
    for number in range(stretches):
        decision = rule.decide(world(found[-1], rng=rng, **what), 10.0 * number)
        found.append(found[-1] if decision is None else decision[0])
    return found


@pytest.mark.parametrize("noise", [0.0, 0.04])
@pytest.mark.parametrize("needed", [1.0, 2.5, 4.3, 7.0, 11.5])
@pytest.mark.parametrize("start", [1, 5, 16])
def test_it_finds_the_number_that_is_of_use_and_stays_there(
    start: int, needed: float, noise: float
) -> None:
    found = sizes(start, 16, needed=needed, noise=noise)
    assert 0.88 * needed <= found[-1] <= 1.2 * needed + 1.5, found
    assert len(set(found[-40:])) == 1, found


@pytest.mark.parametrize("cores", [2.0, 6.0])
def test_members_that_bring_nothing_leave_again(cores: float) -> None:
    found = sizes(1, 16, needed=12.0, cores=cores, noise=0.03)
    assert cores <= found[-1] <= 1.5 * cores + 1, found
    assert len(set(found[-40:])) == 1, found


def test_it_stays_within_its_bounds_and_moves_at_most_to_twice_as_many() -> None:
    found = sizes(1, 6, needed=20.0)
    assert found[-1] == max(found) == 6
    assert all(after <= 2 * before for before, after in itertools.pairwise(found))


def test_one_stretch_alone_decides_nothing() -> None:
    rule, calm, short = SizeRule(1, 8), Rates(4, 9.0, 0.06, 0.1), Rates(4, 5.0, 0.5, 0.0)
    idle = Rates(4, 9.0, 0.0, 0.9)
    for number, seen in enumerate([short, calm, short, idle, idle, calm, idle, short, calm] * 5):
        assert rule.decide(seen, 10.0 * number) is None
    assert rule.decide(short, 500.0) is None
    assert rule.decide(short, 510.0) == (8, short.describe())


def test_where_there_is_no_place_it_is_tried_again_after_a_minute() -> None:
    rule = SizeRule(1, 8)
    rule.refuse(5, 0.0)
    short = Rates(4, 5.0, 0.5, 0.0)
    assert [rule.decide(short, when) for when in (10.0, 20.0, 30.0)] == [None] * 3
    assert rule.decide(short, 70.0) is None
    assert rule.decide(short, 80.0) == (8, short.describe())
