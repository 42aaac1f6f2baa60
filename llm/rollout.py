"""The actor of language recipes: a slot is a prompt, filled with a group of completions and their
rewards while other groups are in flight.

Aborted completions that are continued: APRIL, arXiv 2509.18521. Discarding groups without spread:
DAPO, arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unirl.config.rules import check_setting
from unirl.core.sample import Slot
from unirl.core.seeding import derive_seed
from unirl.core.weights import Weights, WeightStore
from unirl.errors import DiscardSlot, ReissueSlot, UniRLError
from unirl.learners.parallel import Ranks
from unirl.llm.engine import Completion, Engine, EngineFailed, Request, SamplingConfig
from unirl.llm.group import Score, write_group
from unirl.llm.own_code import load_own
from unirl.llm.rewards.rewards import Rewarder, combine
from unirl.llm.tasks.prompts import Prompt, PromptSource

REASONS = ("reward_failed", "filtered", "zero_variance", "prompt_too_long")
"""Why a rollout discards a group."""

RolloutFunction = Callable[["Rollout", Prompt, Sequence[Request]], Awaitable[list[Completion]]]
"""What generates a group: one completion for each request. The default asks the engine."""
GroupFilter = Callable[[Prompt, Sequence[Completion], Sequence[Sequence[Score]]], bool]
"""Whether a finished group is worth learning from."""


@dataclass(frozen=True)
class RolloutConfig:
    """How groups are made."""

    group_size: int = 8
    """Completions of each prompt. More: a better baseline, fewer prompts for the same work."""
    zero_variance: str = "skip"
    """Groups whose rewards are all equal. skip: they count, and no time is spent on learning
    nothing from them; discard: another prompt replaces them (dynamic sampling); train: they are
    computed all the same, for what the KL or entropy term makes of them.
    """
    function: str = ""
    """module:attr of an own rollout function: see RolloutFunction. "": one request, one answer."""
    filter: str = ""
    """module:attr of an own group filter: see GroupFilter. "": every group is kept."""

    def __post_init__(self) -> None:
        size = self.group_size
        check_setting(size >= 1, "rollout.group_size", size, "must be >= 1", "8 is usual")
        if self.zero_variance not in ("skip", "discard", "train"):
            raise UniRLError(
                f"rollout.zero_variance {self.zero_variance!r} is unknown",
                "known: skip, discard, train",
                "skip costs nothing",
            )

    def load_function(self) -> RolloutFunction:
        """What generates a group. Raises UniRLError where `function` names nothing."""
        loaded: RolloutFunction = self._load("function") or ask_engine
        return loaded

    def load_filter(self) -> GroupFilter | None:
        loaded: GroupFilter | None = self._load("filter")
        return loaded

    def _load(self, key: str) -> Any:
        name = getattr(self, key)
        return load_own(name, f"rollout.{key} {name}") if name else None


class Rollout:
    """It starts its engine with the first sample.

    seed: the run's, so that a completion is a function of seed, ticket and weights, whichever actor
    makes it. ranks: processes that share one order of prompts; ticket n of each asks prompt number
    rank + world_size * n. max_staleness: a partial completion that is older is generated again.
    sleeps: the engine gives its memory back while no sample is in flight.
    """

    def __init__(
        self,
        engine: Engine,
        weights: WeightStore,
        prompts: PromptSource,
        rewarder: Rewarder,
        config: RolloutConfig,
        sampling: SamplingConfig,
        *,
        seed: int,
        ranks: Ranks,
        max_staleness: int,
        sleeps: bool = False,
    ) -> None:
        self.engine, self.prompts, self.sampling = engine, prompts, sampling
        self._weights, self._rewarder, self._config = weights, rewarder, config
        self._seed, self._ranks, self._max_staleness = seed, ranks, max_staleness
        self._function, self._keep = config.load_function(), config.load_filter()
        self._swap = asyncio.Lock()
        self._failure: UniRLError | EngineFailed | None = None
        self._incoming = Incoming()
        self._sleeps, self._num_open = sleeps, 0
        self._num_running = 0
        self._retries = 0.0
        """Of the engine, as far as they are reported."""
        self._kept: dict[int, list[Completion | None]] = {}
        """By number of the prompt, what interrupted groups have so far."""

    async def produce(self, slot: Slot) -> None:
        self._num_open += 1
        try:
            await self._produce(slot)
        finally:
            self._num_open -= 1
            if self._sleeps and self._num_open == 0:
                await self.engine.sleep()

    async def _produce(self, slot: Slot) -> None:
        await self._refresh()
        number = self._ranks.rank + self._ranks.world_size * slot.pool_ticket
        prompt = self.prompts.prompt(number)
        started = time.monotonic()
        self._num_running += 1
        try:
            completions = await self._function(self, prompt, self._requests(number, prompt))
        finally:
            self._num_running -= 1
        generated = time.monotonic()
        if len(completions) != self._config.group_size:
            raise UniRLError(
                f"rollout.function returned {len(completions)} completions",
                f"it was given {self._config.group_size} requests, and each has one completion",
                f"fix {self._config.function or 'it'}",
            )
        if any(one.finish == "aborted" for one in completions):
            self._kept[number] = list(completions)
            raise ReissueSlot
        texts = [self.prompts.decode(one.tokens) for one in completions]
        scores = await self._rewarder.score_group(prompt, texts, completions)
        self._judge(prompt, completions, scores)
        slot.used = write_group(slot.data, prompt.tokens, completions, scores)
        slot.data["generate_seconds"].fill_(generated - started)
        slot.data["reward_seconds"].fill_(time.monotonic() - generated)
        retries = self.engine.stats().get("retries", 0.0)
        slot.data["retries"].fill_(retries - self._retries)
        self._retries = retries
        versions = [version for one in completions for version in one.drawn_versions]
        slot.first_version = min(versions, default=self.engine.version)
        slot.last_version = max(versions, default=self.engine.version)

    async def interrupt(self) -> None:
        """Running completions end as they are, and are continued later."""
        await self.engine.abort()

    def restart(self, seed: int) -> None:
        """What was kept of interrupted groups is dropped, as it is not in a checkpoint; all else
        depends on the ticket alone.
        """
        self._kept.clear()

    async def close(self) -> None:
        self._rewarder.close()
        await self.engine.close()

    def _requests(self, number: int, prompt: Prompt) -> list[Request]:
        kept = self._kept.pop(number, [None] * self._config.group_size)
        oldest = self.engine.version - self._max_staleness
        requests = []
        for i, partial in enumerate(kept):
            if partial is not None and min(partial.drawn_versions, default=oldest) < oldest:
                partial = None
            requests.append(
                Request(
                    id=f"{number}.{i}",
                    prompt=prompt.tokens,
                    sampling=self.sampling,
                    seed=derive_seed(self._seed, "completion", number, i),
                    partial=partial,
                )
            )
        return requests

    def _judge(
        self, prompt: Prompt, completions: Sequence[Completion], scores: Sequence[Sequence[Score]]
    ) -> None:
        reward, valid = combine(scores, self._rewarder.weights)
        if not valid.any():
            raise DiscardSlot("reward_failed")
        if self._keep is not None and not self._keep(prompt, completions, scores):
            raise DiscardSlot("filtered")
        if self._config.zero_variance == "discard":
            known = reward[valid]
            if known.numel() > 1 and bool((known == known[0]).all()):
                raise DiscardSlot("zero_variance")

    async def _refresh(self) -> None:
        """Give the engine the newest weights; completions in flight continue with them."""
        async with self._swap:
            if self._failure is not None:
                raise self._failure
            try:
                await self._bring_up_to_date()
            except (UniRLError, EngineFailed) as error:
                # Others wait to do the same: none shall start a broken engine once more.
                self._failure = error
                raise

    async def _bring_up_to_date(self) -> None:
        await self.engine.start()
        if self._sleeps:
            await self.engine.wake()
        version = self._weights.pull(self._incoming, self.engine.version)
        if version == self.engine.version:
            return
        busy = self._num_running > 0
        if busy:
            await self.engine.pause("keep")
        await self.engine.load_weights(self._incoming.weights, version)
        if busy:
            await self.engine.resume()


async def ask_engine(
    rollout: Rollout, prompt: Prompt, requests: Sequence[Request]
) -> list[Completion]:
    """The default rollout function: what was finished before an interruption stays as it is."""

    async def one(request: Request) -> Completion:
        if request.partial is not None and request.partial.finish != "aborted":
            return request.partial
        return await rollout.engine.generate(request)

    return list(await asyncio.gather(*(one(request) for request in requests)))


class Incoming:
    """Weights on their way from the store to an engine that takes its time: a copy, reused."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Weights) -> None:
        if not self.weights:
            self.weights = {name: value.detach().clone() for name, value in weights.items()}
        else:
            for name, value in weights.items():
                self.weights[name].copy_(value)
