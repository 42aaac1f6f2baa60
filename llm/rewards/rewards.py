"""All rewards of a run: each judges every completion, side by side, and none disturbs another."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from unirl.errors import UniRLError, format_error, suggestion
from unirl.imports import is_own
from unirl.llm.engine import Completion
from unirl.llm.outcome import SCORE, Score
from unirl.llm.rewards.code import AsyncReward, PooledReward, is_async_function, own_function
from unirl.llm.rewards.code_tests import CodeTestsReward
from unirl.llm.rewards.complaints import Complaints
from unirl.llm.rewards.config import RewardConfig
from unirl.llm.rewards.episodes import OF_EPISODES
from unirl.llm.rewards.judge import JudgeReward
from unirl.llm.rewards.limits import Limits
from unirl.llm.rewards.pool import WorkerPool
from unirl.llm.rewards.reward import OneByOne, Reward, failed
from unirl.llm.rewards.rules import RULES, Rule
from unirl.llm.sandbox.box import SandboxCounts
from unirl.llm.tasks.prompts import Prompt
from unirl.llm.tasks.task import Task

_CHECKS = {"math": "math_equal", "gym": "gym", "regex": "regex"}
_PACKAGES = {"math": ("math_verify", "math-verify"), "gym": ("reasoning_gym", "reasoning-gym")}
KNOWN = ("auto", *RULES, *_CHECKS, *OF_EPISODES, "model", "judge", "code_tests")
"""Names of rewards besides module:function."""


class Rewarder:
    """Judges groups of completions with every reward of a config; R of them, in `names`.

    Raises UniRLError at once for a reward that is unknown or lacks what it needs. Belongs to one
    event loop. Processes start with the first group that needs them.
    """

    def __init__(
        self, config: RewardConfig, tasks: Sequence[Task], counts: SandboxCounts | None = None
    ) -> None:
        self._config, self._counts = config, counts
        weights = config.weight_of
        self.names = tuple(weights)
        """In the order of the scores."""
        self.weights = tuple(weights.values())
        self._own = _rewards_of_tasks(tasks) if "auto" in weights else {}
        needed = [name for name in weights if name != "auto"] + list(self._own.values())
        self._limits = Limits(config.concurrency, config.rate_per_second)
        functions = {name: _function(name) for name in needed if _is_pooled(name)}
        modules = [_PACKAGES[name][0] for name in functions if name in _PACKAGES]
        self._pool = WorkerPool(config.workers, sorted(set(functions.values())), modules)
        self.rewards = {name: self._make(name) for name in dict.fromkeys(needed)}
        """Each that is needed, also those of tasks, by its name."""
        self._in_vain = dict.fromkeys(self.names, 0)
        """Completions in a row without a score of each."""
        self._complaints = Complaints()

    async def score_group(
        self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]
    ) -> list[list[Score]]:
        """G x R scores: of each completion, in the order of `names`. texts: what
        the model wrote itself.

        Raises UniRLError when a reward has given no score for reward.give_up_after completions.
        """
        jobs = [
            asyncio.ensure_future(self._judge(name, prompt, texts, completions))
            for name in self.names
        ]
        try:
            columns = await asyncio.gather(*jobs)
        finally:
            for job in jobs:
                job.cancel()
        return [list(row) for row in zip(*columns, strict=True)]

    @property
    def worker_pids(self) -> list[int]:
        """The processes that judge now; 0 for one that starts."""
        return self._pool.pids

    def close(self) -> None:
        self._pool.close()
        for reward in self.rewards.values():
            reward.close()

    async def _judge(
        self, name: str, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]
    ) -> list[Score]:
        """One reward of a group; whatever happens to it stays its own."""
        unexpected = None
        try:
            reward = self.rewards[self._own[prompt.task] if name == "auto" else name]
            scores = await reward.score(prompt, texts, completions)
            if len(scores) != len(texts):
                raise RuntimeError(f"{len(scores)} scores for {len(texts)} completions")
        except UniRLError:
            raise
        except Exception as error:
            unexpected = error
            scores = [failed(format_error(error))] * len(texts)
        self._count(name, scores, unexpected)
        return scores

    def _count(self, name: str, scores: Sequence[Score], unexpected: Exception | None) -> None:
        """Complain about what has no score; raise UniRLError where there has long been none."""
        for score in scores:
            self._in_vain[name] = 0 if score.outcome == SCORE else self._in_vain[name] + 1
        reasons = [score.why for score in scores if score.outcome != SCORE]
        for why in dict.fromkeys(reasons):
            self._complaints.log(name, why, len(reasons), len(scores), unexpected)
        most, in_vain = self._config.give_up_after, self._in_vain[name]
        if most and in_vain >= most:
            raise UniRLError(
                f'reward "{name}" gives no scores: {reasons[-1]}',
                f"{in_vain} completions in a row without one, reward.give_up_after is {most}",
                "fix it, or raise reward.give_up_after to sit out an outage",
            )

    def _make(self, name: str) -> Reward:
        config = self._config
        if name in RULES:
            return Rule(RULES[name])
        if name in OF_EPISODES:
            return OneByOne(OF_EPISODES[name])
        if name == "judge":
            return OneByOne(JudgeReward(config.judge, config.timeout_seconds, self._limits).judge)
        if name == "model":
            from unirl.llm.rewards.model import ModelReward

            return ModelReward(config)
        if name == "code_tests":
            tests = CodeTestsReward(config.sandbox, self._counts)
            return OneByOne(tests.judge, tests.close)
        if not _is_pooled(name):
            reward = AsyncReward(own_function(name), config.timeout_seconds, self._limits)
            return OneByOne(reward.judge)
        settings = {"pattern": _checked_pattern(config.pattern)} if name == "regex" else {}
        limits = self._limits if is_own(name) else None
        pooled = PooledReward(
            _function(name), self._pool, config.timeout_seconds, settings=settings, limits=limits
        )
        return OneByOne(pooled.judge)


def combine(scores: Sequence[Sequence[Score]], weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The reward of each completion [G], and whether it has one [G, bool]; scores: G x R."""
    value = torch.tensor([[score.value for score in row] for row in scores], dtype=torch.float32)
    outcome = torch.tensor([[score.outcome for score in row] for row in scores])
    return combine_tensors(value, outcome, weights)


