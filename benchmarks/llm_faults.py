"""Faults of a language run: its processes are killed and stopped at random moments.

First in one run in mode async: every few seconds the actor with its engine, or a worker that judges
completions, gets SIGKILL or SIGSTOP in the middle of whatever it does, or a reward hangs (what is
stopped must first be noticed: runner.hang_seconds is 15 s and reward.timeout_seconds 1 s here).
Then the same with an engine behind a server that sends broken answers and is killed. Measured: how
long until it is replaced, and until updates are made with new samples. At last a run is killed as a
whole and resumed, again and again. Counted: prompts that were lost or learned twice.

    python benchmarks/llm_faults.py
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import measure
from recorded_run import make_recorder
from training_under_faults import require, spread, stat, until

import unirl
from unirl.config import to_toml
from unirl.core.learner import Learner
from unirl.llm.models.tiny import make_tiny
from unirl.runners.loop import TrainLoop
from unirl.runners.plan import Plan
from unirl.runners.processes import ProcessesRunner
from unirl.storage.checkpoint import load_checkpoint

FAULTS = {
    ("actor", "kill -9"): signal.SIGKILL,
    ("actor", "SIGSTOP"): signal.SIGSTOP,
    ("reward worker", "kill -9"): signal.SIGKILL,
    ("reward worker", "SIGSTOP"): signal.SIGSTOP,
    ("reward", "hangs"): 0,
}
SERVER_FAULTS = {("engine server", "kill -9, away for 3 s"): 0}
PID_FOLDER = "UNIRL_FAULTS"
"""Names a folder, in the environment: reward workers leave their ids there."""
GROUP, BATCH, DEADLINE_SECONDS, BROKEN_ONE_IN = 4, 8, 240.0, 40


def judge(text: str, answer: str) -> float:
    """The share of right characters, after a moment; leaves the id of its process. Hangs where a
    file `hang` wants that.
    """
    folder = Path(os.environ[PID_FOLDER])
    (folder / f"reward-{os.getpid()}").touch()
    time.sleep(0.005)
    with contextlib.suppress(FileNotFoundError):
        (folder / "hang").rename(folder / f"hung-{os.getpid()}")
        time.sleep(1e6)
    return sum(a == b for a, b in zip(text, answer, strict=False)) / len(answer)


def make_plan(model: Path, **overrides: Any) -> Plan:
    return unirl.make_plan(
        "grpo",
        **{
            "mode": "async",
            "model.path": str(model),
            "task.name": "reverse",
            "task.max_prompt": 16,
            "reward.weights": {"llm_faults:judge": 1.0},
            "reward.timeout_seconds": 1.0,
            "rollout.group_size": GROUP,
            "queue.batch_size": BATCH,
            "queue.window": 1,
            "sampling.max_tokens": 6,
            "algorithm.entropy_coef": 0.01,
            "learner.optimizer.lr": 1e-3,
            "runner.learner_threads": 1,
            "runner.max_restarts": 10**6,
            "runner.hang_seconds": 15.0,
            "run.log_seconds": 0.0,
            "run.total_steps": 10**9,
            **overrides,
        },
    )


def note(learned: list[int], learner: Learner, tickets: list[int]) -> None:
    learned += tickets


class UpdateCounter:
    """A hook that knows how many updates there were."""

    def __init__(self) -> None:
        self.version = 0

    def after_update(self, loop: TrainLoop) -> None:
        self.version = loop.learner.version

    def at_end(self, loop: TrainLoop) -> None:
        pass


def workers(pid_folder: Path) -> list[int]:
    """Reward workers that have judged and live."""
    found = [int(path.name.removeprefix("reward-")) for path in pid_folder.glob("reward-*")]
    return [pid for pid in found if stat(pid)]


def processes_of(pid_folder: Path) -> list[int]:
    """All processes of a run that was started with this folder."""
    wanted, found = f"{PID_FOLDER}={pid_folder}".encode(), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if stat(pid) and pid != os.getpid()]


def segments() -> set[str]:
    """Of shared memory; without semaphores, which the resource tracker removes at the very end."""
    folder = Path("/dev/shm")
    names = os.listdir(folder) if folder.exists() else []
    return {name for name in names if not name.startswith("sem.")}


class Server:
    """The engine server, a process of its own."""

    def __init__(self, model: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.url, self._model = f"http://127.0.0.1:{self._port}/v1", model
        self.start()

    def start(self) -> None:
        script = str(Path(__file__).with_name("engine_server.py"))
        self._process = subprocess.Popen(
            [sys.executable, script, str(self._port), str(self._model), str(BROKEN_ONE_IN)],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        require(self._process.stdout.readline() == b"ready\n", "the server does not start")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass
class Storm:
    """Faults of one run in this process, and how long it took to notice them and to recover."""

    runner: ProcessesRunner
    counter: UpdateCounter
    pid_folder: Path
    kinds: Mapping[tuple[str, str], int]
    server: Server | None = None
    found: dict[tuple[str, str], list[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    error: BaseException | None = None

    def run(self, seconds: float, seed: int) -> None:
        rng, kinds = random.Random(seed), itertools.cycle(self.kinds)
        try:
            until(lambda: self.counter.version >= 3, "it does not learn")
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(rng.uniform(0.2, 1.5))
                kind = next(kinds)
                self.found[kind].append(self._bring(kind, rng))
        except BaseException as error:
            self.error = error
        finally:
            self.runner.loop.stop("measured")

    def _bring(self, kind: tuple[str, str], rng: random.Random) -> tuple[float, float]:
        """Seconds until the victim is replaced, and until two more updates are made: the first of
        them may still take samples that were finished before.
        """
        role, what = kind
        if role == "actor":
            pid = self.runner.actor_pids()[0]
        elif role == "reward worker":
            until(lambda: bool(workers(self.pid_folder)), "there is no reward worker")
            pid = rng.choice(workers(self.pid_folder))
        started = time.monotonic()
        if role == "engine server":
            assert self.server is not None
            self.server.kill()
            time.sleep(3.0)
            self.server.start()
        elif role == "reward":
            (self.pid_folder / "hang").touch()
            until(lambda: any(self.pid_folder.glob("hung-*")), "no reward was judged")
            started, path = time.monotonic(), next(self.pid_folder.glob("hung-*"))
            pid = int(path.name.removeprefix("hung-"))
            path.unlink()
        else:
            assert pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, self.kinds[kind])
        if role == "actor":
            until(lambda: self.runner.actor_pids()[0] != pid, "the actor was not replaced")
        elif role != "engine server":
            until(lambda: not stat(pid), f"{role} was not ended")
        noticed, before = time.monotonic() - started, self.counter.version
        until(lambda: self.counter.version >= before + 2, f"no update since: {role} {what}")
        return noticed, time.monotonic() - started


def storm(
    plan: Plan,
    pid_folder: Path,
    seconds: float,
    seed: int,
    kinds: Mapping[tuple[str, str], int],
    server: Server | None = None,
) -> tuple[list[list[object]], str]:
    """Rows of the table, and the account of the run."""
    before, tickets = segments(), list[int]()
    make = partial(make_recorder, make=plan.learner.make, record=partial(note, tickets))
    runner = ProcessesRunner(plan.with_learner(make=make))
    faults = Storm(runner, UpdateCounter(), pid_folder, kinds, server)
    thread = threading.Thread(target=faults.run, args=(seconds, seed), daemon=True)
    thread.start()
    runner.run([faults.counter])
    thread.join()
    if faults.error is not None:
        raise faults.error
    stats = runner.loop.queue.stats()
    lost = stats.started - stats.learned - sum(stats.discarded.values()) - stats.out
    twice = sum(count - 1 for count in Counter(tickets).values())
    deadline = time.monotonic() + 10.0
    while workers(pid_folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [pid for pid in runner.actor_pids() if pid is not None and stat(pid)]
    left = len(pids) + len(workers(pid_folder))
    left_segments = len(segments() - before)
    rows: list[list[object]] = [
        [role, fault, len(times), *(spread([one[i] for one in times]) for i in (0, 1))]
        for (role, fault), times in faults.found.items()
    ]
    reasons = ", ".join(
        f"{number} {reason}" for reason, number in stats.discarded.items() if number
    )
    retries = runner.loop.metrics.flush().get("faults/engine_retries", 0.0)
    text = (
        f"{stats.started} prompts begun: {stats.learned} learned ({twice} of them twice),"
        f" {sum(stats.discarded.values())} discarded ({reasons or 'none'}), {stats.out} in flight"
        f" at the end, {lost} lost; {retries:.0f} requests asked again. Left afterwards: {left}"
        f" processes, {left_segments} segments in /dev/shm."
    )
    print(text, flush=True)
    require(not lost and not twice and not left and not left_segments, "see above")
    return rows, text


def all_storms(model: Path, pid_folder: Path, seconds: float, seed: int) -> str:
    """Actor, rewards and then the server of an engine fail; a table."""
    rows, text = storm(make_plan(model), pid_folder, seconds, seed, FAULTS)
    server = Server(model)
    try:
        plan = make_plan(model, **{"engine.kind": "openai", "engine.url": server.url})
        more, also = storm(plan, pid_folder, seconds / 3, seed, SERVER_FAULTS, server)
    finally:
        server.kill()
    columns = ["what", "fault", "times", "noticed after, s (longest)", "recovered after, s"]
    return (
        f"{measure.table(columns, [*rows, *more])}\n\nEngine hf: {text}\n\nA server that cuts one"
        f" answer in {BROKEN_ONE_IN} off within its JSON: {also}"
    )


def killed_learners(model: Path, folder: Path, pid_folder: Path, kills: int, seed: int) -> str:
    """The learner's process, and with it all others, is killed and resumed; a sentence."""
    config, run_dir, rng = folder / "config.toml", folder / "runs" / "killed", random.Random(seed)
    plan = make_plan(model, **{"run.checkpoint_steps": 3 * BATCH * GROUP})
    config.write_text(to_toml(plan.config, recipe="grpo"))
    words = ["train", "grpo", f"@{config}", "--name", "killed"]
    restarts = []
    for i in range(kills + 1):
        more = ["--run.total-steps", str(steps(run_dir) + 10 * BATCH * GROUP)] if i == kills else []
        before, started = steps(run_dir), time.monotonic()
        with (folder / "output.txt").open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "unirl", *words, *more, "--no-console"],
                cwd=folder,
                stdout=output,
                stderr=output,
            )
        if i == kills:
            require(process.wait(DEADLINE_SECONDS) == 0, (folder / "output.txt").read_text())
            break
        until(lambda: steps(run_dir) > before, "no checkpoint")  # noqa: B023
        restarts.append(time.monotonic() - started)
        time.sleep(rng.uniform(0.0, 2.0))
        process.kill()
        process.wait()
        until(lambda: not processes_of(pid_folder), "processes outlive their learner")
        words = ["resume", str(run_dir)]
    until(lambda: not processes_of(pid_folder), "processes are left")
    learned, waiting, begun = account(run_dir)
    twice = sum(count - 1 for count in Counter(learned + waiting).values())
    lost = begun - len(set(learned + waiting))
    text = (
        f"The learner's process killed {kills} times at random moments, and the run resumed: "
        f"{begun} prompts begun, {len(learned)} learned, {len(waiting)} in flight at the end, "
        f"{twice} twice, {lost} lost; {statistics.median(restarts):.1f} s (longest "
        f"{max(restarts):.1f} s) from the start of a process to its first checkpoint, which is "
        "three updates; no process left."
    )
    print(text, flush=True)
    require(not lost and not twice, "see above")
    return text


