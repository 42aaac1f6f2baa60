"""Ray as the control plane: which nodes there are, and agents started and ended on them. Slots and
weights never pass through it.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from unirl.core.pool import Resources
from unirl.errors import RunLost, UniRLError, format_error
from unirl.runners.cluster.actor import AgentActor, NodeNeeds, versions
from unirl.runners.cluster.agent import AgentSetup
from unirl.runners.cluster.placement import Node
from unirl.runners.cluster.shipping import pack
from unirl.runners.config import RayConfig
from unirl.runners.plan import Plan
from unirl.runners.pool_processes import modules_of
from unirl.transports.remote.layout import SlotLayout

log = logging.getLogger(__name__)
T = TypeVar("T")

HEALTH = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
    "worker_niceness": 0,
}
"""Of the clusters that we start: a dead node is known after seconds, not after a minute; agents,
which only pass things on, give way to nobody.
"""
_ASK_SECONDS = 1.0
"""Between two looks whether the head answers, and how long it has to accept a connection."""
_SHM_BYTES, _SHM_BYTES_OF_GPUS = 16 * 2**20, 2**30
"""What is needed in /dev/shm, and where there are several GPUs, by NCCL and vLLM."""
_STORE_BYTES = 80 * 2**20
"""Little more than the least: nothing of ours is stored there."""


class AgentHandle:
    """An agent that was started, from the driver. answers: whether the head does."""

    def __init__(self, ray: Any, actor: Any, started: Any, answers: Callable[[], bool]) -> None:
        self._ray, self._actor, self._started, self._answers = ray, actor, started, answers
        self.pid: int | None = None

    def poll(self) -> Exception | None:
        """What went wrong while it was started; None as long as nothing did."""
        if self._started is None or not self._ray.wait([self._started], timeout=0)[0]:
            return None
        started, self._started = self._started, None
        try:
            self.pid = self._ray.get(started)
        except Exception as error:
            cause = getattr(error, "cause", None)
            return cause if isinstance(cause, UniRLError) else _unstarted(error)
        return None

    def kill(self) -> None:
        """End its process; idempotent. Without a head, which Ray would wait for, it ends by itself:
        its connection is closed.
        """
        with contextlib.suppress(Exception):
            if self._answers():
                self._ray.kill(self._actor)


class RayCluster:
    """A cluster that was joined, or one of this machine alone that ends with the run.

    wanted: what the plan asks for altogether; a cluster of our own has as much. is_again: the run
    had a cluster, which was lost: its head is waited for.
    """

    def __init__(self, config: RayConfig, wanted: Resources, *, is_again: bool = False) -> None:
        import ray

        self._ray, self._config, self._is_ours, self._wants = ray, config, False, False
        self._num_users = 1
        self._parcel = pack(config.working_dir)
        self._asker: threading.Thread | None = None
        self._asking = threading.Lock()
        self._is_gone = self._hangs = False
        self._asked_at = self._heard_at = time.monotonic()
        if ray.is_initialized() and is_again and config.address:
            raise UniRLError(
                f"this process cannot leave the Ray cluster at {config.address}",
                f"its head must let it go within ray.wait_seconds, {config.wait_seconds:g} s",
                "start the head again, then `unirl resume`",
            )
        if ray.is_initialized():
            log.info("the Ray connection of this process is used")
            self.host: str = ray.util.get_node_ip_address()
        elif config.address:
            self._join_in_time(config.address, config.wait_seconds if is_again else 0.0)
        else:
            self._start(wanted)
        self._head = str(ray.get_runtime_context().gcs_address)

    def _start(self, wanted: Resources) -> None:
        cores = os.cpu_count() or 1
        try:
            self._ray.init(
                address="local",
                num_cpus=max(cores, -int(-wanted.cpus // 1)) + 1,
                include_dashboard=False,
                object_store_memory=_STORE_BYTES,
                log_to_driver=False,
                logging_level="warning",
                _system_config=dict(HEALTH),
            )
        except Exception as error:
            raise UniRLError(
                f"a Ray cluster on this machine could not be started: {error}",
                "it needs some ports, 80 MiB in /dev/shm and a writable /tmp/ray",
                "see /tmp/ray/session_latest/logs, or set runner.kind to processes",
            ) from error
        self._is_ours = True
        self.host = "127.0.0.1"

    def _join_in_time(self, address: str, patience: float) -> None:
        deadline = time.monotonic() + patience
        while True:
            try:
                self._join(address)
                return
            except UniRLError as error:
                if not patience:
                    raise
                if time.monotonic() > deadline:
                    raise RunLost(*error.parts) from error
                time.sleep(1.0)

    def _join(self, address: str) -> None:
        remedy = "ask `ray status` on the head, then give its address as --ray.address HOST:PORT"
        if address not in ("auto", "local"):
            host, _, port = address.removeprefix("ray://").rpartition(":")
            try:
                socket.create_connection((host, int(port)), self._config.wait_seconds / 4).close()
            except (OSError, ValueError) as error:
                raise UniRLError(
                    f"no Ray cluster answers at {address!r}: {error}",
                    "ray.address is the head's host and the port of its GCS, usually 6379",
                    remedy,
                ) from error
        try:
            self._ray.init(address=address, log_to_driver=False, logging_level="warning")
        except Exception as error:
            raise _explained(address, error, remedy) from error
        if os.environ.get("RAY_AUTH_MODE") != "token":
            log.warning(
                "the Ray cluster at %s asks for no token: who reaches its ports runs code on it. "
                "Start it with RAY_AUTH_MODE=token.",
                address,
            )
        self.host = self._ray.util.get_node_ip_address()

    def check(self) -> None:
        """RunLost where the head has been gone for ray.silent_seconds: what runs does not need it,
        but Ray would end this process a minute later. One that hangs has ray.wait_seconds.
        """
        now, silent = time.monotonic(), self._config.silent_seconds
        if now - self._asked_at < _ASK_SECONDS:
            return
        if now - self._asked_at > silent:
            self._heard_at = now  # this process was stopped itself
        answers, self._asked_at = self._answers(), time.monotonic()
        waited = self._asked_at - self._heard_at
        if answers:
            self._heard_at, self._hangs = self._asked_at, False
        elif self._is_gone and waited > silent:
            raise self._lost("ray.silent_seconds", silent)
        elif waited > max(silent, self._config.wait_seconds):
            raise self._lost("ray.wait_seconds", self._config.wait_seconds)
        elif waited > silent and not self._hangs:
            self._hangs = True
            text = "the head of the Ray cluster at %s accepts connections and answers nothing: %s"
            log.warning(text, self._head, "training continues, and what is lost waits for it")

    def _lost(self, name: str, seconds: float) -> RunLost:
        return RunLost(
            f"the head of the Ray cluster at {self._head} does not answer",
            f"it must do so within {name}, {seconds:g} s",
            "start it, or another cluster, then `unirl resume`",
        )

    def _answers(self) -> bool:
        return self._of_head(self._ray.nodes) is not None

    def _of_head(self, ask: Callable[[], T]) -> T | None:
        """What the head says; None where it does not in half of the time that it may be silent. Ray
        would wait for it: who asks then is left to itself, and no other asks before it has its
        answer.
        """
        host, _, port = self._head.rpartition(":")
        found: list[T] = []

        def run() -> None:
            with contextlib.suppress(Exception):  # Ray's own, of many kinds: no answer
                found.append(ask())

        with self._asking:
            try:
                socket.create_connection((host.strip("[]"), int(port)), _ASK_SECONDS).close()
                self._is_gone = False
            except OSError:
                self._is_gone = True
                return None
            if self._asker is not None and self._asker.is_alive():
                return None
            self._asker = threading.Thread(target=run, name="head", daemon=True)
            self._asker.start()
            self._asker.join(self._config.silent_seconds / 2)
            return found[0] if found else None

    def nodes(self) -> list[Node]:
        """The nodes that are alive, with what is not taken. None while the head does not answer."""
        return self._of_head(self._read_nodes) or []

    def _read_nodes(self) -> list[Node]:
        free = self._ray._private.state.available_resources_per_node()
        drained = self._ray._private.state.state.get_draining_nodes()
        found = []
        for each in self._ray.nodes():
            if not each["Alive"]:
                continue
            left = _resources(free.get(each["NodeID"], {}))
            found.append(
                Node(
                    each["NodeID"],
                    f"{each['NodeManagerAddress']} ({each['NodeID'][:6]})",
                    left.cpus,
                    left.gpus,
                    left.memory_gib,
                    dict(each.get("Labels") or {}),
                    each["NodeID"] in drained,
                    _resources(each["Resources"]),
                )
            )
        return found

    def want(self, asks: Sequence[Resources]) -> None:
        """Say to an autoscaler, if the cluster has one, what nodes there should be for."""
        if self._is_ours:
            return
        from ray.autoscaler.sdk import request_resources

        self._wants = bool(asks)
        kinds = [
            {"CPU": one.cpus, "GPU": one.gpus, "memory": one.memory_gib * 2**30} for one in asks
        ]
        bundles = [{name: value for name, value in kind.items() if value} for kind in kinds]
        labels = [dict(one.labels) for one in asks]
        # A hint, and nothing waits for it.
        self._of_head(partial(request_resources, bundles=bundles, bundle_label_selectors=labels))

    def start_agent(self, node: str, wanted: Resources, setup: AgentSetup) -> AgentHandle:
        """Start an agent on a node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = (list(sys.path), str(Path.cwd()))
        needs = _needs(setup.plan, setup.shapes, wanted.gpus)
        actor = (
            self._ray.remote(AgentActor)
            .options(
                num_cpus=wanted.cpus,
                num_gpus=wanted.gpus,
                memory=int(wanted.memory_gib * 2**30) or None,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            .remote(*place, *modules_of(setup.plan), needs, self._parcel)
        )
        started = actor.start.remote(pickle.dumps(setup))
        return AgentHandle(self._ray, actor, started, self._answers)

    def share(self) -> RayCluster:
        """For one more user, who closes it, too."""
        self._num_users += 1
        return self

    def close(self) -> None:
        """The last user leaves the cluster; one of ours ends. Idempotent."""
        self._num_users -= 1
        if self._num_users > 0:
            return
        if self._wants:
            self.want(())
        if self._is_ours or self._config.address:
            if not self._hangs:
                self._shutdown()
                return
            # It waits for the head, as it would again when this process ends.
            leaving = threading.Thread(target=self._shutdown, name="leave", daemon=True)
            leaving.start()
            leaving.join(self._config.wait_seconds)
            if leaving.is_alive():
                atexit.unregister(self._ray.shutdown)

    def _shutdown(self) -> None:
        with contextlib.suppress(Exception):
            self._ray.shutdown()


def _resources(found: Mapping[str, float]) -> Resources:
    """Of Ray's names for them."""
    memory = found.get("memory", 0.0) / 2**30
    return Resources(found.get("CPU", 0.0), found.get("GPU", 0.0), memory)


def _needs(plan: Plan, shapes: Sequence[Mapping[str, Any]], gpus: float) -> NodeNeeds:
    slots = sum(SlotLayout(each.spec).slot_bytes * each.queue.num_slots for each in plan.learners)
    weights = sum(
        2 * math.prod(shape) * dtype.itemsize for each in shapes for shape, dtype in each.values()
    )
    shm = _SHM_BYTES_OF_GPUS if gpus > 1 else _SHM_BYTES
    return NodeNeeds(versions(), slots + weights, shm)


def _unstarted(error: Exception) -> Exception:
    """What no other node would do better is an error of ours."""
    text = " ".join(format_error(error).split())
    if "failed to import on the worker" in text or "No module named 'unirl" in text:
        return UniRLError(
            f"a node cannot import UniRL: {text[-300:]}",
            "each node needs the same packages in the Python that Ray runs there",
            "install UniRL on all nodes, or use one image",
        )
    return error


def _explained(address: str, error: Exception, remedy: str) -> UniRLError:
    text = " ".join(str(error).split())[:600]
    if "ersion mismatch" in text:
        return UniRLError(
            f"the Ray cluster at {address!r} and this process do not fit: {text}",
            "Ray and Python must be of the same version on all machines",
            "install the cluster's versions here, or these on the cluster",
        )
    if "oken" in text or "uthentic" in text:
        return UniRLError(
            f"the Ray cluster at {address!r} does not let this process in: {text}",
            "RAY_AUTH_MODE and the token must be those of the cluster",
            "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to the cluster's",
        )
    return UniRLError(
        f"the Ray cluster at {address!r} could not be joined: {text}",
        "ray.address is the head's host and the port of its GCS, and the token in RAY_AUTH_TOKEN "
        "or RAY_AUTH_TOKEN_PATH is the cluster's, if it asks for one",
        remedy,
    )
