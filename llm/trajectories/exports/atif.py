"""Episodes in the Agent Trajectory Interchange Format (Harbor's ATIF), and back.

One document is one path of an episode's tree: the last leaf of its first root is the document, each
other leaf an embedded trajectory beside it, whose turns that another document has are marked
`is_copied_context`. What ATIF has no field for is in `extra.unirl`, so that an episode of ours
comes back whole; what a foreign document has and an episode has not is kept in `info["atif"]`.

Source: RFC 0001 of harbor-framework/harbor, ATIF-v1.7.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from unirl.errors import UniRLError
from unirl.llm.agents.episode import ROOT, Episode, Turn
from unirl.llm.engine import NOBODY, Completion
from unirl.llm.outcome import Score
from unirl.llm.tasks.task import Message
from unirl.llm.trajectories.exports import our_version
from unirl.llm.trajectories.exports.atif_schema import problems
from unirl.llm.trajectories.record import Record

VERSION = "ATIF-v1.7"
_OURS = (
    "ticket", "place", "group_size", "task", "task_id", "split", "reward", "env", "sandbox",
    "engine", "task_digest", "env_digest", "tokenizer_digest", "template_digest", "created",
)  # fmt: skip
_SOURCES = {"system": "system", "user": "user", "developer": "system"}
_OF_TURN = ("origin", "trained", "reward", "started", "seconds", "info")
"""Fields of a turn that ATIF has no place for."""


def to_atif(record: Record, name: str = "") -> dict[str, Any]:
    """The document of an episode. name: of this document; "": made of run, ticket and place."""
    episode = record.episode
    name = name or f"{record.run}-{record.ticket}-{record.place}"
    leaves = episode.leaves
    roots = [episode.path(leaf)[0] for leaf in leaves]
    main = max((leaf for leaf, root in zip(leaves, roots, strict=True) if root == 0), default=None)
    seen: set[int] = set()
    agent = {"name": record.agent or "unirl", "version": our_version()}
    if record.engine:
        agent["model_name"] = record.engine
    tools = episode.info.get("tools")
    if isinstance(tools, list) and all(isinstance(each, dict) for each in tools):
        agent["tool_definitions"] = tools  # type: ignore[assignment]
    ours = {each: getattr(record, each) for each in _OURS}
    ours |= {
        "scores": {key: list(vars(score).values()) for key, score in record.scores.items()},
        "ending": episode.ending,
        "why": episode.why,
        "outcome": episode.outcome,
        "seconds": episode.seconds,
        "info": episode.info,
        "prompt": list(record.prompt),
        "agent": record.agent,
        "leaf": main,
    }
    drawn = sum(len(turn.completion.drawn_versions) for turn in episode.turns)
    document: dict[str, Any] = {
        "schema_version": VERSION,
        "session_id": record.run,
        "trajectory_id": name,
        "agent": agent,
        "steps": _steps(record, main, seen) if main is not None else [_nothing()],
        "final_metrics": {
            "total_prompt_tokens": sum(_num_prompt(episode, i) for i in range(len(episode.turns))),
            "total_completion_tokens": drawn,
        },
        "extra": {"unirl": ours},
    }
    others = [
        {
            "schema_version": VERSION,
            "session_id": record.run,
            "trajectory_id": f"{name}-{leaf}",
            "agent": agent,
            "steps": _steps(record, leaf, seen),
            "extra": {"unirl": {"leaf": leaf}},
        }
        for leaf in leaves
        if leaf != main
    ]
    if others:
        document["subagent_trajectories"] = others
    document.update(episode.info.get("atif", {}))
    # As JSON has it: tuples are lists, and what it cannot hold is a text.
    return json.loads(json.dumps(document, default=repr))  # type: ignore[no-any-return]


def from_atif(document: Mapping[str, Any], run: str = "") -> Record:
    """The episode of a document, ours or another's. Raises UniRLError where it is not ATIF."""
    found = problems(document)
    if found:
        raise UniRLError(
            "this is not a trajectory in ATIF",
            f"{found[0]}" + (f", and {len(found) - 1} more" if len(found) > 1 else ""),
            "look at the format's validator: harbor traces validate",
        )
    ours = dict((document.get("extra") or {}).get("unirl") or {})
    turns: dict[int, Turn] = {}
    after: list[Message] = []
    for each in [document, *(document.get("subagent_trajectories") or ())]:
        left = _read_steps(each["steps"], turns)
        after = after or left
    episode = Episode([turns[number] for number in sorted(turns)])
    for name in ("ending", "why", "outcome", "seconds", "info"):
        if name in ours:
            setattr(episode, name, ours[name])
    if not ours:
        kept = ("session_id", "trajectory_id", "agent", "final_metrics", "notes", "extra",
                "continued_trajectory_ref", "schema_version")  # fmt: skip
        episode.info["atif"] = {name: document[name] for name in kept if name in document}
        tools = document["agent"].get("tool_definitions")
        episode.info |= {"tools": tools} if tools else {}
    if after:
        episode.info["after"] = after
    fields = {name: ours[name] for name in _OURS if name in ours}
    scores = {name: Score(*values) for name, values in ours.get("scores", {}).items()}
    return Record(
        episode,
        run or document.get("session_id") or "imported",
        prompt=tuple(ours.get("prompt", ())),
        scores=scores,
        agent=ours.get("agent", document["agent"]["name"]),
        **fields,
    )


