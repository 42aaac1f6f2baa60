"""Runs of a sweep on the nodes of a Ray cluster: each is a process beside an actor that starts it.

The record stays with the sweep's own process. All nodes see the sweep's folder (decision 048), so a
run whose node is lost continues on another one from its checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.core.pool import Resources
from unirl.errors import UniRLError, format_error
from unirl.runners.cluster.actor import versions
from unirl.runners.cluster.environment import prepare_environment
from unirl.runners.cluster.placement import Ask, Node
from unirl.runners.cluster.shipping import pack
from unirl.runners.config import RayConfig
from unirl.sweep import runs
from unirl.sweep.launcher import End, Training
from unirl.sweep.trial import SeedRun, Trial
from unirl.sweep.trial_actor import Probe, TrialActor

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""From a start to a look at what nodes have left: until then Ray does not know of it."""


def require_ray() -> None:
    """Raise UniRLError where it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UniRLError(
            "on is ray, and Ray is not installed",
            "package ray is an extra of its own",
            "pip install 'unirl[ray]', or leave `on` out",
        )


@dataclass
class NodeRun:
    """A run that trains on a node."""

    trial: Trial
    run: SeedRun
    node: Node
    _ray: Any
    _actor: Any
    _ended: Any
    """What its process returns."""
    _left_out: dict[str, UniRLError]
    """Nodes that are not fit, by id."""
    is_to_leave: bool = False
    _end: End | None = None
    _num_stops: int = 0

    def poll(self) -> End | None:
        if self._end is None and self._ray.wait([self._ended], timeout=0)[0]:
            self._end = self._read()
        return self._end

    def _read(self) -> End:
        try:
            return End(self._ray.get(self._ended))
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, UniRLError):
                self._left_out[self.node.id] = error.cause
                log.warning("%s It is left out.", error.cause)
                return End()  # the run did not begin, and is due
            return End(f"on node {self.node.name}: {format_error(error)[-500:]}")
        except self._ray.exceptions.RayError as error:
            why = " ".join(format_error(error).split())[:200]
            return End(f"node {self.node.name} is gone, or its memory was needed: {why}", True)
        finally:
            self._kill()

    def stop(self) -> None:
        self._num_stops += 1
        self._actor.stop.remote()
        if self._num_stops > 1:  # its process ends with the actor, if that answers or not
            self._kill()

    def wait(self) -> None:
        """Until it has written its checkpoint, at most for as long as another run would wait."""
        deadline = time.monotonic() + runs.LOCK_SECONDS
        while self.poll() is None and time.monotonic() < deadline:
            self._ray.wait([self._ended], timeout=1.0)
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(Exception):  # its node is gone
            self._ray.kill(self._actor)


class RayNodes:
    """Runs are processes of a cluster's nodes, as many as these have room for, or `jobs`."""

    def __init__(
        self, sweep_dir: Path, config: RayConfig, wanted: Resources, jobs: int | None
    ) -> None:
        prepare_environment(config)
        import ray

        from unirl.runners.cluster.ray import RayCluster

        self._ray, self._sweep_dir, self._config = ray, sweep_dir.resolve(), config
        self._wanted, self._jobs = wanted, jobs
        self._cluster = RayCluster(config, wanted)
        self._parcel = pack(config.working_dir)
        self._probe = Probe(self._sweep_dir / f".seen-by-nodes-{secrets.token_hex(8)}")
        self._probe.write()
        self._nodes: list[Node] = []
        self._looked = self._had_room = time.monotonic() - _LOOK_SECONDS
        self._left_out: dict[str, UniRLError] = {}
        self._cluster.want([wanted] * (jobs or 1))

    def describe(self) -> str:
        most = f", at most {self._jobs} at a time" if self._jobs else ""
        return f"on the nodes of a Ray cluster{most}; {self.asks()}"

    def asks(self) -> str:
        """What a run asks for, for people."""
        return Ask(0, "each", (), self._wanted).describe().replace("  ", " ")

    def has_room(self, running: Sequence[Training]) -> bool:
        self._cluster.check()
        if time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._nodes, self._looked = self._cluster.nodes(), time.monotonic()
            self._leave_drained(running)
        if running or self._place() is not None:
            self._had_room = time.monotonic()
        elif time.monotonic() - self._had_room > self._config.wait_seconds:
            raise self._no_place()
        return (self._jobs is None or len(running) < self._jobs) and self._place() is not None

    def start(self, trial: Trial, run: SeedRun, pause_steps: int | None) -> NodeRun:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node, wanted = self._place(), self._wanted
        assert node is not None, "there is room"
        node.take(wanted)
        self._looked = time.monotonic()
        actor = (
            self._ray.remote(TrialActor)
            .options(
                num_cpus=wanted.cpus,
                num_gpus=wanted.gpus,
                memory=int(wanted.memory_gib * 2**30) or None,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=2,  # `stop` comes while `run` waits
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            )
            .remote([*sys.path], os.getcwd(), self._parcel, self._probe, versions())
        )
        num_threads = max(1, int(wanted.cpus))
        ended = actor.run.remote(self._sweep_dir, trial, run, pause_steps, num_threads)
        log.info("%s on node %s", runs.run_name(trial, run), node.name)
        return NodeRun(trial, run, node, self._ray, actor, ended, self._left_out)

    def close(self) -> None:
        self._probe.remove()
        self._cluster.close()

    def _place(self) -> Node | None:
        """The node that has most left, if one has enough."""
        fitting = [n for n in self._nodes if n.fits(self._wanted) and n.id not in self._left_out]
        return max(fitting, key=lambda node: (node.gpus, node.cpus), default=None)

    def _leave_drained(self, running: Sequence[Training]) -> None:
        """Runs of a node that is about to go write their checkpoint now, and continue elsewhere."""
        drained = {node.id for node in self._nodes if node.is_drained}
        for each in running:
            if isinstance(each, NodeRun) and each.node.id in drained and not each.is_to_leave:
                each.is_to_leave = True
                each.stop()

    def _no_place(self) -> UniRLError:
        if self._left_out:
            return next(iter(self._left_out.values()))
        left = "; ".join(node.describe() for node in self._nodes[:8]) or "there is no node"
        return UniRLError(
            f"no node has had room for a run for {self._config.wait_seconds:g} s: {self.asks()}",
            left,
            "start nodes that have it, or ask for less: --resources.cpus 1",
        )
