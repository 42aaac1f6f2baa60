"""A training that writes down which samples it learns, and what a checkpoint makes of them.

    python benchmarks/recorded_run.py FOLDER      # with what is in FOLDER/settings.json

It continues where the newest checkpoint of FOLDER/disk/run is. FOLDER/learned.txt has a line for
each session, `from VERSION`, and one for each update: its time, the version that it starts from,
the steps learned before, and its tickets. An update that a later session made again does not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from unirl.core.learner import Learner, LearnerContext
from unirl.core.sample import Batch
from unirl.errors import UniRLError
from unirl.metrics.metrics import Metrics
from unirl.storage.checkpoint import load_checkpoint

CGROUP = "UNIRL_FAULTS_CGROUP"
"""Names, in the environment, the cgroup that the run shall be in."""


class TicketRecorder:
    """A learner that remembers which tickets it learned; everything else is the real one's."""

    def __init__(self, learner: Learner, record: Callable[[Learner, list[int]], object]) -> None:
        self._learner, self._record = learner, record

    def step(self, batch: Batch) -> Metrics:
        self._record(self._learner, [slot.ticket for slot in batch.slots])
        return self._learner.step(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._learner, name, value)


def make_recorder(
    context: LearnerContext,
    *,
    make: Callable[[LearnerContext], Learner],
    record: Callable[[Learner, list[int]], object],
) -> TicketRecorder:
    return TicketRecorder(make(context), record)


@dataclass
class Learned:
    """What FOLDER/learned.txt says, read as far as it is."""

    path: Path
    updates: list[tuple[float, int, int, list[int]]] = field(default_factory=list)
    """Time, version before, steps before, tickets; of those that count."""
    _read: int = 0

    def read(self) -> None:
        with contextlib.suppress(FileNotFoundError), self.path.open() as file:
            file.seek(self._read)
            for line in iter(file.readline, ""):
                if not line.endswith("\n"):
                    break
                self._read += len(line)
                words = line.split()
                if words[0] == "from":
                    while self.updates and self.updates[-1][1] >= int(words[1]):
                        self.updates.pop()
                else:
                    tickets = [int(word) for word in words[3:]]
                    self.updates.append((float(words[0]), int(words[1]), int(words[2]), tickets))

    @property
    def steps(self) -> int:
        """Learned so far, but for the newest update."""
        return self.updates[-1][2] if self.updates else 0


@dataclass(frozen=True)
class Account:
    """What became of all samples that were begun before a checkpoint."""

    version: int
    begun: int
    learned: int
    twice: int
    discarded: dict[str, int]
    waiting: int
    lost: int

    def __str__(self) -> str:
        reasons = ", ".join(f"{number} {name}" for name, number in self.discarded.items())
        return (
            f"{self.begun:,} samples begun: {self.learned:,} learned ({self.twice} of them twice),"
            f" {sum(self.discarded.values()):,} discarded ({reasons or 'none'}), {self.waiting} in"
            f" flight at the end, {self.lost} lost"
        )


def account(run_dir: Path, learned: Learned) -> Account:
    """Of the newest checkpoint."""
    learned.read()
    state: Any = load_checkpoint(run_dir).state
    version, begun = int(state["version"]), int(state["next_ticket"])
    tickets = [t for _, before, _, some in learned.updates if before < version for t in some]
    tickets += [int(note["ticket"]) for note in state["ready"]]
    twice = sum(number - 1 for number in Counter(tickets).values())
    head = "queue/discarded/"
    discarded = {
        name.removeprefix(head): int(number)
        for name, number in state["metrics"]["totals"].items()
        if name.startswith(head) and number
    }
    unfinished = int(state["num_unfinished"])
    lost = begun - len(set(tickets)) - sum(discarded.values()) - unfinished
    waiting = len(state["ready"]) + unfinished
    return Account(version, begun, len(tickets), twice, discarded, waiting, lost)


def write_update(file: TextIO, learner: Learner, tickets: list[int]) -> None:
    words = [f"{time.monotonic():.4f}", learner.version, learner.num_steps, *tickets]
    file.write(" ".join(map(str, words)) + "\n")
    file.flush()


def main(folder: Path) -> int:
    if cgroup := os.environ.get(CGROUP):
        (Path(cgroup) / "cgroup.procs").write_text("0")
    (folder / "pid").write_text(str(os.getpid()))
    import unirl
    from unirl.recipes import appo, impala  # noqa: F401
    from unirl.supervision.fork_server import fork_now

    fork_now()  # as the commands do
    settings = json.loads((folder / "settings.json").read_text())
    run_dir = folder / "disk" / "run"
    resume = run_dir if (run_dir / "checkpoints" / "latest").exists() else None
    version = load_checkpoint(run_dir).state["version"] if resume else 0
    with (folder / "learned.txt").open("a") as file:
        file.write(f"from {version}\n")
        try:
            plan = unirl.make_plan(settings.pop("recipe"), **settings)
            record = partial(write_update, file)
            make = partial(make_recorder, make=plan.learner.make, record=record)
            unirl.run(plan.with_learner(make=make), run_dir, resume=resume)
        except UniRLError as error:
            print("error:", *error.parts, sep="\n", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
