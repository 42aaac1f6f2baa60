"""Rewards in processes of their own: real ones, killed and hung for real."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.llm.test_rewards import DONE, OWN, TASK, prompt
from unirl.errors import UniRLError
from unirl.llm.outcome import FAILED, SCORE, TIMED_OUT, Score
from unirl.llm.rewards.config import RewardConfig
from unirl.llm.rewards.rewards import Rewarder
from unirl.llm.tasks.prompts import Prompt

BY_TEXT = f"{OWN}:by_text"


@contextlib.contextmanager
def rewards(weights: dict[str, float], **config: Any) -> Iterator[Rewarder]:
    rewarder = Rewarder(RewardConfig(weights=weights, **config), [TASK])
    try:
        yield rewarder
    finally:
        rewarder.close()
        assert rewarder.worker_pids == []


def replaced(caplog: pytest.LogCaptureFixture) -> int:
    """How many of them were replaced so far."""
    return sum("it is replaced" in line for line in caplog.messages)


@pytest.fixture(autouse=True)
def tells_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


async def column(rewarder: Rewarder, texts: list[str], asked: Prompt | None = None) -> list[Score]:
    rows = await rewarder.score_group(asked or prompt(), texts, [DONE] * len(texts))
    return [row[0] for row in rows]


def gone(pid: int, seconds: float = 10.0) -> bool:
    """Whether a process ends in time; a zombie has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_functions_get_what_they_name_and_return_what_they_like() -> None:
    with rewards({f"{OWN}:{name}": 1.0 for name in ("length", "everything", "equal")}) as rewarder:
        rows = asyncio.run(rewarder.score_group(prompt(), ["7", "8"], [DONE] * 2))
    assert [[score.value for score in row] for row in rows] == [[0.3, 12.0, 1.0], [0.3, 12.0, 0.0]]


def test_bad_results_and_errors_are_failures_with_their_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with rewards({BY_TEXT: 1.0}) as rewarder:
        texts = ["raise", "none", "word", "nan", "fine"]
        scores = asyncio.run(column(rewarder, texts))
    assert [score.outcome for score in scores] == [FAILED] * 4 + [SCORE]
    reasons = [
        ": no such luck",
        "None, which is no number",
        "'good'",
        "no finite number",
    ]
    assert all(why in score.why for why, score in zip(reasons, scores[:4], strict=True))
    assert "ValueError in" in scores[0].why and "reward_functions.py:" in scores[0].why
    assert replaced(caplog) == 0


@pytest.mark.parametrize("how", ["hang", "spin"])
def test_a_hung_function_loses_its_own_sample_alone(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def whole(rewarder: Rewarder) -> tuple[list[Score], list[Score]]:
        return (
            await column(rewarder, ["a", how, "b", how, "c", "d"]),
            await column(rewarder, ["a", "b"]),
        )

    with rewards({BY_TEXT: 1.0}, timeout_seconds=1.0) as rewarder:
        first, second = asyncio.run(whole(rewarder))
        assert replaced(caplog) == 2
    wanted = [SCORE, TIMED_OUT, SCORE, TIMED_OUT, SCORE, SCORE]
    assert [score.outcome for score in first] == wanted
    assert "killed" in first[1].why
    assert [score.outcome for score in second] == [SCORE, SCORE]


def test_a_function_that_kills_its_process_fails_with_the_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with rewards({BY_TEXT: 1.0}, workers=1) as rewarder:
        scores = asyncio.run(column(rewarder, ["a", "die", "b", "exit", "c"]))
        # Each was tried twice.
        assert replaced(caplog) == 4
    assert [score.outcome for score in scores] == [SCORE, FAILED, SCORE, FAILED, SCORE]
    assert "SIGKILL" in scores[1].why and "exit code 7" in scores[3].why


def test_a_sample_whose_process_was_killed_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with rewards({f"{OWN}:die_once": 1.0}) as rewarder:
        asked = prompt(flag=str(tmp_path / "flag"))
        scores = asyncio.run(column(rewarder, ["a"], asked))
        assert scores == [Score(1.0)] and replaced(caplog) == 1


def test_kill_9_from_outside_at_any_moment_loses_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def whole(rewarder: Rewarder) -> list[Score]:
        job = asyncio.ensure_future(column(rewarder, ["sleep 0.05"] * 40))
        for _ in range(3):
            await asyncio.sleep(0.3)
            for pid in rewarder.worker_pids[:1]:
                if pid and not job.done():
                    os.kill(pid, signal.SIGKILL)
        return await job

    with rewards({BY_TEXT: 1.0}) as rewarder:
        scores = asyncio.run(whole(rewarder))
        assert replaced(caplog) >= 1
    assert {score.outcome for score in scores} == {SCORE}


def test_a_blocked_event_loop_makes_no_false_timeouts() -> None:
    async def whole(rewarder: Rewarder) -> list[Score]:
        await column(rewarder, ["a"])  # the process is there
        job = asyncio.ensure_future(column(rewarder, ["sleep 0.1"]))
        await asyncio.sleep(0.05)
        time.sleep(1.0)  # as an engine that computes in this very thread
        return await job

    with rewards({BY_TEXT: 1.0}, timeout_seconds=0.5, workers=1) as rewarder:
        assert asyncio.run(whole(rewarder)) == [Score(1.0)]


def test_a_cancelled_group_leaves_no_process_in_doubt() -> None:
    async def whole(rewarder: Rewarder) -> list[Score]:
        await column(rewarder, ["a"])
        job = asyncio.ensure_future(column(rewarder, ["sleep 0.2"]))
        await asyncio.sleep(0.1)
        job.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await job
        # Were the process used again, this would get the answer of the one before.
        return await column(rewarder, ["raise", "a"])

    with rewards({BY_TEXT: 1.0}, workers=1) as rewarder:
        scores = asyncio.run(whole(rewarder))
    assert [score.outcome for score in scores] == [FAILED, SCORE]


def test_closing_ends_all_processes_even_hung_ones() -> None:
    async def whole(rewarder: Rewarder) -> list[int]:
        job = asyncio.ensure_future(column(rewarder, ["hang", "hang"]))
        while len([pid for pid in rewarder.worker_pids if pid]) < 2:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)
        pids = rewarder.worker_pids
        rewarder.close()
        rewarder.close()
        scores = await job
        assert {score.outcome for score in scores} == {FAILED}
        return pids

    with rewards({BY_TEXT: 1.0}, timeout_seconds=60.0) as rewarder:
        assert all(gone(pid) for pid in asyncio.run(whole(rewarder)))


