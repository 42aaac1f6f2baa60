"""Environments and tools of a user's own, as the tests name them."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal


class Guess:
    def __init__(self, most: int = 9) -> None:
        self.most = most

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        self.number = random.Random(seed).randint(1, self.most)
        return f"Guess my number from 1 to {self.most}."

    def step(self, text: str) -> tuple[str, float, bool]:
        if text == "raise":
            raise ValueError("out of order")
        if text == "exit":
            sys.exit(3)
        if text == "hang":
            time.sleep(30)
        right = text.strip() == str(self.number)
        return ("Right." if right else "Wrong."), float(right), right


class AsyncGuess:
    tools = (
        {
            "type": "function",
            "function": {"name": "guess", "description": "", "parameters": {"type": "object"}},
        },
    )

    async def reset(self, task: Mapping[str, Any], seed: int) -> list[dict[str, str]]:
        return [{"role": "system", "content": str(task["answer"])}]

    async def step(self, text: str) -> tuple[str, None, bool, bool]:
        return text, None, False, True

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, int, bool]:
        return f"{name} {arguments['number']}", 2, True


class Nonsense:
    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        return ""

    def step(self, text: str) -> str:
        return text


def weather(
    town: Annotated[str, "where"],
    days: int = 1,
    unit: Literal["C", "F"] = "C",
    *,
    deep: bool = False,
) -> dict[str, Any]:
    """Say the weather.

    It is always the same.

    Args:
        days: How many
            of them.
    """
    return {"town": town, "days": days, "unit": unit}


async def fails(what: str) -> str:
    """Fail."""
    raise RuntimeError(what)


def hangs() -> None:
    time.sleep(30)


def shout(text: str) -> str:
    return text * 1000


def untyped(a) -> None:  # type: ignore[no-untyped-def]
    """No type, on purpose."""


def odd(a: complex) -> None:
    """A type that JSON has not."""


class Shop:
    """A basket for each episode."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._basket: list[str] = [str(task.get("answer"))]

    def add(self, thing: str, times: list[int] | None = None) -> int:
        """Put a thing into the basket."""
        self._basket.append(thing)
        return len(self._basket)

    async def show(self) -> list[str]:
        return self._basket
