"""Rewards as users write them, good and bad ones; worker processes import them from here."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any


def length(text: str, num_tokens: int, scale: float = 10.0) -> float:
    """Tokens of a completion, in tens."""
    return num_tokens / scale


def everything(**offered: Any) -> float:
    """How many arguments there are."""
    return float(len(offered))


def equal(text: str, answer: str) -> bool:
    """A truth value, not a number."""
    return text == answer


def by_text(text: str) -> Any:
    """Does what the text says."""
    if text == "hang":
        time.sleep(600)
    if text == "spin":
        while True:
            pass
    if text == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "exit":
        os._exit(7)
    if text == "raise":
        raise ValueError("no such luck")
    if text == "none":
        return None
    if text == "word":
        return "good"
    if text == "nan":
        return float("nan")
    if text.startswith("sleep "):
        time.sleep(float(text.split()[1]))
    return 1.0


def die_once(text: str, info: dict[str, str]) -> float:
    """Kills its process the first time, as the kernel does when memory runs out."""
    if not os.path.exists(info["flag"]):
        with open(info["flag"], "w"):
            os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def leave_a_child(text: str, info: dict[str, str]) -> float:
    """Starts a process that would live on, then hangs."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(info["child"], "w") as file:
        file.write(str(child.pid))
    time.sleep(600)
    return 0.0


async def slow(text: str) -> float:
    """Takes as many seconds as the text says."""
    await asyncio.sleep(float(text))
    return 1.0


async def broken(text: str) -> float:
    """Always fails."""
    raise RuntimeError("the scorer is down")


async def in_other_words(text: str) -> float:
    """Fails for another reason, which has numbers and quotations."""
    raise ValueError(f"{text!r} has {len(text)} letters")


def demanding(text: str, weather: str) -> float:
    """Wants what nobody offers."""
    return 0.0


NOT_A_FUNCTION = 3
