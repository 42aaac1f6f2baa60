"""An episode as rewards see it: its last answer, its turns in words, and what it is as tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from unirl.errors import UniRLError
from unirl.llm.agents.episode import Episode, Turn
from unirl.llm.engine import NOBODY, Completion, Finish
from unirl.llm.outcome import CUT_OFF
from unirl.llm.tasks.prompts import Said

Decode = Callable[[Sequence[int]], str]


def said(episode: Episode, decode: Decode, decode_token: Callable[[int], str]) -> Said:
    """`text` is the last answer that was drawn; each of `turns` has: parent, messages (what the
    model was given), drawn_text, tokens (their texts), finish, answer (as the agent was given it),
    reward, seconds, info. decode_token: the text of one token.
    """
    if not episode.turns:
        return Said("", "", (), episode.outcome, episode.ending)
    turns = [_row(turn, decode, decode_token) for turn in episode.turns]
    text = str(episode.turns[-1].answer.get("content") or "")
    whole = decode(as_completion(episode).tokens)
    return Said(text, whole, turns, episode.outcome, episode.ending)


def paid(episode: Episode, text: Said, rewards: Sequence[float | Sequence[float]]) -> Said:
    """Step rewards that were judged at the end: the episode's turns get them, and what was said of
    it with them is returned. Raises UniRLError unless there is one a turn, or one a token of it.
    """
    if len(rewards) != len(episode.turns):
        raise UniRLError(
            f"agent.process_reward returned {len(rewards)} values",
            f"the episode has {len(episode.turns)} turns, and each has one",
            "return a number for each turn, or a list of numbers for each of its tokens",
        )
    rows = []
    for i, (turn, reward) in enumerate(zip(episode.turns, rewards, strict=True)):
        if isinstance(reward, Sequence):
            episode.turns[i] = _paid_by_token(turn, tuple(map(float, reward)), i)
        else:
            value = _finite(float(reward), i)
            episode.turns[i] = replace(turn, reward=(turn.reward or 0.0) + value)
        rows.append({**text.turns[i], "reward": episode.turns[i].reward})
    return Said(text, text.whole, rows, text.outcome, text.ending)


def _paid_by_token(turn: Turn, rewards: tuple[float, ...], number: int) -> Turn:
    if len(rewards) != len(turn.completion.tokens):
        raise UniRLError(
            f"agent.process_reward returned {len(rewards)} numbers for turn {number}",
            f"it drew {len(turn.completion.tokens)} tokens, and each has one",
            'go by turn["tokens"], or return one number for the turn',
        )
    total = _finite(math.fsum(rewards), number)
    return replace(turn, reward=(turn.reward or 0.0) + total, token_rewards=rewards)


def _finite(value: float, turn: int) -> float:
    if not math.isfinite(value):
        raise ValueError(f"agent.process_reward returned {value} for turn {turn}")
    return value


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


def _row(turn: Turn, decode: Decode, decode_token: Callable[[int], str]) -> dict[str, Any]:
    return {
        "parent": turn.parent,
        "messages": [dict(each) for each in turn.messages],
        "drawn_text": decode(turn.completion.tokens),
        "tokens": [decode_token(token) for token in turn.completion.tokens],
        "finish": turn.completion.finish,
        "answer": dict(turn.answer),
        "reward": turn.reward,
        "seconds": turn.seconds,
        "info": dict(turn.info),
    }
