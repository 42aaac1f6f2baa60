"""What runner ray costs on one machine: a slot from a node into the learner's memory, weights from
the learner to a node, and a whole training beside the same one with runner processes.

    python benchmarks/ray_cluster.py --write

Node and learner are processes of this machine, so it shows what the way costs and not what a
network adds. A training has the same members in both runners, in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import measure
import torch

import unirl
from unirl.core.queue import QueueConfig
from unirl.core.sample import Field, SampleSpec
from unirl.runners.cluster.environment import prepare_environment
from unirl.runners.loop import TrainLoop
from unirl.runners.make import make_runner
from unirl.runners.plan import Plan
from unirl.transports.remote.layout import NodeMemory
from unirl.transports.remote.link import NodeLink
from unirl.transports.remote.transport import RemoteTransport
from unirl.transports.remote.weights import node_store
from unirl.transports.shared import SharedTransport

SLOT = SampleSpec({"obs": Field((20, 1, 28_200), torch.uint8)})
WEIGHTS_BYTES = 270 * 10**6


def slot_node(address: tuple[str, int], token: bytes, report: Connection, number: int) -> None:
    """A node with one member that commits, and waits for the answer."""
    link = NodeLink(address, token, 0, {0: NodeMemory(SLOT, QueueConfig())}, {})
    client = link.queue(0).join(waits_for_commits=True)
    times = []
    for _ in range(number):
        slot = client.acquire(10.0)
        slot.first_version = slot.last_version = 0
        started = time.perf_counter()
        client.commit(slot)
        times.append(time.perf_counter() - started)
    report.send(times)


def slots(number: int) -> dict[str, float]:
    """Milliseconds from `commit` to the answer that the learner has it; and of a plain copy."""
    transport = RemoteTransport()
    queue = transport.queue(SLOT, QueueConfig())
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    node = get_context("spawn").Process(
        target=slot_node, args=(transport.hub.address, transport.hub.token.data, sender, number)
    )
    node.start()
    for _ in range(number):
        queue.release(queue.take(0, 60.0))
    times = sorted(receiver.recv()[number // 10 :])
    node.join(10.0)
    transport.close()
    here = SharedTransport().queue(SLOT, QueueConfig())
    source, target = torch.ones(SLOT.num_bytes), here.buffers().buffer(0)["obs"].flatten()
    source = source.to(torch.uint8)
    copies = []
    for _ in range(number):
        started = time.perf_counter()
        target.copy_(source)
        copies.append(time.perf_counter() - started)
    return {
        "p50": 1e3 * statistics.median(times),
        "p95": 1e3 * times[int(0.95 * len(times))],
        "copy": 1e3 * statistics.median(copies),
    }


def weights_node(
    address: tuple[str, int], token: bytes, report: Connection, shapes: dict[str, Any]
) -> None:
    """A node that says when it has a version."""
    store = node_store(shapes)
    link = NodeLink(address, token, 0, {0: NodeMemory(SLOT, QueueConfig())}, {0: store})
    have = -1
    while not link.ended.is_set():
        if store.version > have:
            have = store.version
            report.send((have, time.perf_counter()))
        time.sleep(1e-3)


def weights(number: int) -> dict[str, float]:
    """Seconds from `publish` until a node has all of it; and of a plain copy of as much."""
    tensors = {f"{i}": torch.ones(WEIGHTS_BYTES // 4 // 27) for i in range(27)}
    transport = RemoteTransport()
    transport.queue(SLOT, QueueConfig())
    store = transport.weights(tensors)
    store.publish(tensors, 0)
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    arguments = (transport.hub.address, transport.hub.token.data, sender, store.shapes)
    node = get_context("spawn").Process(target=weights_node, args=arguments)
    node.start()
    times, copies = [], []
    copy = {name: torch.zeros_like(value) for name, value in tensors.items()}
    receiver.recv()
    for version in range(1, number + 1):
        started = time.perf_counter()
        store.publish(tensors, version)
        while receiver.recv()[0] != version:
            pass
        times.append(time.perf_counter() - started)
        started = time.perf_counter()
        for name, value in tensors.items():
            copy[name].copy_(value)
        copies.append(time.perf_counter() - started)
    transport.close()
    node.join(10.0)
    return {"seconds": statistics.median(times[1:]), "copy": statistics.median(copies[1:])}


class Window:
    """A hook that measures for some seconds after a warm-up."""

    def __init__(self, seconds: float, warm_up: float = 2.0) -> None:
        self._seconds, self._warm_up = seconds, warm_up
        self._begun: tuple[float, float, int] | None = None
        self._first = 0.0
        self.sps = self.core_us = 0.0

    def after_update(self, loop: TrainLoop) -> None:
        now = time.monotonic()
        self._first = self._first or now
        if self._begun is None:
            if now - self._first > self._warm_up:
                self._begun = (now, time.process_time(), loop.learner.num_steps)
            return
        since, cpu, steps = self._begun
        if now - since > self._seconds:
            number = loop.learner.num_steps - steps
            self.sps = number / (now - since)
            self.core_us = 1e6 * (time.process_time() - cpu) / number
            loop.stop("measured")

    def at_end(self, loop: TrainLoop) -> None:
        pass


def train(plan: Plan, seconds: float) -> Window:
    window = Window(seconds)
    runner = make_runner(plan)
    runner.run([window])
    return window


def training(rounds: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Steps per second, and core-microseconds of the learner's process per step, by runner."""
    plan = unirl.make_plan(
        "impala",
        **{
            "env.id": "CartPole-v1", "runner.kind": "processes", "actor.num_actors": 2,
            "actor.num_envs": 64, "actor.unroll_length": 20, "queue.batch_size": 2,
            "queue.max_staleness": 1, "run.total_steps": 10**12,
        },
    )  # fmt: skip
    prepare_environment(plan.ray)
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for kind in ("processes", "ray"):
            own = replace(plan, runner=replace(plan.runner, kind=kind))
            window = train(own, seconds)
            values = found.setdefault(kind, {"sps": [], "core_us": []})
            values["sps"].append(window.sps)
            values["core_us"].append(window.core_us)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="slots,weights,training")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[list[object]] = []
    if "slots" in options.parts:
        found = slots(2000)
        rows.append(
            [
                "a slot of 564 KB, node to learner, ms",
                f"{found['p50']:.2f} (p95 {found['p95']:.2f})",
                f"copy: {found['copy']:.3f}",
                f"{found['p50'] / found['copy']:.1f}",
            ]
        )
    if "weights" in options.parts:
        found = weights(12)
        rows.append(
            [
                "270 MB of weights, publish to node, ms",
                f"{1e3 * found['seconds']:.0f}",
                f"copy: {1e3 * found['copy']:.0f}",
                f"{found['seconds'] / found['copy']:.2f}",
            ]
        )
    if "training" in options.parts:
        kinds = training(options.rounds, options.seconds)
        for name, what in (
            ("sps", "CartPole, 2 actors, steps/s"),
            ("core_us", "learner's process, core-us per step"),
        ):
            here, there = (statistics.median(kinds[kind][name]) for kind in ("processes", "ray"))
            form = ",.0f" if name == "sps" else ".2f"
            rows.append(
                [what, f"{there:{form}}", f"processes: {here:{form}}", f"{there / here:.2f}"]
            )
    text = measure.table(["what", "runner ray", "beside", "ratio"], rows)
    print(text)
    if options.write:
        measure.write_block("ray-cluster", text)


if __name__ == "__main__":
    main()
