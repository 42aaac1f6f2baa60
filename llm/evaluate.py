"""Held-out prompts answered with given weights: by the run's own engine, or by one of this
process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from unirl.core.evaluator import EvalResult
from unirl.core.weights import Loadable, Weights
from unirl.errors import UniRLError
from unirl.llm.evaluation_link import EvaluationLink
from unirl.llm.rollout import Answer, Answering
from unirl.llm.tasks.prompts import PromptSource


class LlmEvaluator:
    """An episode is one completion of a held-out prompt, its return the reward.

    make: a rollout of this process, made at the first evaluation that needs it. whole: makes all
    weights of what a learner publishes. link: to the engines of a run, where they shall answer.
    """

    def __init__(
        self,
        seed: int,
        *,
        make: Callable[[], Answering],
        whole: Callable[[Weights], Weights],
        link: EvaluationLink | None = None,
    ) -> None:
        self._seed, self._make, self._whole, self._link = seed, make, whole, link
        self._rollout: Answering | None = None
        self._runner = asyncio.Runner()
        self._version = 0

    def evaluate(
        self, weights: Weights, num_episodes: int, *, deterministic: bool = False
    ) -> EvalResult:
        """Prompts come in their order, and again from the first when they are fewer.
        deterministic: the likeliest token each time. Completions whose reward fails are left out.
        A run's engines answer with the weights that were published last.
        """
        found = None
        if self._link is not None:
            found = self._link.ask(num_episodes, seed=self._seed, deterministic=deterministic)
        if found is None:
            found = self._runner.run(self._evaluate(weights, num_episodes, deterministic))
        known = [each for each in found if each is not None]
        if not known:
            raise UniRLError(
                f"none of {num_episodes} completions could be judged",
                "every reward failed or timed out",
                "look at the log for why",
            )
        return EvalResult([each.reward for each in known], [each.length for each in known])

    async def _evaluate(
        self, weights: Weights, num_episodes: int, deterministic: bool
    ) -> Sequence[Answer | None]:
        if self._rollout is None:
            self._rollout = self._make()
        rollout = self._rollout
        require_held_out(rollout.prompts)
        self._version += 1
        await rollout.engine.start()
        await rollout.engine.load_weights(self._whole(weights), self._version)
        return await asyncio.gather(
            *(
                rollout.answer(i, seed=self._seed, deterministic=deterministic, refresh=False)
                for i in range(num_episodes)
            )
        )

    def close(self) -> None:
        if self._rollout is not None:
            self._runner.run(self._rollout.close())
            self._rollout = None
        self._runner.close()


class NoStore:
    """The weights of a rollout that is given them directly."""

    version = -1
    lends = False

    def publish(self, weights: Weights, version: int) -> None:
        """Nobody pulls."""

    def pull(self, into: Loadable, have: int) -> int:
        return have


def require_held_out(prompts: PromptSource) -> None:
    if not prompts.num_eval:
        raise UniRLError(
            "there are no held-out prompts",
            "evaluations ask none of those that are trained on, and task.num_eval is 0 or the file "
            "too small",
            "leave task.num_eval out, or set run.eval_steps to 0",
        )
