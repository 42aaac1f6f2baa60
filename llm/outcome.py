"""What became of an episode: how it ended, and what a reward says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

SCORE, FAILED, TIMED_OUT, ABSENT = range(4)
"""Outcome codes of one reward; only a score has a value. ABSENT: there was no episode to judge."""
Ending = Literal[
    "stop", "max_turns", "context", "time", "invalid", "crash", "aborted", "infrastructure"
]
"""Why an episode ended. stop: the agent or its world said so. max_turns, context, time: its budget
of turns, of tokens or of seconds. invalid: too many calls that nothing could be made of. crash: the
agent's own program died. These are scored: the policy can have caused them. infrastructure: what it
cannot have caused; tried again, and never a score. aborted: the run ended it, as when the rest of
its group waited for it alone.
"""
ENDINGS: tuple[Ending, ...] = get_args(Ending)
CUT_OFF: frozenset[Ending] = frozenset({"max_turns", "context", "time"})
"""Endings by a budget."""


@dataclass(frozen=True)
class Score:
    """What one reward says of one completion: a value, or why there is none. Never a silent 0."""

    value: float = 0.0
    outcome: int = SCORE
    """SCORE, FAILED, TIMED_OUT or ABSENT."""
    why: str = ""
