"""Agents of users' own, for tests."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from unirl.errors import Restartable
from unirl.llm.agents.agent import AgentTask
from unirl.llm.agents.session import Session

FAILURES: list[int] = []
"""Seeds of the attempts that failed."""


BEGUN: list[int] = []
"""Tasks that were begun."""


class ServerGone(Restartable):
    """What the policy cannot have caused."""


async def two_turns(session: Session, task: AgentTask) -> float:
    """Answers are appended to, and each turn is paid."""
    messages = list(task.messages)
    for i in range(2):
        answer = await session.chat(messages)
        session.reward(0.5 * i, answer.turn)
        messages += [answer.message, {"role": "user", "content": "more?"}]
    return float(task.seed % 2)


async def fails_once(session: Session, task: AgentTask) -> float:
    if len(FAILURES) < 1:
        FAILURES.append(task.seed)
        raise ServerGone("a server is gone", "it answered before", "wait")
    return await two_turns(session, task)


async def first_is_slow(session: Session, task: AgentTask) -> float:
    BEGUN.append(task.index)
    if BEGUN.count(task.index) == 1:
        await asyncio.sleep(1.5)
    return await two_turns(session, task)


async def always_fails(session: Session, task: AgentTask) -> float:
    raise ServerGone("a server is gone", "it never answers", "wait")


async def crashes(session: Session, task: AgentTask) -> float:
    await session.chat(task.messages)
    raise KeyError("a mistake in an agent")


async def sleeps(session: Session, task: AgentTask) -> float:
    await session.chat(task.messages)
    await asyncio.sleep(60)
    return 1.0


async def never_ends(session: Session, task: AgentTask) -> float:
    messages = list(task.messages)
    while True:
        answer = await session.chat(messages)
        messages += [answer.message, {"role": "user", "content": "x"}]


async def talks(session: Session, task: AgentTask) -> float:
    """Ten turns, each with what a tool said behind it."""
    messages = list(task.messages)
    for i in range(10):
        answer = await session.chat(messages)
        messages += [answer.message, {"role": "user", "content": f"{i} and {task.seed % 1000}"}]
    return 1.0


async def swallows(session: Session, task: AgentTask) -> float:
    """Whatever goes wrong, it ends well."""
    try:
        await session.chat(task.messages)
        await session.chat([{"role": "user", "content": "x" * 400}])
    except Exception:
        return 1.0
    return 0.5


async def waits(session: Session, task: AgentTask) -> float:
    """For a tool that takes longer than an actor may be silent."""
    await session.chat(task.messages)
    await asyncio.to_thread(time.sleep, 4.0)
    return 1.0


async def first_hangs(session: Session, task: AgentTask) -> float:
    """The first of a group, which takes its time to let go, too."""
    await session.chat(task.messages)
    if session.id.split(".")[1] == "0":
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(20)
    return 1.0


async def first_fails(session: Session, task: AgentTask) -> float:
    if session.id.split(".")[1] == "0":
        raise ServerGone("a server is gone", "it never answers", "wait")
    return await two_turns(session, task)


def hangs(turns: Any, answer: str, info: Any) -> list[float]:
    """A process reward."""
    time.sleep(20)
    return [0.0] * len(turns)


def by_token(turns: Any, answer: str, info: Any) -> list[Any]:
    """A process reward: the length of each token's text in the first turn, 3 for each other."""
    return [[float(len(token)) for token in turn["tokens"]] for turn in turns[:1]] + [3.0] * (
        len(turns) - 1
    )


def too_few(turns: Any, answer: str, info: Any) -> list[Any]:
    return [[1.0] for turn in turns]


async def fails_and_then_hangs(session: Session, task: AgentTask) -> float:
    if session.id.endswith(".0"):
        raise Restartable("the world is gone", "a test wants it to", "try again")
    return await sleeps(session, task)


async def never_asks(session: Session, task: AgentTask) -> float:
    raise ImportError("a program that does not work")


async def forgets(session: Session, task: AgentTask) -> float:
    """Its history is rewritten, as by compaction."""
    await session.chat(task.messages)
    await session.chat([{"role": "user", "content": "in short"}])
    return 1.0


async def judged(turns: Any, ending: str, outcome: float | None) -> float:
    """A reward that is offered what an episode was."""
    assert all(turn["drawn_text"] is not None for turn in turns)
    return {"stop": 1.0, "time": 0.25, "crash": 0.125}.get(ending, 0.5)
