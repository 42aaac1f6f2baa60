"""Rewards for tests of faults. Each reward worker imports this file: it needs nothing heavy."""

from __future__ import annotations

import os
import time
from pathlib import Path

FOLDER = "UNIRL_TEST_FAULTS"
"""Names, in the environment, a folder that reward workers leave their ids in."""


def known_worker(text: str, answer: str) -> float:
    """The share of right characters; leaves the id of its process in the folder."""
    (Path(os.environ[FOLDER]) / f"reward-{os.getpid()}").touch()
    time.sleep(0.001)
    return sum(a == b for a, b in zip(text, answer, strict=False)) / len(answer)


def hangs_now_and_then(text: str, answer: str, prompt: str) -> float:
    """As known_worker, but on one question in ten it never returns."""
    if prompt.startswith("7"):
        time.sleep(600)
    return known_worker(text, answer)
