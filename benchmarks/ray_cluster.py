"""What runner ray costs on one machine: a slot from a node into the learner's memory, weights from
the learner to a node, and whole trainings beside the same ones with runner processes.

    python benchmarks/ray_cluster.py --parts slots,weights --write
    python benchmarks/ray_cluster.py --parts relay --write
    python benchmarks/ray_cluster.py --parts cartpole --write
    python benchmarks/ray_cluster.py --parts pong --write

Nodes and learner are processes of this machine, so it shows what the way costs and not what a
network adds. A training has the same two members in both runners, in pairs that begin with either
in turn; those of runner ray are on two raylets.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
from unirl.runners.config import RayConfig
from unirl.runners.loop import TrainLoop
from unirl.runners.make import make_runner
from unirl.runners.plan import Plan
from unirl.supervision.process_settings import keep_freed_memory
from unirl.transports.remote import link as link_module
from unirl.transports.remote import outgoing as outgoing_module
from unirl.transports.remote.layout import NodeMemory
from unirl.transports.remote.link import NodeLink
from unirl.transports.remote.transport import RemoteTransport
from unirl.transports.remote.weights import node_store
from unirl.transports.shared import SharedTransport

SLOT = SampleSpec({"obs": Field((20, 1, 28_200), torch.uint8)})
WEIGHTS_BYTES, NETWORK_WEIGHTS_BYTES = 270 * 10**6, 27 * 10**6
RELAY_NODES = 4
_SO_MAX_PACING_RATE = 47
"""Linux paces TCP by itself."""
DEADLINE_SECONDS = 60.0
COLUMNS = ["what", "runner ray", "beside", "ratio"]
GAMES: dict[str, dict[str, Any]] = {  # as @cartpole and @pong, and a learner with less to do
    "cartpole": {
        "env.id": "CartPole-v1", "actor.num_envs": 128, "actor.unroll_length": 16,
        "learner.epochs": 2, "learner.minibatches": 4, "learner.policy_clip": 0.2,
    },
    "cartpole-light": {
        "env.id": "CartPole-v1", "actor.num_envs": 64, "actor.unroll_length": 20,
    },
    "pong": {
        "env.id": "ALE/Pong-v5", "env.num_threads": 1, "env.frame_size": 42,
        "policy.torso": "shallow", "policy.feature_size": 256, "policy.image_stride": 2,
        "actor.num_envs": 16, "actor.unroll_length": 32, "learner.epochs": 2,
        "learner.minibatches": 8, "learner.policy_clip": 0.2,
    },
}  # fmt: skip


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
    times = sorted(hear(receiver)[number // 10 :])
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


def hear(receiver: Connection) -> Any:
    """What the node reports; TimeoutError where it says nothing."""
    if not receiver.poll(DEADLINE_SECONDS):
        raise TimeoutError(f"the node said nothing for {DEADLINE_SECONDS:g} s")
    return receiver.recv()


def weights_node(
    address: tuple[str, int], token: bytes, report: Connection, shapes: dict[str, Any], near: bool,
    number: int = 0, each_way: int = 0,
) -> None:  # fmt: skip
    """A node that says when it has a version. near: as one on the learner's machine. each_way:
    bytes a second of each connection on which it passes weights on; 0: all that there is.
    """
    pace(each_way)
    if not near:
        link_module._connect_near = lambda name: None
    store = node_store(shapes)
    link = NodeLink(address, token, number, {0: NodeMemory(SLOT, QueueConfig())}, {0: store})
    have = -1
    while not link.ended.is_set():
        if store.version > have:
            have = store.version
            report.send((have, time.perf_counter()))
        time.sleep(1e-3)


def weights(number: int, near: bool) -> dict[str, float]:
    """Seconds from `publish` until a node has all of it; and of a plain copy of as much."""
    tensors = {f"{i}": torch.ones(WEIGHTS_BYTES // 4 // 27) for i in range(27)}
    transport = RemoteTransport()
    queue = transport.queue(SLOT, QueueConfig())
    store = transport.weights(tensors)
    store.publish(tensors, 0)
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    arguments = (transport.hub.address, transport.hub.token.data, sender, store.shapes, near)
    node = get_context("spawn").Process(target=weights_node, args=arguments)
    node.start()
    times, copies = [], []
    copy = {name: torch.zeros_like(value) for name, value in tensors.items()}
    hear(receiver)
    for version in range(1, number + 1):
        started = time.perf_counter()
        store.publish(tensors, version)
        while hear(receiver)[0] != version:
            pass
        times.append(time.perf_counter() - started)
        started = time.perf_counter()
        for name, value in tensors.items():
            copy[name].copy_(value)
        copies.append(time.perf_counter() - started)
    queue.close()
    transport.close()
    node.join(10.0)
    return {"seconds": statistics.median(times[1:]), "copy": statistics.median(copies[1:])}


def pace(bytes_per_second: int) -> None:
    """Let each connection for weights be so fast at most, as its share of a network would be."""
    if bytes_per_second:
        outgoing_module._keep_in_cache = lambda sock: sock.setsockopt(
            socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_second
        )


def relay(fanout: int, number: int, network: int = 0) -> dict[str, float]:
    """Seconds from `publish` until all of four nodes have weights, and how often they leave the
    learner's process for that. network: bytes a second that each machine sends at most.
    """
    num_bytes = NETWORK_WEIGHTS_BYTES if network else WEIGHTS_BYTES
    tensors = {f"{i}": torch.ones(num_bytes // 4 // 27) for i in range(27)}
    each_way = network // (fanout or RELAY_NODES)
    pace(each_way)
    transport = RemoteTransport(weights_fanout=fanout)
    queue, store = transport.queue(SLOT, QueueConfig()), transport.weights(tensors)
    receivers, nodes = [], []
    for node in range(RELAY_NODES):
        receiver, sender = get_context("spawn").Pipe(duplex=False)
        about = (transport.hub.address, transport.hub.token.data, sender, store.shapes, False)
        nodes.append(
            get_context("spawn").Process(target=weights_node, args=(*about, node, each_way))
        )
        nodes[-1].start()
        receivers.append(receiver)
    times = []
    for version in range(number + 1):
        started = time.perf_counter()
        store.publish(tensors, version)
        ended = [hear_version(receiver, version) for receiver in receivers]
        times.append(max(ended) - started)
    time.sleep(0.1)
    sent = store.outgoing.num_sent / store.num_bytes / (number + 1)
    queue.close()
    transport.close()
    for node in nodes:
        node.join(10.0)
    return {"seconds": statistics.median(times[1:]), "sent": sent}


def hear_version(receiver: Connection, version: int) -> float:
    """When a node had it."""
    while (found := hear(receiver))[0] != version:
        pass
    return float(found[1])


class Window:
    """A hook that measures for some seconds after a warm-up."""

    def __init__(self, seconds: float, warm_up: float = 5.0) -> None:
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


@contextmanager
def two_nodes() -> Iterator[str]:
    """The address of a cluster of two raylets on this machine, with a CPU each."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    prepare_environment(RayConfig(address="here"))
    from ray.cluster_utils import Cluster

    from unirl.runners.cluster.ray import HEALTH

    small = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    head = {**small, "include_dashboard": False, "_system_config": dict(HEALTH)}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(**small)
        yield cluster.address
    finally:
        cluster.shutdown()


