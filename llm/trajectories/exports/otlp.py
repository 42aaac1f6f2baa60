"""Episodes as OpenTelemetry traces (OTLP as JSON): a span for the episode, below it one for each
answer of the model and each call of a tool, with the attributes of the GenAI conventions.

Rewards have no attribute there: they are `unirl.reward.NAME` on the episode's span. Token ids are
never in spans: `unirl.episode` names the stored episode that has them.

Source: OpenTelemetry semantic conventions for generative AI (development); OTLP 1.x, JSON encoding.
"""

from __future__ import annotations

import hashlib
import json
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Any

from unirl.errors import UniRLError
from unirl.llm.agents.episode import Turn
from unirl.llm.outcome import SCORE
from unirl.llm.tasks.task import Message
from unirl.llm.trajectories.exports import our_version
from unirl.llm.trajectories.record import Record, tools_of

_SECONDS = 30.0
_INTERNAL, _CLIENT = 1, 3
_ERROR = 2


def to_otlp(records: Iterable[tuple[int, Record]], *, content: bool = True) -> dict[str, Any]:
    """A request to /v1/traces. records: with their numbers. content: texts are in it, too."""
    spans = [span for number, record in records for span in _spans(number, record, content)]
    resource = {"attributes": _attributes({"service.name": "unirl"})}
    scope = {"name": "unirl.llm.trajectories", "version": our_version()}
    scoped = [{"scope": scope, "spans": spans}]
    return {"resourceSpans": [{"resource": resource, "scopeSpans": scoped}]}


def post(request: Mapping[str, Any], url: str) -> None:
    """Send it. Raises UniRLError where it is not accepted."""
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(url, json.dumps(request).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(asked, timeout=_SECONDS) as answer:
            answer.read(1 << 16)
    except (OSError, ValueError) as error:
        raise UniRLError(
            f"the traces were not accepted by {url}",
            f"it says: {error}",
            "check the address: OTLP over HTTP with JSON, usually http://HOST:4318/v1/traces",
        ) from error


def _spans(number: int, record: Record, content: bool) -> Iterable[dict[str, Any]]:
    episode = record.episode
    name = f"{record.run}/{record.ticket}/{record.place}/{number}"
    trace = hashlib.blake2b(name.encode(), digest_size=16).hexdigest()
    scores = {name: each.value for name, each in record.scores.items() if each.outcome == SCORE}
    conversation = f"{record.run}/{number}"
    model = record.engine or "policy"
    root = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "unirl",
        "gen_ai.agent.name": record.agent or "unirl",
        "gen_ai.conversation.id": conversation,
        "unirl.episode": number,
        "unirl.task": record.task,
        "unirl.task_id": record.task_id,
        "unirl.ending": episode.ending,
        "unirl.reward": record.total,
        **{f"unirl.reward.{name}": value for name, value in scores.items()},
    }
    is_error = episode.ending in ("crash", "infrastructure", "aborted")
    ends = [record.created + turn.started + turn.seconds for turn in episode.turns]
    yield _span(
        trace, "episode", "", f"invoke_agent {record.agent or 'unirl'}", _INTERNAL,
        record.created, max([record.created + episode.seconds, *ends]), root,
        episode.why or episode.ending if is_error else "",
    )  # fmt: skip
    for index, turn in enumerate(episode.turns):
        begin = record.created + turn.started
        finish = "length" if turn.completion.finish == "length" else "stop"
        chat: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "unirl",
            "gen_ai.request.model": model,
            "gen_ai.conversation.id": conversation,
            "gen_ai.response.id": f"{number}-{index}",
            "gen_ai.response.finish_reasons": ["tool_calls" if tools_of(turn) else finish],
            "gen_ai.usage.input_tokens": _num_before(record, index),
            "gen_ai.usage.output_tokens": len(turn.completion.drawn_versions),
            "unirl.reward.step": turn.reward,
        }
        if content:
            chat["gen_ai.input.messages"] = json.dumps([_parts(each) for each in turn.messages])
            answered = {**_parts(turn.answer), "finish_reason": finish}
            chat["gen_ai.output.messages"] = json.dumps([answered])
        ended = begin + turn.seconds
        yield _span(trace, f"turn {index}", "episode", f"chat {model}", _CLIENT, begin, ended, chat)
        yield from _tool_spans(trace, index, turn, ended, content)


def _tool_spans(
    trace: str, index: int, turn: Turn, begin: float, content: bool
) -> Iterable[dict[str, Any]]:
    """A call's own times are not known: those of all calls of its turn are taken."""
    seconds = float(turn.info.get("tool_seconds", 0) or 0)
    error = str(turn.info.get("error") or "")
    for place, call in enumerate(turn.answer.get("tool_calls") or ()):
        function = call.get("function", {})
        name = str(function.get("name", ""))
        tool = {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.tool.name": name,
            "gen_ai.tool.call.id": str(call.get("id", "")),
            "gen_ai.tool.type": "function",
        }
        if content:
            tool["gen_ai.tool.call.arguments"] = str(function.get("arguments", ""))
        yield _span(
            trace, f"turn {index} call {place}", f"turn {index}", f"execute_tool {name}",
            _INTERNAL, begin, begin + seconds, tool, error,
        )  # fmt: skip


def _span(
    trace: str,
    name: str,
    parent: str,
    title: str,
    kind: int,
    begin: float,
    end: float,
    attributes: Mapping[str, Any],
    error: str = "",
) -> dict[str, Any]:
    def number_of(each: str) -> str:
        return hashlib.blake2b(f"{trace}/{each}".encode(), digest_size=8).hexdigest()

    if error:
        attributes = {**attributes, "error.type": error[:100]}
    return {
        "traceId": trace,
        "spanId": number_of(name),
        **({"parentSpanId": number_of(parent)} if parent else {}),
        "name": title,
        "kind": kind,
        "startTimeUnixNano": str(int(begin * 1e9)),
        "endTimeUnixNano": str(int(max(begin, end) * 1e9)),
        "attributes": _attributes(attributes),
        "status": {"code": _ERROR, "message": error[:400]} if error else {},
    }


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": _value(value)} for key, value in values.items() if value is not None
    ]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}  # as protobuf's JSON has 64-bit numbers
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(each) for each in value]}}
    return {"stringValue": str(value)}


def _parts(message: Message) -> dict[str, Any]:
    """A message as the conventions have it."""
    role, content = message.get("role", "assistant"), message.get("content")
    text = content if isinstance(content, str) else json.dumps(content, default=repr)
    parts: list[dict[str, Any]] = []
    if role == "tool":
        answered = {"type": "tool_call_response", "id": message.get("tool_call_id")}
        parts.append({**answered, "response": text})
    elif content:
        parts.append({"type": "text", "content": text})
    for call in message.get("tool_calls") or ():
        function = call.get("function", {})
        called = {"type": "tool_call", "id": call.get("id"), "name": function.get("name")}
        parts.append({**called, "arguments": function.get("arguments")})
    return {"role": role, "parts": parts}


def _num_before(record: Record, index: int) -> int:
    episode = record.episode
    drawn = len(episode.turns[index].completion.tokens)
    return len(episode.tokens(index)) - drawn
