"""Episodes for the tests of the store, and a process that writes some until it is killed."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any, TextIO

from unirl.llm.agents.episode import ROOT, Episode, Turn
from unirl.llm.engine import Completion
from unirl.llm.outcome import Score
from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.ledger import Ledger
from unirl.llm.trajectories.record import Record
from unirl.llm.trajectories.store import open_store

CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "calculator", "arguments": '{"expression": "1+1"}'},
        }
    ],
}


def float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def completion(draw: random.Random, size: int, version: int = 0) -> Completion:
    tokens = tuple(draw.randrange(50000) for _ in range(size))
    logp = tuple(float32(-draw.expovariate(1.0)) for _ in range(size))
    return Completion(tokens, logp, (version,) * size, "stop")


def straight(seed: int = 0, turns: int = 2, tokens: int = 50, version: int = 0) -> Episode:
    """A conversation that is only ever appended to."""
    draw = random.Random(seed)
    found = [
        Turn(
            index - 1,
            tuple(draw.randrange(50000) for _ in range(tokens - tokens // 2)),
            completion(draw, tokens // 2, version),
            ({"role": "user", "content": f"question {index}"},),
            {"role": "assistant", "content": f"answer {index}"},
            origin="prompt" if index == 0 else "extended",
            started=0.5 * index,
            seconds=0.25,
        )
        for index in range(turns)
    ]
    return Episode(found, outcome=1.0, seconds=0.5 * turns)


def tree() -> Episode:
    """Forked, rewritten, with a tool, step rewards, several versions, given tokens in an answer."""
    draw = random.Random(5)
    system = {"role": "system", "content": "be brief"}
    said = {"role": "tool", "tool_call_id": "c1", "content": "2"}
    mixed = Completion((7, 8, 9), (-0.5, 0.0, -0.25), (3, -1, 4), "length", (True, False, True))
    turns = [
        Turn(ROOT, (1, 2, 3), completion(draw, 4, 3), (system, {"role": "user", "content": "1+1"}),
             CALL, "prompt", reward=0.5, token_rewards=(0.25, 0.0, 0.125, 0.0),
             seconds=0.5, info={"ok": True, "tool_seconds": 0.125}),
        Turn(0, (11, 12), mixed, (said,), {"role": "assistant", "content": "2"}, "extended",
             started=1.0, seconds=0.5),
        Turn(0, (13,), completion(draw, 3, 4),
             ({"role": "user", "content": [{"type": "text", "text": "again \u00e9\ud83d"}]},),
             {"role": "assistant", "content": "two", "reasoning_content": "1+1"}, "forked",
             trained=False, started=2.0),
        Turn(ROOT, (1, 5), completion(draw, 0, 4),
             (system, {"role": "user", "content": "summary"},
              {"role": "assistant", "content": "old", "name": "sub"}),
             {"role": "assistant", "content": None}, "rewritten", started=3.0,
             info={"error": "too long"}),
    ]  # fmt: skip
    return Episode(turns, "time", "\x1b[2J out of time", 0.25, 4.0, {"tools": [{"name": "c"}]})


def record(episode: Episode | None = None, **changes: Any) -> Record:
    values: dict[str, Any] = {
        "run": "test", "ticket": 3, "place": 1, "group_size": 2, "prompt": (1, 2), "task": "sums",
        "task_id": "17", "scores": {"exact": Score(0.5), "format": Score(0.25)}, "agent": "native",
        "env": "calculator", "engine": "hf", "task_digest": "t1", "env_digest": "e1",
        "created": 1.7e9,
    }  # fmt: skip
    return Record(tree() if episode is None else episode, **{**values, **changes})


def group(ticket: int, size: int = 2, **changes: Any) -> list[Record]:
    return [
        record(straight(100 * ticket + place), ticket=ticket, place=place, group_size=size,
               prompt=(), **changes)
        for place in range(size)
    ]  # fmt: skip


def write_until_killed(folder: Path, out: TextIO) -> None:
    """Write, mark and lease; each thing that was acknowledged is a line of `out`. The
    process that reads them may kill this one, at any moment.
    """
    store = open_store(StoreConfig(), folder)
    ledger = Ledger(store)
    first = 1 + (store.database.execute("SELECT COALESCE(MAX(ticket), -1) FROM episode")[0][0])
    ledger.release("reader")
    for ticket in range(first, first + 10**6):
        for each in group(ticket):
            store.put(each)
        print(f"put {ticket}", file=out, flush=True)
        if ticket % 3 == 0:
            for number in ledger.mark_trained("test", [ticket], ticket):
                print(f"trained {number}", file=out, flush=True)
        if ticket % 5 == 4:
            taken = ledger.lease(1, "reader")
            for each in ledger.acknowledge("reader", taken, ticket):
                print(f"trained {each.ticket}", file=out, flush=True)
