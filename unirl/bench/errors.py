"""What keeps a stage of a plan from being measured."""

from __future__ import annotations

from unirl.core.errors import UniRLError


class Unmeasurable(UniRLError):
    """This stage cannot be told apart in this plan; others can be measured all the same."""

    def __init__(self, what: str) -> None:
        super().__init__(
            what,
            "only unrolls of a unirl.policy.Policy can be taken apart",
            "see how the plan does end to end",
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
