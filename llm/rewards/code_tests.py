"""A reward for programs: the tests of the example, run on what the model wrote, in sandboxes.

The tests are `info["tests"]` of the prompt, or its answer: Python that fails by raising (one text
or a list), or a list of {"input": ..., "output": ...} for what a program reads and prints.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from unirl.config.rules import check_setting
from unirl.llm.engine import Completion
from unirl.llm.outcome import Score
from unirl.llm.rewards.reward import failed
from unirl.llm.sandbox.box import SandboxCounts, SandboxFailed
from unirl.llm.sandbox.config import SandboxConfig
from unirl.llm.sandbox.judging import CodeTests, Judged
from unirl.llm.sandbox.levels import make_local, require_local
from unirl.llm.sandbox.pool import LocalSandboxes
from unirl.llm.tasks.prompts import Prompt

_FENCED = re.compile(r"```[ \t]*(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_ATTEMPTS = 2


class CodeTestsReward:
    """1 where all tests pass, else 0. What the program does is always a score; only a sandbox that
    fails, twice, and tests that are none give no score.

    Sandboxes are made with the first program. Belongs to one event loop.
    """

    def __init__(self, config: SandboxConfig, counts: SandboxCounts | None = None) -> None:
        check_setting(
            config.slots >= 2,
            "sandbox.slots",
            config.slots,
            "must be >= 2: tests run in one box, and the program that they call in another",
            "raise it, or leave it out",
        )
        require_local(config)
        self._config, self._counts = config, counts or SandboxCounts()
        self._sandboxes: LocalSandboxes | None = None
        self._tests: CodeTests | None = None
        self._making = asyncio.Lock()

    async def judge(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        tests = given_tests(prompt)
        if tests is None:
            return failed(f"example {prompt.index} of {prompt.task} has no tests")
        why = ""
        for _ in range(_ATTEMPTS):
            try:
                judged = await self._judge(program_of(str(text)), tests)
            except SandboxFailed as error:
                why = str(error)
                continue
            return failed(judged.why) if judged.why else Score(float(all(judged.passed)))
        return failed(why)

    async def _judge(self, program: str, tests: list[Any]) -> Judged:
        async with self._making:
            if self._tests is None:
                self._sandboxes = await make_local(self._config, self._counts)
                self._tests = CodeTests(self._sandboxes)
        seconds = self._config.seconds
        if all(isinstance(test, dict) for test in tests):
            return await self._tests.compare(program, tests, seconds)
        return await self._tests.judge(program, [str(test) for test in tests], seconds)

    def close(self) -> None:
        if self._sandboxes is not None:
            self._sandboxes.end()


def program_of(text: str) -> str:
    """The last fenced block of an answer; where there is none, all of it."""
    blocks = _FENCED.findall(text)
    return str(blocks[-1]) if blocks else text


def given_tests(prompt: Prompt) -> list[Any] | None:
    """None: there are none."""
    tests: Any = prompt.info.get("tests", prompt.answer)
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = [tests] if tests.strip() else []
    if not isinstance(tests, list) or not tests:
        return None
    cases = [isinstance(test, dict) for test in tests]
    if all(cases):
        return tests if all("input" in test and "output" in test for test in tests) else None
    return None if any(cases) else tests
