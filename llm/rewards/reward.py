"""What every reward is: it judges the completions of one prompt, and says so where it cannot."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from unirl.llm.engine import Completion
from unirl.llm.outcome import FAILED, TIMED_OUT, Score
from unirl.llm.tasks.prompts import Prompt

_WHY_CHARACTERS = 500


class Reward(Protocol):
    """Judges completions. Raises UniRLError for what no repetition fixes; whatever else goes wrong
    is said in the scores.
    """

    async def score(
        self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]
    ) -> list[Score]:
        """One score for each completion, in their order. texts: what the model wrote itself, each a
        `Said` where tools or users spoke as well.
        """

    def close(self) -> None:
        """Release processes and memory; idempotent."""


class OneByOne:
    """A reward that judges each completion by a call of its own, all of a group side by side."""

    def __init__(
        self,
        judge: Callable[[Prompt, str, Completion], Awaitable[Score]],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._judge, self._close = judge, close

    async def score(
        self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]
    ) -> list[Score]:
        pairs = zip(texts, completions, strict=True)
        return list(await asyncio.gather(*(self._judge(prompt, text, one) for text, one in pairs)))

    def close(self) -> None:
        self._close()


def failed(why: str) -> Score:
    return Score(outcome=FAILED, why=why[:_WHY_CHARACTERS])


def timed_out(why: str) -> Score:
    return Score(outcome=TIMED_OUT, why=why[:_WHY_CHARACTERS])


def as_score(value: Any) -> Score:
    """What a function returned: a finite number (or true, false) is a value, anything else a
    failure.
    """
    try:
        number = float(value) if not isinstance(value, str | bytes) else math.nan
    except (TypeError, ValueError):
        return failed(f"it returned {value!r}, which is no number")
    if not math.isfinite(number):
        return failed(f"it returned {value!r}, which is no finite number")
    return Score(number)
