"""Rewards that may take long for some texts, and so run in worker processes: mathematics, puzzles,
patterns.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from unirl.llm.rewards.rules import numbers
from unirl.llm.tasks.gym import dataset

_PLAIN_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def math_equal(text: str, answer: str) -> float:
    """1 where a text ends in an expression that equals the answer, by math-verify: 1/2 and 0.5.

    What follows #### in an answer counts, as in GSM8K. Raises ValueError for an answer that is no
    mathematics.
    """
    from math_verify import parse, verify

    # It warns that it has no time limit; this process has one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Its own time limits are off: they are alarms, and hide what they interrupt as a wrong answer.
    right = _gold(answer.rpartition("####")[2].strip())
    said = parse(text, parsing_timeout=None)
    return float(verify(list(right), said, timeout_seconds=None))


@lru_cache(maxsize=4096)
def _gold(answer: str) -> tuple[Any, ...]:
    from math_verify import parse

    for spelled in (answer, f"${answer}$"):
        right = parse(spelled, parsing_timeout=None)
        # The last entry may be the text itself, which is what is left where parsing failed.
        if any(not isinstance(one, str) for one in right):
            return tuple(right)
    raise ValueError(f"the answer {answer!r} is no mathematics")


def gym(text: str, answer: str, info: Mapping[str, Any]) -> float:
    """What reasoning-gym gives a text: what stands in <answer> tags if there are any; of a text
    without them its last number, where the answer is one.
    """
    origin = info["gym"]
    puzzles = dataset(origin["name"], json.dumps(origin["settings"]), origin["size"])
    tagged = _ANSWER.findall(text)
    if tagged:
        said = tagged[-1].strip()
    elif _PLAIN_NUMBER.fullmatch(answer.strip()) and (found := numbers(text)):
        # As the answer spells it: the scorers of many puzzles compare letter by letter.
        said = answer if found[-1] == numbers(answer)[0] else str(found[-1])
    else:
        said = text.strip()
    return float(puzzles.score_answer(said, puzzles[origin["index"]]))


def regex(text: str, pattern: str) -> float:
    return float(re.search(pattern, text, re.DOTALL) is not None)
