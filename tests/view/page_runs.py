"""Run folders that the tests of the page look at: as runs write them, but made in a moment."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.llm.trajectories.stored_episodes import record, tree
from unirl.llm.agents.episode import ROOT, Episode, Turn
from unirl.llm.engine import Completion
from unirl.llm.outcome import Score
from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.store import open_store

BEGAN = 1_790_000_000.0
HOSTILE = (
    "<img src=x onerror=\"document.title='attacked'\"><script>document.title='attacked'</script>"
    "</script><!-- \x1b[31mred\x1b[0m \u202egnp.exe " + "A" * 20_000
)
"""What a model may write: elements, a terminal's sequences, other directions, a long line."""
CARTPOLE = """recipe = "impala"

[env]
id = "CartPole-v1"

[queue]
max_staleness = 2
batch_size = 4

[learner.optimizer]
lr = {lr}

[run]
seed = {seed}
total_steps = 200000
"""
AGENT = """recipe = "agent"
mode = "one-step-off"

[model]
path = "tiny"

[task]
name = "products"

[run]
seed = 1
total_steps = 60000
"""


def write_runs(folder: Path, *, num_more: int = 0) -> None:
    """Three seeds of CartPole, one of them with faults, another config, and a run of agents."""
    for seed in (1, 2, 3):
        write_run(folder / f"cartpole-{seed}", CARTPOLE.format(seed=seed, lr=0.001), seed)
    write_run(folder / "cartpole-slow", CARTPOLE.format(seed=1, lr=0.0001), 7, slowness=3.0)
    write_agent_run(folder / "agent")
    for number in range(num_more):
        write_run(folder / f"more-{number:03}", CARTPOLE.format(seed=number, lr=0.01), number)


def write_run(folder: Path, config: str, seed: int, *, slowness: float = 1.0) -> None:
    begin(folder, config)
    draw = random.Random(seed)
    pace = slowness * (1 + 0.15 * (seed % 3))
    add_lines(folder / "metrics.jsonl", [row(i, draw, pace) for i in range(1, 101)])
    events: list[dict[str, Any]] = [
        {"event": "started", "member": "run", "step": 0, "recipe": "impala", "runner": "processes",
         "pools": [{"name": "actor", "members": 4, "most": 8}],
         "queues": [{"slots": 12, "batch_size": 4, "max_staleness": 2, "window": 1}]},
        *({"event": "started", "member": f"actor {i}", "pid": 100 + i} for i in range(4)),
    ]  # fmt: skip
    if seed == 1:
        events += [
            {"event": "died", "member": "actor 2", "cause": "killed by SIGKILL", "at": 21.0},
            {"event": "restarted", "member": "actor 2", "pid": 110, "at": 23.0},
            {"event": "scaled", "pool": "actor", "size": 6, "cause": "elastic", "at": 60.0},
        ]
    events.append({"event": "ended", "member": "run", "cause": "total_steps", "at": 100.0})
    add_lines(
        folder / "events.jsonl",
        [{"time": BEGAN + each.pop("at", 0.0), **each} for each in events],
    )
    for step in (50_000, 100_000, 200_000):
        table = {"step": step, "episodes": 20, "return_mean": 2e-3 * step, "return_std": 30.0}
        path = folder / "eval" / f"step_{step:08}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(table))


