"""What a session answers, and how it says that it does not any more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from unirl.errors import UniRLError
from unirl.llm.outcome import Ending

Finish = Literal["stop", "length", "tool_calls"]


class EpisodeEnded(Exception):
    """A request that the episode's budget has no room for."""

    def __init__(self, ending: Ending, why: str) -> None:
        self.ending, self.why = ending, why
        super().__init__(why)


@dataclass(frozen=True)
class Answer:
    message: dict[str, Any]
    """As OpenAI's API has it: role, content, tool_calls, reasoning_content."""
    finish: Finish
    turn: int
    """Its number in the episode."""
    errors: tuple[str, ...] = ()
    """Of each call that nothing can be made of: a sentence for the model."""
    replayed: bool = False
    """Whether it was drawn for an earlier request that this one repeats."""


class MessagesRefused(UniRLError):
    """Nothing can be made of the messages of a request: the agent that sent them did wrong."""