def combine_tensors(
    value: Tensor, outcome: Tensor, weights: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """`combine` for values and outcomes [G, R] as a Group holds them.

    A completion has a reward where everything that counts (weight not 0) gave a score; elsewhere
    the reward is 0, and not valid. Raises ValueError when shapes disagree.
    """
    if value.shape != outcome.shape or value.dim() != 2 or value.shape[1] != len(weights):
        raise ValueError(
            f"value {tuple(value.shape)}, outcome {tuple(outcome.shape)} and {len(weights)} "
            "weights: [G, R], [G, R] and R are wanted"
        )
    weight = torch.tensor(weights, dtype=value.dtype, device=value.device)
    scored = outcome == SCORE
    valid = (scored | (weight == 0)).all(dim=1)
    # where, not a product: what stands for a missing value may be NaN.
    total = torch.where(scored, value * weight, 0.0).sum(dim=1)
    return torch.where(valid, total, 0.0), valid


def _rewards_of_tasks(tasks: Sequence[Task]) -> dict[str, str]:
    for task in tasks:
        if not task.reward:
            raise UniRLError(
                f'task "{task.name}" has no reward of its own',
                "reward.weights asks for auto, the task's own, as it does when it is empty",
                "name one, such as reward.weights.exact = 1.0 or reward.weights.math = 1.0",
            )
    return {task.name: task.reward for task in tasks}


def _is_pooled(name: str) -> bool:
    """Whether it runs in worker processes. Raises UniRLError for a name that stands for nothing and
    for a package that is missing.
    """
    if name in _PACKAGES and importlib.util.find_spec(_PACKAGES[name][0]) is None:
        raise UniRLError(
            f'reward "{name}" cannot be given',
            f"the package {_PACKAGES[name][1]} is not installed",
            "pip install 'unirl[llm]'",
        )
    if name in _CHECKS:
        return True
    if is_own(name):
        return not is_async_function(own_function(name))
    if name in KNOWN:
        return False
    raise UniRLError(
        f'reward "{name}" is unknown',
        f"there are {', '.join(KNOWN)} and module:function of your own",
        suggestion(name, KNOWN) or "name one of them in reward.weights",
    )


def _function(name: str) -> str:
    return f"unirl.llm.rewards.checks:{_CHECKS[name]}" if name in _CHECKS else name


def _checked_pattern(pattern: str) -> str:
    try:
        re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UniRLError(
            f"reward.pattern {pattern!r} is no regular expression",
            f"{error}",
            "spell it as Python's re module wants it",
        ) from None
    return pattern
