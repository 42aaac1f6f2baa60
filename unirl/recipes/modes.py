"""How generation and learning of a language recipe go together: what each mode makes of the queue
and the runner, and which settings contradict it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from unirl.core.queue import QueueConfig
from unirl.errors import UniRLError
from unirl.runners.config import RunnerConfig

Mode = Literal["sync", "colocated", "partial", "one-step-off", "async"]
_OPEN = ("partial", "async")
"""Modes in which completions may be of different ages."""


@dataclass(frozen=True)
class ModeQueue(QueueConfig):
    """How many groups may be in flight, and in which order they are learned."""

    # Wider than the parent's, so that a default differs from a choice; `queue_of` narrows it before
    # a queue is made.
    max_staleness: int | None = None  # type: ignore[assignment]
    """How many updates old a completion may be; async and partial leave a choice, of 1 or more.
    More: generation and learning wait less for each other. none: as the mode has it, 1 in these.
    """


@dataclass(frozen=True)
class ModeRunner(RunnerConfig):
    """Where engine and learner run."""

    # As above: `runner_of` narrows it.
    kind: Literal["auto", "inline", "processes", "ray"] = field(  # type: ignore[assignment]
        default="auto", metadata={"common": True}
    )
    """inline: one process, turn by turn, reproducible bit for bit. processes: the engine has a
    process of its own. ray: so has each, on the machines of a Ray cluster. auto: inline where
    engine and learner take turns, else processes.
    """
    # Generation is what is waited for, and rewards have deadlines on the clock.
    actor_niceness: int = 0
    """Processes only: how much the engine's process and those it starts give way to the learner, as
    `nice` counts: 0 to 19.
    """


def queue_of(mode: Mode, queue: ModeQueue) -> QueueConfig:
    """The queue with what the mode decides. Raises UniRLError where other values are set."""
    age = queue.max_staleness
    if mode in _OPEN:
        if age == 0:
            raise UniRLError(
                f"mode {mode} with queue.max_staleness 0",
                "completions in flight are at least 1 update old when they end",
                "set queue.max_staleness to 1 or more, or mode to sync",
            )
        if mode == "partial" and queue.window is not None:
            raise UniRLError(
                f"mode partial with queue.window {queue.window}",
                "a batch is whatever is finished first, and a window would wait for the others",
                "leave queue.window out, or set mode to async",
            )
        return replace(queue, max_staleness=age or 1)
    decided = 1 if mode == "one-step-off" else 0
    if age not in (None, decided):
        raise UniRLError(
            f"mode {mode} with queue.max_staleness {age}",
            f"in this mode it is {decided}: "
            + (
                "the next batch is made during an update"
                if decided
                else "engine and learner take turns"
            ),
            'set queue.max_staleness to "none", or mode to async',
        )
    if mode != "one-step-off":
        return replace(queue, max_staleness=decided)
    if queue.window not in (None, 1):
        raise UniRLError(
            f"mode one-step-off with queue.window {queue.window}",
            "batches are learned in the order in which they were begun, which is a window of 1",
            "leave queue.window out, or set mode to async",
        )
    return replace(queue, max_staleness=decided, window=1)


def runner_of(mode: Mode, runner: ModeRunner) -> RunnerConfig:
    """The runner with what the mode decides. Raises UniRLError where another one is set."""
    overlaps = mode in ("one-step-off", "async")
    if overlaps and runner.kind == "inline":
        raise UniRLError(
            f"mode {mode} with runner.kind inline",
            "it generates while it learns, and one process that takes turns cannot do both",
            "leave runner.kind out, or set mode to sync",
        )
    if mode == "partial" and runner.kind in ("processes", "ray"):
        raise UniRLError(
            f"mode partial with runner.kind {runner.kind}",
            "an engine in a process of its own is not interrupted: it continues while others learn",
            "leave runner.kind out, or set mode to async",
        )
    if runner.kind != "auto":
        return runner
    return replace(runner, kind="processes" if overlaps else "inline")
