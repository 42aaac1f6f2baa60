"""Nodes of a run as processes of this machine: real agents and connections, without Ray, so that
hundreds of faults fit in a minute. And a plan whose samples say where they come from.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from unirl.core.actor import ActorContext
from unirl.core.learner import LearnerContext, LearnerState
from unirl.core.pool import Pool, Resources
from unirl.core.queue import QueueConfig
from unirl.core.sample import Batch, Field, SampleSpec, Slot
from unirl.core.weights import Weights
from unirl.host import is_stopped
from unirl.metrics.metrics import Metrics
from unirl.runners.cluster.agent import AgentSetup, NodeAgent, run_agent
from unirl.runners.cluster.members import ClusterMembers
from unirl.runners.cluster.placement import Node
from unirl.runners.config import RayConfig, RunConfig, RunnerConfig
from unirl.runners.loop import TrainLoop
from unirl.runners.plan import LearnerPlan, Plan
from unirl.runners.processes import TrainingRunner
from unirl.supervision.fork_server import fork_now, process_context
from unirl.transports.remote.transport import RemoteTransport

SPEC = SampleSpec(
    {
        "ticket": Field((64, 8), torch.int64),
        "version": Field((8,), torch.int64, batch_axis=0),
        "seed": Field((1,), torch.int64, batch_axis=0),
    }
)


class Writer:
    """Writes ticket and version all over its slots; some time passes meanwhile."""

    def __init__(self, context: ActorContext, seconds: float = 1e-3) -> None:
        self._weights, self._seconds, self._seed = context.weights, seconds, context.seed
        self._value, self._version = torch.zeros(4096, dtype=torch.int64), -1

    def load_weights(self, weights: Weights) -> None:
        self._value.copy_(weights["w"])

    def produce(self, slot: Slot) -> None:
        self._version = self._weights.pull(self, self._version)
        assert self._value.eq(self._version).all(), "torn weights"
        slot.first_version = slot.last_version = self._version
        slot.data["version"].fill_(self._version)
        slot.data["seed"].fill_(self._seed % 2**62)
        for row in slot.data["ticket"]:
            row.fill_(slot.ticket)
        time.sleep(self._seconds)

    def close(self) -> None:
        pass


class SeedTeller(Writer):
    """Writes its seed to a folder, and nothing else until a file `go` is there."""

    def __init__(self, context: ActorContext, folder: Path) -> None:
        super().__init__(context)
        self._folder = folder
        (folder / f"seed-{os.getpid()}").write_text(str(context.seed))

    def produce(self, slot: Slot) -> None:
        while not (self._folder / "go").exists():
            time.sleep(0.01)
        super().produce(slot)


class Checker:
    """A learner that checks every sample: whole, and none twice."""

    def __init__(self, context: LearnerContext) -> None:
        self.version = self.num_steps = self.oldest = 0
        self.tickets: list[int] = []
        self.seeds: list[int] = []
        self.first_at: dict[int, float] = {}
        """By seed, which each start of a member has of its own: when its first sample came."""
        self.last_at: dict[int, float] = {}

    def step(self, batch: Batch) -> Metrics:
        self.oldest = max(self.oldest, *batch.staleness)
        for slot in batch.slots:
            assert slot.data["ticket"].eq(slot.ticket).all(), "torn sample"
            assert slot.data["version"].eq(slot.first_version).all()
            self.tickets.append(slot.ticket)
            self.seeds.append(seed := int(slot.data["seed"]))
            self.last_at[seed] = now = time.monotonic()
            self.first_at.setdefault(seed, now)
        self.version += 1
        self.num_steps += len(batch.slots)
        return Metrics()

    def weights(self) -> Weights:
        return {"w": torch.full((4096,), self.version, dtype=torch.int64)}

    def state_dict(self) -> LearnerState:
        return LearnerState({}, {})

    def load_state_dict(self, state: LearnerState) -> None:
        pass


def make_plan(
    *,
    members: int = 2,
    most: int = 0,
    seconds: float = 1e-3,
    reissue: bool = False,
    **settings: Any,
) -> Plan:
    """A plan of writers and one checker. settings: of the queue, total_steps, and of RayConfig."""
    ray = RayConfig(**{k: settings.pop(k) for k in [*settings] if k in vars(RayConfig())})
    total_steps = settings.pop("total_steps", 10**9)
    count = (members, most) if most else members
    pool = Pool(
        partial(Writer, seconds=seconds),
        "writer",
        count,
        resources=Resources(cpus=1.0),
        preload=("tests.cluster.nodes",),  # as UniRL's own actors are
    )
    queue = QueueConfig(**{"batch_size": members, **settings})
    return Plan(
        "checked",
        pools=(pool,),
        learners=(LearnerPlan(Checker, SPEC, queue, reissue=reissue),),
        runner=RunnerConfig(kind="ray", max_restarts=1000, actor_niceness=0),
        run=RunConfig(total_steps=total_steps),
        ray=ray,
    )


def serve_node(setup: AgentSetup) -> None:
    """What the process of a node does."""
    os.setpgid(0, 0)
    forkserver._forkserver._forkserver_pid = None  # the server that made it makes nodes
    fork_now()  # as long as there is one thread: its members need not import torch again
    run_agent(NodeAgent(setup))


def wait_for_room(setup: AgentSetup) -> None:
    """What an agent does whose node is full, as Ray has it."""
    time.sleep(3600.0)


@dataclass
class NodeProcess:
    """An agent in a process; see Handle."""

    process: Any
    node: str
    wanted: Resources

    def poll(self) -> Exception | None:
        return None

    def kill(self) -> None:
        if is_stopped(self.process.pid):
            return  # as with Ray, whose messages a silent node does not get
        self.process.kill()
        self.process.join(5.0)

    def tree(self) -> list[int]:
        """The agent's process and all below it."""
        return [self.process.pid, *descendants(self.process.pid)]

    def signal_all(self, number: int) -> None:
        """As if it came from the machine itself."""
        for pid in self.tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass
