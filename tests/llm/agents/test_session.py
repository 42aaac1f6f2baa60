"""Sessions: each request extends a stored path by the very tokens drawn there, or begins a root."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers", reason="language models need the extra llm")

from tests.llm.agents.chat_tokenizer import chat_model, chat_tokenizer
from unirl.llm.agents.answer import EpisodeEnded
from unirl.llm.agents.bridge import Bridge
from unirl.llm.agents.config import AgentConfig
from unirl.llm.agents.episode import ROOT
from unirl.llm.agents.session import Session
from unirl.llm.engine import Completion, Request, SamplingConfig
from unirl.llm.engines.hf.engine import HfEngine

TOKENIZER = chat_tokenizer()
END = TOKENIZER.eos_token_id
ASK = [{"role": "system", "content": "you are an agent"}, {"role": "user", "content": "12 and 30?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}}}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": "\\u00e9"}}\n</tool_call>'
ROOMY = AgentConfig(max_turns=1000, max_episode_tokens=100_000)


class Script:
    """Draws these texts, in tokens that no encoder would choose, and keeps what it was asked."""

    def __init__(self, *texts: str, tokenizer: Any = TOKENIZER, ends: bool = True) -> None:
        self.texts, self.tokenizer, self.ends = list(texts), tokenizer, ends
        self.requests: list[Request] = []

    async def __call__(self, request: Request) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(0)
        text = self.texts.pop(0)
        tokens = [
            token
            for letter in text
            for token in self.tokenizer.encode(letter, add_special_tokens=False)
        ]
        tokens += [END] * self.ends
        count = len(tokens)
        return Completion(tuple(tokens), (-1.0,) * count, (0,) * count, "stop")


def session(draw: Any, config: AgentConfig = ROOMY, **more: Any) -> Session:
    bridge = Bridge(TOKENIZER, thoughts=more.pop("thoughts", "sampled"))
    sampling = more.pop("sampling", SamplingConfig(max_tokens=400))
    return Session("s", draw, bridge, config, sampling, **{"seed": 0, **more})


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def extends(one: Session, draw: Script) -> None:
    """Each request's prompt is its parent's path and what was given, nothing encoded twice."""
    turns = one.episode.turns
    assert len(turns) == len(draw.requests)
    for number, (turn, request) in enumerate(zip(turns, draw.requests, strict=True)):
        path = one.episode.tokens(turn.parent) if turn.parent != ROOT else ()
        assert request.prompt[: len(path)] == path
        assert request.prompt == path + turn.given == one.prompt_tokens(number)


def test_a_conversation_is_one_path_and_reads_as_the_template_writes_it() -> None:
    draw = Script("let me see", CALL, "42.")
    one = session(draw)

    async def talk() -> None:
        history: list[Any] = [*ASK]
        for answer in (said("user", "and the sum?"), said("tool", "42", tool_call_id="x"), None):
            history.append((await one.chat(history, tools=TOOLS)).message)
            history += [answer] if answer else []

    asyncio.run(talk())
    extends(one, draw)
    assert [turn.origin for turn in one.episode.turns] == ["prompt", "extended", "extended"]
    text = TOKENIZER.decode(one.episode.tokens(2))
    assert "let me see<|im_end|>\n<|im_start|>user\nand the sum?<|im_end|>\n" in text
    assert "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n42\n" in text
    assert text.count("Tools:") == 1
    (segment,) = one.episode.segments(draw.requests[0].prompt)
    assert segment.is_shared and sum(segment.mask) == one.episode.num_drawn
    assert one.counts == {"prompt": 1, "extended": 2}


def test_the_bridge_is_what_the_template_writes_of_any_conversation() -> None:
    words = ["what", "is", "the", "sum", "of", "12", "30", "?", "\n", "<tool_call>", "é"]
    chance = random.Random(0)

    def text() -> str:
        return " ".join(chance.choices(words, k=chance.randint(0, 9))).strip()

    bridge = Bridge(TOKENIZER)
    for _ in range(100):
        history = [said("user", text()), said("assistant", text())]
        new = [said(chance.choice(["user", "tool"]), text()) for _ in range(chance.randint(1, 3))]
        path = bridge.whole(history)
        path = path[: max(i for i, token in enumerate(path) if token == END) + 1]
        assert path + (bridge.after(path, new) or ()) == bridge.whole([*history, *new])
        cut = path[:-1]
        assert cut + (bridge.after(cut, new) or ()) == bridge.whole([*history, *new])


@pytest.mark.parametrize("echo", ["arguments", "parts", "reasoning", "stripped"])
def test_what_clients_do_to_an_answer_does_not_fork_it(echo: str) -> None:
    draw = Script("<think>hm</think>\n\n" + (CALL if echo == "arguments" else " yes "), "so.")
    one = session(draw)

    async def talk() -> None:
        message = dict((await one.chat(ASK, tools=TOOLS)).message)
        if echo == "arguments":
            function = {"name": "add", "arguments": '{"b":"\\u00e9",  "a":12}'}
            message = {"role": "assistant", "tool_calls": [{"id": "own", "function": function}]}
        elif echo == "parts":
            message["content"] = [{"type": "text", "text": message["content"]}]
        elif echo == "reasoning":
            assert message.pop("reasoning_content") == "hm"
        else:
            message["content"] = message["content"].strip()
        await one.chat([*ASK, message, said("tool", "42")], tools=TOOLS)

    asyncio.run(talk())
    extends(one, draw)
    assert one.episode.turns[1].origin == "extended"
    assert "<think>hm" in TOKENIZER.decode(one.episode.tokens(1))


def test_forks_and_rewritten_histories_have_turns_of_their_own() -> None:
    draw = Script("one", "two", "three", "four", "five", "six")
    one = session(draw)

    async def talk() -> None:
        first = [*ASK, (await one.chat(ASK)).message]
        await one.chat([*first, said("user", "a")])
        await one.chat([*first, said("user", "b")])
        await one.chat([*ASK, said("assistant", "rewritten"), said("user", "a")])
        await one.chat([said("system", "you make titles"), ASK[1]])
        await one.chat([*first, said("user", "c")], tools=TOOLS)

    asyncio.run(talk())
    extends(one, draw)
    origins = ["prompt", "extended", "forked", "rewritten", "rewritten", "rewritten"]
    assert [turn.origin for turn in one.episode.turns] == origins
    # A title and another set of tools are no part of the task, a compacted history is.
    assert [turn.trained for turn in one.episode.turns] == [True] * 4 + [False] * 2
    segments = one.episode.segments()
    assert len(segments) == 3
    trained = sum(len(turn.completion.tokens) for turn in one.episode.turns[:4])
    assert sum(sum(segment.mask) for segment in segments) == trained


def test_an_answer_that_was_cut_off_is_closed_and_the_closing_not_learned() -> None:
    draw = Script("first", "second", ends=False)
    one = session(draw)

    async def talk() -> None:
        answer = await one.chat(ASK)
        await one.chat([*ASK, answer.message, said("user", "more")])

    asyncio.run(talk())
    extends(one, draw)
    assert one.episode.turns[1].given[0] == END
    (segment,) = one.episode.segments()
    assert sum(segment.mask) == one.episode.num_drawn


def test_a_stop_text_stays_in_the_tokens_and_not_in_the_answer() -> None:
    draw = Script("look it up Observation:", "so.", ends=False)
    one = session(draw)

    async def talk() -> None:
        answer = await one.chat(ASK, stop=["Observation:"])
        assert answer.message["content"] == "look it up "
        await one.chat([*ASK, answer.message, said("user", "Observation: 42")])

    asyncio.run(talk())
    extends(one, draw)
    assert draw.requests[0].sampling.stop == ("Observation:",)
    assert one.episode.turns[1].origin == "extended"
    assert "Observation:<|im_end|>\n<|im_start|>user\nObservation: 42" in TOKENIZER.decode(
        one.episode.tokens(1)
    )


def test_thoughts_may_be_left_to_the_template() -> None:
    for thoughts, origin in (("sampled", "extended"), ("rendered", "rewritten")):
        draw = Script("<think>hm</think>\n\nyes", "so.")
        one = session(draw, thoughts=thoughts)

        async def talk(one: Session = one) -> None:
            answer = await one.chat(ASK)
            await one.chat([*ASK, answer.message, said("user", "more")])

        asyncio.run(talk())
        extends(one, draw)
        assert one.episode.turns[1].origin == origin
        assert ("hm" in TOKENIZER.decode(one.prompt_tokens(1))) == (thoughts == "sampled")


@pytest.mark.parametrize(
    ("config", "ending", "more"),
    [
        (AgentConfig(max_turns=1, max_episode_tokens=9999), "max_turns", {}),
        (AgentConfig(max_episode_tokens=20), "context", {}),
        (ROOMY, "context", {"context": 70}),
    ],
)
def test_what_does_not_fit_ends_the_episode_with_its_name(
    config: AgentConfig, ending: str, more: dict[str, Any]
) -> None:
    one = session(Script("a", "b"), config, **more)

    async def talk() -> None:
        answer = await one.chat(ASK)
        await one.chat([*ASK, answer.message, said("user", "a long word " * 12)])

    with pytest.raises(EpisodeEnded) as caught:
        asyncio.run(talk())
    assert caught.value.ending == ending
    assert len(one.episode.turns) == 1


def test_a_turn_and_an_episode_have_budgets_apart() -> None:
    draw = Script("a", "b")
    one = session(draw, AgentConfig(max_episode_tokens=60), sampling=SamplingConfig(max_tokens=40))

    async def talk() -> None:
        answer = await one.chat(ASK, max_tokens=50)
        await one.chat([*ASK, answer.message, said("user", "and?")])

    asyncio.run(talk())
    given = len(one.episode.turns[1].given)
    assert [each.sampling.max_tokens for each in draw.requests] == [40, min(40, 58 - given)]


def test_retries_join_what_is_drawn_and_replay_what_was() -> None:
    draw = Script("a", "b")
    one = session(draw)

    async def talk() -> None:
        answers = await asyncio.gather(*(one.chat(ASK, is_retry=i > 0) for i in range(3)))
        answers.append(await one.chat(ASK, is_retry=True))
        assert {answer.turn for answer in answers} == {0}
        assert [answer.replayed for answer in answers] == [False, True, True, True]
        assert (await one.chat(ASK)).turn == 1  # an equal body is a turn of its own

    asyncio.run(talk())
    assert len(draw.requests) == len(one.episode.turns) == 2
    assert one.episode.turns[1].origin == "forked"
    assert draw.requests[0].seed != draw.requests[1].seed


def test_what_nobody_has_read_is_learned_once_a_history_holds_it() -> None:
    one = session(Script("a", "b"))

    async def talk() -> None:
        answer = await one.chat(ASK, is_read=False)
        assert not one.episode.turns[0].trained
        await one.chat([*ASK, answer.message, said("user", "and?")], is_read=False)

    asyncio.run(talk())
    assert [turn.trained for turn in one.episode.turns] == [True, False]
    one.own(1)
    assert one.episode.turns[1].trained


def test_a_cancelled_chat_draws_no_more_unless_a_retry_waits_for_it() -> None:
    async def talk(retries: bool) -> tuple[bool, int]:
        begun, ended = asyncio.Event(), asyncio.Event()
        was_cancelled = False

        async def draw(request: Request) -> Completion:
            nonlocal was_cancelled
            begun.set()
            try:
                await ended.wait()
            except asyncio.CancelledError:
                was_cancelled = True
                raise
            return Completion((END,), (0.0,), (0,), "stop")

        one = session(draw)
        first = asyncio.create_task(one.chat(ASK))
        await begun.wait()
        again = asyncio.create_task(one.chat(ASK, is_retry=True)) if retries else None
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0.01)
        ended.set()
        if again is not None:
            await again
        await asyncio.gather(first, return_exceptions=True)
        return was_cancelled, len(one.episode.turns)

    assert asyncio.run(talk(retries=False)) == (True, 0)
    assert asyncio.run(talk(retries=True)) == (False, 1)


def test_closing_a_session_ends_what_is_in_flight_with_a_name() -> None:
    async def never(request: Request) -> Completion:
        await asyncio.sleep(60)
        raise AssertionError

    async def talk() -> None:
        one = session(never)
        work = asyncio.create_task(one.chat(ASK))
        await asyncio.sleep(0)
        one.close()
        for chat in (work, one.chat(ASK)):
            with pytest.raises(EpisodeEnded) as caught:
                await chat
            assert caught.value.ending == "aborted"

    asyncio.run(talk())


def engine_session(run: Callable[[Session, HfEngine], Any]) -> tuple[Session, list[Request]]:
    engine = HfEngine(None, loaded=(chat_model(TOKENIZER), TOKENIZER))  # type: ignore[arg-type]
    asked: list[Request] = []

    async def draw(request: Request) -> Completion:
        asked.append(request)
        return await engine.generate(request)

    one = session(draw, sampling=SamplingConfig(max_tokens=24))

    async def work() -> None:
        try:
            await run(one, engine)
        finally:
            await engine.close()

    asyncio.run(work())
    return one, asked


async def _four_turns(one: Session, engine: HfEngine) -> None:
    history: list[Any] = [*ASK]
    for number in range(4):
        history.append((await one.chat(history)).message)
        history.append(said("user", f"and {number}?"))


def test_an_interrupted_answer_is_continued_where_it_was() -> None:
    async def interrupted(one: Session, engine: HfEngine) -> None:
        work = asyncio.create_task(_four_turns(one, engine))
        while not work.done():
            for _ in range(40):
                await asyncio.sleep(0)
            await engine.abort()
        await work

    calm, _ = engine_session(_four_turns)
    shaken, asked = engine_session(interrupted)
    assert any(request.partial is not None for request in asked)
    assert calm.episode.tokens(3) == shaken.episode.tokens(3)
    for one in (calm, shaken):
        assert [turn.origin for turn in one.episode.turns] == ["prompt", *["extended"] * 3]


def test_chats_in_parallel_share_what_they_have_in_common() -> None:
    async def parallel(one: Session, engine: HfEngine) -> None:
        first = await one.chat(ASK)
        history = [*ASK, first.message]
        await asyncio.gather(*(one.chat([*history, said("user", f"{i}")]) for i in range(4)))

    one, asked = engine_session(parallel)
    turns = one.episode.turns
    assert [turn.origin for turn in turns[1:]] == ["extended", "forked", "forked", "forked"]
    assert {turn.parent for turn in turns[1:]} == {0}
    assert len({replace(request, id="").seed for request in asked}) == 5
    assert sum(sum(segment.mask) for segment in one.episode.segments()) == one.episode.num_drawn


def test_step_rewards_are_at_their_turns() -> None:
    one = session(Script("a", "b"))

    async def talk() -> None:
        await one.chat(ASK)
        await one.chat([*ASK, said("user", "x")])
        one.reward(1.0, 0)
        one.reward(0.25)
        one.reward(0.25)

    asyncio.run(talk())
    assert [turn.reward for turn in one.episode.turns] == [1.0, 0.5]
