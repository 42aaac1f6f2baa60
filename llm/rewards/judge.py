"""A language model as judge, behind an OpenAI-compatible endpoint (the idea: arXiv 2306.05685)."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from unirl.core.errors import UniRLError
from unirl.llm.group import SCORE, Score
from unirl.llm.http import Http, HttpFailed
from unirl.llm.rewards.limits import Limits, within

if TYPE_CHECKING:
    from unirl.llm.engine import Completion
    from unirl.llm.tasks.prompts import Prompt

_QUESTION = """\
Rate how well the answer answers the question, from 0 (useless) to {scale} (perfect).
Reply with one number and nothing else.

<question>
{prompt}
</question>
<reference>
{answer}
</reference>
<answer>
{text}
</answer>"""
_PLACES = re.compile(r"\{(prompt|answer|text|scale)\}")
_THOUGHTS = re.compile(r"<think>.*?</think>", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_MAX_ANSWER_BYTES = 8 << 20
_FIRST_WAIT_SECONDS, _MOST_WAIT_SECONDS = 0.25, 30.0


@dataclass(frozen=True)
class JudgeConfig:
    """Which model judges, and what it is told."""

    url: str = ""
    """Of an OpenAI-compatible server, such as http://127.0.0.1:8000/v1."""
    model: str = ""
    """The model's name there."""
    key_variable: str = ""
    """Name of the environment variable that holds the key. "": none is sent."""
    question: str = _QUESTION
    """What the judge is asked; {prompt}, {answer} (the right one), {text} and {scale} are filled
    in.
    """
    scale: float = 10.0
    """The best rating: the value is rating / scale. A rating outside 0 to scale is a failure."""
    max_tokens: int = 16
    """Tokens a reply may have. More: for judges that think first."""
    retries: int = 3
    """How often a call is repeated after a broken connection, status 429 or 5xx, with growing
    pauses. More: sits out longer outages.
    """

    def __post_init__(self) -> None:
        for name, least in (("scale", 0), ("max_tokens", 0), ("retries", -1)):
            if not getattr(self, name) > least:
                raise UniRLError(
                    f"reward.judge.{name} is {getattr(self, name)}",
                    f"it must be > {least}",
                    "leave it out for the default",
                )
        if self.url and not (
            urlsplit(self.url).scheme in ("http", "https") and urlsplit(self.url).hostname
        ):
            raise UniRLError(
                f'reward.judge.url is "{self.url}"',
                "it must begin with http:// or https:// and name a host",
                "http://127.0.0.1:8000/v1 is a usual one",
            )
        if "{text}" not in self.question:
            raise UniRLError(
                "reward.judge.question does not show the completion",
                "{text} must occur in it",
                "write {text} where the completion belongs",
            )


class JudgeReward:
    """Asks the judge about each completion, at temperature 0."""

    def __init__(self, config: JudgeConfig, timeout_seconds: float, limits: Limits) -> None:
        self._config, self._seconds, self._limits = config, timeout_seconds, limits
        headers = {}
        if config.key_variable:
            if not os.environ.get(config.key_variable):
                raise UniRLError(
                    'reward "judge" has no key',
                    f"environment variable {config.key_variable} is empty or not set",
                    f"export {config.key_variable}=..., or leave reward.judge.key_variable out",
                )
            headers["Authorization"] = f"Bearer {os.environ[config.key_variable]}"
        self._http = Http(config.url, headers)

    async def score(
        self, prompt: Prompt, texts: Sequence[str], completions: Sequence[Completion]
    ) -> list[Score]:
        """All completions at a time, as far as the limits allow."""
        return list(await asyncio.gather(*(self._one(prompt, text) for text in texts)))

    async def _one(self, prompt: Prompt, text: str) -> Score:
        from unirl.llm.rewards.reward import failed, timed_out

        asked = "\n\n".join(str(turn.get("content", "")) for turn in prompt.messages)
        parts = {
            "prompt": asked,
            "answer": prompt.answer,
            "text": text,
            "scale": f"{self._config.scale:g}",
        }
        # In one pass, so that braces in a completion stay what they are.
        content = _PLACES.sub(lambda match: parts[match[1]], self._config.question)
        problems: list[str] = []
        async with self._limits.place():
            try:
                reply = await within(self._ask(content, problems), self._seconds)
            except TimeoutError as error:
                return timed_out("; ".join([str(error), *problems[-1:]]))
            except HttpFailed as error:
                return failed(f"the judge failed: {error}")
        return self._rating(reply)

    async def _ask(self, content: str, problems: list[str]) -> str:
        """The judge's reply; what went wrong on the way goes to `problems`."""
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": self._config.max_tokens,
        }
        for attempt in range(self._config.retries + 1):
            try:
                async with aclosing(
                    await self._http.ask("POST", "/chat/completions", body)
                ) as answer:
                    return _content(await answer.whole(_MAX_ANSWER_BYTES))
            except HttpFailed as error:
                passing = error.status in (0, 408, 429) or error.status >= 500
                if not passing or attempt == self._config.retries:
                    raise
                problems.append(str(error))
                pause = max(_FIRST_WAIT_SECONDS * 2**attempt, error.retry_after)
                await asyncio.sleep(min(pause, _MOST_WAIT_SECONDS))
                await self._limits.turn()
        raise AssertionError("the last attempt returns or raises")

    def _rating(self, reply: str) -> Score:
        """The one number of a reply; 8/10 is 8. Anything less clear is a failure."""
        from unirl.llm.rewards.reward import failed

        best = self._config.scale
        said = re.sub(rf"(/|\bout of\b)\s*{best:g}(?:\.0+)?\b", "", _THOUGHTS.sub("", reply))
        found = [float(number) for number in _NUMBER.findall(said)]
        if len(found) != 1:
            return failed(f"the judge replied {reply[:100]!r}: {len(found)} numbers, 1 is wanted")
        if not 0 <= found[0] <= best:
            return failed(f"the judge rated {found[0]:g}, ratings go from 0 to {best:g}")
        return Score(found[0] / best, SCORE)

    def close(self) -> None:
        """Nothing to let go of."""


def _content(data: bytes) -> str:
    try:
        return str(json.loads(data)["choices"][0]["message"]["content"] or "")
    except (ValueError, KeyError, IndexError, TypeError):
        beginning = data[:100].decode(errors="replace")
        raise HttpFailed(f"no choices in its answer, or no JSON: {beginning}", 200) from None
