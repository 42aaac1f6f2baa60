"""Records as bytes for another process of the same interpreter. marshal takes a fifth of the time
that pickling objects takes, and it is the time of the process that draws.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Sequence
from typing import Any

from unirl.llm.agents.episode import Episode, Turn
from unirl.llm.engine import Completion
from unirl.llm.outcome import Score
from unirl.llm.trajectories.frames import as_json
from unirl.llm.trajectories.record import Record


def pack(records: Sequence[Record]) -> bytes:
    """What marshal does not know becomes what JSON makes of it, as it would when it is stored."""
    values = [_plain(record) for record in records]
    try:
        return marshal.dumps(values)
    except ValueError:
        for each in values:
            each["episode"]["info"] = _known(each["episode"]["info"])
            for turn in each["episode"]["turns"]:
                turn["messages"] = tuple(map(_known, turn["messages"]))
                turn["answer"], turn["info"] = _known(turn["answer"]), _known(turn["info"])
        return marshal.dumps(values)


def unpack(data: bytes) -> list[Record]:
    return [_record(values) for values in marshal.loads(data)]


def _plain(record: Record) -> dict[str, Any]:
    turns = [{**vars(each), "completion": vars(each.completion)} for each in record.episode.turns]
    return {
        **vars(record),
        "episode": {**vars(record.episode), "turns": turns},
        "scores": {name: vars(score) for name, score in record.scores.items()},
    }


def _known(value: Any) -> Any:
    return json.loads(as_json(value))


def _record(values: dict[str, Any]) -> Record:
    episode = values.pop("episode")
    turns = [
        Turn(completion=Completion(**turn.pop("completion")), **turn)
        for turn in episode.pop("turns")
    ]
    scores = {name: Score(**score) for name, score in values.pop("scores").items()}
    return Record(Episode(turns=turns, **episode), scores=scores, **values)
