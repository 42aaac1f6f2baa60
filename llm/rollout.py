"""The actor of language recipes: a slot is a prompt, filled with a group of completions and their
rewards while other groups are in flight.

Aborted completions that are continued: APRIL, arXiv 2509.18521. Discarding groups without spread:
DAPO, arXiv 2503.14476, section 3.2.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from unirl.config.rules import check_at_least, check_setting
from unirl.core.sample import Slot
from unirl.core.seeding import derive_seed
from unirl.core.weights import WeightStore
from unirl.errors import DiscardSlot, ReissueSlot, UniRLError
from unirl.imports import load_own
from unirl.learners.parallel import Ranks
from unirl.llm.engine import Completion, Engine, Request, SamplingConfig
from unirl.llm.function_run import FunctionRun, FunctionRuns
from unirl.llm.group import write_group
from unirl.llm.group_saver import GroupSaver
from unirl.llm.in_vain import InVain
from unirl.llm.live_engine import LiveEngine
from unirl.llm.outcome import Score
from unirl.llm.rewards.rewards import Rewarder, combine
from unirl.llm.tasks.prompts import Prompt, PromptSource

log = logging.getLogger(__name__)

REASONS = ("reward_failed", "filtered", "zero_variance", "prompt_too_long")
"""Why a rollout discards a group."""

RolloutFunction = Callable[["Rollout", Prompt, Sequence[Request]], Awaitable[list[Completion]]]
"""What generates a group: one completion for each request, drawn as the request says. The default
asks the engine. Evaluations call it too, with one request, and `Rollout.sampling` is theirs then.
`Rollout.generate` returns whole completions, however often the engine is interrupted meanwhile.
"""
_SIGN_OF_LIFE_SECONDS = 1.0
GroupFilter = Callable[[Prompt, Sequence[Completion], Sequence[Sequence[Score]]], bool]
"""Whether a finished group is worth learning from."""


@dataclass(frozen=True)
class RolloutConfig:
    """How groups are made."""

    group_size: int = field(default=8, metadata={"common": True})
    """Completions of each prompt. More: a better baseline, fewer prompts for the same work."""
    zero_variance: str = "skip"
    """Groups whose rewards are all equal. skip: they count, and no time is spent on learning
    nothing from them; discard: another prompt replaces them (dynamic sampling); train: they are
    computed all the same, for what the KL or entropy term makes of them.
    """
    function: str = ""
    """module:attr of an own rollout function: see RolloutFunction. "": one request, one answer."""
    save_seconds: float = 1.0
    """How often completions in flight are saved, so that another engine can continue them when
    theirs dies; where engines have processes of their own, and without `function`. 0: never.
    """
    filter: str = ""
    """module:attr of an own group filter: see GroupFilter. "": every group is kept."""
    give_up_after: int = 512
    """Groups in a row of which nothing is learned, because they are discarded or masked, at which
    the run ends. More: sits out a longer drought. 0: it never does.
    """

    def __post_init__(self) -> None:
        size = self.group_size
        check_setting(size >= 1, "rollout.group_size", size, "must be >= 1", "8 is usual")
        check_at_least(0, "rollout", self, "give_up_after", "save_seconds")
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


class Answer(NamedTuple):
    """A held-out prompt answered."""

    reward: float
    length: int


class Answering(Protocol):
    """What answers held-out prompts: Rollout, and AgentRollout."""

    prompts: PromptSource

    @property
    def engine(self) -> Engine: ...

    async def answer(
        self, number: int, *, seed: int, deterministic: bool, refresh: bool = True
    ) -> Answer | None: ...

    async def close(self) -> None: ...


class Visitors(Protocol):
    """Who else uses a rollout's engine: evaluations."""

    async def open(self, rollout: Answering) -> None:
        """They may come from now on; idempotent."""

    async def close(self) -> None:
        """No more."""


