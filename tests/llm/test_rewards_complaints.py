"""Why a reward gives no scores stands in the log, and does not fill it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests.llm.test_rewards import DONE, OWN, TASK, prompt
from unirl.llm.engine import Completion
from unirl.llm.outcome import Score
from unirl.llm.rewards import complaints
from unirl.llm.rewards.config import RewardConfig
from unirl.llm.rewards.rewards import Rewarder
from unirl.llm.tasks.prompts import Prompt

BROKEN, WORDS = f"{OWN}:broken", f"{OWN}:in_other_words"


class Faulty:
    """A reward with a bug of its own."""

    async def score(
        self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]
    ) -> list[Score]:
        raise ZeroDivisionError("oh")

    def close(self) -> None:
        pass


async def judge(rewarder: Rewarder, *groups: list[str]) -> None:
    for texts in groups:
        await rewarder.score_group(prompt(), texts, [DONE] * len(texts))


def logged(caplog: pytest.LogCaptureFixture, *groups: list[str], **config: Any) -> list[str]:
    rewarder = Rewarder(RewardConfig(**config), [TASK])
    asyncio.run(judge(rewarder, *groups))
    rewarder.close()
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    return [record.getMessage() for record in records]


def test_each_reward_tells_once_why_it_gives_no_score(caplog: pytest.LogCaptureFixture) -> None:
    weights = {BROKEN: 1.0, WORDS: 0.0, "last_number": 1.0}
    lines = logged(caplog, ["a", "b"], ["cc", "ddd"], weights=weights)
    assert sorted(re.sub(r" in \S+:\d+", "", line) for line in lines) == [
        f'reward "{BROKEN}" gives 2 of 2 completions no score: RuntimeError: the scorer is down',
        f"reward \"{WORDS}\" gives 2 of 2 completions no score: ValueError: 'a' has 1 letters",
    ]
    assert all("reward_functions.py:" in line for line in lines)


def test_a_late_score_is_logged_as_well(caplog: pytest.LogCaptureFixture) -> None:
    slow = f"{OWN}:slow"
    lines = logged(caplog, ["0", "9"], weights={slow: 1.0}, timeout_seconds=0.2)
    assert lines == [f'reward "{slow}" gives 1 of 2 completions no score: no result after 0.2 s']


def test_reasons_in_quick_succession_are_logged_one_at_a_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = complaints.Complaints()
    for why in ("it is down", "it is broken"):
        every.log("a", why, 1, 2)
    every.log("b", "it is down", 1, 2)
    assert [line.rpartition(": ")[2] for line in caplog.messages] == ["it is down"] * 2
    monkeypatch.setattr(complaints, "_PAUSE_SECONDS", 0.0)
    for i in range(100):
        every.log("a", "it is broken", 1, 2)
        every.log("a", f"reason {chr(33 + i) * 2}", 1, 2)
    assert len(caplog.messages) <= 2 + complaints.MOST_REASONS
    assert sum("it is broken" in line for line in caplog.messages) == 1


def test_an_error_that_nobody_expected_comes_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rewarder = Rewarder(RewardConfig(weights={"exact": 1.0}), [TASK])
    rewarder.rewards["exact"] = Faulty()
    asyncio.run(judge(rewarder, ["a"]))
    assert "ZeroDivisionError in" in caplog.messages[0]
    assert 'raise ZeroDivisionError("oh")' in caplog.text
