"""What a document in ATIF may hold, up to version 1.7, and what is wrong with one.

Source: RFC 0001 of harbor-framework/harbor and its validator, whose rules these are.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from typing import Any

_NUMBER = (int, float)
_TEXT, _TABLE, _LIST = (str,), (dict,), (list,)
_INT, _BOOL = (int,), (bool,)

# Name of the field: whether it is required, and types.
_TRAJECTORY = {
    "schema_version": (True, _TEXT), "session_id": (False, _TEXT), "trajectory_id": (False, _TEXT),
    "agent": (True, _TABLE), "steps": (True, _LIST), "notes": (False, _TEXT),
    "final_metrics": (False, _TABLE), "continued_trajectory_ref": (False, _TEXT),
    "extra": (False, _TABLE), "subagent_trajectories": (False, _LIST),
}  # fmt: skip
_AGENT = {
    "name": (True, _TEXT), "version": (True, _TEXT), "model_name": (False, _TEXT),
    "tool_definitions": (False, _LIST), "extra": (False, _TABLE),
}  # fmt: skip
_STEP = {
    "step_id": (True, _INT), "timestamp": (False, _TEXT), "source": (True, _TEXT),
    "model_name": (False, _TEXT), "reasoning_effort": (False, (*_TEXT, *_NUMBER)),
    "message": (True, (str, list)), "reasoning_content": (False, _TEXT),
    "tool_calls": (False, _LIST), "observation": (False, _TABLE), "metrics": (False, _TABLE),
    "is_copied_context": (False, _BOOL), "llm_call_count": (False, _INT), "extra": (False, _TABLE),
}  # fmt: skip
_CALL = {
    "tool_call_id": (True, _TEXT), "function_name": (True, _TEXT), "arguments": (True, _TABLE),
    "extra": (False, _TABLE),
}  # fmt: skip
_RESULT = {
    "source_call_id": (False, _TEXT), "content": (False, (str, list)),
    "subagent_trajectory_ref": (False, _LIST), "extra": (False, _TABLE),
}  # fmt: skip
_METRICS = {
    "prompt_tokens": (False, _INT), "completion_tokens": (False, _INT),
    "cached_tokens": (False, _INT), "cost_usd": (False, _NUMBER),
    "prompt_token_ids": (False, _LIST), "completion_token_ids": (False, _LIST),
    "logprobs": (False, _LIST), "extra": (False, _TABLE),
}  # fmt: skip
_FINAL = {
    "total_prompt_tokens": (False, _INT), "total_completion_tokens": (False, _INT),
    "total_cached_tokens": (False, _INT), "total_cost_usd": (False, _NUMBER),
    "total_steps": (False, _INT), "extra": (False, _TABLE),
}  # fmt: skip
_PART = {"type": (True, _TEXT), "text": (False, _TEXT), "source": (False, _TABLE)}
_IMAGE = {"media_type": (True, _TEXT), "path": (True, _TEXT)}
_REFERENCE = {
    "trajectory_id": (False, _TEXT), "session_id": (False, _TEXT),
    "trajectory_path": (False, _TEXT), "extra": (False, _TABLE),
}  # fmt: skip
_IMAGES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_AGENT_ALONE = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")

Fields = Mapping[str, tuple[bool, tuple[type, ...]]]


def problems(document: object) -> list[str]:
    """Sentences; none: it is valid."""
    return list(_trajectory(document, "the document"))


def _trajectory(value: object, where: str) -> Iterator[str]:
    yield from _fields(value, _TRAJECTORY, where)
    if not isinstance(value, dict):
        return
    version = str(value.get("schema_version"))
    if not re.fullmatch(r"ATIF-v1\.[0-7]", version):
        yield f"{where}: schema_version is {version:.40}, and must be ATIF-v1.0 to ATIF-v1.7"
    yield from _fields(value.get("agent", {}), _AGENT, f"{where}.agent")
    yield from _fields(value.get("final_metrics") or {}, _FINAL, f"{where}.final_metrics")
    steps = value.get("steps")
    if isinstance(steps, list):
        if not steps:
            yield f"{where}: steps is empty"
        for number, step in enumerate(steps):
            yield from _step(step, number, f"{where}.steps[{number}]")
    seen = set()
    for number, other in enumerate(value.get("subagent_trajectories") or ()):
        inside = f"{where}.subagent_trajectories[{number}]"
        yield from _trajectory(other, inside)
        name = other.get("trajectory_id") if isinstance(other, dict) else None
        if name is None or name in seen:
            yield f"{inside}: trajectory_id is missing, or not its own"
        seen.add(name)


def _step(value: object, number: int, where: str) -> Iterator[str]:
    yield from _fields(value, _STEP, where)
    if not isinstance(value, dict):
        return
    source, calls = value.get("source"), value.get("llm_call_count")
    if value.get("step_id") != number + 1:
        yield f"{where}: step_id is {value.get('step_id')}, and must be {number + 1}"
    if source not in ("system", "user", "agent"):
        yield f"{where}: source must be system, user or agent"
    if source != "agent":
        for name in _AGENT_ALONE:
            if value.get(name) is not None:
                yield f"{where}: {name} is an agent's alone"
    if calls == 0 and source == "agent":
        for name in ("metrics", "reasoning_content"):
            if value.get(name) is not None:
                yield f"{where}: {name} has no place where llm_call_count is 0"
    if isinstance(calls, int) and calls < 0:
        yield f"{where}: llm_call_count is negative"
    if isinstance(value.get("timestamp"), str):
        try:
            datetime.datetime.fromisoformat(value["timestamp"].replace("Z", "+00:00"))
        except ValueError:
            yield f"{where}: timestamp is no ISO 8601 time"
    yield from _content(value.get("message"), f"{where}.message")
    yield from _metrics(value.get("metrics"), f"{where}.metrics")
    known = set()
    for index, call in enumerate(_listed(value.get("tool_calls"))):
        yield from _fields(call, _CALL, f"{where}.tool_calls[{index}]")
        known.add(call.get("tool_call_id") if isinstance(call, dict) else None)
    observation = value.get("observation")
    if isinstance(observation, dict):
        yield from _fields(observation, {"results": (True, _LIST)}, f"{where}.observation")
        for index, result in enumerate(_listed(observation.get("results"))):
            yield from _result(result, known, f"{where}.observation.results[{index}]")


def _result(value: object, known: set[Any], where: str) -> Iterator[str]:
    yield from _fields(value, _RESULT, where)
    if isinstance(value, dict):
        call = value.get("source_call_id")
        if call is not None and call not in known:
            yield f"{where}: source_call_id {call!s:.40} is no call of this step"
        yield from _content(value.get("content"), f"{where}.content")
        for index, each in enumerate(_listed(value.get("subagent_trajectory_ref"))):
            inside = f"{where}.subagent_trajectory_ref[{index}]"
            yield from _fields(each, _REFERENCE, inside)
            names = ("trajectory_id", "trajectory_path")
            if isinstance(each, dict) and all(each.get(name) is None for name in names):
                yield f"{inside}: neither trajectory_id nor trajectory_path is set"


def _metrics(value: object, where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        return
    yield from _fields(value, _METRICS, where)
    for name in ("prompt_token_ids", "completion_token_ids"):
        if not all(_is(each, _INT) for each in _listed(value.get(name))):
            yield f"{where}.{name} must hold whole numbers"
    if not all(_is(each, _NUMBER) for each in _listed(value.get("logprobs"))):
        yield f"{where}.logprobs must hold numbers"


def _content(value: object, where: str) -> Iterator[str]:
    for index, part in enumerate(_listed(value)):
        inside = f"{where}[{index}]"
        yield from _fields(part, _PART, inside)
        if not isinstance(part, dict):
            continue
        kind, text, source = (part.get(name) for name in ("type", "text", "source"))
        if kind == "text":
            if text is None or source is not None:
                yield f"{inside}: a text has text, and no source"
        elif kind == "image":
            if source is None or text is not None:
                yield f"{inside}: an image has a source, and no text"
            elif isinstance(source, dict):
                yield from _fields(source, _IMAGE, f"{inside}.source")
                if source.get("media_type") not in _IMAGES:
                    yield f"{inside}.source: media_type must be one of {', '.join(_IMAGES)}"
        else:
            yield f"{inside}: type must be text or image"


def _fields(value: object, fields: Fields, where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where} must be an object"
        return
    for name in value.keys() - fields.keys():
        yield f"{where} has no field {name!s:.40}"
    for name, (is_required, types) in fields.items():
        found = value.get(name)
        if found is None and is_required:
            yield f"{where} lacks {name}"
        elif found is not None and not _is(found, types):
            names = " or ".join(each.__name__ for each in types)
            yield f"{where}.{name} is {type(found).__name__}, and must be {names}"


def _is(value: object, types: tuple[type, ...]) -> bool:
    if isinstance(value, bool):
        return bool in types
    is_whole = isinstance(value, float) and value.is_integer() and int in types
    return isinstance(value, types) or is_whole


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
