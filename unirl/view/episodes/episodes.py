"""All episodes of one run, wherever they are: found, opened, side by side, exported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unirl.errors import UniRLError
from unirl.llm.trajectories.databases.database import StoreFailed
from unirl.view.answers import cut
from unirl.view.episodes.samples import Samples
from unirl.view.episodes.sources import Databases
from unirl.view.episodes.stored import Stored
from unirl.view.episodes.turns import outline, turns_of
from unirl.view.episodes.vocabulary import Vocabulary
from unirl.view.episodes.wanted import Wanted
from unirl.view.folders import NotThere, Run
from unirl.view.rows import number

FORMATS = ("atif", "verifiers", "otlp")


@dataclass(frozen=True)
class Export:
    name: str
    """Of the file."""
    text: str


class Episodes:
    """config: the run's. databases: those that runs share."""

    def __init__(self, run: Run, config: Mapping[str, Any], databases: Databases) -> None:
        self._stored = Stored(databases.source(run.path, config))
        self._samples = Samples(run.path, _weights(config))
        self._vocabulary = Vocabulary(run.path)

    def has(self) -> dict[str, bool]:
        """samples: completions with their texts; episodes: stored ones with their turns."""
        return {"samples": self._samples.is_there, "episodes": self._stored.is_there}

    def find(self, wanted: Wanted) -> dict[str, Any]:
        if self._stored.is_there:
            return self._stored.find(wanted)
        if self._samples.is_there:
            return self._samples.find(wanted)
        return {"total": 0, "rows": [], "next": None, "facets": {}, "source": None}

    def open(self, id: str) -> dict[str, Any]:
        """One of them, with its turns and tokens."""
        ep = _id(id)
        self._vocabulary.load()
        if not self._stored.is_there:
            return self._samples.open(ep, self._vocabulary)
        row = self._stored.row(ep)
        try:
            episode = self._stored.record(ep).episode
        except UniRLError as error:  # its row is shown all the same
            return {**row, "turns": [], "outline": [], "missing": list(error.parts)}
        ticket, place = row["ticket"], row["place"]
        learned = self._samples.learned(ticket, place) if ticket is not None else []
        return {
            **row,
            "num_turns": row["turns"],
            "why": cut(episode.why, 2000),
            "turns": turns_of(episode, self._vocabulary.spell, learned),
            "outline": outline(episode),
            "learner_recorded": bool(learned),
            "source": "store",
        }

    def group(self, ticket: str) -> dict[str, Any]:
        """The episodes of a ticket, with the text of each as a whole."""
        number_ = _id(ticket)
        if not self._stored.is_there:
            rows = self._samples.of_ticket(number_)
            if not rows:
                raise _no_ticket(number_)
            return {"ticket": number_, "prompt": rows[0]["prompt"], "rows": rows}
        rows = self._stored.of_ticket(number_)
        if not rows:
            raise _no_ticket(number_)
        prompt, lost = None, None
        for row in rows:
            try:
                if lost is not None:  # one time limit for all of them
                    raise lost
                turns = turns_of(self._stored.record(row["id"]).episode, str)
            except UniRLError as error:
                lost = error if isinstance(error, StoreFailed) else None
                row["text"] = f"({error.what})"
                continue
            prompt = prompt or next((turn["given"] for turn in turns), None)
            row["text"] = cut("\n\n".join(_line(turn) for turn in turns), 20_000)
        return {"ticket": number_, "prompt": prompt, "rows": rows}

    def export(self, id: str, format: str) -> Export:
        """One stored episode as another program reads it."""
        ep = _id(id)
        if not self._stored.is_there:
            raise UniRLError(
                "this run has no stored episodes",
                "episodes of agents are stored, completions are not",
                "samples/samples.jsonl in the run folder has the completions",
            )
        record = self._stored.record(ep)
        # Late: the three formats are asked for once in a while.
        from unirl.llm.trajectories.exports.atif import to_atif
        from unirl.llm.trajectories.exports.otlp import to_otlp
        from unirl.llm.trajectories.exports.verifiers import to_verifiers

        made = {
            "atif": lambda: to_atif(record, str(ep)),
            "verifiers": lambda: to_verifiers(record, ep),
            "otlp": lambda: to_otlp([(ep, record)]),
        }[format]()
        return Export(f"episode-{ep}.{format}.json", json.dumps(made) + "\n")


def _line(turn: Mapping[str, Any]) -> str:
    calls = [f"calls {call['name']}({call['arguments']})" for call in turn["calls"]]
    return "\n".join([turn["text"], *calls]).strip()


def _weights(config: Mapping[str, Any]) -> list[tuple[str, float]]:
    reward = config.get("reward")
    weights = reward.get("weights") if isinstance(reward, dict) else None
    if not isinstance(weights, dict):
        return []
    return [(cut(name, 100), number(w)) for name, w in weights.items() if number(w) == number(w)]


def _id(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise NotThere(
            f"{text[:40]!r} names no episode", "it is a number of the list", "load the list again"
        )
    return int(text)


def _no_ticket(ticket: int) -> NotThere:
    return NotThere(
        f"there is nothing of ticket {ticket}",
        "tickets are in the list of episodes",
        "it may have expired, or was not shown",
    )
