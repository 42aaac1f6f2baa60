from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from unirl.errors import UniRLError
from unirl.llm.engine import Completion
from unirl.llm.outcome import FAILED, SCORE, TIMED_OUT, Score
from unirl.llm.rewards.config import RewardConfig
from unirl.llm.rewards.limits import Limits, within
from unirl.llm.rewards.rewards import Rewarder, combine, combine_tensors
from unirl.llm.rewards.rules import characters, exact, last_number
from unirl.llm.tasks.prompts import Prompt
from unirl.llm.tasks.task import Task, question

OWN = "tests.llm.reward_functions"
DONE = Completion((1, 2, 3), (0.0, 0.0, 0.0), (0, 0, 0), "stop")
TASK = Task("sums", [question("3 + 4?", "7")], [], "last_number")


def prompt(answer: str = "7", task: Task = TASK, **info: Any) -> Prompt:
    turns = ({"role": "user", "content": "3 + 4?"},)
    return Prompt((1,), "3 + 4?", answer, turns, info, task.name, task.reward, 0, 0, 0)


def judged(
    texts: list[str], asked: Prompt | None = None, tasks: tuple[Task, ...] = (TASK,), **config: Any
) -> tuple[list[list[Score]], float]:
    """Scores of one group, and the seconds they took."""
    rewarder = Rewarder(RewardConfig(**config), tasks)

    async def run() -> list[list[Score]]:
        return await rewarder.score_group(asked or prompt(), texts, [DONE] * len(texts))

    began = time.monotonic()
    try:
        return asyncio.run(run()), time.monotonic() - began
    finally:
        rewarder.close()


@pytest.mark.parametrize(
    ("rule", "text", "answer", "value"),
    [
        (exact, " 7\n", "7", 1.0),
        (exact, "7.", "7", 0.0),
        (last_number, "3 + 4 = 7.", "7", 1.0),
        (last_number, "It is 7, not 8", "7", 0.0),
        (last_number, "7.0", "7", 1.0),
        (last_number, "1,000", "1000", 1.0),
        (last_number, "3-4", "4", 1.0),
        (last_number, "the result is -4", "-4", 1.0),
        (last_number, "none", "7", 0.0),
        (last_number, "", "7", 0.0),
        (last_number, "so it is 72", "48/2=24, so 48+24 #### 72", 1.0),
        (characters, " 74", "74", 1.0),
        (characters, "47", "74", 0.0),
        (characters, "7", "74", 0.5),
        (characters, "7474", "74", 0.5),
        (characters, "7 4", "74", 1 / 3),
    ],
)
def test_rules_give_what_they_say(
    rule: Callable[[str, str], float], text: str, answer: str, value: float
) -> None:
    assert rule(text, answer) == value


def test_the_tasks_own_reward_is_used_by_default() -> None:
    other = Task("copy", [question("3?", "33")], [], "characters")
    asked = prompt("33", other)
    scores, _ = judged(["31"], asked, (TASK, other))
    assert scores == [[Score(0.5)]]
    scores, _ = judged(["= 7"], None, (TASK, other))
    assert scores == [[Score(1.0)]]


def test_a_missing_answer_is_a_failure_and_never_a_zero() -> None:
    for name in ("exact", "last_number", "characters"):
        scores, _ = judged(["7", "8"], prompt(""), weights={name: 1.0})
        assert [row[0].outcome for row in scores] == [FAILED, FAILED]
        assert "has no answer" in scores[0][0].why
    scores, _ = judged(["7"], prompt("seven"), weights={"last_number": 1.0})
    assert scores[0][0].outcome == FAILED and "no number" in scores[0][0].why


def test_several_rewards_judge_side_by_side_and_only_those_with_weight_count() -> None:
    weights = {"last_number": 1.0, "exact": 0.5, f"{OWN}:broken": 0.0}
    scores, _ = judged(["so 7", "7"], weights=weights)
    assert [[score.outcome for score in row] for row in scores] == [[SCORE, SCORE, FAILED]] * 2
    reward, valid = combine(scores, list(weights.values()))
    assert reward.tolist() == [1.0, 1.5] and valid.tolist() == [True, True]
    assert "reward_functions.py:" in scores[0][2].why
    assert "the scorer is down" in scores[0][2].why


def test_a_completion_without_a_score_that_counts_has_no_reward() -> None:
    late = Score(outcome=TIMED_OUT)
    reward, valid = combine([[Score(1.0), Score(1.0)], [Score(1.0), late]], [1.0, 1.0])
    assert reward.tolist() == [2.0, 0.0] and valid.tolist() == [True, False]
    value = torch.tensor([[1.0, math.nan]])
    outcome = torch.tensor([[SCORE, FAILED]], dtype=torch.int8)
    assert combine_tensors(value, outcome, [1.0, 0.0])[0].tolist() == [1.0]
    assert combine_tensors(value, outcome, [1.0, 1.0])[0].tolist() == [0.0]
    with pytest.raises(ValueError, match="are wanted"):
        combine_tensors(value, outcome, [1.0])


