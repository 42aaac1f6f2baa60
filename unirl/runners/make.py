"""The runner that a plan asks for: the one place where its kind decides something."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from unirl.core.pool import Pool
from unirl.errors import UniRLError
from unirl.runners.cluster.environment import prepare_environment
from unirl.runners.cluster.members import ClusterMembers
from unirl.runners.cluster.ray import RayCluster
from unirl.runners.cluster.shares import most_wanted
from unirl.runners.config import RunnerConfig
from unirl.runners.inline import InlineRunner
from unirl.runners.loop import Agree, Hook, TrainLoop
from unirl.runners.plan import Plan
from unirl.runners.processes import ProcessesRunner, TrainingRunner
from unirl.transports.remote.transport import RemoteTransport


class Runner(Protocol):
    """Executes a plan."""

    loops: list[TrainLoop]
    """One for each learner."""

    def run(self, hooks: Sequence[Hook], *others: Sequence[Hook]) -> None:
        """Train until a hook stops a loop. others: the hooks of further learners."""

    def resize(self, pool: Pool, size: int | None) -> None:
        """Let a pool have so many members, None: as many as it can use. May raise UniRLError."""

    def restart_actors(self) -> None:
        """What a checkpoint asks for: runners that repeat bit for bit restart their actors."""

    def close(self) -> None:
        """End what it started; idempotent."""


def make_runner(
    plan: Plan,
    *,
    log_dir: Path | None = None,
    rank: int = 0,
    agree: Agree | None = None,
    cluster: RayCluster | None = None,
) -> Runner:
    """The plan's runner; nothing is started. rank, agree: see InlineRunner. cluster: of
    `make_cluster`, for runner ray; the runner leaves it when it is closed.
    """
    if plan.runner.is_inline:
        return InlineRunner(plan, rank=rank, agree=agree)
    if plan.runner.kind == "ray":
        return _ray_runner(plan, log_dir, cluster or make_cluster(plan))
    return ProcessesRunner(plan, log_dir=log_dir)


def make_cluster(plan: Plan, *, is_again: bool = False) -> RayCluster:
    """The cluster of runner ray, with nothing on it. is_again: it was lost, and is waited for."""
    if importlib.util.find_spec("ray") is None:
        raise UniRLError(
            "runner.kind is ray, and Ray is not installed",
            "package ray is an extra of its own",
            "pip install 'unirl[ray]', or set runner.kind to processes",
        )
    prepare_environment(plan.ray)  # Ray reads it when it is imported
    wanted, ranks, number = most_wanted(plan), plan.rank_resources, plan.learner.ranks - 1
    wanted = replace(
        wanted, cpus=wanted.cpus + number * ranks.cpus, gpus=wanted.gpus + number * ranks.gpus
    )
    return RayCluster(plan.ray, wanted, is_again=is_again)


def _ray_runner(
    plan: Plan, log_dir: Path | None, cluster: RayCluster
) -> TrainingRunner[ClusterMembers]:
    """Nothing runs on the cluster yet."""
    try:
        transport = RemoteTransport(cluster.host, plan.ray.silent_seconds, plan.ray.weights_fanout)
        return TrainingRunner(
            plan,
            transport,
            lambda plan, found: ClusterMembers(plan, found, transport, cluster, log_dir),
        )
    except BaseException:
        cluster.close()
        raise


@contextmanager
def learner_threads(config: RunnerConfig) -> Iterator[None]:
    """Torch threads of the learner's process for the time of the run."""
    before = torch.get_num_threads()
    torch.set_num_threads(config.learner_threads or (before if config.is_inline else 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)
