"""Rewards that compare a text with the answer: at once, in this process."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType

from unirl.llm.engine import Completion
from unirl.llm.outcome import Score
from unirl.llm.rewards.reward import failed
from unirl.llm.tasks.prompts import Prompt

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


class Rule:
    """A reward that is a function of text and answer. Where there is no answer it fails."""

    def __init__(self, rule: Callable[[str, str], float]) -> None:
        self._rule = rule

    async def score(
        self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]
    ) -> list[Score]:
        if not prompt.answer:
            return [failed(f"example {prompt.index} of {prompt.task} has no answer")] * len(texts)
        try:
            return [Score(self._rule(text, prompt.answer)) for text in texts]
        except ValueError as error:  # the answer itself is not what the rule compares
            return [failed(str(error))] * len(texts)

    def close(self) -> None:
        """Nothing to let go of."""


def exact(text: str, answer: str) -> float:
    """1 where text and answer are equal but for white space at the ends."""
    return float(text.strip() == answer.strip())


def last_number(text: str, answer: str) -> float:
    """1 where the last number of the text is that of the answer: 7, 7.0 and 1,000 as 1000.

    Of an answer with its reasoning, as in GSM8K, what follows #### counts. Raises ValueError for an
    answer without a number.
    """
    right = numbers(answer.rpartition("####")[2])
    if not right:
        raise ValueError(f"the answer {answer!r} has no number")
    found = numbers(text)
    return float(bool(found) and found[-1] == right[-1])


def numbers(text: str) -> list[Decimal]:
    """All numbers in a text. A minus sign after a digit is a subtraction."""
    found = []
    for match in _NUMBER.finditer(text):
        word, begin = match.group().replace(",", ""), match.start()
        if word.startswith("-") and begin and (text[begin - 1].isalnum() or text[begin - 1] == ")"):
            word = word[1:]
        found.append(Decimal(word))
    return found


def characters(text: str, answer: str) -> float:
    """The share of equal characters at the same position, but for white space at the ends; what one
    has more than the other counts as wrong. 1 where they are equal.
    """
    said, right = text.strip(), answer.strip()
    longest = max(len(said), len(right))
    return sum(a == b for a, b in zip(said, right, strict=False)) / longest if longest else 1.0


RULES: Mapping[str, Callable[[str, str], float]] = MappingProxyType(
    {"exact": exact, "last_number": last_number, "characters": characters}
)
"""By their name in reward.weights."""
