"""The ranks of a learner as processes of this machine that the run starts by itself, or of nodes of
a cluster that Ray places them on (ray.rank_cpus, ray.rank_gpus).

The run's own process is rank 0. It alone has the queue, in whatever mode and with whatever runner:
of each batch every rank gets an equal part, and what all must do together is an order to the others
first. They hold the same weights, or a shard each: a checkpoint is that of one process.

Where they hold the same weights, a rank that is lost is replaced, and continues with those of rank
0: queue, actors and engines keep what they have. A shard that is lost ends the learner.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch.distributed
from torch import Tensor

from unirl.core.learner import Learner, LearnerContext, LearnerState
from unirl.core.sample import Batch
from unirl.core.tree import tree_map
from unirl.core.weights import Weights
from unirl.errors import ActorFailed, QueueClosed, RunLost
from unirl.launch.ranks.orders import (
    checkpoint_of,
    contents,
    limit_sending,
    packed,
    read_order,
    send_order,
    unpacked,
)
from unirl.launch.several_ranks import digest_of
from unirl.learners.parallel import RankLost, Ranks
from unirl.metrics.metrics import Metrics
from unirl.run_events import event
from unirl.runners import state
from unirl.runners.hooks import is_divided
from unirl.runners.plan import Plan
from unirl.storage.checkpoint import Checkpoint, load_checkpoint
from unirl.supervision.restarts import Restarts

log = logging.getLogger(__name__)

_END_SECONDS = 10.0


class RankProcess(Protocol):
    """A further rank that runs, on whatever machine."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None:
        """None while it runs."""

    def join(self, timeout: float) -> None: ...

    def is_alive(self) -> bool: ...

    def kill(self) -> None: ...


class RankStarter(Protocol):
    """Where further ranks are started."""

    host: str
    """Where they reach the first one."""
    sends: bool
    """Whether they are sent a checkpoint, which they cannot read."""

    def prepare(self) -> None:
        """Wait until there is room for all. RankLost or CannotPlace where there is none in time."""

    def start(self, setup: RankSetup) -> RankProcess:
        """Start one; it calls `follow(setup, orders)` there."""

    def connection(self, rank: int, process: RankProcess) -> Connection:
        """What its orders are sent by, once it has come."""

    def end(self) -> None:
        """All processes that it started have ended: nothing is left of them."""

    def close(self) -> None:
        """Idempotent."""


@dataclass(frozen=True)
class RankSetup:
    """What a further rank gets; picklable while its process is started."""

    plan: Plan
    rank: int
    host: str
    port: int
    checkpoint: Path | None
    """What it continues from, as the first does, where it can read that file."""
    local_rank: int


@contextmanager
def further_ranks(
    plan: Plan, checkpoint: Checkpoint | None, starter: RankStarter
) -> Iterator[Plan]:
    """The plan, with a learner that learns together with ranks that end with this context."""
    others = _Others(plan, checkpoint, starter)
    with others.started():
        try:
            yield plan.with_learner(make=_MakeFirst(others))
        except RankLost as error:  # half of a sharded model may be gone, and a batch half learned
            raise RunLost(*error.parts) from error


class _MakeFirst:
    """The factory of the first rank's learner; in other processes that get the plan, the plan's."""

    def __init__(self, others: _Others) -> None:
        self._others = others

    def __call__(self, context: LearnerContext) -> Learner:
        return self._others.make(context)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (self._others.plan.learner.make,)


