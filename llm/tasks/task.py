"""Tasks: questions with their answers, by index; some to train on, others held out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from unirl.core.seeding import derive_seed
from unirl.errors import UniRLError, suggestion
from unirl.llm.tasks.config import TaskConfig

Message: TypeAlias = Mapping[str, Any]
"""One turn of a conversation: role and content."""
Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
MOST_HELD_OUT = 200
"""Examples held out of a task that proposes no number itself, if it is large."""


@dataclass(frozen=True)
class Example:
    """One question: messages for a chat template, or a plain text to be continued."""

    answer: str = ""
    """The right answer; "" where no reward needs one."""
    messages: tuple[Message, ...] = ()
    text: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    """What else rewards may want to know: values that JSON can hold."""


class Examples(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Example: ...


@dataclass(frozen=True)
class Task:
    name: str
    train: Examples
    held_out: Examples
    reward: str = ""
    """Name of the reward that judges it by default; "": it has none."""


@dataclass(frozen=True)
class Subset:
    """Some of the examples of another sequence, in this order."""

    examples: Examples
    indices: Indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int, /) -> Example:
        return self.examples[int(self.indices[index])]


def question(text: str, answer: str) -> Example:
    return Example(answer=answer, messages=({"role": "user", "content": text},))


def split(size: int, config: TaskConfig, task: str, propose: int | None = None) -> tuple[Any, Any]:
    """Indices of [0, size) to train on and those held out: disjoint, and a function of the size and
    the two counts alone. Raises UniRLError when either would be empty.
    """
    asked = config.num_eval
    if asked is None:
        asked = propose if propose is not None else min(MOST_HELD_OUT, size // 10)
    # Raw bits of a counter-based generator, sorted: the order is the same with every numpy.
    order = permutation(derive_seed("held out"), size)
    if asked >= size:
        raise empty_split(task, "train", size, config)
    held_out, train = order[:asked], order[asked:]
    if config.num_train is not None:
        if config.num_train > len(train):
            raise UniRLError(
                f'task "{task}" has {size} examples',
                f"task.num_train + held out <= examples: {config.num_train} + {asked} > {size}",
                f"lower task.num_train to {len(train)}, or leave it out",
            )
        train = train[: config.num_train]
    return np.sort(train), np.sort(held_out)


def permutation(seed: int, size: int) -> Indices:
    """An order of [0, size) that depends on the seed alone, never on the version of numpy."""
    raw = np.random.Philox(key=seed).random_raw(size)
    return np.argsort(raw, kind="stable")


def checked_options(task: str, config: TaskConfig, known: Sequence[str]) -> dict[str, str]:
    """The options of a task; UniRLError for one it does not know. In a mix, options for all need
    not concern each.
    """
    options = config.options_of(task)
    for key in options:
        alone = len(config.weights) == 1 or f"{task}/{key}" in config.options
        if key not in known and alone:
            raise UniRLError(
                f'task "{task}" has no option "{key}"',
                f"it has {', '.join(known) or 'none'}",
                suggestion(key, known) or f"remove task.options.{key}",
            )
    return {key: value for key, value in options.items() if key in known}


def empty_split(task: str, name: str, size: int, config: TaskConfig) -> UniRLError:
    return UniRLError(
        f'task "{task}" has no examples in its split "{name}"',
        f"1 at least is needed; it has {size} in all, task.num_eval is {config.num_eval}",
        "lower task.num_eval, or give it more data",
    )
