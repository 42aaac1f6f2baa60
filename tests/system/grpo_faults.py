"""What goes wrong in tests of faults: engines and rewards that fail, and who learned what."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from unirl.core.actor import ActorContext
from unirl.core.weights import Weights
from unirl.llm import assembly
from unirl.llm.engine import EngineFailed
from unirl.llm.engines.hf.engine import HfEngine
from unirl.llm.rollout import Rollout
from unirl.storage.checkpoint import load_checkpoint

MARK = "UNIRL_FAULTS"
"""Names, in the environment, a folder that processes leave their ids in; so it marks them, too."""


class Refusing(HfEngine):
    """Refuses the weights of one version, once."""

    def __init__(self, *settings: Any, version: int, mark: Path) -> None:
        super().__init__(*settings)
        self._refused, self._mark = version, mark

    async def load_weights(self, weights: Weights, version: int) -> None:
        if version == self._refused and not self._mark.exists():
            self._mark.touch()
            raise EngineFailed("the engine refuses weights", "a test wants it to", "try again")
        await super().load_weights(weights, version)


def make_refusing(context: ActorContext, *, config: Any, version: int, mark: Path) -> Rollout:
    """The recipe's rollout with an engine that refuses."""
    rollout = assembly.make_rollout(context, config=config)
    rollout.engine = Refusing(config.model, config.engine, version=version, mark=mark)
    return rollout


def known_worker(text: str, answer: str) -> float:
    """Characters in their place; leaves the id of its process in the folder."""
    (Path(os.environ[MARK]) / f"reward-{os.getpid()}").touch()
    time.sleep(0.001)
    return sum(a == b for a, b in zip(text, answer, strict=False)) / len(answer)


def hangs_now_and_then(text: str, answer: str, prompt: str) -> float:
    """As known_worker, but on one question in ten it never returns."""
    if prompt.startswith("7"):
        time.sleep(600)
    return known_worker(text, answer)


def marked(folder: Path) -> list[int]:
    """Processes that live and have this folder as their mark; without the caller."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"{MARK}={folder}".encode() in environment and state != "Z":
            found.append(int(entry.name))
    return found


def learned(run_dir: Path) -> list[int]:
    """Tickets that the newest checkpoint learned from, as often as it did."""
    version = int(load_checkpoint(run_dir).state["version"])
    updates: dict[int, dict[int, None]] = {}
    newest = 0
    for line in (run_dir / "samples" / "samples.jsonl").open():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # written by a process that was killed meanwhile
        # What was learned after a checkpoint that the run was resumed from was cut off.
        assert row["update"] >= newest
        newest = row["update"]
        updates.setdefault(newest, {})[row["ticket"]] = None
    assert sorted(update for update in updates if update <= version) == list(range(1, version + 1))
    return [ticket for update in sorted(updates) if update <= version for ticket in updates[update]]


def account(run_dir: Path) -> tuple[list[int], list[int]]:
    """Tickets of a run that ended: learned or waiting in its checkpoint, and those that are
    nowhere.
    """
    state = load_checkpoint(run_dir).state
    waiting = [int(note["ticket"]) for note in state["ready"]] + list(state["due"])
    there = learned(run_dir) + waiting
    return there, sorted(set(range(int(state["next_ticket"]))) - set(there))
