"""Tasks that need no data: small sums for models that speak, strings of digits for models from
scratch, people for agents that search.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from unirl.errors import UniRLError
from unirl.llm.tasks.config import TaskConfig
from unirl.llm.tasks.people import questions
from unirl.llm.tasks.task import (
    Example,
    Examples,
    Message,
    Subset,
    Task,
    checked_options,
    question,
    split,
)

CHARACTERS = "0123456789 =:#"
"""All that reverse, copy and count are written with: what a character tokenizer needs."""
_MOST_STRINGS = 100_000


@dataclass(frozen=True)
class DigitStrings:
    """All strings of n digits, or 100 000 of them evenly spread, each made into a question."""

    num_digits: int
    sign: str
    answer: Callable[[str], str]

    def __len__(self) -> int:
        return int(min(10**self.num_digits, _MOST_STRINGS))

    def __getitem__(self, index: int, /) -> Example:
        number = index * 10**self.num_digits // len(self)
        text = f"{number:0{self.num_digits}d}"
        return Example(text=f"{' '.join(text)} {self.sign}", answer=self.answer(text))


@dataclass(frozen=True)
class Products:
    """a*b of all numbers with n digits; `info` has the call of a calculator."""

    num_digits: int
    before: tuple[Message, ...]
    """What stands before each question."""

    def __len__(self) -> int:
        return self._num_numbers * self._num_numbers

    def __getitem__(self, index: int, /) -> Example:
        first = 10 ** (self.num_digits - 1)
        a, b = (first + each for each in divmod(index, self._num_numbers))
        messages = (*self.before, {"role": "user", "content": f"{a}*{b}"})
        return Example(answer=str(a * b), messages=messages, info={"call": f"={a}*{b}"})

    @property
    def _num_numbers(self) -> int:
        return 9 * int(10 ** (self.num_digits - 1))


def built_in_task(name: str, config: TaskConfig) -> Task:
    examples, reward, propose = BUILT_IN[name](name, config)
    train, held_out = split(len(examples), config, name, propose)
    return Task(name, Subset(examples, train), Subset(examples, held_out), reward)


def _arithmetic(name: str, config: TaskConfig) -> tuple[Examples, str, int | None]:
    """What is a + b?, a and b in 0..20: 441 questions."""
    checked_options(name, config, ())
    sums = [question(f"What is {a} + {b}?", str(a + b)) for a in range(21) for b in range(21)]
    return sums, "last_number", 41


def _digits(name: str, config: TaskConfig) -> tuple[Examples, str, int | None]:
    """Sums and products of two digits: 200 questions, 150 of them to train on."""
    checked_options(name, config, ())
    pairs = [(a, b) for a in range(10) for b in range(10)]
    sums = [question(f"What is {a} + {b}?", str(a + b)) for a, b in pairs]
    products = [question(f"What is {a} * {b}?", str(a * b)) for a, b in pairs]
    return sums + products, "last_number", 50


def _products(name: str, config: TaskConfig) -> tuple[Examples, str, int | None]:
    """Before each stand so many shots: products that were worked out with a calculator."""
    digits = _whole(name, config, "digits", "1", 1, 3)
    shots = _whole(name, config, "shots", "0", 0, 8)
    first, last = 10 ** (digits - 1), 10**digits - 1
    before = [one for i in range(shots) for one in _worked_out(first * 4 + i, last - first - i, i)]
    return Products(digits, tuple(before)), "exact", None


def _worked_out(a: int, b: int, number: int) -> list[Message]:
    asked, id = f"{a}*{b}", f"shot_{number}"
    function = {"name": "calculator", "arguments": json.dumps({"expression": asked})}
    call = {"id": id, "type": "function", "function": function}
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]


def _people(name: str, config: TaskConfig) -> tuple[Examples, str, int | None]:
    """Where was the teacher of X born? 400 questions, to be answered with the tool search."""
    checked_options(name, config, ())
    return [question(text, answer) for text, answer in questions()], "exact", 80


def _strings(
    sign: str, answer: Callable[[str], str], name: str, config: TaskConfig
) -> tuple[Examples, str, int | None]:
    """The digits with spaces between them, then the sign; the answer follows."""
    digits = _whole(name, config, "digits", "2", 1, 18)
    return DigitStrings(digits, sign, answer), "characters", None


def _whole(name: str, config: TaskConfig, key: str, default: str, least: int, most: int) -> int:
    known = ("digits", "shots") if name == "products" else ("digits",)
    value = checked_options(name, config, known).get(key, default)
    if not (value.isdecimal() and least <= int(value) <= most):
        raise UniRLError(
            f'task.options.{key} is "{value}"',
            f"it must be a whole number from {least} to {most}",
            f"{default} is the default",
        )
    return int(value)


BUILT_IN: Mapping[str, Callable[[str, TaskConfig], tuple[Examples, str, int | None]]] = (
    MappingProxyType(
        {
            "arithmetic": _arithmetic,
            "digits": _digits,
            "products": _products,
            "people": _people,
            "reverse": partial(_strings, "=", lambda text: text[::-1]),
            "copy": partial(_strings, ":", lambda text: text),
            # How often the first digit occurs.
            "count": partial(_strings, "#", lambda text: str(text.count(text[0]))),
        }
    )
)
"""By name: examples, the reward that judges them, and how many to hold out (None: a tenth)."""
