"""An episode as rewards see it: its last answer, its turns in words, and what it is as tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unirl.llm.agents.episode import Episode, Turn
from unirl.llm.engine import NOBODY, Completion, Finish
from unirl.llm.outcome import CUT_OFF
from unirl.llm.tasks.prompts import Said

Decode = Callable[[Sequence[int]], str]


def said(episode: Episode, decode: Decode) -> Said:
    """`text` is the last answer that was drawn; each of `turns` has: parent, messages (what the
    model was given), drawn_text, finish, answer (as the agent was given it), reward,
    seconds, info.
    """
    if not episode.turns:
        return Said("", "", (), episode.outcome, episode.ending)
    turns = [_row(turn, decode) for turn in episode.turns]
    text = str(episode.turns[-1].answer.get("content") or "")
    whole = decode(as_completion(episode).tokens)
    return Said(text, whole, turns, episode.outcome, episode.ending)


def as_completion(episode: Episode) -> Completion:
    """The path to the last turn; what stood in its root's prompt is left out."""
    if not episode.turns:
        return Completion((), (), (), "stop")
    tokens: list[int] = []
    logp: list[float] = []
    version: list[int] = []
    drawn: list[bool] = []
    for place, number in enumerate(episode.path(len(episode.turns) - 1)):
        turn = episode.turns[number]
        given = turn.given if place else ()
        tokens += (*given, *turn.completion.tokens)
        logp += (0.0,) * len(given) + turn.completion.logp
        version += (NOBODY,) * len(given) + turn.completion.version
        drawn += (False,) * len(given) + (True,) * len(turn.completion.tokens)
    finish: Finish = "length" if episode.ending in CUT_OFF else "stop"
    return Completion(tuple(tokens), tuple(logp), tuple(version), finish, tuple(drawn))


def _row(turn: Turn, decode: Decode) -> dict[str, Any]:
    return {
        "parent": turn.parent,
        "messages": [dict(each) for each in turn.messages],
        "drawn_text": decode(turn.completion.tokens),
        "finish": turn.completion.finish,
        "answer": dict(turn.answer),
        "reward": turn.reward,
        "seconds": turn.seconds,
        "info": dict(turn.info),
    }
