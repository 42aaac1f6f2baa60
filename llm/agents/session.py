"""A session: the conversations of one episode, as a tree of turns in token space.

Messages lead to a turn by a chain of hashes: a request continues the longest history that is
stored, by the very tokens that were drawn there, and begins a root where none is. So a conversation
that grows is one path, whichever client drives it and however it writes its messages again.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from unirl.core.seeding import derive_seed
from unirl.errors import Restartable, UniRLError
from unirl.llm.agents.answer import Answer, EpisodeEnded, Finish, MessagesRefused
from unirl.llm.agents.bridge import Bridge
from unirl.llm.agents.config import AgentConfig
from unirl.llm.agents.episode import ROOT, Episode, Origin, Turn
from unirl.llm.agents.history import Histories, beginning, hashed
from unirl.llm.agents.tool_calls import (
    MARKS,
    Parsed,
    as_openai,
    canonical,
    parse_answer,
    sorted_json,
)
from unirl.llm.engine import Completion, Request, SamplingConfig
from unirl.llm.tasks.task import Message

Draw = Callable[[Request], Awaitable[Completion]]
Tools = Sequence[Mapping[str, Any]]
Roots = Literal["same", "all"]
"""Which roots are learned from. same: those with the system's turn and the tools of the first, as a
compacted history has; not a title or a summary for the screen. all: sub-agents, too.
"""


@dataclass
class _Asked:
    """A request that was made, and those that wait for its answer."""

    work: asyncio.Future[Answer]
    waiting: int = 0


@dataclass
class _Prompt:
    parent: int
    given: tuple[int, ...]
    tokens: tuple[int, ...]
    messages: tuple[Message, ...]
    origin: Origin
    trained: bool = True
    info: dict[str, Any] = field(default_factory=dict)


class Session:
    """One episode's model. Chats may be made in parallel, on one event loop.

    draw: draws a completion. seed: of this episode. prompt: the group's, which counts towards no
    budget; (): what the first request renders to. context: tokens that the model can look at; 0:
    any number. bridge: shared by sessions of one tokenizer.
    """

    def __init__(
        self,
        id: str,
        draw: Draw,
        bridge: Bridge,
        config: AgentConfig,
        sampling: SamplingConfig,
        *,
        seed: int,
        prompt: Sequence[int] = (),
        context: int = 0,
        roots: Roots = "same",
    ) -> None:
        self.id, self.episode = id, Episode()
        self.counts: Counter[str] = Counter()
        """Requests by origin; replayed: those that repeat another one."""
        self._draw, self._bridge, self._config, self._sampling = draw, bridge, config, sampling
        self._seed, self._prompt, self._context = seed, tuple(prompt), context
        self._roots = roots
        self._first: bytes | None = None
        """Of the first request, its tools and the system's turn."""
        self._histories = Histories()
        self._node: dict[bytes, int] = {}
        """Turns, by the history that ends with their answer."""
        self._learns: list[bool] = []
        """By number of the turn, whether its root is learned from."""
        self._children: Counter[int] = Counter()
        self._asked: dict[bytes, _Asked] = {}
        self._num_asked = self._num_drawing = 0
        self._started = time.monotonic()
        self._works = set[asyncio.Future[Answer]]()
        self._is_closed = False
        self.failure: Exception | None = None
        """Of the engine: whatever the agent made of it, the episode is not to be judged."""
        self.ended: EpisodeEnded | None = None
        """The first budget that was used up."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools = (),
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        sampling: SamplingConfig | None = None,
        is_retry: bool = False,
        is_read: bool = True,
    ) -> Answer:
        """The model's answer. sampling: instead of the run's. is_retry: where the same was asked
        before, that answer is waited for or given again, and nothing is drawn. is_read: False: it
        is context alone until `own` says that somebody has read it, or a request continues it.

        Raises EpisodeEnded where the budget has no room, UniRLError where nothing can be made of
        the messages.
        """
        tools, sampling = tuple(tools), self._limited(sampling, stop, max_tokens)
        chain = self._histories.chain(messages, tools)
        key = hashed(chain[-1], repr(sampling))
        asked = self._asked.get(key)
        replays = is_retry and asked is not None
        if asked is None or not is_retry:
            work = asyncio.ensure_future(
                self._answer(tuple(messages), tools, chain, sampling, is_read)
            )
            asked = self._asked[key] = _Asked(work)
            self._works.add(work)
            work.add_done_callback(self._works.discard)
        else:
            self.counts["replayed"] += 1
        asked.waiting += 1
        try:
            answer = await asyncio.shield(asked.work)
        except BaseException as error:
            # A failure is not repeated: another attempt may do better.
            if self._asked.get(key) is asked and (asked.work.done() or asked.waiting == 1):
                del self._asked[key]
            if isinstance(error, asyncio.CancelledError):
                if asked.work.cancelled() and self._is_closed:
                    raise EpisodeEnded("aborted", "the episode has ended") from None
                if asked.waiting == 1:
                    asked.work.cancel()
            raise
        finally:
            asked.waiting -= 1
        return replace(answer, replayed=True) if replays else answer

    def reward(self, value: float, turn: int = -1) -> None:
        """Step reward of a turn; -1: the last. Several of them add up."""
        turns = self.episode.turns
        if not turns:
            raise UniRLError(
                "a step reward was given before the first turn",
                "it belongs to an answer of the model",
                "call session.chat first",
            )
        turns[turn] = replace(turns[turn], reward=(turns[turn].reward or 0.0) + value)

    def own(self, turn: int) -> None:
        """Somebody has read this turn."""
        one, learns = self.episode.turns[turn], self._learns[turn]
        if one.trained != learns:
            self.episode.turns[turn] = replace(one, trained=learns)

    async def count(self, messages: Sequence[Message], tools: Tools = ()) -> int:
        return len(self._bridge.whole(messages, tools))

    def sampling_with(self, wanted: Mapping[str, float]) -> SamplingConfig:
        return replace(self._sampling, **wanted)  # type: ignore[arg-type]

    def text_of(self, token: int) -> str:
        return str(self._bridge.tokenizer.decode([token]))

    def close(self) -> None:
        """Nothing is drawn any more; requests in flight end, and so does what they wait for."""
        self._is_closed = True
        for work in self._works:
            work.cancel()
        self._asked.clear()

    def prompt_tokens(self, turn: int) -> tuple[int, ...]:
        """What was in the model's context before it drew this turn."""
        last = self.episode.turns[turn]
        return self.episode.tokens(last.parent) + last.given

    def num_given(self, turn: int) -> int:
        """How many these are."""
        turns = [self.episode.turns[each] for each in self.episode.path(turn)]
        drawn = sum(len(each.completion.tokens) for each in turns[:-1])
        return drawn + sum(len(each.given) for each in turns)

    async def _answer(
        self,
        messages: tuple[Message, ...],
        tools: Tools,
        chain: list[bytes],
        sampling: SamplingConfig,
        is_read: bool,
    ) -> Answer:
        if self._is_closed:
            raise EpisodeEnded("aborted", "the episode has ended")
        number, self._num_asked = self._num_asked, self._num_asked + 1
        try:
            self._check_turns()
            prompt = self._prompt_of(messages, tools, chain)
            sampling = self._fitting(prompt, sampling)
        except EpisodeEnded as ended:
            self.ended = self.ended or ended
            raise
        started = time.monotonic()
        self._children[prompt.parent] += 1
        self._num_drawing += 1
        try:
            seed = derive_seed(self._seed, "turn", number)
            request = Request(f"{self.id}.{number}", prompt.tokens, sampling, seed)
            drawn = await self._drawn(replace(request, may_continue=True))
            if self._is_closed:
                raise EpisodeEnded("aborted", "the episode has ended")
        except BaseException as error:
            self._children[prompt.parent] -= 1
            if isinstance(error, UniRLError | Restartable):
                self.failure = self.failure or error
            raise
        finally:
            self._num_drawing -= 1
        turn = len(self.episode.turns)
        text = self._text(drawn.tokens, sampling.stop)
        said = parse_answer(
            text, tools, self._bridge.tokenizer, style=self._config.calls, prefix=f"call_{turn}_"
        )
        message = _message(said)
        self.episode.turns.append(
            Turn(
                parent=prompt.parent,
                given=prompt.given,
                completion=drawn,
                messages=prompt.messages,
                answer=message,
                origin=prompt.origin,
                trained=prompt.trained and is_read,
                started=started - self._started,
                seconds=time.monotonic() - started,
                info=prompt.info,
            )
        )
        self._learns.append(prompt.trained)
        self._node[hashed(chain[-1], sorted_json(canonical(message)))] = turn
        for stop in sampling.stop:  # some clients write again what stopped the answer
            written = {**message, "content": said.content.rstrip() + stop}
            self._node.setdefault(hashed(chain[-1], sorted_json(canonical(written))), turn)
        self.counts[prompt.origin] += 1
        finish: Finish = "length" if drawn.finish == "length" else "stop"
        return Answer(message, "tool_calls" if said.calls else finish, turn, said.errors)

    async def _drawn(self, request: Request) -> Completion:
        found = await self._draw(request)
        while found.finish == "aborted":
            if self._is_closed:
                raise EpisodeEnded("aborted", "the run ended the episode")
            await asyncio.sleep(0)
            found = await self._draw(replace(request, partial=found))
        return found

    def _prompt_of(
        self, messages: tuple[Message, ...], tools: Tools, chain: list[bytes]
    ) -> _Prompt:
        first = beginning(messages, chain)
        if self._first is None:
            self._first = first
        counts = range(len(messages), 0, -1) if self._bridge.thoughts == "sampled" else ()
        for count in counts:
            parent = self._node.get(chain[count])
            if parent is None:
                continue
            path, new = self.episode.tokens(parent), messages[count:]
            given = self._bridge.after(path, new, tools)
            if given is not None:
                for each in self.episode.path(parent):  # what a history holds was read
                    self.own(each)
                return self._extended(parent, path + given, len(path), new)
        tokens = self._bridge.whole(messages, tools)
        if not tokens:
            raise MessagesRefused(
                "the messages are empty",
                "they rendered to 0 tokens, the model needs 1 at least",
                "send a message of the user",
            )
        parent, length = self._stored_prefix(tokens)
        if parent != ROOT:
            return self._extended(parent, tokens, length, messages)
        is_first = not self.episode.turns and not self._children[ROOT]
        if is_first and not self._prompt:
            self._prompt = tokens
        origin: Origin = "prompt" if is_first else "rewritten"
        if not is_first and any(
            turn.parent == ROOT and turn.given == tokens for turn in self.episode.turns
        ):
            origin = "forked"
        trained = self._roots == "all" or first == self._first
        info = {"tools": list(tools)} if tools else {}
        return _Prompt(ROOT, tokens, tokens, messages, origin, trained, info)

    def _extended(
        self, parent: int, tokens: tuple[int, ...], length: int, messages: tuple[Message, ...]
    ) -> _Prompt:
        """By what stands behind the first `length` tokens, which are the parent's path."""
        origin: Origin = "forked" if self._children[parent] else "extended"
        given = tokens[length:]
        return _Prompt(parent, given, tokens, messages, origin, self._learns[parent])

    def _stored_prefix(self, tokens: tuple[int, ...]) -> tuple[int, int]:
        """The turn with the longest path that these tokens begin with, and its length."""
        ends, best = {ROOT: 0}, ROOT
        for number, turn in enumerate(self.episode.turns):
            start = ends.get(turn.parent)
            if start is None:
                continue
            piece = turn.given + turn.completion.tokens
            end = start + len(piece)
            if end < len(tokens) and tokens[start:end] == piece:
                ends[number] = end
                best = number if end > ends[best] else best
        return best, ends[best]

    def _limited(
        self, sampling: SamplingConfig | None, stop: Sequence[str], max_tokens: int | None
    ) -> SamplingConfig:
        own = sampling or self._sampling
        most = own.max_tokens if max_tokens is None else min(own.max_tokens, max(1, max_tokens))
        stops = tuple(dict.fromkeys((*own.stop, *(one for one in stop if one))))
        return replace(own, max_tokens=most, stop=stops)

    def _check_turns(self) -> None:
        most = self._config.max_turns
        if len(self.episode.turns) + self._num_drawing >= most:
            raise EpisodeEnded("max_turns", f"the episode has had its {most} turns")

    def _fitting(self, prompt: _Prompt, sampling: SamplingConfig) -> SamplingConfig:
        """With no more tokens than there is room for behind the prompt."""
        own, have = self._prompt, len(prompt.tokens)
        behind = have - len(own) if prompt.tokens[: len(own)] == own else have
        budgets = [("agent.max_episode_tokens", self._config.max_episode_tokens, behind)]
        if self._context:
            budgets.append(("the model's context", self._context, have))
        for what, limit, used in budgets:
            if used >= limit:
                why = f"the conversation has {used} tokens, {what} is {limit}"
                raise EpisodeEnded("context", why)
        left = min(limit - used for _, limit, used in budgets)
        return replace(sampling, max_tokens=min(sampling.max_tokens, left))

    def _text(self, tokens: Sequence[int], stop: Sequence[str]) -> str:
        """What was said, without end tokens and from before the first stop text."""
        tokenizer = self._bridge.tokenizer
        special = set(tokenizer.all_special_tokens)
        if special.intersection(MARKS):
            kept = [*tokens]
            while kept and kept[-1] in self._bridge.special:
                kept.pop()
            text = str(tokenizer.decode(kept, skip_special_tokens=False))
        else:
            text = str(tokenizer.decode(list(tokens), skip_special_tokens=True))
        ends = [text.find(one) for one in stop if one in text]
        return text[: min(ends)] if ends else text


def _message(said: Parsed) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.thought:
        message["reasoning_content"] = said.thought
    if said.calls:
        message["tool_calls"] = [as_openai(call) for call in said.calls]
    return message
