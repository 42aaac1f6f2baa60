"""What keeps a stage of a plan from being measured."""

from __future__ import annotations

from pathlib import Path

from unirl.errors import UniRLError


class Unmeasurable(UniRLError):
    """This stage cannot be told apart in this plan; others can be measured all the same."""

    def __init__(self, what: str) -> None:
        super().__init__(
            what,
            "only unrolls of a unirl.policy.Policy can be taken apart",
            "see how the plan does end to end",
        )


def parts_of(error: UniRLError, log: Path) -> tuple[str, ...]:
    """The parts of an error that ended a stage: a benchmark has no run folder, and nothing in it
    can be resumed. log: where the output of the stage is.
    """
    return tuple(
        part.replace("the run's log.txt", str(log)).replace("`unirl resume`", "measure again")
        for part in error.parts
    )


class StageCrashed(Exception):
    """A stage failed unexpectedly in its process; the cause bears its trace."""


class RemoteTrace(Exception):
    """The trace of another process, as text."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        return f"\n{self.text}"
