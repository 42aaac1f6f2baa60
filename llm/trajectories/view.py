"""A table of episodes, and one episode as turns, for a console.

What a model or a tool has written is shown as text: escape sequences and other control characters
are spelled out, so that no episode can act on the terminal that shows it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from unirl.llm.agents.episode import Turn
from unirl.llm.tasks.task import Message
from unirl.llm.trajectories.record import Record

COLUMNS = (
    ("id", "id", 6), ("when", "created", 11), ("task", "task", 16), ("example", "task_id", 8),
    ("ticket", "ticket", 6), ("place", "place", 5), ("ending", "ending", 14),
    ("reward", "reward", 7), ("turns", "turns", 5), ("drawn", "drawn", 6),
    ("versions", "version", 9), ("seconds", "seconds", 7), ("state", "state", 8),
)  # fmt: skip
"""Heading, key and width."""
_DRAWN, _GIVEN, _PLAIN = "\x1b[32m", "\x1b[2m", "\x1b[0m"


def printable(text: object) -> str:
    """With every character that is not shown as itself spelled out; lines stay lines."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii")
        for c in str(text)
    )


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each episode."""
    yield "  ".join(f"{heading:<{width}}" for heading, _, width in COLUMNS).rstrip()
    for row in rows:
        cells = (_cell(row, key)[: max(width, 20)] for _, key, width in COLUMNS)
        widths = (width for _, _, width in COLUMNS)
        yield "  ".join(
            f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)
        ).rstrip()


def _cell(row: Mapping[str, Any], key: str) -> str:
    if key == "version":
        first, last = row["version_min"], row["version_max"]
        return "-" if first is None else f"{first}" if first == last else f"{first}-{last}"
    value = row[key]
    if value is None or value == "":
        return "-"
    if key == "created":
        return time.strftime("%m-%d %H:%M", time.localtime(value))
    if key in ("reward", "seconds"):
        return f"{value:.3g}"
    return printable(value).replace("\n", "\\n")


def episode(record: Record, number: int, *, colour: bool, step: int | None = None) -> Iterator[str]:
    """An episode as its turns; step: this one alone."""
    episode = record.episode
    yield f"episode {number} of run {printable(record.run)}, ticket {record.ticket}.{record.place}"
    total = "none" if record.total is None else f"{record.total:g}"
    scores = ", ".join(
        f"{printable(name)} {score.value:g}" if score.outcome == 0
        else f"{printable(name)} has no value ({printable(score.why)})"
        for name, score in record.scores.items()
    )  # fmt: skip
    yield f"task {printable(record.task)} {printable(record.task_id)} ({printable(record.split)})"
    yield f"reward {total}" + (f" ({scores})" if scores else "")
    why = f": {printable(episode.why)}" if episode.why else ""
    yield f"ended with {episode.ending}{why}, after {episode.seconds:.2f} s, state {record.state}"
    for index, turn in enumerate(episode.turns):
        if step in (None, index):
            yield ""
            yield from turn_lines(turn, index, colour=colour, ids=step is not None)


def turn_lines(turn: Turn, index: int, *, colour: bool, ids: bool = False) -> Iterator[str]:
    """What a turn was given, and what it drew: marked with < and >, and by colour."""
    drawn = turn.completion
    versions = sorted(set(drawn.drawn_versions))
    facts = [
        f"turn {index}",
        turn.origin if turn.parent == index - 1 else f"{turn.origin}, continues {turn.parent}",
        f"given {len(turn.given)}, drew {len(drawn.drawn_versions)} tokens",
        "version " + (", ".join(map(str, versions)) or "-"),
        f"{turn.seconds:.2f} s",
        f"ended by {drawn.finish}",
    ]
    if turn.reward is not None:
        facts.append(f"reward {turn.reward:g}")
    if not turn.trained:
        facts.append("context alone, not trained")
    yield "-- " + "; ".join(facts)
    for message in turn.messages:
        yield from _lines(f"< {printable(message.get('role', '?'))}: ", message, _GIVEN, colour)
    yield from _lines("> ", turn.answer, _DRAWN, colour)
    if turn.info:
        yield f"   {printable(json.dumps(turn.info, default=repr, ensure_ascii=False))}"
    if ids:
        yield f"given ids: {' '.join(map(str, turn.given))}"
        marks = zip(drawn.tokens, drawn.logp, drawn.mask, strict=True)
        shown = (f"{token}:{logp:.3f}" if own else f"({token})" for token, logp, own in marks)
        yield f"drawn ids, with their log-probabilities: {' '.join(shown)}"


def _lines(head: str, message: Message, mark: str, colour: bool) -> Iterator[str]:
    for text in _texts(message):
        for number, line in enumerate(printable(text).split("\n")):
            begin = head if number == 0 else " " * len(head)
            yield f"{mark}{begin}{line}{_PLAIN}" if colour else f"{begin}{line}"


def _texts(message: Message) -> Iterable[str]:
    content = message.get("content")
    thoughts = message.get("reasoning_content")
    if thoughts:
        yield f"(thinks) {thoughts}"
    if isinstance(content, str) and content:
        yield content
    elif content:
        yield json.dumps(content, default=repr, ensure_ascii=False)
    for call in message.get("tool_calls") or ():
        function = call.get("function", {}) if isinstance(call, Mapping) else {}
        yield f"calls {function.get('name')}({function.get('arguments')})"
