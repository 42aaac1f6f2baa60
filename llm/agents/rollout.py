"""The actor of agents: a slot is a ticket's task, attempted in a group of episodes, each with a
session of its own and driven by the agent, while other groups are in flight.

An episode that fails for what the policy cannot have caused is tried again, and never scored; all
else is scored under the name of its ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from unirl.core.sample import Slot
from unirl.core.seeding import derive_seed
from unirl.core.weights import WeightStore
from unirl.errors import DiscardSlot, Restartable, UniRLError, format_error
from unirl.learners.parallel import Ranks
from unirl.llm.agents.agent import Agent, AgentTask
from unirl.llm.agents.answer import EpisodeEnded, MessagesRefused
from unirl.llm.agents.config import AgentConfig, ProcessReward
from unirl.llm.agents.episode import Episode
from unirl.llm.agents.gathering import CUT, NO_SCORE, Attempt, Gathering, Haste
from unirl.llm.agents.judged import as_completion, paid, said
from unirl.llm.agents.sample import write_episodes
from unirl.llm.agents.session import Session
from unirl.llm.agents.threads import Threads
from unirl.llm.engine import Engine, EngineFailed, SamplingConfig
from unirl.llm.group import GroupShape
from unirl.llm.in_vain import InVain
from unirl.llm.live_engine import LiveEngine
from unirl.llm.outcome import Score
from unirl.llm.rewards.rewards import Rewarder, combine
from unirl.llm.rollout import Answer, RolloutConfig, Visitors
from unirl.llm.sandbox.box import SandboxCounts
from unirl.llm.tasks.prompts import Prompt, PromptSource, Said

log = logging.getLogger(__name__)

REASONS = ("infrastructure", "reward_failed", "zero_variance", "prompt_too_long")
"""Why a group of episodes is discarded."""
_SIGN_OF_LIFE_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.25
"""Before an episode is tried again; the next ones are twice as long each."""
MakeSession = Callable[..., Session]
"""A session, but for its bridge, config and context."""


class Keeper(Protocol):
    """What is given every episode that was scored: a store of trajectories."""

    def keep(
        self,
        slot: Slot | None,
        prompt: Prompt,
        episodes: Sequence[Episode],
        scores: Sequence[Sequence[Score]],
    ) -> None:
        """Must not wait; slot None: of an evaluation."""

    def stats(self) -> Mapping[str, float]:
        """Totals by name, and `queued`: what waits now."""

    async def settled(self) -> None:
        """May wait until what was kept is stored."""

    def close(self) -> None: ...


class AgentRollout:
    """It starts its engine with the first sample. For the rest of its arguments see Rollout.

    make_session: of one episode. agent: drives all of them. haste: None, groups wait for all of
    their episodes. keeper: None, nothing is kept. boxes:
    what its sandboxes count.
    """

    def __init__(
        self,
        engine: Engine,
        weights: WeightStore,
        prompts: PromptSource,
        rewarder: Rewarder,
        config: RolloutConfig,
        sampling: SamplingConfig,
        agent_config: AgentConfig,
        agent: Agent,
        make_session: MakeSession,
        shape: GroupShape,
        *,
        seed: int,
        ranks: Ranks,
        haste: Haste | None = None,
        sleeps: bool = False,
        visitors: Visitors | None = None,
        keeper: Keeper | None = None,
        boxes: SandboxCounts | None = None,
    ) -> None:
        self.prompts, self.sampling = prompts, sampling
        self._rewarder, self._config, self._agent_config = rewarder, config, agent_config
        self._agent, self._make_session, self._shape = agent, make_session, shape
        self._seed, self._ranks, self._visitors, self._keeper = seed, ranks, visitors, keeper
        self._live, self._in_vain = (
            LiveEngine(engine, weights, sleeps),
            InVain(config.give_up_after),
        )
        limit = agent_config.max_episodes
        self._room = asyncio.Semaphore(limit) if limit else contextlib.nullcontext()
        self._process, self._threads = agent_config.load_process(), Threads()
        self._gathering = Gathering(
            config.group_size,
            agent_config.oversample,
            agent_config.quorum,
            lambda: weights.version,
            haste,
        )
        self._complaints: Counter[str] = Counter()
        self.boxes = boxes or SandboxCounts()
        self._reported: Counter[str] = Counter()

    @property
    def engine(self) -> Engine:
        return self._live.engine

    async def produce(self, slot: Slot) -> None:
        if self._visitors is not None:
            await self._visitors.open(self)
        async with self._live.awake():
            await self._live.refresh()
            await self._produce(slot)

    async def answer(
        self, number: int, *, seed: int, deterministic: bool, refresh: bool = True
    ) -> Answer | None:
        """One episode of held-out task `number`, as Rollout.answer; None: its reward failed, or it
        failed by itself each time it was tried.
        """
        sampling = replace(self.sampling, temperature=0.0) if deterministic else self.sampling
        prompt = self.prompts.held_out(number % self.prompts.num_eval)
        own = derive_seed(seed, "evaluation", number)
        async with self._live.awake():
            if refresh:
                await self._live.refresh()
            attempt = await self._attempt(prompt, f"eval.{number}", own, 0, sampling)
        if attempt.episode.ending == "infrastructure":
            return None
        scores = await self._score(prompt, [attempt.episode])
        if self._keeper is not None:
            self._keeper.keep(None, prompt, [attempt.episode], scores)
        reward, valid = combine(scores, self._rewarder.weights)
        return Answer(float(reward[0]), attempt.episode.num_drawn) if valid[0] else None

    async def _produce(self, slot: Slot) -> None:
        number = self._ranks.rank + self._ranks.world_size * slot.pool_ticket
        prompt = self.prompts.prompt(number)
        started = time.monotonic()
        alive = asyncio.create_task(_signs_of_life(slot))
        try:
            attempts, cancelled = await self._gathering.group(partial(self._begin, prompt, number))
            generated = time.monotonic()
            episodes = [attempt.episode for attempt in attempts]
            whole = [attempt.episode for attempt in attempts if attempt.place != CUT]
            scores = await self._score(prompt, whole)
            none = [NO_SCORE] * len(self._rewarder.names)
            scores += [none] * (len(episodes) - len(whole))  # they stand behind the others
            self._judge(scores)
        except DiscardSlot as discard:
            self._in_vain.count(discard.reason)
            raise
        finally:
            alive.cancel()
        self._in_vain.reset()
        counts = counts_of(episodes)
        counts["retried"], counts["cancelled"] = sum(each.retried for each in attempts), cancelled
        counts |= self._news()
        slot.used = write_episodes(slot.data, prompt.tokens, episodes, scores, self._shape, counts)
        versions = [version for each in episodes for version in each.versions]
        self._live.label(slot, versions, started, generated)
        if self._keeper is not None:
            self._keeper.keep(slot, prompt, episodes, scores)
            await self._keeper.settled()

    def _news(self) -> dict[str, float]:
        """What store and sandboxes have counted since the last group; what waits, now."""
        now = {f"sandbox_{name}": value for name, value in vars(self.boxes).items()}
        if self._keeper is not None:
            now |= {f"store_{name}": value for name, value in self._keeper.stats().items()}
        waiting = now.pop("store_queued", 0.0)
        news = {name: value - self._reported[name] for name, value in now.items()}
        self._reported.update(news)
        return {**news, "store_queued": waiting}

    def _begin(self, prompt: Prompt, number: int, place: int) -> Coroutine[None, None, Attempt]:
        seed = derive_seed(self._seed, "episode", number, place)
        return self._attempt(prompt, f"{number}.{place}", seed, place, self.sampling)

    async def _attempt(
        self, prompt: Prompt, key: str, seed: int, place: int, sampling: SamplingConfig
    ) -> Attempt:
        """An episode, tried again where it failed for what the policy cannot have caused. Its
        ending is "infrastructure" where that was so each time. All attempts have one deadline; an
        attempt that reaches it after others have failed is not scored.
        """
        async with self._room:
            ends, retried = time.monotonic() + self._agent_config.episode_seconds, 0
            while True:
                own = derive_seed(seed, "attempt", retried) if retried else seed
                left = ends - time.monotonic()
                episode = await self._episode(prompt, f"{key}.{retried}", own, sampling, left)
                if retried and episode.ending == "time":
                    episode.ending = "infrastructure"
                pause = min(_FIRST_PAUSE_SECONDS * 2**retried, 30.0)
                is_last = retried == self._agent_config.retries
                is_over = episode.ending != "infrastructure" or is_last
                if is_over or time.monotonic() + pause >= ends:
                    return Attempt(episode, place, retried)
                await asyncio.sleep(pause)
                retried += 1

    async def _episode(
        self, prompt: Prompt, key: str, seed: int, sampling: SamplingConfig, seconds: float
    ) -> Episode:
        session = self._make_session(
            key, self.engine.generate, sampling=sampling, seed=seed, prompt=prompt.tokens
        )
        episode, started = session.episode, time.monotonic()
        task = AgentTask(
            prompt.task, prompt.messages, prompt.info, prompt.index, seed, prompt.answer
        )
        try:
            with self._live.drawing():
                async with asyncio.timeout(seconds):
                    episode.ending = await self._agent.run(task, session)
        except EpisodeEnded as ended:
            episode.ending, episode.why = ended.ending, str(ended)
        except TimeoutError as error:
            is_late = time.monotonic() - started >= seconds
            episode.ending, episode.why = "time" if is_late else "crash", format_error(error)
        except MessagesRefused as refused:
            episode.ending, episode.why = "crash", format_error(refused)
        except (UniRLError, EngineFailed):
            raise
        except Restartable as failure:
            episode.ending, episode.why = "infrastructure", format_error(failure)
        except Exception as error:  # the agent's own program
            episode.ending, episode.why = "crash", format_error(error)
        finally:
            session.close()
        if session.failure is not None:
            raise session.failure
        if session.ended is not None and episode.ending in ("stop", "crash"):
            episode.ending, episode.why = session.ended.ending, str(session.ended)
        if episode.ending == "crash" and not episode.turns:
            # It has asked the model nothing: its program does not work, whatever the policy does.
            episode.ending = "infrastructure"
        episode.seconds = time.monotonic() - started
        if episode.ending in ("crash", "infrastructure"):
            self._complain(episode)
        return episode

    async def _score(self, prompt: Prompt, episodes: Sequence[Episode]) -> list[list[Score]]:
        texts = [said(each, self.prompts.decode, self.prompts.decode_token) for each in episodes]
        if self._process is not None:
            texts = await self._paid(self._process, prompt, episodes, texts)
        return await self._rewarder.score_group(
            prompt, texts, [as_completion(each) for each in episodes]
        )

    async def _paid(
        self,
        process: ProcessReward,
        prompt: Prompt,
        episodes: Sequence[Episode],
        texts: Sequence[Said],
    ) -> list[Said]:
        """With step rewards, which are judged in one call of a thread: the event loop is the
        engine's.
        """

        def judge() -> list[Sequence[float | Sequence[float]]]:
            return [process(text.turns, prompt.answer, prompt.info) for text in texts]

        try:
            async with asyncio.timeout(self._agent_config.tool_seconds * len(episodes)):
                found = await self._threads.call(judge)
            return list(map(paid, episodes, texts, found))
        except UniRLError:
            raise
        except Exception as error:
            raise DiscardSlot("reward_failed") from error

    def _judge(self, scores: Sequence[Sequence[Score]]) -> None:
        reward, valid = combine(scores, self._rewarder.weights)
        if not valid.any():
            raise DiscardSlot("reward_failed")
        if self._config.zero_variance == "discard":
            known = reward[valid]
            if known.numel() > 1 and bool((known == known[0]).all()):
                raise DiscardSlot("zero_variance")

    def _complain(self, episode: Episode) -> None:
        """Each reason at its 1st, 10th, 100th ... time."""
        self._complaints[episode.why] += 1
        count = self._complaints[episode.why]
        if str(count).strip("0") == "1":
            log.warning("an episode ended as %s (%d times): %s", episode.ending, count, episode.why)

    async def interrupt(self) -> None:
        """For modes that stop generation at a batch: refused for agents before a run begins."""
        await self.engine.abort()

    def restart(self, seed: int) -> None:
        """An episode depends on its ticket alone."""

    async def close(self) -> None:
        if self._visitors is not None:
            await self._visitors.close()
        await self._gathering.cancel()
        await self._agent.close()
        self._threads.close()
        self._rewarder.close()
        if self._keeper is not None:
            self._keeper.close()
        await self.engine.close()


def counts_of(episodes: Sequence[Episode]) -> dict[str, float]:
    """What EPISODE_COUNTS name, as far as the episodes know it."""
    counts: dict[str, float] = {}
    for episode in episodes:
        counts["turns"] = counts.get("turns", 0) + len(episode.turns)
        for turn in episode.turns:
            for name in ("rewritten", "forked"):
                counts[name] = counts.get(name, 0) + (turn.origin == name)
            counts["model_seconds"] = counts.get("model_seconds", 0) + turn.seconds
            info: Mapping[str, Any] = turn.info
            for name in ("calls", "invalid_calls", "failed_calls", "tool_seconds"):
                counts[name] = counts.get(name, 0) + info.get(name, 0)
    return counts


async def _signs_of_life(slot: Slot) -> None:
    """However long its episodes take, which have deadlines of their own, a group whose event loop
    runs is not taken for stuck.
    """
    while True:
        await asyncio.sleep(_SIGN_OF_LIFE_SECONDS)
        slot.progress()
