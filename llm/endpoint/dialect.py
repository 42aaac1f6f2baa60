"""What the dialects of the endpoint have in common: what was asked, what was found, and how values
that strangers sent are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from unirl.llm.agents.answer import Answer
from unirl.llm.engine import Completion

_PIECE = 24
"""Characters of a piece of a streamed answer."""
_LAST_EVENTS = 3


class BadRequest(Exception):
    """Nothing can be made of a request. status: of HTTP; code: as OpenAI's API names it."""

    def __init__(self, why: str, status: int = 400, code: str | None = None) -> None:
        self.status, self.code = status, code
        super().__init__(why)

    @classmethod
    def left(cls) -> BadRequest:
        """Nobody reads the answer."""
        return cls("the client has closed the connection", 499)


@dataclass(frozen=True)
class Asked:
    """A request, whichever dialect it came in."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    model: str = "policy"
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    token_ids: bool = False
    temperature: float | None = None
    top_p: float | None = None
    ignored: tuple[str, ...] = ()
    """Fields that were set and have no effect."""


@dataclass(frozen=True)
class Found:
    """The answer to it, and the tokens that it consists of."""

    id: str
    created: int
    answer: Answer
    num_given: int
    """Tokens of the prompt."""
    prompt: tuple[int, ...]
    """Where token ids were asked for: (), else."""
    completion: Completion
    text_of: Callable[[int], str]
    """Text of a token."""

    @property
    def content(self) -> str:
        return str(self.answer.message["content"])

    @property
    def thought(self) -> str:
        return str(self.answer.message.get("reasoning_content", ""))

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        found: Sequence[Mapping[str, Any]] = self.answer.message.get("tool_calls", ())
        return found


class Event(NamedTuple):
    """Of a stream. name: "" where the dialect has none."""

    name: str
    data: Mapping[str, Any]


class Dialect(Protocol):
    """A module for each API: how it is read and written."""

    def read(self, body: Mapping[str, Any]) -> Asked:
        """Raises BadRequest."""

    def write(self, asked: Asked, found: Found) -> dict[str, Any]:
        """The answer as a whole."""

    def events(self, asked: Asked, found: Found) -> Iterator[Event]:
        """The answer as a stream."""

    def error(self, why: str, status: int, code: str | None) -> dict[str, Any]:
        """The body of an error."""

    END: str
    """What a stream ends with, besides its last event."""


def openai_error(why: str, status: int, code: str | None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": why, "type": kind, "param": None, "code": code}}


def pieces(text: str) -> Iterator[str]:
    """Of a streamed text: it was drawn as a whole."""
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]


def streamed(dialect: Dialect, asked: Asked, found: Found) -> list[bytes]:
    """An answer as server-sent events. The last ones are one piece: some clients have enough before
    the very last.
    """
    events = []
    for event in dialect.events(asked, found):
        name = f"event: {event.name}\n" if event.name else ""
        events.append(f"{name}data: {json.dumps(event.data)}\n\n")
    last = "".join(events[-_LAST_EVENTS:]) + dialect.END
    return [each.encode() for each in (*events[:-_LAST_EVENTS], last)]


def value_of(body: Mapping[str, Any], key: str, kinds: Any, what: str) -> Any:
    """The value of a key; None where it is missing or null. Raises BadRequest for another kind; a
    truth value is no number.
    """
    value = body.get(key)
    if value is None:
        return None
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise BadRequest(f"{key} must be {what}, it is {shown(value)}")
    return value


def count_of(body: Mapping[str, Any], *keys: str) -> int | None:
    """The first of these keys that is set; a number of tokens."""
    for key in keys:
        value: int | None = value_of(body, key, int, "a whole number")
        if value is not None:
            if value < 1:
                raise BadRequest(f"{key} must be at least 1, it is {value}")
            return min(value, 1 << 40)
    return None


def number_of(body: Mapping[str, Any], key: str, low: float, high: float) -> float | None:
    value = value_of(body, key, (int, float), "a number")
    if value is not None and not low <= value <= high:
        raise BadRequest(f"{key} must be between {low} and {high}, it is {shown(value)}")
    return None if value is None else float(value)


def texts_of(body: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A text, or a list of some."""
    value = value_of(body, key, (str, list), "a text or a list of texts")
    found = [value] if isinstance(value, str) else value or []
    if not all(isinstance(each, str) for each in found):
        raise BadRequest(f"{key} must be a text or a list of texts, it is {shown(value)}")
    return tuple(each for each in found if each)


def objects_of(body: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    value = value_of(body, key, list, "a list of objects")
    for i, each in enumerate(value or ()):
        if not isinstance(each, dict):
            raise BadRequest(f"{key}[{i}] must be an object, it is {shown(each)}")
    return value or []


def text_of_parts(content: Any, where: str, kinds: Sequence[str]) -> str:
    """Of a message: a text, nothing, or a list of parts of these kinds."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where} must be a text or a list of parts, it is {shown(content)}")
    found = []
    for part in content:
        if isinstance(part, str):
            found.append(part)
            continue
        if not isinstance(part, dict) or not isinstance(part.get("text", ""), str):
            raise BadRequest(f"{where} has a part that is no text: {shown(part)}")
        kind = part.get("type", "text")
        if kind not in kinds:
            raise BadRequest(
                f"{where} has a part of type {shown(kind)}; this model reads text alone "
                f"({', '.join(kinds)})"
            )
        found.append(part.get("text", ""))
    return "".join(found)


def tool(name: Any, description: Any, parameters: Any, where: str) -> dict[str, Any]:
    """A tool as OpenAI's chat API has it, without what is of no use to a model."""
    if not isinstance(name, str) or not name:
        raise BadRequest(f"{where} needs a name, it is {shown(name)}")
    if not isinstance(parameters, dict | None):
        raise BadRequest(f"{where}: its parameters must be an object, they are {shown(parameters)}")
    if not isinstance(description, str | None):
        raise BadRequest(f"{where}: its description must be a text, it is {shown(description)}")
    function = {"name": name, "description": description or "", "parameters": parameters or {}}
    return {"type": "function", "function": function}


def call(id: Any, name: Any, arguments: Any, where: str) -> dict[str, Any]:
    """An entry of an assistant's `tool_calls`."""
    if not isinstance(name, str):
        raise BadRequest(f"{where} needs a name, it is {shown(name)}")
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments)
    function = {"name": name, "arguments": arguments}
    return {"id": str(id or ""), "type": "function", "function": function}


def shown(value: Any) -> str:
    """A value in an error, no longer than a line."""
    text = repr(value) if not isinstance(value, dict | list) else type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."
