"""Callbacks of a user's own, for tests that name them `tests.callbacks:...`."""

from __future__ import annotations

import unirl

number = 3


def count(training: unirl.Training) -> None:
    """A mean, a total and a last number for each update."""
    training.metrics.mean("mine/version", training.version)
    training.metrics.total("mine/updates", 1)
    training.metrics.last("mine/step", training.step)


def stop_early(training: unirl.Training) -> None:
    if training.version == 3:
        training.stop("good enough")


def fail(training: unirl.Training) -> None:
    if training.version == 2:
        raise ValueError("this is no good")


def without_parameters() -> None:
    """Cannot be called."""


class Recorder:
    """Remembers all calls; made without arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int, str | None]] = []
        self.trainings: list[unirl.Training] = []

    def after_update(self, training: unirl.Training) -> None:
        self._note("update", training)

    def at_end(self, training: unirl.Training) -> None:
        self._note("end", training)

    def _note(self, what: str, training: unirl.Training) -> None:
        self.trainings.append(training)
        self.calls.append((training.learner_name, training.version, training.step, training.reason))


class NeedsArguments:
    def __init__(self, number: int) -> None:
        self.number = number


class FailsAtTheEnd:
    def at_end(self, training: unirl.Training) -> None:
        raise RuntimeError(f"after {training.step}")
