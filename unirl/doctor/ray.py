"""The facts of every node of a Ray cluster, how far their clocks are apart, and how fast
connections are: from each node to this process, as samples travel, and from each to the next.
"""

from __future__ import annotations

import logging
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from unirl.doctor.facts import node_facts
from unirl.errors import UniRLError
from unirl.runners.cluster.environment import prepare_environment
from unirl.runners.config import RayConfig

DEADLINE_SECONDS, _CONNECT_SECONDS = 60.0, 20.0
_NUM_BYTES = 64 * 2**20


def facts_of_nodes(address: str, folder: str) -> list[dict[str, Any]]:
    """By node: `node`, `facts`, `clock_seconds` and `rates`, or `node` and `error`. rates: by whom
    the node sent something to, megabytes per second, or what went wrong.

    Raises UniRLError without ray, or without a cluster at this address.
    """
    prepare_environment(RayConfig(address=address))
    try:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError as error:
        raise UniRLError(
            f"--ray.address is {address!r}",
            "ray is not installed here",
            "pip install 'unirl[ray]', or leave --ray.address out for this machine alone",
        ) from error
    cluster: Any = ray
    try:
        if address != "auto":  # Ray itself would try for a long time
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=DEADLINE_SECONDS / 4).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray's are of many kinds
        raise UniRLError(
            f"no Ray cluster answers at {address!r}",
            " ".join(str(error).split())[:300] or type(error).__name__,
            "ray status shows whether one is up; RAY_AUTH_MODE and the token must be its own",
        ) from error
    try:
        # One after the other: they would share the network that is measured.
        found, places = [], []
        for node in cluster.nodes():
            if node["Alive"]:
                strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                options = {"num_cpus": 0, "scheduling_strategy": strategy}
                name = f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})"
                found.append({"node": name, **_ask(cluster, options, folder)})
                places.append((name, node["NodeManagerAddress"], options))
        for one, here, there in zip(found, places, [*places[1:], places[0]], strict=True):
            if here is not there and "facts" in one:
                one["rates"][there[0]] = _between(cluster, here[2], *there[1:])
        return found
    finally:
        ray.shutdown()


def _ask(ray: Any, options: dict[str, Any], folder: str) -> dict[str, Any]:
    options = {**options, "max_retries": 0}
    try:
        facts = ray.get(
            ray.remote(node_facts).options(**options).remote(folder), timeout=DEADLINE_SECONDS
        )
        differences = []
        for _ in range(3):
            before = time.time()
            there = ray.get(ray.remote(_now).options(**options).remote(), timeout=DEADLINE_SECONDS)
            after = time.time()
            differences.append((after - before, there - (before + after) / 2))
    except Exception as error:  # of Ray, or of a node that cannot import UniRL
        return {"error": _said(error)}
    receiver = Receiver(token := secrets.token_bytes(16))
    where = (ray.util.get_node_ip_address(), receiver.port())
    with ThreadPoolExecutor(1) as thread:
        rate = _rate(ray, options, where, token, thread.submit(receiver.receive).result)
    return {"facts": facts, "clock_seconds": min(differences)[1], "rates": {"this process": rate}}


def _between(ray: Any, sender: dict[str, Any], host: str, receiver: dict[str, Any]) -> float | str:
    """From one node to another one."""
    token = secrets.token_bytes(16)
    actor = ray.remote(Receiver).options(**receiver, max_restarts=0).remote(token)
    try:
        port = ray.get(actor.port.remote(), timeout=DEADLINE_SECONDS)
        received = actor.receive.remote()
        sender = {**sender, "max_retries": 0}
        wait = lambda: ray.get(received, timeout=DEADLINE_SECONDS)  # noqa: E731
        return _rate(ray, sender, (host, port), token, wait)
    except Exception as error:
        return _said(error)
    finally:
        ray.kill(actor)


def _rate(
    ray: Any, sender: dict[str, Any], where: tuple[str, int], token: bytes, wait: Any
) -> float | str:
    """Megabytes per second of a connection, or why there was none."""
    try:
        ray.get(ray.remote(_send).options(**sender).remote(where, token), timeout=DEADLINE_SECONDS)
        return _NUM_BYTES / 1e6 / float(wait())
    except Exception as error:
        return _said(error)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[-1][:300]


def _now() -> float:
    return time.time()


class Receiver:
    """Takes what one sender that knows the token sends."""

    def __init__(self, token: bytes) -> None:
        self._token, self._server = token, socket.create_server(("", 0))
        self._server.settimeout(_CONNECT_SECONDS)

    def port(self) -> int:
        """Where it listens."""
        return int(self._server.getsockname()[1])

    def receive(self) -> float:
        """How many seconds it took. OSError where it did not come."""
        with self._server:
            connection, _ = self._server.accept()
        with connection:
            connection.settimeout(_CONNECT_SECONDS)
            if not secrets.compare_digest(connection.recv(16, socket.MSG_WAITALL), self._token):
                raise ConnectionError("somebody else connected")
            buffer, left, started = bytearray(2**20), _NUM_BYTES, time.perf_counter()
            while left and (number := connection.recv_into(buffer)):
                left -= number
            if left:
                raise ConnectionError(f"{left} bytes did not arrive")
            return time.perf_counter() - started


def _send(where: tuple[str, int], token: bytes) -> None:
    block = bytes(2**20)
    with socket.create_connection(where, timeout=_CONNECT_SECONDS) as connection:
        connection.sendall(token)
        for _ in range(_NUM_BYTES // len(block)):
            connection.sendall(block)