def row(i: int, draw: random.Random, slowness: float = 1.0) -> dict[str, Any]:
    """The i-th row of a run on CartPole."""
    gained = 500 / (1 + math.exp(3 - i / (9 * slowness)))
    ages = [draw.randint(8, 12), draw.randint(3, 7), draw.randint(0, 3 if i > 30 else 0)]
    return {
        "step": 2000 * i,
        "seconds": float(i),
        "charts/episodic_return": round(gained + draw.uniform(-20, 20), 3),
        "charts/updates": 4 * i,
        "losses/entropy": round(0.7 * math.exp(-i / 60), 4),
        "losses/value": round(20 * math.exp(-i / 30) + draw.random(), 4),
        "queue/discarded/stale": float(2 * (i // 30)),
        "queue/discarded/actor_died": float(i > 20),
        "queue/ready": draw.randint(1, 3),
        "queue/running": draw.randint(4, 8),
        "staleness/mean": round(ages[1] / sum(ages) + 2 * ages[2] / sum(ages), 3),
        **{f"staleness/age/{age}": float(count) for age, count in enumerate(ages)},
        "perf/sps": 2000.0 + draw.uniform(-90, 90),
        "perf/produced_sps": 2000.0 + draw.uniform(-90, 90),
        "perf/updates_per_second": 4.0,
        "time/actor/wait": 0.1,
        "time/actor/work": 3.9,
        "time/learner/wait": 0.6,
        "time/learner/work": 0.4,
    }


def begin(folder: Path, config: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config)
    (folder / "command.txt").write_text(f"unirl train @{folder.name}\n")


def add_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in rows)


def write_agent_run(folder: Path) -> None:
    """Its store has groups of four, an episode with forks, and one with a hostile text."""
    begin(folder, AGENT)
    rows = [
        {**row(i, random.Random(i)), "charts/episodic_return": 1 - math.exp(-i / 30), "reward": 0.5}
        for i in range(1, 61)
    ]
    add_lines(folder / "metrics.jsonl", rows)
    add_lines(
        folder / "events.jsonl",
        [{"time": BEGAN, "event": "started", "member": "run", "step": 0, "recipe": "agent"}],
    )
    words, samples = Words(), folder / "samples" / "samples.jsonl"
    samples.parent.mkdir()
    with closing(open_store(StoreConfig(), folder)) as store:
        for ticket in range(12):
            episodes = [multiplication(ticket, place, words) for place in range(4)]
            rewards = [float((ticket + place) % 2) for place in range(4)]
            store.put_many(
                [
                    record(
                        episode, run="agent", ticket=ticket, place=place, group_size=4,
                        task="products", task_id=str(ticket), scores={"exact": Score(reward)},
                        prompt=(), created=BEGAN + ticket, trained_version=ticket + 1,
                    )
                    for place, (episode, reward) in enumerate(zip(episodes, rewards, strict=True))
                ]
            )  # fmt: skip
            add_lines(
                samples,
                [
                    {"update": ticket + 1, "ticket": ticket, "place": place, "reward": [reward],
                     "outcome": [0], "each": shown(episode, 2 * reward - 1)}
                    for place, (episode, reward) in enumerate(zip(episodes, rewards, strict=True))
                ],
            )  # fmt: skip
        store.put(record(tree(), run="agent", ticket=50, task="forks", created=BEGAN + 50))
        hostile = talk(99, [(HOSTILE, HOSTILE)], 4, Words())
        store.put(record(hostile, run="agent", ticket=51, task="hostile", created=BEGAN + 51))
    samples.with_name("vocabulary.json").write_text(json.dumps(list(words.ids)))


class Words:
    """A vocabulary that has what was said."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def encode(self, text: str) -> tuple[int, ...]:
        found = re.findall(r" ?[\w*]+|[^\w]", text)
        return tuple(self.ids.setdefault(each, len(self.ids)) for each in found)


def multiplication(ticket: int, place: int, words: Words) -> Episode:
    """One of a group's attempts; that at an odd place is right, or at an even one."""
    first, second = 3 + ticket % 7, 4 + ticket % 5
    result = first * second
    answer = result if (ticket + place) % 2 else result + 1 + place
    said = [
        (f"How much is {first} * {second}?", f"I ask the calculator for {first} * {second}."),
        (str(result), f"The calculator says {result}, so the answer is {answer}."),
        ("Are you sure?", ("Yes, I am.", "Yes.", "I think so.", "I am not sure.")[place]),
    ]
    return talk(4 * ticket + place, said, ticket, words)


def talk(seed: int, said: list[tuple[str, str]], version: int, words: Words) -> Episode:
    """A question and an answer for each turn."""
    draw = random.Random(seed)
    turns = []
    for index, (question, answer) in enumerate(said):
        tokens = words.encode(answer)[:200]
        logp = tuple(-draw.expovariate(1.2) for _ in tokens)
        turns.append(
            Turn(
                ROOT if index == 0 else index - 1,
                words.encode(question)[:200],
                Completion(tokens, logp, (version,) * len(tokens), "stop"),
                ({"role": "user" if index % 2 == 0 else "tool", "content": question},),
                {"role": "assistant", "content": answer, **_call(index, said)},
                origin="prompt" if index == 0 else "extended",
                reward=0.25 if index == 0 else None,
                started=0.5 * index,
                seconds=0.25,
                info={"ok": True, "tool_seconds": 0.05} if index == 0 else {},
            )
        )
    return Episode(turns, "stop", seconds=0.5 * len(turns))


def shown(episode: Episode, advantage: float) -> dict[str, list[Any]]:
    """What the learner says of its tokens."""
    found: dict[str, list[Any]] = {"token": [], "drawn": [], "new_logp": [], "advantage": []}
    draw = random.Random(len(episode.turns))
    for place, turn in enumerate(episode.turns):
        for token, logp in zip(turn.completion.tokens, turn.completion.logp, strict=True):
            found["token"].append(token)
            found["drawn"].append(1)
            found["new_logp"].append(logp + draw.gauss(0, 0.02))
            found["advantage"].append(advantage * (1.0, 0.6, 0.3)[place])
    return found


def _call(index: int, said: list[tuple[str, str]]) -> Mapping[str, Any]:
    if index or len(said) < 2:
        return {}
    function = {"name": "calculator", "arguments": json.dumps({"expression": said[0][0][12:-1]})}
    return {"tool_calls": [{"id": "c1", "type": "function", "function": function}]}
