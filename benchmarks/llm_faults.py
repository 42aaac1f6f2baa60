"""Faults of a language run: its processes are killed and stopped at random moments.

First in one run in mode async: every few seconds the actor with its engine, or a worker that judges
completions, gets SIGKILL or SIGSTOP in the middle of whatever it does (a stopped one must first be
noticed: runner.hang_seconds is 15 s and reward.timeout_seconds 1 s here). Measured: how long until
the next update is made with new samples. Then a run in mode async is killed as a whole and resumed,
again and again. Counted: tickets, that is prompts, that were lost or learned twice.

    python benchmarks/llm_faults.py
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import measure

import unirl
from unirl.config import to_toml
from unirl.core.learner import Learner, LearnerContext
from unirl.core.sample import Batch
from unirl.llm.models.tiny import make_tiny
from unirl.metrics.metrics import Metrics
from unirl.runners.loop import TrainLoop
from unirl.runners.plan import Plan
from unirl.runners.processes import ProcessesRunner
from unirl.storage.checkpoint import load_checkpoint

FAULTS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
PID_FOLDER = "UNIRL_FAULTS"
"""Names a folder, in the environment: reward workers leave their ids there."""
GROUP, BATCH, DEADLINE_SECONDS = 4, 8, 240.0


def judge(text: str, answer: str) -> float:
    """The share of right characters, after a moment; leaves the id of its process."""
    (Path(os.environ[PID_FOLDER]) / f"reward-{os.getpid()}").touch()
    time.sleep(0.005)
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


class PromptRecorder:
    """A learner that remembers which tickets it learned; everything else is the real one's."""

    def __init__(self, learner: Learner, tickets: list[int]) -> None:
        self._learner, self._tickets = learner, tickets

    def step(self, batch: Batch) -> Metrics:
        self._tickets += [slot.ticket for slot in batch.slots]
        return self._learner.step(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            object.__setattr__(self, name, value)
        else:
            setattr(self._learner, name, value)


def make_recorder(
    context: LearnerContext, *, make: Callable[[LearnerContext], Learner], tickets: list[int]
) -> PromptRecorder:
    return PromptRecorder(make(context), tickets)


class UpdateCounter:
    """A hook that knows how many updates there were."""

    def __init__(self) -> None:
        self.version = 0

    def after_update(self, loop: TrainLoop) -> None:
        self.version = loop.learner.version

    def at_end(self, loop: TrainLoop) -> None:
        pass


def require(held: bool, what: str) -> None:
    if not held:
        raise RuntimeError(what)


def until(held: Callable[[], bool], what: str) -> None:
    started = time.monotonic()
    while not held():
        require(time.monotonic() - started < DEADLINE_SECONDS, what)
        time.sleep(0.005)


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def workers(pid_folder: Path) -> list[int]:
    """Reward workers that have judged and live."""
    found = [int(path.name.removeprefix("reward-")) for path in pid_folder.glob("reward-*")]
    return [pid for pid in found if alive(pid)]


def processes_of(pid_folder: Path) -> list[int]:
    """All processes of a run that was started with this folder."""
    wanted, found = f"{PID_FOLDER}={pid_folder}".encode(), []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return [pid for pid in found if alive(pid) and pid != os.getpid()]


def segments() -> set[str]:
    """Of shared memory; without semaphores, which the resource tracker removes at the very end."""
    folder = Path("/dev/shm")
    names = os.listdir(folder) if folder.exists() else []
    return {name for name in names if not name.startswith("sem.")}


def seconds_to_recover(
    runner: ProcessesRunner, counter: UpdateCounter, role: str, pid: int, number: int
) -> float:
    """Until the victim is replaced and two more updates are made: the first of them may still take
    samples that were finished before.
    """
    started = time.monotonic()
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    if role == "actor":
        until(lambda: runner.actor_pids()[0] != pid, "the actor was not replaced")
    else:
        until(lambda: not alive(pid), "the reward worker was not replaced")
    before = counter.version
    until(lambda: counter.version >= before + 2, f"no update since a fault of the {role}")
    return time.monotonic() - started


def storm(
    runner: ProcessesRunner,
    counter: UpdateCounter,
    pid_folder: Path,
    seconds: float,
    seed: int,
    found: dict[tuple[str, str], list[float]],
    errors: list[BaseException],
) -> None:
    rng, pairs = random.Random(seed), 0
    try:
        until(lambda: counter.version >= 3, "it does not learn")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(rng.uniform(0.2, 1.5))
            role = ("actor", "reward worker")[pairs % 2]
            fault = list(FAULTS)[pairs // 2 % 2]
            pairs += 1
            until(lambda: bool(workers(pid_folder)), "there is no reward worker")
            pid = runner.actor_pids()[0] if role == "actor" else rng.choice(workers(pid_folder))
            assert pid is not None
            took = seconds_to_recover(runner, counter, role, pid, FAULTS[fault])
            found[role, fault].append(took)
    except BaseException as error:
        errors.append(error)
    finally:
        runner.loop.stop("measured")


def storm_of_kills(model: Path, pid_folder: Path, seconds: float, seed: int) -> str:
    """Actor and reward workers fail; a table."""
    before = segments()
    tickets: list[int] = []
    plan = make_plan(model)
    make_learner = partial(make_recorder, make=plan.learner.make, tickets=tickets)
    runner = ProcessesRunner(plan.with_learner(make=make_learner))
    counter, found = UpdateCounter(), defaultdict[tuple[str, str], list[float]](list)
    errors: list[BaseException] = []
    thread = threading.Thread(
        target=storm, args=(runner, counter, pid_folder, seconds, seed, found, errors), daemon=True
    )
    thread.start()
    runner.run([counter])
    thread.join()
    if errors:
        raise errors[0]
    queue = runner.loop.queue
    stats = queue.stats()
    out = stats.out
    lost = stats.started - stats.learned - sum(stats.discarded.values()) - out
    twice = sum(count - 1 for count in Counter(tickets).values())
    deadline = time.monotonic() + 10.0
    while workers(pid_folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    pids = [pid for pid in runner.actor_pids() if pid is not None and alive(pid)]
    left = len(pids) + len(workers(pid_folder))
    left_segments = len(segments() - before)
    rows = [
        [role, fault, len(times), f"{statistics.median(times):.2f}", f"{max(times):.2f}"]
        for (role, fault), times in sorted(found.items())
    ]
    discarded = stats.discarded
    reasons = ", ".join(f"{number} {reason}" for reason, number in discarded.items() if number)
    columns = ["process", "fault", "count", "seconds to recover, median", "longest"]
    text = measure.table(columns, rows) + (
        f"\n\n{stats.started} prompts begun: {stats.learned} learned ({twice} of them"
        f" twice), {sum(discarded.values())} discarded ({reasons or 'none'}), {out} in flight at"
        f" the end, {lost} lost. Left afterwards: {left} processes, {left_segments} segments in"
        " /dev/shm."
    )
    print(text, flush=True)
    require(not lost and not twice and not left and not left_segments, "see above")
    return text


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
        text = storm_of_kills(model, pid_folder, flags.seconds, flags.seed)
        # Another folder: the fork server of this process has the first one in its environment.
        pid_folder = folder / "later"
        pid_folder.mkdir()
        os.environ[PID_FOLDER] = str(pid_folder)
        text += "\n\n" + killed_learners(model, folder, pid_folder, flags.kills, flags.seed)
    if not flags.no_write:
        measure.write_block("llm-faults", text)


if __name__ == "__main__":
    main()
