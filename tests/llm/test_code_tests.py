"""The reward of programs by their tests, and that a program cannot forge it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.llm.boxes import CONFINED, hold, python_for
from unirl.errors import UniRLError
from unirl.llm.engine import Completion
from unirl.llm.outcome import FAILED, SCORE, Score
from unirl.llm.rewards.code_tests import CodeTestsReward, given_tests, program_of
from unirl.llm.rewards.config import RewardConfig
from unirl.llm.rewards.rewards import Rewarder
from unirl.llm.sandbox.config import LevelName, SandboxConfig
from unirl.llm.sandbox.judging import CodeTests
from unirl.llm.sandbox.levels import make_sandboxes
from unirl.llm.tasks.prompts import Prompt

DRAWN = Completion((1,), (0.0,), (0,), "stop")


def prompt(tests: Any = None, answer: str = "") -> Prompt:
    info: Mapping[str, Any] = {} if tests is None else {"tests": tests}
    return Prompt(
        task="t", index=0, text="", messages=(), tokens=(1,), answer=answer, info=info,
        reward="", epoch=0, ticket=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeTestsReward]:
    config = SandboxConfig(seconds=1.0, python=python_for("auto"))
    try:
        asyncio.run(make_sandboxes(config)).end()
    except UniRLError as error:
        pytest.skip(f"this machine has no sandboxes: {error}")
    made = CodeTestsReward(config)
    yield made
    made.close()


def score(runner: asyncio.Runner, reward: CodeTestsReward, text: str, tests: Any) -> Score:
    return runner.run(reward.judge(prompt(tests), text, DRAWN))


GOOD = """
from collections import Counter
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def __len__(self): return len(self.items)
def add(a, b): return a + b
def sort(items): items.sort()
def pairs(n): return {(i, i + 1): {i} for i in range(n)}
def fail(): raise KeyError("k")
def twice(f): return f
LIMIT = 7
"""
TESTS = [
    "assert add(1, 2) == 3 and add('a', 'b') == 'ab' and add((1,), (2,)) == (1, 2)",
    "items = [3, 1, 2]\nsort(items)\nassert items == [1, 2, 3]",
    "assert pairs(2) == {(0, 1): {0}, (1, 2): {1}} and LIMIT == 7",
    "stack = Stack()\nstack.push(4)\nassert len(stack) == 1 and stack.items == [4]",
    "try:\n    fail()\n    assert False\nexcept KeyError:\n    pass",
]


def test_a_program_that_passes_all_its_tests_scores_1(
    runner: asyncio.Runner, reward: CodeTestsReward
) -> None:
    fenced = f"Thus:\n```python\n{GOOD}```\nDone."
    assert score(runner, reward, fenced, TESTS) == Score(1.0)
    assert score(runner, reward, GOOD, [*TESTS, "assert add(1, 1) == 3"]) == Score(0.0)
    assert score(runner, reward, "I cannot do that.", TESTS) == Score(0.0)
    cases = [{"input": "2 3\n", "output": "5\n"}, {"input": "1 1", "output": "2"}]
    sums = "print(sum(map(int, input().split())))"
    assert score(runner, reward, sums, cases) == Score(1.0)
    assert score(runner, reward, "print(5)", cases) == Score(0.0)
    assert score(runner, reward, f"import sys\nprint('e', file=sys.stderr)\n{sums}", cases).value
    long = [{"input": "", "output": "x" * 100_000}]
    assert score(runner, reward, "print('x' * 100_000)", long) == Score(1.0)
    assert score(runner, reward, GOOD, ["assert LIMIT == 7"] * 1500) == Score(1.0)


@pytest.mark.parametrize("level", CONFINED)
def test_every_level_judges(level: LevelName) -> None:
    for held in hold(level, slots=2, seconds=5.0):
        tests = CodeTests(held.sandboxes)
        assert all(held.run(tests.judge(GOOD, TESTS, 5.0)).passed)
        assert held.run(tests.judge("def add(a, b): return 4", TESTS[:1], 5.0)).passed == (False,)


def test_one_box_is_too_few() -> None:
    with pytest.raises(UniRLError, match="slots"):
        CodeTestsReward(SandboxConfig(slots=1))


ONE_TEST = "for i in range(1, 4):\n    assert abs(add(i, 2) - i - 2) < 0.5 and add(1, 2) == 3"
FORGERIES = {
    "range": "def range(*given): return []\ndef add(a, b): return 0",
    "abs": "abs = lambda x: 0\ndef add(a, b): return 3",
    "equal to all": """