class ProcessCluster:
    """See Cluster. Each node has room for so many members, and what is left of it is known late,
    as by Ray: here never.
    """

    num_nodes: int = 2
    cpus: float = 8.0
    started: list[NodeProcess] = field(default_factory=list)
    wanted: list[Resources] = field(default_factory=list)
    drained: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    """Silent nodes, of which the cluster does not know."""

    def want(self, asks: Sequence[Resources]) -> None:
        self.wanted = [*asks]

    def nodes(self) -> list[Node]:
        names = [str(i) for i in range(self.num_nodes)]
        total = Resources(self.cpus)
        return [
            Node(name, f"node {name}", self.cpus, is_drained=name in self.drained, total=total)
            for name in names
        ]

    def check(self) -> None:
        pass

    def start_agent(self, node: str, wanted: Resources, setup: AgentSetup) -> NodeProcess:
        held = [each for each in self.started if each.node == node and each.process.is_alive()]
        is_full = sum(each.wanted.cpus for each in held) + wanted.cpus > self.cpus
        context = process_context(2, ["unirl.runners.cluster.members"])
        target = wait_for_room if is_full or node in self.dead else serve_node
        process = context.Process(target=target, args=(setup,))
        process.start()
        self.started.append(NodeProcess(process, node, wanted))
        return self.started[-1]

    def silence(self, node: str) -> None:
        """All that runs there stops, and what is started there."""
        self.dead.add(node)
        for each in self.started:
            if each.node == node:
                each.signal_all(signal.SIGSTOP)

    def close(self) -> None:
        for each in self.started:
            each.signal_all(signal.SIGKILL)
            each.process.join(5.0)


def make_runner(
    plan: Plan, cluster: Any, log_dir: Path | None = None
) -> TrainingRunner[ClusterMembers]:
    """A runner as make_runner has it, on these nodes."""
    transport = RemoteTransport(silent_seconds=plan.ray.silent_seconds)
    return TrainingRunner(
        plan,
        transport,
        lambda plan, found: ClusterMembers(plan, found, transport, cluster, log_dir),
    )


class Each:
    """A hook that calls a function after each update."""

    def __init__(self, work: Callable[[TrainLoop], None]) -> None:
        self._work = work

    def after_update(self, loop: TrainLoop) -> None:
        self._work(loop)

    def at_end(self, loop: TrainLoop) -> None:
        pass


def check_books(loop: TrainLoop) -> None:
    """Every started sample was learned once, discarded with a reason, or is still out; none was too
    old. May be called while the run continues.
    """
    learner: Any = loop.learner
    with loop.queue._lock:  # type: ignore[attr-defined]
        stats, tickets = loop.queue.stats(), [*learner.tickets]
        tickets = tickets[: stats.learned]  # of the batch that is out some may be learned by now
    assert len(set(tickets)) == len(tickets)
    assert learner.oldest <= loop.queue.config.max_staleness
    assert stats.started == len(tickets) + sum(stats.discarded.values()) + stats.out
    if loop.queue.config.window == 1:
        assert stats.discarded["stale"] == 0


def descendants(pid: int) -> list[int]:
    """Processes below this one."""
    found, waiting = [], [pid]
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            stat = Path(f"/proc/{int(name)}/stat").read_text()
            children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(name))
    while waiting:
        new = children.get(waiting.pop(), [])
        found += new
        waiting += new
    return found


def lives(pid: int) -> bool:
    """Whether the process is there and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_of(pid: int) -> str:
    """The process's command line; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