class _Others:
    """The processes of ranks 1 and up, and the orders that they get."""

    def __init__(self, plan: Plan, checkpoint: Checkpoint | None, starter: RankStarter) -> None:
        self.plan, self._checkpoint, self._starter = plan, checkpoint, starter
        learner, runner = plan.learner, plan.runner
        self.ranks = Ranks(0, learner.ranks, 0, meet_at=lambda timeout: self._store)
        self._restarts = Restarts(runner.max_restarts, runner.restart_window_seconds)
        self._processes: list[RankProcess] = []
        self._pipes: list[Connection] = []
        self._group, self._is_checked, self._num_counted = ExitStack(), False, 0
        self._store: Any = None
        self._load: Callable[[LearnerState], None]

    @contextmanager
    def started(self) -> Iterator[None]:
        """They run, and have met this one."""
        try:
            self._meet()
            yield
        except BaseException as error:
            self._leave(error)
            raise
        else:
            self._leave(None)
        finally:
            self._end(_END_SECONDS)
            self._starter.close()

    def _meet(self) -> None:
        """Start them all, and meet them."""
        learner, starter = self.plan.learner, self._starter
        seconds, size = learner.queue.timeout_seconds, learner.ranks
        starter.prepare()
        self._store = _open_store(starter.host, size, seconds)
        path = self._checkpoint.path if self._checkpoint is not None else None
        for rank in range(1, size):
            setup = RankSetup(self.plan, rank, starter.host, self._store.port, path, rank)
            process = starter.start(setup)
            self._processes.append(process)
            kind = "restarted" if self._restarts.total else "started"
            about = event(kind, member=f"rank {rank}", pid=process.pid)
            where = f"process {process.pid}" if process.pid else "on a node of the cluster"
            log.info("rank %d is %s", rank, where, extra=about)
        for rank, process in enumerate(self._processes, 1):
            pipe = starter.connection(rank, process)
            limit_sending(pipe, seconds)
            self._pipes.append(pipe)
        self._group.enter_context(self.ranks.joined(seconds))
        self._is_checked = False

    def _leave(self, error: BaseException | None) -> None:
        """Let the others end, and leave them."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                send_order(pipe, "end")
        trace = error.__traceback__ if error is not None else None
        self._group.__exit__(type(error) if error is not None else None, error, trace)
        self._group = ExitStack()

    def make(self, context: LearnerContext) -> Learner:
        """The learner of this rank, which has the others do what all must do."""
        learner: Any = self.plan.learner.make(context, ranks=self.ranks)  # type: ignore[call-arg]
        # Its own methods and not those of another class: hooks ask what a learner can do.
        learner.step = partial(self._step, learner, learner.step)
        learner.weights = partial(self._weights, learner, learner.weights)
        learner.state_dict = partial(self._state_dict, learner, learner.state_dict)
        self._load = learner.load_state_dict
        learner.load_state_dict = self._load_state_dict
        found: Learner = learner
        return found

    def _step(self, learner: Learner, step: Callable[[Batch], Metrics], batch: Batch) -> Metrics:
        while True:
            try:
                metrics = self._step_together(learner, step, batch)
                if (number := self._restarts.total) > self._num_counted:
                    metrics.total("faults/rank_restarts", number - self._num_counted)
                    self._num_counted = number
                return metrics
            except RankLost as error:
                if is_divided(learner):
                    raise
                self._replace(learner, error)

    def _replace(self, learner: Learner, lost: RankLost) -> None:
        """Others in place of those that were lost, with the weights of this one; then all learn
        from the same batch once more. RankLost where it happens too often, or fails again.
        """
        dead = [each.name.removeprefix("unirl-") for each in self._processes if each.exitcode]
        about = event("died", member=", ".join(dead or ["learner"]), cause=lost.what)
        log.warning("%s; others take their place", lost.what, extra=about)
        try:
            self._restarts.count(lost.what, lost.parts[-1], lost)
        except ActorFailed as error:
            raise RankLost(*error.parts) from lost
        self._end(0.0)
        self._leave(lost)
        self._meet()
        state = learner.state_dict()
        trees = [tree_map(_to_host, tree) for tree in (state.model, state.optimizer)]
        facts = (dict(state.counters), learner.version, learner.num_steps)
        for rank in range(1, self.ranks.world_size):
            self._tell(rank, "continue", *trees, *facts)
        self._load(state)  # as the others: what the lost one left half done is forgotten

    def _step_together(
        self, learner: Learner, step: Callable[[Batch], Metrics], batch: Batch
    ) -> Metrics:
        if not self._is_checked:
            self._is_checked = True
            for rank in range(1, self.ranks.world_size):
                self._tell(rank, "require_alike")
            _require_alike(learner, self.ranks)
        size = len(batch.slots) // self.ranks.world_size
        for rank in range(1, self.ranks.world_size):
            part = batch.slots[rank * size : (rank + 1) * size]
            slots = [packed(slot, self.plan.learner.spec) for slot in part]
            self._tell(rank, "step", batch.version, batch.wait_seconds, slots)
        return step(replace(batch, slots=batch.slots[:size]))

    def _weights(self, learner: Learner, weights: Callable[[], Weights]) -> Weights:
        self._tell_all_of(learner, "weights")
        return weights()

    def _state_dict(self, learner: Learner, state_dict: Callable[[], LearnerState]) -> LearnerState:
        self._tell_all_of(learner, "state_dict")
        return state_dict()

    def _load_state_dict(self, state: LearnerState) -> None:
        """The others do so, too, now: weights were gathered before."""
        content = contents(self._checkpoint) if self._starter.sends else ()
        for rank in range(1, self.ranks.world_size):
            self._tell(rank, "restore", *content)
        self._load(state)

    def _tell_all_of(self, learner: Learner, order: str) -> None:
        """Where each holds all, each does it alone."""
        if is_divided(learner):
            for rank in range(1, self.ranks.world_size):
                self._tell(rank, order)

    def _tell(self, rank: int, *order: Any) -> None:
        try:
            send_order(self._pipes[rank - 1], *order)
        except OSError as error:
            code = self._processes[rank - 1].exitcode
            raise RankLost(
                f"rank {rank} of {self.ranks.world_size} "
                + ("does not listen" if code is None else f"has ended with code {code}"),
                f"all ranks learn from each batch: {error or 'its deadline has passed'}",
                f"see logs/rank-{rank:03d}.txt, then continue from the newest checkpoint: "
                "unirl resume",
            ) from error

    def _end(self, patience: float) -> None:
        """Nothing is left of them."""
        for pipe in self._pipes:
            pipe.close()  # who still waits for an order ends
        for process in self._processes:
            process.join(patience)
            if process.is_alive():
                process.kill()
                process.join(_END_SECONDS)
        self._starter.end()
        self._pipes, self._processes = [], []


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu()  # device -> host, once for a rank that was lost


def _open_store(host: str, size: int, seconds: float) -> Any:
    """Where ranks meet: at a port that the system chooses, of this address alone."""
    dist: Any = torch.distributed
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        size,
        True,
        timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def follow(setup: RankSetup, orders: Connection) -> None:
    """What a further rank does."""
    dist: Any = torch.distributed
    plan, learner_plan = setup.plan, setup.plan.learner
    size = learner_plan.ranks

    def meet_at(timeout: timedelta) -> Any:
        return dist.TCPStore(setup.host, setup.port, size, False, timeout)

    ranks = Ranks(setup.rank, size, setup.local_rank, meet_at=meet_at)
    with ranks.joined(learner_plan.queue.timeout_seconds):
        make: Callable[..., Learner] = learner_plan.make
        learner = make(LearnerContext(plan.learner_seed(0)), ranks=ranks)
        while True:
            try:
                order, *values = read_order(orders)
            except (EOFError, OSError):
                raise QueueClosed from None
            if order == "end":
                return
            if order == "step":
                version, wait_seconds, found = values
                slots = [unpacked(each) for each in found]
                learner.step(Batch(slots, version, wait_seconds))
            elif order == "restore" and setup.checkpoint is not None:
                found = checkpoint_of(values) if values else load_checkpoint(setup.checkpoint)
                state.restore_learner(learner, found)
            elif order == "continue":
                *found, learner.version, learner.num_steps = values
                learner.load_state_dict(LearnerState(*found))
            elif order == "require_alike":
                _require_alike(learner, ranks)
            else:
                getattr(learner, order)()


def _require_alike(learner: Learner, ranks: Ranks) -> None:
    """Raise UniRLError unless all ranks begin at the same weights."""
    ranks.require_alike(
        steps=f"{learner.version} {learner.num_steps}", weights=digest_of(learner.weights())
    )
