"""A language model as judge, behind an OpenAI-compatible endpoint (the idea: arXiv 2306.05685)."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unirl.errors import UniRLError
from unirl.llm.group import SCORE, Score
from unirl.llm.http import HttpClient, HttpFailed, bearer, require_url
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
# Also thoughts whose <think> stands in the prompt: models that always think begin behind it.
_THOUGHTS = re.compile(r"<think>.*?</think>|^.*</think>", re.DOTALL)
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)")
_SCALE = r"(?:/|\bout\s+of\b)\s*"
"""What stands before the best rating: 8/10, 8 out of 10."""
_MAX_ANSWER_BYTES = 8 << 20
_KEY_SETTING = "reward.judge.key_variable"
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
    """Tokens a reply may have, its end token included: a reply that is cut off is a failure. More:
    for judges that think first.
    """
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
        if self.url:
            require_url(self.url, "reward.judge.url", _KEY_SETTING)
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
        self._http = HttpClient(config.url, bearer(config.key_variable, _KEY_SETTING))

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
                    return _content(await answer.whole(_MAX_ANSWER_BYTES), self._config.max_tokens)
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

        best, said = self._config.scale, _THOUGHTS.sub("", reply)
        if "<think>" in said:
            return failed(f"the judge replied {reply[:100]!r}: its thoughts have no end")
        # Only behind a rating: "out of 10, I would say" names the scale and gives none.
        scale = rf"(?<=\d)[\s*]*{_SCALE}{re.escape(f'{best:g}')}(?:\.0+)?(?![\d.]*\d)"
        said = re.sub(scale, "", said, flags=re.IGNORECASE)
        found = [float(number) for number in _NUMBER.findall(said)]
        if len(found) == 1 and re.search(rf"{_SCALE}\d", said, re.IGNORECASE):
            return failed(f"the judge replied {reply[:100]!r}: a scale without a rating")
        if len(found) != 1:
            return failed(f"the judge replied {reply[:100]!r}: {len(found)} numbers, 1 is wanted")
        if not 0 <= found[0] <= best:
            return failed(f"the judge rated {found[0]:g}, ratings go from 0 to {best:g}")
        return Score(found[0] / best, SCORE)

    def close(self) -> None:
        """Nothing to let go of."""


def _content(data: bytes, max_tokens: int) -> str:
    """The text of an answer. Raises HttpFailed where there is none, or only its beginning."""
    try:
        choice = json.loads(data)["choices"][0]
        content = str(choice["message"]["content"] or "")
        finish = choice.get("finish_reason")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        beginning = data[:100].decode(errors="replace")
        raise HttpFailed(f"no choices in its answer, or no JSON: {beginning}", 200) from None
    if finish == "length":
        raise HttpFailed(
            f"its reply was cut off, reward.judge.max_tokens is {max_tokens}: {content[:100]!r}",
            200,
        )
    return content
