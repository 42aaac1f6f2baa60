"""What slow tools cost: agents of four turns in a world that sleeps, with engine hf and a tiny
model of which a turn takes 20 to 30 ms when it is alone. Turns end by chance, as answers do, after
eight tokens in the mean.

    python benchmarks/agent_tails.py --write

Nothing is learned (all episodes earn the same), so that what is measured is generation: the engine,
the sessions, the loop of the agent, threads that sleep, groups that become whole, swaps of weights.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measure
import torch

import unirl
from unirl.llm.models.tiny import make_tiny
from unirl.runners.loop import TrainLoop
from unirl.runners.make import make_runner

TURNS, TOKENS, GROUP, EPISODES = 4, 32, 8, 64
END_TOKENS = 9
"""Of 74, by which a turn ends."""


class Waits:
    """A world whose steps take time: `even` 300 ms; `tails`: 40 % below 30 ms, 10 % above 600;
    `long`: 300 ms, in one episode of ten 20 times as much.
    """

    def __init__(self, kind: str) -> None:
        self._kind, self._turn = kind, 0

    def reset(self, task: Mapping[str, Any], seed: int) -> str:
        self._random = random.Random(seed)
        self._is_long = self._kind == "long" and self._random.random() < 0.1
        return "do"

    def step(self, text: str) -> tuple[str, float, bool]:
        time.sleep(self._seconds())
        self._turn += 1
        return "more", 1.0, self._turn == TURNS

    def _seconds(self) -> float:
        if self._kind != "tails":
            return 6.0 if self._is_long else 0.3
        low, high = self._random.choices([(0.005, 0.03), (0.03, 0.6), (0.6, 2.4)], [0.4, 0.5, 0.1])[
            0
        ]
        return self._random.uniform(low, high)


@dataclass
class Watch:
    """A hook: what a run does between two moments."""

    warm_up: float
    seconds: float
    found: dict[str, float] = field(default_factory=dict)
    _first: float = 0.0
    _begun: tuple[float, int, int] | None = None

    def after_update(self, loop: TrainLoop) -> None:
        now, episodes = time.monotonic(), loop.learner.num_steps
        lost = sum(loop.queue.stats().discarded.values())
        self._first = self._first or now
        if self._begun is None:
            if now - self._first >= self.warm_up:
                loop.metrics.flush()
                self._begun = (now, episodes, lost)
        elif now - self._begun[0] >= self.seconds:
            took = now - self._begun[0]
            metrics = loop.metrics.flush()
            scored = 1 - metrics["agent/ending/aborted"]
            self.found = {
                "episodes_per_s": scored * (episodes - self._begun[1]) / took,
                "cut": 1 - scored,
                "busy": metrics["perf/engine_busy"],
                "turn_ms": 1e3 * metrics["time/agent/model_seconds"] / metrics["agent/turns"],
                "groups_lost": lost - self._begun[2],
                "seconds": took,
            }
            loop.stop("measured")

    def at_end(self, loop: TrainLoop) -> None:
        pass


def make_model(folder: Path, width: int, layers: int) -> Path:
    """The tiny model, which has several tokens that end a turn."""
    model = make_tiny(folder / "tiny", width=width, layers=layers)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((model / name).read_text())
        settings["eos_token_id"] = [2, *range(20, 19 + END_TOKENS)]
        (model / name).write_text(json.dumps(settings))
    return model


def run(model: Path, kind: str, seconds: float, **overrides: Any) -> dict[str, float]:
    settings: dict[str, Any] = {
        "model.path": str(model),
        "task.name": "products",
        "task.max_prompt": 16,
        "mode": "async",
        "agent.world": "text:agent_tails:Waits",
        "agent.options": {"kind": f'"{kind}"'},
        "agent.max_turns": TURNS,
        "agent.max_episode_tokens": TURNS * (TOKENS + 8),
        "sampling.max_tokens": TOKENS,
        "rollout.group_size": GROUP,
        "rollout.give_up_after": 0,
        "queue.batch_size": 4,
        "queue.max_staleness": 3,
        "agent.max_episodes": EPISODES,
        "runner.learner_threads": 1,
        "run.eval_steps": 0,
        "run.log_seconds": 1e6,
        "run.total_steps": 10**9,
        "store.enabled": False,
    }
    plan = unirl.make_plan("agent", **{**settings, **overrides})
    watch = Watch(min(5.0, seconds / 3), seconds)
    with tempfile.TemporaryDirectory() as folder:
        make_runner(plan, log_dir=Path(folder)).run([watch])
    return watch.found


ALONE = {"agent.max_episodes": 1, "rollout.group_size": 2, "queue.batch_size": 1}
SYNC = {"mode": "sync", "queue.batch_size": 8, "queue.max_staleness": None}
WIDE = {"agent.max_episodes": 0, "queue.batch_size": 2, "queue.max_staleness": 7}
"""Sixteen groups in flight, whatever number of episodes they are."""
RUNS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("tools of 300 ms, one episode at a time", "even", ALONE),
    (f"tools of 300 ms, {EPISODES} episodes", "even", {}),
    (f"tails, sync, {EPISODES} episodes", "tails", SYNC),
    (f"tails, async, {EPISODES} episodes", "tails", {}),
)
LONG: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("tools of 300 ms, 16 groups", "even", WIDE),
    ("1 of 10 episodes 20 times longer", "long", WIDE),
    ("the same, agent.quorum 1", "long", {**WIDE, "agent.quorum": 1.0}),
    ("the same, agent.oversample 4", "long", {**WIDE, "agent.oversample": 4}),
    (
        "the same, agent.oversample 2, agent.episode_seconds 5",
        "long",
        {**WIDE, "agent.oversample": 2, "agent.episode_seconds": 5.0},
    ),
)
"""Measured by turns, in rounds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=16.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=2, help="of those with long episodes")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    flags = parser.parse_args()
    torch.set_num_threads(1)  # as the process of an engine has, for the run that is one process
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), flags.width, flags.layers)
        for name, kind, overrides in (*RUNS, *LONG * flags.rounds):
            one = run(model, kind, flags.seconds, **overrides)
            found.setdefault(name, []).append(one)
            print(name, {key: round(value, 3) for key, value in one.items()}, flush=True)
    rows = [
        [
            name,
            f"{measure.median(ones, 'episodes_per_s'):.1f}",
            f"{measure.median(ones, 'busy'):.0%}",
            f"{measure.median(ones, 'turn_ms'):.0f}",
            f"{measure.median(ones, 'cut'):.0%}",
            f"{measure.median(ones, 'groups_lost'):.0f}",
        ]
        for name, ones in found.items()
    ]
    sync, tails = (found[name][0]["episodes_per_s"] for name, _, _ in RUNS[2:])
    plain, *others = (found[name] for name, _, _ in LONG)
    shares = [statistics.median(measure.ratios(each, plain, "episodes_per_s")) for each in others]
    columns = ["", "episodes/s", "engine busy", "ms a turn", "cut", "groups lost"]
    body = measure.table(columns, rows) + (
        f"\n\nTails: async over sync **{tails / sync:.1f}**. One episode of ten 20 times longer: "
        f"**{shares[0]:.0%}** of the throughput without; **{shares[1]:.0%}** where groups wait for "
        f"all of their episodes; **{shares[2]:.0%}** where four episodes more are begun in a group "
        f"of {GROUP} and the last four are cancelled; **{shares[3]:.0%}** where two are, and an "
        "episode ends after 5 s. Medians of rounds by turns. Episodes are counted when they are "
        "learned from, and cut when their group waits for them no longer; groups are lost that "
        "were older than queue.max_staleness. Tails: 40 % of calls 5 to 30 ms, 50 % 30 to 600, "
        "10 % 600 to 2 400. "
        f"Model: {flags.layers} layers of {flags.width}, one thread."
    )
    print(body)
    if flags.write:
        measure.write_block("agent-tails", body)


if __name__ == "__main__":
    main()