def _steps(record: Record, leaf: int, seen: set[int]) -> list[dict[str, Any]]:
    """The path to a leaf. An answer's observation is what its tools said: the tool messages that
    the next turn was given first.
    """
    found: list[dict[str, Any]] = []
    episode = record.episode
    path = episode.path(leaf)
    for number in path:
        turn = episode.turns[number]
        messages = list(turn.messages)
        calls = _calls(turn.answer)
        if found and number != path[0]:
            _observe(found[-1], messages)
        found += [_given(message) for message in messages]
        found.append(_answered(record, number, turn, calls, number in seen))
    after = list(episode.info.get("after", ()))
    if after and leaf == path[-1] and not seen:
        _observe(found[-1], after)
    seen.update(path)
    for number, step in enumerate(found, 1):
        step["step_id"] = number
    return found


def _observe(step: dict[str, Any], messages: list[Message]) -> None:
    """Tool messages at the beginning become the step's observation."""
    known = {call["tool_call_id"] for call in step.get("tool_calls", ())}
    results = []
    while messages and messages[0].get("role") == "tool":
        message = messages.pop(0)
        result: dict[str, Any] = {}
        if message.get("tool_call_id") in known:
            result["source_call_id"] = message["tool_call_id"]
        if isinstance(message.get("content"), str):
            result["content"] = message["content"]
        result |= message.get("atif", {})
        if _observed(result) != message:
            result["extra"] = {"unirl": {"message": message}}
        results.append(result)
    if results:
        step["observation"] = {"results": results}


def _observed(result: Mapping[str, Any]) -> Message:
    kept = (result.get("extra") or {}).get("unirl")
    if kept:
        return dict(kept["message"])
    message = {"role": "tool", "content": result.get("content")}
    if result.get("source_call_id") is not None:
        message["tool_call_id"] = result["source_call_id"]
    others = {name: result[name] for name in ("subagent_trajectory_ref", "extra") if name in result}
    return {**message, "atif": others} if others else message


def _given(message: Message) -> dict[str, Any]:
    step: dict[str, Any] = {
        "step_id": 0,
        "source": _SOURCES.get(message.get("role", ""), "user"),
        "message": message["content"] if isinstance(message.get("content"), str) else "",
    }
    foreign = message.get("atif")
    if isinstance(foreign, Mapping):
        return {**step, **foreign}
    if _as_message(step) != message:
        step["extra"] = {"unirl": {"message": message}}
    return step


def _as_message(step: Mapping[str, Any]) -> Message:
    kept = (step.get("extra") or {}).get("unirl")
    if kept and "message" in kept:
        return dict(kept["message"])
    role = "assistant" if step["source"] == "agent" else step["source"]
    text = step["message"]
    known = {"role": role, "content": text if isinstance(text, str) else ""}
    plain = {"step_id", "source", "message"}
    foreign = {name: value for name, value in step.items() if name not in plain}
    if role == "assistant" or not isinstance(text, str):
        foreign |= {"source": step["source"], "message": text}
    return {**known, "atif": foreign} if foreign else known


def _answered(
    record: Record, number: int, turn: Turn, calls: list[dict[str, Any]], copied: bool
) -> dict[str, Any]:
    drawn, answer = turn.completion, turn.answer
    content, thoughts = answer.get("content"), answer.get("reasoning_content")
    step: dict[str, Any] = {
        "step_id": 0,
        "timestamp": _time(record.created + turn.started),
        "source": "agent",
        "message": content if isinstance(content, str) else "",
        "llm_call_count": 1,
    }
    if isinstance(thoughts, str):
        step["reasoning_content"] = thoughts
    if calls:
        step["tool_calls"] = calls
    step["metrics"] = {
        "prompt_tokens": _num_prompt(record.episode, number),
        "completion_tokens": len(drawn.drawn_versions),
        "prompt_token_ids": list(_before(record.episode, number)),
        "completion_token_ids": list(drawn.tokens),
        "logprobs": list(drawn.logp),
    }
    ours = {
        "turn": number,
        "parent": turn.parent,
        "num_given": len(turn.given),
        "version": list(drawn.version),
        "drawn": list(drawn.drawn),
        "finish": drawn.finish,
        "token_rewards": list(turn.token_rewards),
        **{name: getattr(turn, name) for name in _OF_TURN},
    }
    if _answer(step) != answer:
        ours["answer"] = answer
    step["extra"] = {"unirl": ours}
    if copied:
        step["is_copied_context"] = True
    foreign = turn.info.get("atif")
    if isinstance(foreign, Mapping):
        step = {
            "step_id": 0,
            "source": "agent",
            "message": step["message"],
            **({"tool_calls": calls} if calls else {}),
            **({"is_copied_context": True} if copied else {}),
            **foreign,
        }
    return step


