"""Raylets on this machine that are nodes of one cluster, and what can happen to them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.cluster.nodes import Checker, check_books, descendants
from unirl.runners.loop import TrainLoop

_SMALL = {"object_store_memory": 80 * 2**20}
DEADLINE_SECONDS = 60.0


class Raylets:
    """A head without members, and nodes with room for so many each: a raylet starts several
    processes, and takes seconds, so one cluster serves all tests of a module.
    """

    def __init__(self, num_nodes: int = 2, cpus: int = 4) -> None:
        from ray.cluster_utils import Cluster

        from unirl.runners.cluster.ray import HEALTH

        self._cpus = cpus
        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={
                **_SMALL, "num_cpus": 0, "include_dashboard": False, "_system_config": dict(HEALTH)
            },
        )  # fmt: skip
        self.nodes: dict[str, Any] = {}
        for _ in range(num_nodes):
            self.add()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> str:
        """One more node; its id."""
        node = self.cluster.add_node(num_cpus=self._cpus, **_SMALL)
        self.nodes[node.node_id] = node
        return str(node.node_id)

    def pid(self, node: str) -> int:
        """Of the node's raylet, above all that runs on it."""
        return int(self.nodes[node].all_processes["raylet"][0].process.pid)

    def signal(self, node: str, number: int) -> None:
        """To all of a node."""
        pid = self.pid(node)
        for each in (pid, *descendants(pid)):
            kill(each, number)

    def kill(self, node: str) -> None:
        """A raylet alone: what it started is left to notice."""
        kill(self.pid(node), signal.SIGKILL)
        gone = self.nodes.pop(node)
        threading.Thread(target=self.cluster.remove_node, args=(gone, False), daemon=True).start()

    def have(self, number: int) -> None:
        """So many nodes that live."""
        for node, found in [*self.nodes.items()]:
            if found.all_processes["raylet"][0].process.poll() is not None:
                del self.nodes[node]
        while len(self.nodes) < number:
            self.add()

    def close(self) -> None:
        self.cluster.shutdown()


def kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(pid, number)


@dataclass
class Faults:
    """Faults for a run on raylets. Each returns the time at which it was."""

    raylets: Any
    """None: the nodes are processes, and the test brings their faults about."""
    runner: Any
    members: int
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    silent: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def loop(self) -> TrainLoop:
        found: TrainLoop = self.runner.loop
        return found

    @property
    def checker(self) -> Checker:
        found: Any = self.loop.learner
        assert isinstance(found, Checker)
        return found

    def used(self) -> list[str]:
        """Nodes with members."""
        nodes = {share.node for share in self.runner.processes._shares if share.handle}
        return sorted(nodes & self.raylets.nodes.keys() - set(self.silent))

    def member(self, number: int = signal.SIGKILL) -> float:
        found = [pid for pid in self.runner.actor_pids() if pid]
        if found:
            kill(self.rng.choice(sorted(found)), number)
        return time.monotonic()

    def stop_member(self) -> float:
        """For a moment: nobody is to notice."""
        found = [pid for pid in self.runner.actor_pids() if pid]
        if found:
            kill(pid := self.rng.choice(found), signal.SIGSTOP)
            time.sleep(self.rng.uniform(0.0, 0.3))
            kill(pid, signal.SIGCONT)
        return time.monotonic()

    def agent(self) -> float:
        shares = self.runner.processes._shares
        pids = [share.handle.pid for share in shares if share.handle and share.handle.pid]
        if pids:
            kill(self.rng.choice(pids), signal.SIGKILL)
        return time.monotonic()

    def raylet(self) -> float:
        if used := self.used():
            self.raylets.kill(self.rng.choice(used))
        return time.monotonic()

    def silence(self, node: str = "") -> float:
        """node: which; empty: any that has members."""
        if used := self.used():
            self.silent.append(node or self.rng.choice(used))
            self.raylets.signal(self.silent[-1], signal.SIGSTOP)
        return time.monotonic()

    def wake(self) -> float:
        while self.silent:
            self.raylets.signal(self.silent.pop(), signal.SIGCONT)
        return time.monotonic()

    def wake_dead(self) -> None:
        """Those that were silent for so long that Ray, too, counts them as gone."""
        silent = [*self.silent]
        self.wake()
        time.sleep(1.0)
        for node in silent:
            self.raylets.kill(node)

    def drain(self) -> float:
        """As a cloud does that will take a machine back in 30 s."""
        import ray

        (node,) = self.used()[:1]
        client = ray._raylet.GcsClient(address=self.raylets.address)
        deadline_ms = int(1000 * (time.time() + 30))
        accepted, why = client.drain_node(node, 2, "preempted", deadline_ms)
        assert accepted, why
        self.raylets.nodes.pop(node)
        return time.monotonic()

    def bring(self, name: str) -> float:
        """One of these by its name."""
        self.counts[name] = self.counts.get(name, 0) + 1
        return float(getattr(self, name)())

    # -- after them --------------------------------------------------------------------------------

    def num_producing(self, since: float = 0.0) -> int:
        """Members of which a sample was learned of late."""
        since = max(since, time.monotonic() - 0.5)
        return sum(last > since for last in [*self.checker.last_at.values()])

    def until(self, held: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not held():
            assert self.loop.reason is None, f"{what}: the run ended, {self.loop.reason}"
            assert time.monotonic() < deadline, f"{what}: {self.loop.queue.describe()}"
            time.sleep(0.01)

    def settle(self) -> None:
        """Wait until as many members as there should be produce."""
        since = time.monotonic() + 0.2
        self.until(lambda: self.num_producing(since) >= self.members, "the run does not recover")

    def recover(self, name: str) -> float:
        """Bring a fault about: seconds until a sample of a member was learned that was started
        after it.
        """
        at = self.bring(name)
        self.until(lambda: self.newest() > at, f"nothing follows {name}")
        return self.newest() - at

    def newest(self) -> float:
        """When the newest member had its first sample learned."""
        return max([*self.checker.first_at.values()], default=0.0)


def run_beside(
    runner: Any, work: Callable[[], None], check: Callable[[TrainLoop], None] = check_books
) -> None:
    """Train in a thread until the work is done, which needs the main one: Ray starts nodes there
    alone. Then look at the books.
    """
    errors: list[BaseException] = []

    def train() -> None:
        try:
            runner.run([])
        except BaseException as error:
            errors.append(error)
        runner.loop.stop("ended")

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    try:
        work()
    except BaseException:
        if errors:
            raise errors[0] from None
        raise
    finally:
        runner.loop.stop("enough")
        thread.join(DEADLINE_SECONDS)
    if errors:
        raise errors[0]
    check(runner.loop)
