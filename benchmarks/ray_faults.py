"""Faults on a cluster: what happens to IMPALA on three raylets of this machine while members,
agents and nodes are killed, fall silent, hang, are drained, and are fewer or more.

    python benchmarks/ray_faults.py --minutes 10 --write

A minute without faults comes after every nine. Nodes that were killed are added again when the run
has recovered without them.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[1:1] = [str(ROOT)]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", "5e" * 32)
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import measure  # noqa: E402
from faults import CALM_SECONDS, EVERY_SECONDS, FAULTS_BETWEEN, Found, Stretches  # noqa: E402
from recorded_run import TicketRecorder  # noqa: E402
from training_under_faults import MARK, command, marked, require, spread, stat, until  # noqa: E402

import unirl  # noqa: E402
from tests.cluster.nodes import descendants  # noqa: E402
from tests.cluster.raylets import Faults, Raylets, kill  # noqa: E402
from unirl.runners.make import make_runner  # noqa: E402

NODES, MEMBERS, HANG_SECONDS, SILENT_SECONDS = 3, 6, 2.0, 12.0
KINDS = (
    "kill -9 of a member", "kill -9 of an agent", "kill -9 of a raylet",
    "a node is silent for 12 s", "SIGSTOP of a member", "kill -9 of a node's fork server",
    "a node is drained", "two members more, then two fewer", "a node is silent for 1.5 s",
)  # fmt: skip


class Live:
    """What the run in this process has learned: see Learns and Learning."""

    def __init__(self, runner: Any, tickets: list[int]) -> None:
        self.runner, self.tickets, self.learned, self.steps = runner, tickets, self, 0

    def read(self) -> None:
        self.steps = self.runner.loop.learner.num_steps

    def lost_and_twice(self) -> tuple[int, int]:
        queue = self.runner.loop.queue
        with queue._lock:
            stats, tickets = queue.stats(), [*self.tickets]
        known = stats.learned + sum(stats.discarded.values()) + stats.out
        return stats.started - known, len(tickets) - len(set(tickets))


class ClusterTrial:
    """Brings faults to the run, and keeps what was found."""

    def __init__(self, raylets: Raylets, live: Live, rng: random.Random) -> None:
        self.raylets, self.live, self.rng = raylets, live, rng
        self.faults = Faults(raylets, live.runner, MEMBERS, rng)
        self.found: dict[str, Found] = defaultdict(Found)
        self._lost = self._twice = 0

    def healthy(self) -> bool:
        """Whether all members give signs of life, where they are to be."""
        require(self.live.runner.loop.reason is None, "the run has ended")
        members, found = self.live.runner.processes, self.live.runner.loop.queue.members()
        # What leaves may be counted still.
        there = all(share.agent in members.transport.hub.nodes for share in members._shares)
        works = sum(each.idle_seconds < 1.5 for each in found) == len(found) == MEMBERS
        return there and works and not members._leaving

    def _after(self, work: Callable[[], object]) -> tuple[float, Callable[[], bool]]:
        """When the fault was, and how one sees that it was noticed."""
        before = self.live.runner.num_restarts
        at = time.monotonic()
        work()
        return at, lambda: self.live.runner.num_restarts > before

    def _fork_server(self) -> None:
        members = [pid for pid in self.live.runner.actor_pids() if pid]
        servers = {each[2] for pid in members if (each := stat(pid)) is not None}
        kill(self.rng.choice(sorted(servers)), signal.SIGKILL)

    def _stop_member(self) -> None:
        self.faults.member(signal.SIGSTOP)

    def _gone(self, nodes: Iterable[str]) -> set[str]:
        return {*nodes} - {*self.raylets.nodes}

    def bring(self, kind: str) -> None:
        """One fault, until all is as before."""
        faults, found, ended = self.faults, self.found[kind], list[int]()
        noticed: Callable[[], bool] | None = None
        nodes = {node: [self.raylets.pid(node)] for node in faults.used()}
        nodes = {node: [*pids, *descendants(pids[0])] for node, pids in nodes.items()}
        if kind == "kill -9 of a raylet":
            at, noticed = self._after(faults.raylet)
            ended = [
                p for node, pids in nodes.items() if node not in self.raylets.nodes for p in pids
            ]
        elif kind == "a node is silent for 12 s":
            at, noticed = self._after(faults.silence)
        elif kind == "a node is silent for 1.5 s":
            at = faults.silence()
            time.sleep(1.5)
            faults.wake()
        elif kind == "a node is drained":
            at = faults.drain()
            gone = self._gone(nodes)
            ended = [pid for node in gone for pid in nodes[node]]
            shares = self.live.runner.processes._shares
            noticed = lambda: not gone & {share.node for share in shares}  # noqa: E731
        elif kind == "two members more, then two fewer":
            at, pool = time.monotonic(), self.live.runner.loop.plan.pools[0]
            self.live.runner.resize(pool, MEMBERS + 2)
            until(lambda: len(self.live.runner.loop.queue.members()) == MEMBERS + 2, "no more")
            self.live.runner.resize(pool, MEMBERS)
        else:
            work: dict[str, Callable[[], object]] = {
                "kill -9 of a member": faults.member,
                "kill -9 of an agent": faults.agent,
                "SIGSTOP of a member": self._stop_member,
                "kill -9 of a node's fork server": self._fork_server,
            }
            at, noticed = self._after(work[kind])
        if noticed is not None:
            until(noticed, f"{kind}: nobody notices")
            found.noticed.append(time.monotonic() - at)
        until(self.healthy, f"{kind}: it does not recover")
        found.recovered.append(time.monotonic() - at)
        if faults.silent:
            time.sleep(max(0.0, SILENT_SECONDS - (time.monotonic() - at)))
            faults.wake_dead()
        until(lambda: not [pid for pid in ended if stat(pid)], f"{kind}: left", 40.0)
        self.raylets.have(NODES)
        lost, twice = self.live.lost_and_twice()
        found.lost += lost - self._lost
        found.twice += twice - self._twice
        self._lost, self._twice = lost, twice
        print(
            f"{time.strftime('%H:%M:%S')} {kind}: noticed {spread(found.noticed[-1:])}, recovered"
            f" {spread(found.recovered[-1:])} s; {lost} lost, {twice} twice",
            flush=True,
        )


def plan_of(address: str) -> unirl.Plan:
    return unirl.make_plan(
        "impala",
        **{
            "env.id": "unirl-bench/SlowCartPole-v0", "env.import_module": "sleepy_env",
            "env.engine": "sync", "runner.kind": "ray", "ray.address": address,
            "actor.num_actors": MEMBERS, "actor.num_envs": 4, "actor.unroll_length": 16,
            "queue.batch_size": 2, "queue.max_staleness": 7, "queue.window": None,
            "policy.hidden": (32,), "run.total_steps": 10**9, "runner.max_restarts": 10**6,
            "runner.hang_seconds": HANG_SECONDS, "ray.max_node_failures": 10**6,
        },
    )  # fmt: skip


def _record(tickets: list[int], learner: object, some: list[int]) -> None:
    tickets.extend(some)


def soak(minutes: float, seed: int, calm_seconds: float, every: float) -> str:
    """Some minutes with a fault every 20 s; the table."""
    folder = Path(tempfile.mkdtemp(prefix="unirl-ray-faults-"))
    os.environ[MARK] = str(folder)
    before = {*os.listdir("/dev/shm")}
    raylets, tickets, deck, count = Raylets(NODES, cpus=4), list[int](), list[str](), 0
    failed: list[str] = []
    runner: Any = make_runner(plan_of(raylets.address), log_dir=folder)
    # Not in the plan, which is sent to each agent.
    runner.loop.learner = TicketRecorder(runner.loop.learner, partial(_record, tickets))
    live, rng = Live(runner, tickets), random.Random(seed)
    trial, stretches = ClusterTrial(raylets, live, rng), Stretches(live)

    def one_fault() -> None:
        began = time.monotonic()
        try:
            trial.bring(kind := deck.pop())
        except RuntimeError as error:
            require(runner.loop.reason is None, f"{kind}: {error}")
            print(f"FAILED: {kind}: {error}", flush=True)
            failed.append(f"{kind}: {error}")
        time.sleep(max(0.0, every - time.monotonic() + began))

    def all_of_them() -> None:
        nonlocal count
        until(trial.healthy, "it does not start")
        time.sleep(3.0)
        while stretches.seconds[True] < 60.0 * minutes:
            if count % FAULTS_BETWEEN == 0:
                stretches.over(False, lambda: time.sleep(calm_seconds))
            if not deck:
                deck.extend(rng.sample(KINDS, len(KINDS)))
            stretches.over(True, one_fault)
            count += 1
            print(f"{stretches.rate(True):.0f} of {stretches.rate(False):.0f} steps/s", flush=True)

    from tests.cluster.raylets import run_beside

    try:
        run_beside(runner, all_of_them, check=lambda loop: None)
    finally:
        raylets.close()
    lost, twice = live.lost_and_twice()
    until(lambda: not marked(folder), "", 10.0) if marked(folder) else None
    left = [f"process {command(pid)[:60]}" for pid in marked(folder)]
    left += [f"shared memory {name}" for name in {*os.listdir("/dev/shm")} - before]
    stats, goodput = runner.loop.queue.stats(), stretches.rate(True) / stretches.rate(False)
    rows = [
        [name, len(one.recovered), spread(one.noticed), spread(one.recovered), one.lost, one.twice]
        for name, one in trial.found.items()
    ]
    columns = ["fault", "times", "noticed after, s", "recovered after, s", "lost", "twice"]
    text = measure.table(columns, rows) + (
        f"\n\n{count} faults in {stretches.seconds[True] / 60:.1f} minutes, one every {every:g} s,"
        f" in random order: goodput **{goodput:.3f}**: {stretches.rate(True):,.0f} steps learned"
        f" per second with faults, {stretches.rate(False):,.0f} in {stretches.seconds[False]:.0f} s"
        f" without, {calm_seconds:g} s before every {FAULTS_BETWEEN} faults. {stats.started:,}"
        f" samples begun, {stats.learned:,} learned, {sum(stats.discarded.values())} discarded,"
        f" {stats.late} calls came too late and were refused; {lost} lost, {twice} learned twice."
        f" Left after the end: {', '.join(left) or 'nothing'}."
    )
    print(text)
    require(not lost and not twice and not left and not failed, "\n".join([text, *failed]))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=EVERY_SECONDS, help="seconds, of faults")
    parser.add_argument("--calm", type=float, default=CALM_SECONDS, help="seconds without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    text = soak(options.minutes, options.seed, options.calm, options.every)
    if options.write:
        measure.write_block("ray-fault-soak", text)


if __name__ == "__main__":
    main()