def _calls(answer: Message) -> list[dict[str, Any]]:
    found = []
    for call in answer.get("tool_calls") or ():
        function = call.get("function", {})
        arguments = function.get("arguments")
        try:
            values = json.loads(arguments) if isinstance(arguments, str) else arguments
        except ValueError:
            values = None
        found.append(
            {
                "tool_call_id": str(call.get("id", "")),
                "function_name": str(function.get("name", "")),
                "arguments": values if isinstance(values, dict) else {},
            }
        )
    return found


def _answer(step: Mapping[str, Any]) -> Message:
    """The assistant's message of a step."""
    text = step["message"]
    answer: dict[str, Any] = {"role": "assistant", "content": text}
    if step.get("reasoning_content") is not None:
        answer["reasoning_content"] = step["reasoning_content"]
    if step.get("tool_calls"):
        answer["tool_calls"] = [
            {
                "id": call["tool_call_id"],
                "type": "function",
                "function": {
                    "name": call["function_name"],
                    "arguments": json.dumps(call["arguments"]),
                },
            }
            for call in step["tool_calls"]
        ]
    return answer


def _read_steps(steps: Sequence[Mapping[str, Any]], turns: dict[int, Turn]) -> list[Message]:
    """Enter the turns of a document; returns what the last one's tools said."""
    messages: list[Message] = []
    last = ROOT
    for step in steps:
        ours = (step.get("extra") or {}).get("unirl") or {}
        is_known = "turn" in ours and ours["turn"] in turns
        # An answer that a foreign document has copied is part of what the next one was given.
        if step["source"] != "agent" or (step.get("is_copied_context") and "turn" not in ours):
            if not ours.get("nothing"):
                messages.append(_as_message(step))
        elif is_known:
            last = ours["turn"]
            messages = []
        else:
            number = ours.get("turn", len(turns))
            turns[number] = _read_turn(step, ours, turns, last, messages)
            last, messages = number, []
        observation = step.get("observation")
        if observation:
            messages += [_observed(result) for result in observation["results"]]
    return messages


def _read_turn(
    step: Mapping[str, Any],
    ours: Mapping[str, Any],
    turns: Mapping[int, Turn],
    last: int,
    messages: Sequence[Message],
) -> Turn:
    metrics = step.get("metrics") or {}
    prompt = tuple(metrics.get("prompt_token_ids") or ())
    tokens = tuple(metrics.get("completion_token_ids") or ())
    logp = tuple(float(each) for each in metrics.get("logprobs") or ())
    if ours:
        return Turn(
            ours["parent"],
            prompt[len(prompt) - ours["num_given"] :],
            Completion(tokens, logp, tuple(ours["version"]), ours["finish"], tuple(ours["drawn"])),
            messages=tuple(messages),
            answer=ours["answer"] if "answer" in ours else _answer(step),
            token_rewards=tuple(ours.get("token_rewards", ())),
            **{name: ours[name] for name in _OF_TURN},
        )
    before: tuple[int, ...] = ()
    if last != ROOT:
        path = Episode(list(turns.values())).tokens(last) if prompt else ()
        before = path if prompt[: len(path)] == path else ()
    # Without its log-probabilities a token cannot be learned from.
    is_whole = len(logp) == len(tokens) > 0
    shown = ("step_id", "source", "message", "tool_calls", "observation", "is_copied_context")
    foreign = {name: value for name, value in step.items() if name not in shown}
    # What arguments or parts would lose on the way is kept as it was.
    calls = step.get("tool_calls")
    if calls and _calls(_answer(step)) != calls:
        foreign["tool_calls"] = calls
    if not isinstance(step["message"], str):
        foreign["message"] = step["message"]
    return Turn(
        last if before or not prompt else ROOT,
        prompt[len(before) :],
        Completion(
            tokens, logp if is_whole else (0.0,) * len(tokens), (NOBODY,) * len(tokens), "stop"
        ),
        messages=tuple(messages),
        answer=_answer(step),
        origin="prompt" if last == ROOT else "extended" if before or not prompt else "rewritten",
        trained=is_whole,
        info={"atif": foreign},
    )


def _before(episode: Episode, number: int) -> tuple[int, ...]:
    """Tokens in the context before a turn's first own one."""
    parent = episode.turns[number].parent
    return (episode.tokens(parent) if parent != ROOT else ()) + episode.turns[number].given


def _num_prompt(episode: Episode, number: int) -> int:
    return len(_before(episode, number))


def _nothing() -> dict[str, Any]:
    """ATIF asks for a step: an episode that failed at once has none."""
    step = {"step_id": 1, "source": "system", "message": ""}
    return {**step, "extra": {"unirl": {"nothing": True}}}


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
