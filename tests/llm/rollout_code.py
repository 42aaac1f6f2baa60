"""Rollout functions, filters and rewards as users write them; rollouts import them from here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from unirl.llm.engine import Completion, Request
from unirl.llm.outcome import Score
from unirl.llm.rollout import Rollout
from unirl.llm.tasks.config import TaskConfig
from unirl.llm.tasks.prompts import Prompt
from unirl.llm.tasks.task import Example, Task


async def two_turns(
    rollout: Rollout, prompt: Prompt, requests: Sequence[Request]
) -> list[Completion]:
    """Three tokens, then up to three more, one completion after the other."""
    found = []
    for request in requests:
        short = replace(request, sampling=replace(request.sampling, max_tokens=3))
        first = await rollout.generate(short)
        longer = replace(request.sampling, max_tokens=6)
        found.append(
            await rollout.generate(
                replace(request, sampling=longer, partial=replace(first, finish="aborted"))
            )
            if first.finish == "length"
            else first
        )
    return found


OBSERVATION = (7, 8)
"""What the tool says, whatever it is asked."""


async def with_a_tool(
    rollout: Rollout, prompt: Prompt, requests: Sequence[Request]
) -> list[Completion]:
    """Two tokens, what the tool says, and up to two more."""
    found = []
    for request in requests:
        short = replace(request, sampling=replace(request.sampling, max_tokens=2))
        first = await rollout.generate(short)
        longer = replace(request.sampling, max_tokens=6)
        again = replace(request, sampling=longer, partial=first.with_observation(OBSERVATION))
        found.append(await rollout.generate(again) if first.finish == "length" else first)
    return found


ASKED: list[str] = []
"""Requests for which the tool was called."""


async def asks_a_tool(
    rollout: Rollout, prompt: Prompt, requests: Sequence[Request]
) -> list[Completion]:
    """Side by side: up to four tokens, a call of a tool, and up to 24 more."""

    async def one(request: Request) -> Completion:
        short = replace(request, sampling=replace(request.sampling, max_tokens=4))
        first = await rollout.generate(short)
        ASKED.append(request.id)
        await asyncio.sleep(0)
        longer = replace(request.sampling, max_tokens=4 + len(OBSERVATION) + 24)
        partial = first.with_observation(OBSERVATION)
        return await rollout.generate(replace(request, sampling=longer, partial=partial))

    return list(await asyncio.gather(*map(one, requests)))


async def one_too_few(
    rollout: Rollout, prompt: Prompt, requests: Sequence[Request]
) -> list[Completion]:
    """Forgets the last request."""
    return [await rollout.generate(request) for request in requests[:-1]]


def even_prompts(
    prompt: Prompt, completions: Sequence[Completion], scores: Sequence[Sequence[Score]]
) -> bool:
    """Keeps the prompts with an even ticket."""
    return prompt.ticket % 2 == 0


def nothing(
    prompt: Prompt, completions: Sequence[Completion], scores: Sequence[Sequence[Score]]
) -> bool:
    """Keeps no group."""
    return False


async def first_letters(text: str) -> float:
    """Differs between completions; has no value for those that begin with a digit."""
    if text[:1].isdigit():
        raise ValueError("digits are not judged")
    return float(ord(text[0])) if text else 0.0


async def constant(text: str) -> float:
    """The same for all."""
    return 1.0


async def never(text: str) -> float:
    """Takes longer than anyone waits."""
    await asyncio.sleep(600)
    return 0.0


async def own_words(text: str, whole_text: str) -> float:
    """How many characters others said: the line break between two turns is in `text` alone."""
    return float(len(whole_text) - len(text.replace("\n", "")))


class Counted:
    """Questions that count how often they are looked at."""

    looked_at = 0

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int, /) -> Example:
        Counted.looked_at += 1
        return Example(text=f"{index} =", answer=str(index))


def counted_task(config: TaskConfig) -> Task:
    return Task("counted", Counted(300), Counted(20), "characters")
