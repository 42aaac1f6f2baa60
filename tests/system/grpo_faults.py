"""What goes wrong in tests of faults: an engine that fails; and which prompts were learned."""

from __future__ import annotations

import contextlib
import json
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from unirl.core.actor import ActorContext
from unirl.core.weights import Weights
from unirl.llm import generating
from unirl.llm.engine import EngineFailed
from unirl.llm.engines.hf.engine import HfEngine
from unirl.llm.rollout import Rollout
from unirl.storage.checkpoint import load_checkpoint


class Refusing(HfEngine):
    """Refuses the weights of one version, once: then the file `refused` exists."""

    def __init__(self, *settings: Any, version: int, refused: Path) -> None:
        super().__init__(*settings)
        self.version_to_refuse, self.refused = version, refused

    async def load_weights(self, weights: Weights, version: int) -> None:
        if version == self.version_to_refuse and not self.refused.exists():
            self.refused.touch()
            raise EngineFailed("the engine refuses weights", "a test wants it to", "try again")
        await super().load_weights(weights, version)


def make_refusing(context: ActorContext, *, config: Any, version: int, refused: Path) -> Rollout:
    """The recipe's rollout with an engine that refuses."""
    rollout = generating.make_rollout(context, config=config)
    assert isinstance(rollout, Rollout)
    rollout.engine = Refusing(config.model, config.engine, version=version, refused=refused)
    return rollout


def session(process: BaseProcess) -> list[int]:
    """Living processes of the session that this one was started to lead."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                state, _, _, leader = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(leader) == process.pid and state not in "ZX":
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
    waiting = [int(note["ticket"]) for note in state["ready"]] + [
        number for number, _, _ in state["due"]
    ]
    there = learned(run_dir) + waiting
    return there, sorted(set(range(int(state["next_ticket"]))) - set(there))
