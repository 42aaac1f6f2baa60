"""A time in which nothing of a run could run prolongs what is waited for, once."""

from __future__ import annotations

from unirl.supervision.pauses import Pauses


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_deadline_is_prolonged_by_the_pauses_that_ended_within_it() -> None:
    clock = Clock()
    pauses = Pauses(clock)
    for seconds, pause in ((0.25, 0.0), (0.875, 0.0), (90.0, 90.0), (0.25, 0.0), (5.0, 5.0)):
        clock.now += seconds
        assert pauses.look() == pause
    assert pauses.within(1.0) == 5.0
    assert pauses.within(6.0) == 95.0
    clock.now += 2.0
    assert pauses.within(1.0) == 0.0