def steps(run_dir: Path) -> int:
    """Of the newest checkpoint."""
    found = [path.name.removeprefix("step_") for path in (run_dir / "checkpoints").glob("step_*")]
    return max((int(name) for name in found if name.isdecimal()), default=0)


def account(run_dir: Path) -> tuple[list[int], list[int], int]:
    """Tickets that the newest checkpoint learned from, those that wait in it, how many were begun.

    What was learned after a checkpoint that a later session began from does not count.
    """
    state = load_checkpoint(run_dir).state
    updates: dict[int, dict[int, None]] = {}
    newest = 0
    for line in (run_dir / "samples" / "samples.jsonl").open():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # of a process that was killed while it wrote
        if row["update"] < newest:
            updates = {key: value for key, value in updates.items() if key < row["update"]}
        newest = row["update"]
        updates.setdefault(newest, {})[row["ticket"]] = None
    version = int(state["version"])
    learned = [ticket for update in updates if update <= version for ticket in updates[update]]
    waiting = [int(note["ticket"]) for note in state["ready"]] + [
        int(number) for number, _, _ in state["due"]
    ]
    return learned, waiting, int(state["next_ticket"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="of the storm of kills")
    parser.add_argument("--kills", type=int, default=10, help="of the learner's process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    flags = parser.parse_args()
    here = str(Path(__file__).resolve().parent)
    path = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(path)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pid_folder = folder / "pids"
        pid_folder.mkdir()
        os.environ[PID_FOLDER] = str(pid_folder)
        model = make_tiny(folder / "model", width=64, layers=2)
        text = all_storms(model, pid_folder, flags.seconds, flags.seed)
        # Another folder: the fork server of this process has the first one in its environment.
        pid_folder = folder / "later"
        pid_folder.mkdir()
        os.environ[PID_FOLDER] = str(pid_folder)
        text += "\n\n" + killed_learners(model, folder, pid_folder, flags.kills, flags.seed)
    if not flags.no_write:
        measure.write_block("llm-faults", text)


if __name__ == "__main__":
    main()
