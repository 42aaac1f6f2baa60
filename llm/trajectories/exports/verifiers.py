"""Episodes as traces of verifiers (version 1): a line of JSON for each, with a graph of messages.

Each message is a node; what the model answered is a sampled one. A turn's tokens were rendered as
one text, so the last message that it was given has them all.
"""

from __future__ import annotations

import json
from typing import Any

from unirl.llm.agents.episode import ROOT
from unirl.llm.outcome import SCORE
from unirl.llm.trajectories.record import Record

VERSION = 1


def to_verifiers(record: Record, number: int) -> dict[str, Any]:
    """The line of an episode."""
    episode = record.episode
    nodes: list[dict[str, Any]] = []
    node_of: dict[int, int] = {}
    for index, turn in enumerate(episode.turns):
        parent = node_of[turn.parent] if turn.parent != ROOT else None
        messages = turn.messages or ({"role": "user", "content": ""},)
        for place, message in enumerate(messages):
            given = list(turn.given) if place == len(messages) - 1 else []
            nodes.append(_node(parent, message, False, given, [False] * len(given), []))
            parent = len(nodes) - 1
        drawn = turn.completion
        mask = [own and turn.trained for own in drawn.mask]
        nodes.append(_node(parent, turn.answer, True, list(drawn.tokens), mask, list(drawn.logp)))
        node_of[index] = len(nodes) - 1
    rewards = {
        name: {"score": score.value, "weight": 1.0}
        for name, score in record.scores.items()
        if score.outcome == SCORE
    }
    trace = {
        "id": f"{record.run}/{number}",
        "nodes": nodes,
        "calls": list(node_of.values()),
        "rewards": rewards,
        "metrics": {"reward": record.total, "outcome": episode.outcome},
        "timing": {
            "start": record.created,
            "seconds": episode.seconds,
            "model_seconds": sum(turn.seconds for turn in episode.turns),
        },
        "stop_condition": episode.ending,
    }
    task = {"name": record.task, "id": record.task_id, "split": record.split}
    line = {"version": VERSION, "task": task, "traces": [trace]}
    return json.loads(json.dumps(line, default=repr))  # type: ignore[no-any-return]


def _node(
    parent: int | None, message: Any, sampled: bool, ids: list[int], mask: list[bool], logp: Any
) -> dict[str, Any]:
    return {
        "parent": parent,
        "message": message,
        "sampled": sampled,
        "token_ids": ids,
        "mask": mask,
        "logprobs": logp,
    }