def test_what_a_hung_function_started_is_killed_with_it(tmp_path: Path) -> None:
    child = tmp_path / "child"
    with rewards({f"{OWN}:leave_a_child": 1.0}, timeout_seconds=2.0) as rewarder:
        scores = asyncio.run(column(rewarder, ["a"], prompt(child=str(child))))
    assert scores[0].outcome == TIMED_OUT
    assert gone(int(child.read_text()))


_PARENT = f"""
import asyncio, sys
from tests.llm.test_rewards import DONE, TASK, prompt
from unirl.llm.rewards.config import RewardConfig
from unirl.llm.rewards.rewards import Rewarder

async def main():
    rewarder = Rewarder(RewardConfig(weights={{"{BY_TEXT}": 1.0}}, timeout_seconds=600.0), [TASK])
    job = asyncio.ensure_future(rewarder.score_group(prompt(), ["hang", "spin"], [DONE] * 2))
    while len([pid for pid in rewarder.worker_pids if pid]) < 2:
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.5)
    print(*rewarder.worker_pids, flush=True)
    await job

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_no_process_outlives_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    environ = os.environ | {"PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env=environ, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_patterns_that_never_end_time_out() -> None:
    with rewards({"regex": 1.0}, pattern=r"^(a+)+$", timeout_seconds=1.0) as rewarder:
        scores = asyncio.run(column(rewarder, ["aaa", "b", "a" * 60 + "b"]))
    assert [score.outcome for score in scores] == [SCORE, SCORE, TIMED_OUT]
    assert [score.value for score in scores[:2]] == [1.0, 0.0]


def test_mathematics_is_compared_by_its_meaning_and_may_not_take_forever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("math_verify", reason="compares the expressions")
    cases = [
        ("so the answer is $\\boxed{0.5}$", "\\frac{1}{2}", Score(1.0)),
        ("The answer is 72", "48/2=24 #### 72", Score(1.0)),
        ("The answer is 71", "72", Score(0.0)),
        ("I do not know", "72", Score(0.0)),
        ("$x^2 + 2x + 1$", "$(x+1)^2$", Score(1.0)),
        ("$7$", "", None),
        ("$\\boxed{9^{9^{9^{9}}}}$", "7", None),
        ("$\\boxed{7}$", "7", Score(1.0)),
    ]
    with rewards({"math": 1.0}, workers=1, timeout_seconds=3.0) as rewarder:

        async def whole() -> list[Score]:
            return [(await column(rewarder, [text], prompt(gold)))[0] for text, gold, _ in cases]

        scores = asyncio.run(whole())
        assert replaced(caplog) == 1
    assert [score if score.outcome == SCORE else None for score in scores] == [
        score for _, _, score in cases
    ]
    assert scores[5].outcome == FAILED and "no mathematics" in scores[5].why
    assert scores[6].outcome == TIMED_OUT


def test_puzzles_are_judged_by_their_own_scorer() -> None:
    pytest.importorskip("reasoning_gym", reason="makes and judges the puzzles")
    from unirl.llm.tasks.config import TaskConfig
    from unirl.llm.tasks.make import make_tasks

    task = make_tasks(TaskConfig(name="gym:chain_sum", num_train=10, num_eval=2))[0]
    example = task.train[3]
    asked = prompt(example.answer, task, **example.info)
    rewarder = Rewarder(RewardConfig(workers=1), [task])
    right = example.answer
    wrong = str(int(right) + 1)
    texts = [f"<answer>{right}</answer> or 5", f"So it is {right}.", f"{right}? {wrong}", "Oh"]
    try:
        scores = asyncio.run(column(rewarder, texts, asked))
    finally:
        rewarder.close()
    assert [score.outcome for score in scores] == [SCORE] * 4
    assert [score.value for score in scores[:2]] == [1.0, 1.0]
    assert max(score.value for score in scores[2:]) < 0.1


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    present: Callable[..., Any] = importlib.util.find_spec
    hidden = ("math_verify", "reasoning_gym")
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in hidden else present(name)
    )
    for name in ("math", "gym"):
        with pytest.raises(UniRLError, match=r"pip install 'unirl\[llm\]'"):
            Rewarder(RewardConfig(weights={name: 1.0}), [TASK])


def test_workers_start_where_a_fork_server_has_been_running_before() -> None:
    """It has not loaded what they run, and is their parent all the same."""
    program = f"""
import asyncio
from unirl.supervision.fork_server import process_context
process_context(1)
from tests.llm.test_rewards_workers import column, rewards
with rewards({{"{BY_TEXT}": 1.0}}, workers=1) as rewarder:
    print(asyncio.run(column(rewarder, ["a"]))[0].outcome)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.strip() == str(SCORE), done.stderr
