"""An episode as JSON: its turns with what was given, answered and called, and its tokens one by
one. Texts and numbers of tokens are bounded, and what is left out is counted.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from unirl.llm.agents.episode import Episode, Turn
from unirl.llm.trajectories.record import tools_of
from unirl.view.answers import cut

MAX_TOKENS = 20_000
"""Of an episode that are shown one by one."""
MAX_TURNS = 1_000
Spell = Callable[[int], str]


def turns_of(
    episode: Episode, spell: Spell, learned: Sequence[Mapping[str, Any]] = ()
) -> list[dict[str, Any]]:
    """spell: the text of a token. learned: what the learner has shown of the tokens."""
    segment_of = _segments(episode)
    room = MAX_TOKENS
    found = []
    shown = _learned(episode, learned)
    for index, turn in enumerate(episode.turns[:MAX_TURNS]):
        drawn = list(_drawn(turn, spell, shown.get(index, ())))
        given = [{"text": spell(token), "id": token, "drawn": False} for token in turn.given[:room]]
        tokens = [*given, *drawn[: max(0, room - len(given))]]
        left_out = len(turn.given) + len(drawn) - len(tokens)
        room -= len(tokens)
        versions = turn.completion.drawn_versions
        found.append(
            {
                "index": index,
                "parent": turn.parent if turn.parent >= 0 else None,
                "segment": segment_of[index],
                "role": str(turn.answer.get("role", "assistant"))[:40],
                "origin": turn.origin,
                "trained": turn.trained,
                "tool": ", ".join(tools_of(turn)) or None,
                "ok": _ok(turn),
                "error": cut(str(turn.info["error"]), 2000) if turn.info.get("error") else None,
                "given": cut("\n\n".join(map(_given, turn.messages))),
                "text": cut(_said(turn.answer)),
                "calls": [_call(call) for call in _calls(turn.answer)],
                "reward": turn.reward,
                "started": turn.started,
                "seconds_model": turn.seconds,
                "seconds_tool": _seconds(turn.info.get("tool_seconds")),
                "finish": turn.completion.finish,
                "version": max(versions, default=None),
                "versions": sorted(set(versions))[:100],
                "num_given": len(turn.given),
                "num_drawn": len(versions),
                "tokens": tokens,
                "cut": left_out or None,
            }
        )
    return found


def _learned(
    episode: Episode, rows: Sequence[Mapping[str, Any]]
) -> dict[int, list[dict[str, float]]]:
    """What the learner has shown of each turn's tokens, by the turn's number. A slot has an
    episode's paths one after the other, each turn in the first that holds it; a path that did not
    fit is left out.
    """
    names = ("token", "drawn", "new_logp", "advantage")
    entries = [
        entry
        for row in rows
        for entry in itertools.zip_longest(*(row.get(name) or () for name in names))
        if entry[1]
    ]
    found: dict[int, list[dict[str, float]]] = {}
    begin, seen = 0, set[int]()
    for leaf in episode.leaves:
        for number in episode.path(leaf):
            turn = episode.turns[number]
            if number in seen or not turn.trained:
                continue
            seen.add(number)
            some = entries[begin : begin + len(turn.completion.tokens)]
            # What is shown may end within a turn.
            if some and all(entry[0] == token for entry, token in zip(
                some, turn.completion.tokens, strict=False
            )):  # fmt: skip
                begin += len(some)
                named = ((("learner_logp", each[2]), ("advantage", each[3])) for each in some)
                found[number] = [
                    {name: value for name, value in pairs if value is not None} for pairs in named
                ]
    return found


def _drawn(
    turn: Turn, spell: Spell, learned: Sequence[Mapping[str, float]]
) -> Iterator[dict[str, Any]]:
    completion = turn.completion
    columns = (completion.tokens, completion.logp, completion.version, completion.mask)
    for number, (token, logp, version, is_drawn) in enumerate(zip(*columns, strict=True)):
        entry: dict[str, Any] = {"text": spell(token), "id": token, "drawn": is_drawn}
        if is_drawn:
            entry |= {"logp": round(logp, 5), "version": version}
            entry |= learned[number] if number < len(learned) else {}
        yield entry


def outline(episode: Episode) -> list[dict[str, Any]]:
    """The tree of its turns: for each which one it continues, and how."""
    return [
        {"index": index, "parent": turn.parent if turn.parent >= 0 else None, "origin": turn.origin}
        for index, turn in enumerate(episode.turns[:MAX_TURNS])
    ]


def _segments(episode: Episode) -> list[int]:
    """For each turn the number of the first path that holds it."""
    found = [-1] * len(episode.turns)
    for number, leaf in enumerate(episode.leaves):
        turn = leaf
        while turn >= 0 and found[turn] < 0:
            found[turn] = number
            turn = episode.turns[turn].parent
    return found


def _given(message: Mapping[str, Any]) -> str:
    return f"{message.get('role', '?')}: {_said(message)}"


def _said(message: Mapping[str, Any]) -> str:
    """What a message says; what it thinks is before it."""
    content = message.get("content")
    thoughts = message.get("reasoning_content")
    parts = [f"(thinks) {thoughts}\n"] if thoughts else []
    if isinstance(content, str):
        parts.append(content)
    elif content:
        parts.append(json.dumps(content, default=repr, ensure_ascii=False))
    return "".join(parts)


def _calls(message: Mapping[str, Any]) -> list[Any]:
    calls = message.get("tool_calls")
    return list(calls)[:100] if isinstance(calls, Sequence) and not isinstance(calls, str) else []


def _call(call: Any) -> dict[str, str]:
    function = call.get("function") if isinstance(call, Mapping) else None
    function = function if isinstance(function, Mapping) else {}
    return {
        "name": cut(str(function.get("name", "?")), 200),
        "arguments": cut(str(function.get("arguments", "")), 10_000),
    }


def _ok(turn: Turn) -> bool | None:
    ok = turn.info.get("ok", None if turn.info.get("error") is None else False)
    return None if ok is None else bool(ok)


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
