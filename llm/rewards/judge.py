"""A language model as judge, behind an OpenAI-compatible endpoint (the idea: arXiv 2306.05685)."""

from __future__ import annotations

import json
import re
from contextlib import aclosing

from unirl.llm.engine import Completion
from unirl.llm.http import MAX_PAUSE, HttpClient, HttpFailed, bearer
from unirl.llm.outcome import SCORE, Score
from unirl.llm.rewards.config import JUDGE_KEY, JudgeConfig
from unirl.llm.rewards.limits import Limits, within
from unirl.llm.rewards.reward import failed, timed_out
from unirl.llm.tasks.prompts import Prompt

_BLANKS = re.compile(r"\{(prompt|answer|text|scale)\}")
# Also thoughts whose <think> stands in the prompt: models that always think begin behind it.
_THOUGHTS = re.compile(r"<think>.*?</think>|^.*</think>", re.DOTALL)
_NUMBER = re.compile(r"-?(?:\d+(?:\.\d+)?|\.\d+)")
_SCALE = r"(?:/|\bout\s+of\b)\s*"
"""What stands before the best rating: 8/10, 8 out of 10."""
_MAX_ANSWER_BYTES = 8 << 20
_FIRST_WAIT_SECONDS = 0.25


class JudgeReward:
    """Asks the judge about each completion, at temperature 0."""

    def __init__(self, config: JudgeConfig, timeout_seconds: float, limits: Limits) -> None:
        self._config, self._seconds, self._limits = config, timeout_seconds, limits
        pauses = [min(_FIRST_WAIT_SECONDS * 2**i, MAX_PAUSE) for i in range(config.retries)]
        key = bearer(config.key_variable, JUDGE_KEY)
        self._http = HttpClient(config.url, key, pauses=pauses)

    async def judge(self, prompt: Prompt, text: str, completion: Completion) -> Score:
        asked = "\n\n".join(str(turn.get("content", "")) for turn in prompt.messages)
        fills = {
            "prompt": asked,
            "answer": prompt.answer,
            "text": text,
            "scale": f"{self._config.scale:g}",
        }
        # In one pass, so that braces in a completion stay what they are.
        content = _BLANKS.sub(lambda match: fills[match[1]], self._config.question)
        problems: list[str] = []
        async with self._limits.call():
            try:
                reply = await within(self._ask(content, problems), self._seconds)
            except TimeoutError as error:
                return timed_out("; ".join([str(error), *problems[-1:]]))
            except HttpFailed as error:
                return failed(f"the judge failed: {error}")
        return self._rating(reply)

    async def _ask(self, content: str, problems: list[str]) -> str:
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": self._config.max_tokens,
        }

        async def attempt() -> str:
            if problems:
                await self._limits.turn()
            try:
                asked = await self._http.ask("POST", "/chat/completions", body)
                async with aclosing(asked) as answer:
                    return _content(await answer.whole(_MAX_ANSWER_BYTES), self._config.max_tokens)
            except HttpFailed as error:
                problems.append(str(error))
                raise

        return await self._http.again(attempt)

    def _rating(self, reply: str) -> Score:
        """The one number of a reply; 8/10 is 8. Anything less clear is a failure."""
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


def _content(data: bytes, max_tokens: int) -> str:
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
