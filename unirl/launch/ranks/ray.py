"""Ranks on the nodes of a Ray cluster, packed: on as few of them as have what all ask for."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import sys
import time
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from unirl.errors import UniRLError, format_error
from unirl.launch.ranks.actor import RankActor
from unirl.launch.ranks.orders import NETWORK, OrderPort, connect, use_network_of
from unirl.launch.ranks.ranks import RankProcess, RankSetup, follow
from unirl.learners.parallel import RankLost
from unirl.runners.cluster.actor import NodeNeeds, versions
from unirl.runners.cluster.placement import CannotPlace
from unirl.runners.cluster.ray import RayCluster
from unirl.runners.cluster.shipping import pack
from unirl.runners.plan import Plan

log = logging.getLogger(__name__)
_SHM_BYTES = 16 * 2**20


class RankOnNode:
    """A rank that was started, as far as a process would be."""

    pid = None

    def __init__(self, ray: Any, actor: Any, ended: Any, name: str) -> None:
        self._ray, self._actor, self._ended, self.name = ray, actor, ended, name
        self._exitcode: int | None = None
        self.error: BaseException | None = None

    @property
    def exitcode(self) -> int | None:
        """None while it runs."""
        if self._exitcode is None and self._ray.wait([self._ended], timeout=0)[0]:
            try:
                self._ray.get(self._ended)
                self._exitcode = 0
            except Exception as error:
                self._exitcode = 1
                self.error = getattr(error, "cause", None) or error
                log.warning("%s ended: %s", self.name, " ".join(str(error).split())[-300:])
        return self._exitcode

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float) -> None:
        """Wait for its end, at most so long."""
        with contextlib.suppress(Exception):  # the cluster is gone
            self._ray.wait([self._ended], timeout=timeout)

    def kill(self) -> None:
        with contextlib.suppress(Exception):
            self._ray.kill(self._actor)
        self._exitcode = -9


class RankNodes:
    """See RankStarter: room for them is reserved at once and kept until `close`, so that members of
    pools get what is left. Each is sent what it needs: no folder has to be shared.
    """

    sends = True

    def __init__(self, plan: Plan, cluster: RayCluster) -> None:
        import ray
        from ray.util.placement_group import placement_group

        config, number = plan.ray, plan.learner.ranks - 1
        self._ray, self._cluster, self._config = ray, cluster, config
        self._threads = plan.runner.learner_threads or 1
        self._wanted = plan.rank_resources
        self.host = cluster.host
        self._port = OrderPort(cluster.host)
        self._names_network = use_network_of(cluster.host)
        bundle = {"CPU": self._wanted.cpus, "GPU": self._wanted.gpus}
        bundle = {name: value for name, value in bundle.items() if value}
        self._parcel = pack(config.working_dir)
        self._group = placement_group([bundle] * number, strategy="PACK")
        self._number, self._had_room = number, False

    def prepare(self) -> None:
        """Also where a node was lost: its part of the room is looked for elsewhere."""
        deadline = time.monotonic() + self._config.wait_seconds
        while not self._group.wait(1):
            if time.monotonic() > deadline:
                left = "; ".join(node.describe() for node in self._cluster.nodes()[:8])
                error = RankLost if self._had_room else CannotPlace
                raise error(
                    f"{self._number} ranks of the learner find no place: each asks for "
                    f"{self._wanted.cpus:g} CPUs and {self._wanted.gpus:g} GPUs (ray.rank_cpus, "
                    "ray.rank_gpus)",
                    left or "there is no node",
                    "start nodes that have it, use fewer ranks, or ask for less",
                )
        self._had_room = True

    def start(self, setup: RankSetup) -> RankProcess:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # Ray shows a rank its own devices alone.
        setup = replace(setup, local_rank=0)
        work = partial(
            follow_elsewhere, setup, self._port.address, self._port.token.data, self._threads
        )
        needs = NodeNeeds(versions(), 0, _SHM_BYTES)
        actor = (
            self._ray.remote(RankActor)
            .options(
                num_cpus=self._wanted.cpus,
                num_gpus=self._wanted.gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=setup.rank - 1
                ),
            )
            .remote(list(sys.path), str(Path.cwd()), needs, self._parcel)
        )
        ended = actor.follow.remote(pickle.dumps(work))
        return RankOnNode(self._ray, actor, ended, f"unirl-rank {setup.rank}")

    def connection(self, rank: int, process: RankProcess) -> Connection:
        deadline = time.monotonic() + self._config.wait_seconds
        while True:
            with contextlib.suppress(TimeoutError):
                return self._port.accept(rank, 0.5)
            if (code := process.exitcode) is not None or time.monotonic() > deadline:
                error = getattr(process, "error", None)
                if isinstance(error, UniRLError):
                    raise error
                raise RankLost(
                    f"rank {rank} did not come to {self._port.address[0]}:{self._port.address[1]}",
                    f"it had {self._config.wait_seconds:g} s (ray.wait_seconds)"
                    if code is None
                    else f"it ended: {format_error(error) if error else code}"[:500],
                    "see whether its node reaches that address, and the logs of Ray there",
                )

    def end(self) -> None:
        """Ray ends what they started."""
        self._port.forget()  # of these: what comes next is of others

    def close(self) -> None:
        self._port.close()
        if self._names_network:  # the next run of this process may be of another cluster
            os.environ.pop(NETWORK, None)
            self._names_network = False
        from ray.util.placement_group import remove_placement_group

        with contextlib.suppress(Exception):  # the cluster is gone
            remove_placement_group(self._group)


def follow_elsewhere(
    setup: RankSetup, address: tuple[str, int], token: bytes, num_threads: int
) -> None:
    """What a rank does on a node."""
    torch.set_num_threads(num_threads)
    with connect(address, token, setup.rank) as orders:
        follow(setup, orders)