def training(game: str, rounds: int, seconds: float) -> dict[str, dict[str, list[float]]]:
    """Steps per second, and core-microseconds of the learner's process per step, by runner."""
    found: dict[str, dict[str, list[float]]] = {
        kind: {"sps": [], "core_us": []} for kind in ("processes", "ray")
    }
    with two_nodes() as address:
        plan = unirl.make_plan(
            "impala",
            **GAMES[game],
            **{
                "runner.kind": "processes", "ray.address": address, "actor.num_actors": 2,
                "queue.batch_size": 2, "queue.max_staleness": 1, "run.total_steps": 10**12,
            },
        )  # fmt: skip
        for number in range(rounds):
            for kind in [*found][:: 1 if number % 2 else -1]:
                own = replace(plan, runner=replace(plan.runner, kind=kind))
                window = train(own, seconds)
                print(f"{game} {kind}: {window.sps:,.0f} steps/s, {window.core_us:.2f} core-us")
                found[kind]["sps"].append(window.sps)
                found[kind]["core_us"].append(window.core_us)
    return found


def rows_of_training(game: str, rounds: int, seconds: float) -> list[list[object]]:
    """Medians of both runners, and the ratios of the pairs."""
    found, rows = training(game, rounds, seconds), []
    for name, what in (("sps", "steps/s"), ("core_us", "learner's process, core-us per step")):
        here, there = found["processes"][name], found["ray"][name]
        ratios = [there / here for here, there in zip(here, there, strict=True)]
        form = ",.0f" if name == "sps" else ".1f"
        pairs = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        rows.append(
            [
                f"{game}, 2 members on 2 nodes, {what}",
                f"{statistics.median(there):{form}}",
                f"processes: {statistics.median(here):{form}}",
                f"**{statistics.median(ratios):.2f}** ({pairs})",
            ]
        )
    return rows


def rows_of_slots(number: int) -> list[list[object]]:
    found = slots(number)
    return [
        [
            "a slot of 564 KB, node to learner, ms",
            f"{found['p50']:.2f} (p95 {found['p95']:.2f})",
            f"copy: {found['copy']:.3f}",
            f"{found['p50'] / found['copy']:.1f}",
        ]
    ]


def rows_of_weights(number: int) -> list[list[object]]:
    rows: list[list[object]] = []
    for near, where in ((True, "the learner's machine"), (False, "TCP")):
        found = weights(number, near)
        rows.append(
            [
                f"270 MB of weights, from `publish` until a node on {where} has them, ms",
                f"{1e3 * found['seconds']:.0f}",
                f"copy: {1e3 * found['copy']:.0f}",
                f"{found['seconds'] / found['copy']:.2f}",
            ]
        )
    return rows


def rows_of_relay(number: int) -> list[list[object]]:
    rows: list[list[object]] = []
    for network, where in ((0, "270 MB"), (125_000_000, "27 MB at 1 Gbit/s a machine")):
        star, tree = relay(0, number, network), relay(2, number, network)
        rows.append(
            [
                f"weights of {where} to 4 nodes that pass them on, ms until all have them",
                f"{1e3 * tree['seconds']:.0f}, sent {tree['sent']:.1f} times by the learner",
                f"to each: {1e3 * star['seconds']:.0f}, sent {star['sent']:.1f} times",
                f"{tree['seconds'] / star['seconds']:.2f}",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=f"slots,weights,relay,{','.join(GAMES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as a run does
    rows: list[list[object]] = []
    for part in options.parts.split(","):
        if part == "slots":
            rows += rows_of_slots(2000)
        elif part == "relay":
            rows += rows_of_relay(8)
        elif part == "weights":
            rows += rows_of_weights(12)
        else:
            rows += rows_of_training(part, options.rounds, options.seconds)
    print(measure.table(COLUMNS, rows))
    if options.write:
        measure.write_rows("ray-cluster", COLUMNS, rows)


if __name__ == "__main__":
    main()
