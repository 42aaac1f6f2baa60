"""What environments said when they were asked, kept for the time of one command: making one may
take seconds, and several parts of a command ask the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

from unirl.envs.config import EnvConfig

T = TypeVar("T")
Answers: TypeAlias = dict[tuple[str, str], Any]

_KEPT: ContextVar[Answers | None] = ContextVar("unirl_env_answers", default=None)


@contextmanager
def answers_kept(answers: Answers) -> Iterator[None]:
    """In this block what was asked once is taken from `answers`, and what is new is put there."""
    token = _KEPT.set(answers)
    try:
        yield
    finally:
        _KEPT.reset(token)


def asked_once(question: str, config: EnvConfig, ask: Callable[[], T]) -> T:
    """What was answered before, or what `ask` returns; what it raises is not kept."""
    answers = _KEPT.get()
    if answers is None:
        return ask()
    key = (question, repr(config))
    if key not in answers:
        answers[key] = ask()
    found: T = answers[key]
    return found