class All:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
def add(a, b): return All()
""",
    "equal numbers": """
class All(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def add(a, b): return All(0)
""",
    "printed": "print('passed'); print('[\"\", 0, true]'); import os; os._exit(0)",
    "written": """
import os
for fd in range(3, 64):
    for line in (b'["", 0, true]\\n', b'{"value": 3, "args": []}\\n'):
        try: os.write(fd, line)
        except OSError: pass
""",
    "tests changed": """
import builtins, sys, gc
builtins.AssertionError = KeyboardInterrupt
builtins.exec = lambda *a: None
for each in gc.get_objects():
    if isinstance(each, list) and each and isinstance(each[0], str) and 'assert' in each[0]:
        each[0] = 'pass'
for name in ("main.py", "test.py", "tests.py", "conftest.py"):
    open(name, "w").write("pass")
def add(a, b): return 4
""",
    "judge killed": """
import os, signal
for pid in range(1, 400):
    if pid != os.getpid():
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
""",
    "ended": "raise SystemExit(0)",
    "hung": "def add(a, b):\n    while True: pass",
    "answers of its own": """
import json, socket, os
own = socket.socket(fileno=os.dup(3)).makefile("rwb")
own.write(json.dumps({"add": {"kind": "object", "items": 0}}).encode() + b"\\n"); own.flush()
own.readline()
own.write(b'{"value": {"kind": "eval", "items": "3"}, "args": []}\\n'); own.flush()
import time; time.sleep(60)
""",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_reward_cannot_be_forged(
    name: str, runner: asyncio.Runner, reward: CodeTestsReward
) -> None:
    given = score(runner, reward, FORGERIES[name], [ONE_TEST])
    assert given == Score(0.0)  # and not a failure: this is what the policy did
    assert score(runner, reward, GOOD, TESTS[:1]) == Score(1.0)


def test_bad_tests_are_no_score(runner: asyncio.Runner, reward: CodeTestsReward) -> None:
    for tests in (
        None,
        [],
        "",
        ["assert ("],
        [{"input": "1"}],
        ["pass", {"input": "", "output": ""}],
    ):
        given = score(runner, reward, GOOD, tests)
        assert given.outcome == FAILED and given.why, tests


def test_what_is_taken_of_an_answer_and_of_an_example() -> None:
    assert program_of("a\n```python\nx = 1\n```\nb\n```\ny = 2\n```") == "y = 2\n"
    assert program_of("x = 1") == "x = 1"
    assert given_tests(prompt(answer="assert f(1)")) == ["assert f(1)"]
    assert given_tests(prompt(answer='["assert f(1)", "assert f(2)"]')) == [
        "assert f(1)",
        "assert f(2)",
    ]


@pytest.mark.usefixtures("reward")
def test_a_run_is_given_it_by_its_name(runner: asyncio.Runner) -> None:
    sandbox = SandboxConfig(python=python_for("auto"))
    rewarder = Rewarder(RewardConfig(weights={"code_tests": 1.0}, sandbox=sandbox), [])
    try:
        texts = [GOOD, "def add(a, b): return 0"]
        scores = runner.run(rewarder.score_group(prompt(TESTS[:1]), texts, [DRAWN] * 2))
        assert [row[0].value for row in scores] == [1.0, 0.0]
        assert all(row[0].outcome == SCORE for row in scores)
    finally:
        rewarder.close()
