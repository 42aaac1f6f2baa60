"""Held-out prompts answered with given weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from unirl.core.evaluator import EvalResult
from unirl.core.seeding import derive_seed
from unirl.core.weights import Weights
from unirl.errors import UniRLError
from unirl.llm.engine import Engine, Request, SamplingConfig
from unirl.llm.rewards.rewards import Rewarder, combine
from unirl.llm.tasks.prompts import PromptSource

EvalPieces = tuple[Engine, PromptSource, Rewarder]


class LlmEvaluator:
    """An episode is one completion of a held-out prompt, its return the reward.

    make: engine, prompts and rewards, made at the first evaluation. whole: makes all weights of
    what a learner publishes.
    """

    def __init__(
        self,
        seed: int,
        *,
        make: Callable[[], EvalPieces],
        sampling: SamplingConfig,
        whole: Callable[[Weights], Weights],
    ) -> None:
        self._seed, self._make, self._sampling = seed, make, sampling
        self._whole = whole
        self._pieces: EvalPieces | None = None
        self._runner = asyncio.Runner()
        self._version = 0

    def evaluate(
        self, weights: Weights, num_episodes: int, *, deterministic: bool = False
    ) -> EvalResult:
        """Prompts come in their order, and again from the first when they are fewer.
        deterministic: the likeliest token each time. Completions whose reward fails are left out.
        """
        if self._pieces is None:
            self._pieces = self._make()
        prompts = self._pieces[1]
        require_held_out(prompts)
        sampling = replace(self._sampling, temperature=0.0) if deterministic else self._sampling
        self._version += 1
        work = self._evaluate(self._pieces, self._whole(weights), num_episodes, sampling)
        return self._runner.run(work)

    async def _evaluate(
        self,
        pieces: EvalPieces,
        weights: Weights,
        num_episodes: int,
        sampling: SamplingConfig,
    ) -> EvalResult:
        engine, prompts, rewarder = pieces
        await engine.start()
        await engine.load_weights(weights, self._version)

        async def one(i: int) -> tuple[float, int] | None:
            prompt = prompts.held_out(i % prompts.num_eval)
            seed = derive_seed(self._seed, "evaluation", i)
            completion = await engine.generate(Request(f"eval.{i}", prompt.tokens, sampling, seed))
            text = prompts.decode(completion.tokens)
            scores = await rewarder.score_group(prompt, [text], [completion])
            reward, valid = combine(scores, rewarder.weights)
            return (float(reward[0]), len(completion.tokens)) if valid[0] else None

        found = await asyncio.gather(*(one(i) for i in range(num_episodes)))
        known = [each for each in found if each is not None]
        if not known:
            raise UniRLError(
                f"none of {num_episodes} completions could be judged",
                "every reward failed or timed out",
                "look at the log for why",
            )
        return EvalResult([reward for reward, _ in known], [length for _, length in known])

    def close(self) -> None:
        if self._pieces is not None:
            self._pieces[2].close()
            self._runner.run(self._pieces[0].close())
            self._pieces = None
        self._runner.close()


def require_held_out(prompts: PromptSource) -> None:
    if not prompts.num_eval:
        raise UniRLError(
            "there are no held-out prompts",
            "evaluations ask none of those that are trained on, and task.num_eval is 0 or the file "
            "too small",
            "leave task.num_eval out, or set run.eval_steps to 0",
        )