class Rollout:
    """It starts its engine with the first sample.

    seed: the run's, so that a completion is a function of seed, ticket and weights, whichever actor
    makes it. ranks: processes that share one order of prompts; ticket n of each asks prompt number
    rank + world_size * n. max_staleness: a partial completion that is older is generated again.
    sleeps: the engine gives its memory back while no sample is in flight. visitors: they may come
    from the first sample on. saves: groups in flight are saved for other engines.
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
        visitors: Visitors | None = None,
        saves: bool = False,
    ) -> None:
        self.prompts, self.sampling = prompts, sampling
        self._rewarder, self._config = rewarder, config
        self._seed, self._ranks, self._max_staleness = seed, ranks, max_staleness
        self._function, self._keep = config.load_function(), config.load_filter()
        self._live, self._in_vain = (
            LiveEngine(engine, weights, sleeps),
            InVain(config.give_up_after),
        )
        self._visitors = visitors
        self._save_seconds = config.save_seconds if saves and not config.function else 0.0
        self._kept: dict[int, Sequence[Completion | None]] = {}
        """By number of the prompt, what interrupted groups have so far."""
        self._slots: dict[str, tuple[Slot, GroupSaver]] = {}
        """By id of a request, the slot that its group is for."""
        self._runs = FunctionRuns()
        self._run: FunctionRun | None = None
        """Of the view that an own function has."""

    @property
    def engine(self) -> Engine:
        return self._live.engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        """Before the first sample: another one than it was made with."""
        self._live.engine = engine

    async def produce(self, slot: Slot) -> None:
        if self._visitors is not None:
            await self._visitors.open(self)
        async with self._live.awake():
            await self._live.refresh()
            await self._produce(slot)

    async def answer(
        self, number: int, *, seed: int, deterministic: bool, refresh: bool = True
    ) -> Answer | None:
        """Held-out prompt number, and again from the first when there are fewer, answered with the
        newest weights, as the rollout function does it; None: its reward failed. deterministic: the
        likeliest token each time. refresh: False where the engine has the right weights.
        """
        view = copy.copy(self)
        if deterministic:
            view.sampling = replace(self.sampling, temperature=0.0)
        prompt = self.prompts.held_out(number % self.prompts.num_eval)
        own = derive_seed(seed, "evaluation", number)
        request = Request(
            f"eval.{number}",
            prompt.tokens,
            view.sampling,
            own,
            may_continue=bool(self._config.function),
        )
        async with self._live.awake():
            if refresh:
                await self._live.refresh()
            found = await self._generate(view, prompt, [request])
            while found[0].finish == "aborted":  # by an interruption that was meant for groups
                found = await self._generate(view, prompt, [replace(request, partial=found[0])])
        scores = await self._score(prompt, found)
        reward, valid = combine(scores, self._rewarder.weights)
        return Answer(float(reward[0]), len(found[0].tokens)) if valid[0] else None

    async def _produce(self, slot: Slot) -> None:
        number = self._ranks.rank + self._ranks.world_size * slot.pool_ticket
        prompt = self.prompts.prompt(number)
        saver = GroupSaver(
            self.engine,
            slot,
            prompt.tokens,
            self._save_seconds,
            lambda: len(self._slots) // self._config.group_size,
        )
        requests = self._requests(number, prompt, saver.saved())
        self._slots.update((request.id, (slot, saver)) for request in requests)
        started = time.monotonic()
        saver.start(requests)
        try:
            completions = await self._generate(self, prompt, requests, number)
        finally:
            for request in requests:
                del self._slots[request.id]
            saver.close()
        generated = time.monotonic()
        if any(one.finish == "aborted" for one in completions):
            self._kept[number] = list(completions)
            raise ReissueSlot
        scores = await self._score(prompt, completions)
        try:
            self._judge(prompt, completions, scores)
        except DiscardSlot as discard:
            self._in_vain.count(discard.reason)
            raise
        self._in_vain.reset()
        saver.forget()
        slot.used = write_group(slot.data, prompt.tokens, completions, scores)
        versions = [version for one in completions for version in one.drawn_versions]
        self._live.label(slot, versions, started, generated)

    async def generate(self, request: Request) -> Completion:
        """Engine.generate. However long it takes, the group is not taken for stuck meanwhile: an
        engine that hangs raises by itself. What a rollout function does elsewhere must end within
        runner.hang_seconds.
        """
        if self._run is not None:
            return await self._run.generate(self._draw, request)
        return await self._draw(request)

    async def _draw(self, request: Request) -> Completion:
        work = asyncio.ensure_future(self.engine.generate(request))
        try:
            while not (await asyncio.wait({work}, timeout=_SIGN_OF_LIFE_SECONDS))[0]:
                if request.id in self._slots:
                    self._slots[request.id][0].progress()
            if request.id in self._slots:
                self._slots[request.id][1].end(request, work.result())
            return work.result()
        finally:
            work.cancel()

    async def interrupt(self) -> None:
        """Running completions end as they are, and are continued later."""
        self._runs.halt()
        await self.engine.abort()

    def restart(self, seed: int) -> None:
        """What was kept of interrupted groups is dropped, as it is not in a checkpoint; all else
        depends on the ticket alone.
        """
        self._kept.clear()
        self._runs.cancel()

    async def close(self) -> None:
        if self._visitors is not None:
            await self._visitors.close()
        self._runs.cancel()
        self._rewarder.close()
        await self.engine.close()

    async def _generate(
        self,
        view: Rollout,
        prompt: Prompt,
        requests: Sequence[Request],
        number: int | None = None,
    ) -> list[Completion]:
        """view: the rollout as its function sees it. number: of the group's prompt, if it is to be
        learned from.
        """
        with self._live.drawing():
            if self._config.function:
                completions = await self._run_function(view, prompt, requests, number)
            else:
                completions = await self._function(view, prompt, requests)
        if len(completions) != len(requests):
            raise UniRLError(
                f"rollout.function returned {len(completions)} completions",
                f"it was given {len(requests)} requests, and each has one completion",
                f"fix {self._config.function or 'it'}",
            )
        return completions

    async def _run_function(
        self, view: Rollout, prompt: Prompt, requests: Sequence[Request], number: int | None
    ) -> list[Completion]:
        """Raises ReissueSlot where it is interrupted: the next call for the group continues it."""

        def begin() -> FunctionRun:
            own = copy.copy(view)
            own._run = FunctionRun(lambda: self._function(own, prompt, requests))
            return own._run

        if number is None:
            run = begin()
            while (found := await run.result()) is None:
                log.debug("an evaluation continues: groups were to be interrupted")
            return found
        oldest = self.engine.version - self._max_staleness
        found = await self._runs.result(number, begin, oldest)
        if found is None:
            raise ReissueSlot
        return found

    async def _score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[list[Score]]:
        texts = [self.prompts.said(one) for one in completions]
        return await self._rewarder.score_group(prompt, texts, completions)

    def _requests(
        self, number: int, prompt: Prompt, saved: Sequence[Completion | None] | None
    ) -> list[Request]:
        """saved: what another engine had of the group when it was lost."""
        if saved is not None:
            have = sum(len(one.tokens) for one in saved if one is not None)
            log.info("prompt %d is continued with %d tokens of a lost engine", number, have)
        nothing: list[Completion | None] = [None] * self._config.group_size
        kept = self._kept.pop(number, saved or nothing)
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
                    may_continue=bool(self._config.function),
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


async def ask_engine(
    rollout: Rollout, prompt: Prompt, requests: Sequence[Request]
) -> list[Completion]:
    """The default rollout function: what was finished before an interruption stays as it is."""

    async def one(request: Request) -> Completion:
        if request.partial is not None and request.partial.finish != "aborted":
            return request.partial
        return await rollout.generate(request)

    return list(await asyncio.gather(*(one(request) for request in requests)))
