"""What every engine counts, and how a continued completion is put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from unirl.errors import UniRLError
from unirl.llm.engine import Completion, Finish, Request


class Usage:
    """The requests in flight, and tokens in and out."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self._prompt = self._generated = 0

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        """This request is in flight inside. Raises UniRLError when one of its name is already."""
        if name in self.ids:
            raise UniRLError(
                f"request {name} is in flight already",
                "an id names one request at a time",
                "give each request an id of its own",
            )
        self.ids.add(name)
        try:
            yield
        finally:
            self.ids.remove(name)

    def count(self, *, prompt: int, generated: int) -> None:
        self._prompt += prompt
        self._generated += generated

    def as_stats(self) -> dict[str, float]:
        return {
            "generated_tokens": float(self._generated),
            "prompt_tokens": float(self._prompt),
        }


def continuation_seed(request: Request) -> int:
    """The request's seed; another one where it is continued, which must not meet the numbers again
    that drew its beginning. In [0, 2^63).
    """
    done = request.sampling.max_tokens - request.num_left
    return (request.seed + done * 0x9E3779B97F4A7C15) % 2**63


def finish_of(reason: str | None) -> Finish:
    """From a server's finish_reason, as OpenAI's API and vLLM spell it."""
    if reason == "abort":
        return "aborted"
    return "length" if reason == "length" else "stop"


def extend(
    request: Request,
    tokens: Sequence[int],
    logp: Sequence[float],
    version: Sequence[int],
    finish: Finish,
) -> Completion:
    before = request.partial or Completion((), (), (), "aborted")
    return Completion(
        tokens=before.tokens + tuple(tokens),
        logp=before.logp + tuple(logp),
        version=before.version + tuple(version),
        finish=finish,
        drawn=before.drawn and before.drawn + (True,) * len(tokens),
    )