def test_slow_async_functions_time_out_alone() -> None:
    config = {"weights": {f"{OWN}:slow": 1.0}, "timeout_seconds": 0.3}
    scores, seconds = judged(["0", "30", "0.01"], **config)
    assert [row[0].outcome for row in scores] == [SCORE, TIMED_OUT, SCORE]
    assert scores[1][0].why == "no result after 0.3 s"
    assert 0.3 <= seconds < 5


def test_async_functions_run_side_by_side_up_to_the_limit() -> None:
    loop_seconds = []
    for concurrency in (10, 1):
        config = {"weights": {f"{OWN}:slow": 1.0}, "concurrency": concurrency}
        loop_seconds.append(judged(["0.1"] * 10, **config)[1])
    assert loop_seconds[1] >= 1.0 and loop_seconds[1] > 1.5 * loop_seconds[0]


def test_no_more_calls_start_per_second_than_allowed() -> None:
    config = {"weights": {f"{OWN}:slow": 1.0}, "rate_per_second": 20.0, "timeout_seconds": 0.2}
    scores, seconds = judged(["0"] * 11, **config)
    # Ten pauses of 50 ms; waiting for a turn is not held against the call.
    assert {row[0].outcome for row in scores} == {SCORE}
    assert 0.5 <= seconds < 5


@pytest.mark.parametrize("seconds", [0.0, 0.1], ids=["is there", "is near"])
def test_a_result_is_never_lost_to_a_blocked_event_loop(seconds: float) -> None:
    async def answers(there: asyncio.Event) -> str:
        await there.wait()
        await asyncio.sleep(seconds)
        return "in time"

    async def whole() -> str:
        there = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, there.set)
        # The loop is held up across the answer and the deadline.
        loop.call_later(0.01, time.sleep, 0.4)
        return await within(answers(there), 0.2)

    assert asyncio.run(whole()) == "in time"


def test_what_ignores_its_cancellation_does_not_hold_up_the_rest() -> None:
    async def stubborn(until: float, over: asyncio.Event) -> None:
        while time.monotonic() < until and not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.02)

    async def whole() -> float:
        began, over = time.monotonic(), asyncio.Event()
        with pytest.raises(TimeoutError):
            await within(stubborn(began + 30.0, over), 0.05)
        over.set()
        return time.monotonic() - began

    assert asyncio.run(whole()) < 10.0


def test_a_reward_that_never_scores_ends_the_run() -> None:
    with pytest.raises(UniRLError, match="the scorer is down") as caught:
        judged(["a"] * 8, weights={f"{OWN}:broken": 1.0}, give_up_after=8)
    assert "8 completions in a row" in str(caught.value)
    scores, _ = judged(["a"] * 8, weights={f"{OWN}:broken": 1.0}, give_up_after=9)
    assert {row[0].outcome for row in scores} == {FAILED}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"weights": {"exakt": 1.0}}, 'did you mean "exact"'),
        ({"weights": {f"{OWN}:nothing": 1.0}}, 'has no attribute "nothing"'),
        ({"weights": {"no.such.module:score": 1.0}}, 'no module "no"'),
        ({"weights": {f"{OWN}:NOT_A_FUNCTION": 1.0}}, "found int"),
        ({"weights": {f"{OWN}:demanding": 1.0}}, 'has an argument "weather"'),
        ({"weights": {"math:dict.get": 1.0}}, "does not exist|without a signature"),
        ({"weights": {"exact": 0.0}}, "no reward counts"),
        ({"weights": {"exact": math.inf}}, "must be finite"),
        ({"weights": {"regex": 1.0}}, "lacks its pattern"),
        ({"weights": {"regex": 1.0}, "pattern": "("}, "no regular expression"),
        ({"weights": {"model": 1.0}}, "lacks its model"),
        ({"weights": {"judge": 1.0}}, "no one to ask"),
        ({"timeout_seconds": 0.0}, "timeout_seconds is 0"),
        ({"workers": 0}, "workers is 0"),
        ({"workers": 65}, "must be <= 64"),
        ({"rate_per_second": -1.0}, "rate_per_second is -1"),
    ],
)
def test_what_cannot_be_is_refused_in_three_parts(config: dict[str, Any], what: str) -> None:
    with pytest.raises(UniRLError, match=what) as caught:
        Rewarder(RewardConfig(**config), [TASK])
    assert len(caught.value.parts) == 3


def test_a_task_without_reward_is_refused_unless_one_is_named() -> None:
    bare = Task("mine", [question("Why?", "So.")], [])
    with pytest.raises(UniRLError, match='task "mine" has no reward') as caught:
        Rewarder(RewardConfig(), [TASK, bare])
    assert "reward.weights.exact" in str(caught.value)
    Rewarder(RewardConfig(weights={"exact": 1.0}), [bare]).close()


def test_a_call_that_failed_counts_no_longer_towards_the_limit() -> None:
    async def whole() -> int:
        limits = Limits(1)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                async with limits.call():
                    raise ZeroDivisionError
        async with limits.call():
            return 1

    assert asyncio.run(whole()) == 1
