"""What slow tools cost: agents of four turns in a world that sleeps, with engine hf and a tiny
model of which a turn takes about 30 ms when it is alone.

    python benchmarks/agent_tails.py --write

Nothing is learned (all episodes earn the same), so that what is measured is generation: the engine,
the sessions, the loop of the agent, threads that sleep, groups that become whole, swaps of weights.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measure

import unirl
from unirl.llm.models.tiny import make_tiny
from unirl.runners.loop import TrainLoop
from unirl.runners.make import make_runner

TURNS, TOKENS, GROUP = 4, 12, 8


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
        low, high = self._random.choices(
            [(0.005, 0.03), (0.03, 0.6), (0.6, 2.4)], [0.4, 0.5, 0.1]
        )[0]
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
            self.found = {
                "episodes_per_s": (episodes - self._begun[1]) / took,
                "busy": metrics["perf/engine_busy"],
                "turn_ms": 1e3 * metrics["time/agent/model_seconds"] / metrics["agent/turns"],
                "groups_lost": lost - self._begun[2],
                "seconds": took,
            }
            loop.stop("measured")

    def at_end(self, loop: TrainLoop) -> None:
        pass


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
        "queue.max_staleness": 1,
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
    print(kind, overrides, {name: round(value, 3) for name, value in watch.found.items()}, flush=True)
    return watch.found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny(Path(folder) / "tiny", width=flags.width, layers=flags.layers)
        alone = {"agent.max_episodes": 1, "rollout.group_size": 2, "queue.batch_size": 1}
        sync = {"mode": "sync", "queue.batch_size": 8, "queue.max_staleness": None}
        if flags.only in ("", "busy"):
            run(model, "even", flags.seconds, **alone)
            run(model, "even", flags.seconds)
        if flags.only in ("", "tails"):
            run(model, "tails", flags.seconds, **sync)
            run(model, "tails", flags.seconds)
        if flags.only in ("", "long"):
            run(model, "even", flags.seconds)
            run(model, "long", flags.seconds)


if __name__ == "__main__":
    main()
