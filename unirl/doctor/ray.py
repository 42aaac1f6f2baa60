"""The facts of every node of a Ray cluster, how far their clocks are apart, and how fast a
connection from each of them is.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import Any

from unirl.doctor.facts import node_facts
from unirl.errors import UniRLError

DEADLINE_SECONDS = 60.0
_NUM_BYTES = 64 * 2**20


def facts_of_nodes(address: str, folder: str) -> list[dict[str, Any]]:
    """By node: `node`, `facts`, `clock_seconds`, `megabytes_per_second`; or `node` and `error`.

    Raises UniRLError without ray, or without a cluster at this address.
    """
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
        found = []
        for node in cluster.nodes():
            if node["Alive"]:
                strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": strategy}
                name = f"{node['NodeManagerHostname']} ({node['NodeID'][:6]})"
                found.append({"node": name, **_ask(cluster, options, folder)})
        return found
    finally:
        ray.shutdown()


def _ask(ray: Any, options: dict[str, Any], folder: str) -> dict[str, Any]:
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
        rate = _measure(ray, options)
    except Exception as error:  # of Ray, or of a node that cannot import UniRL
        return {"error": f"{type(error).__name__}: {error}".strip().splitlines()[-1]}
    return {"facts": facts, "clock_seconds": min(differences)[1], "megabytes_per_second": rate}


def _now() -> float:
    return time.time()


def _measure(ray: Any, options: dict[str, Any]) -> float:
    """MB per second of one connection from a node to here, as samples travel."""
    token = secrets.token_bytes(16)
    seconds: list[float] = []
    with socket.create_server(("", 0)) as server:
        server.settimeout(DEADLINE_SECONDS)
        receiver = threading.Thread(target=_receive, args=(server, token, seconds), daemon=True)
        receiver.start()
        where = (ray.util.get_node_ip_address(), server.getsockname()[1])
        ray.get(ray.remote(_send).options(**options).remote(where, token), timeout=DEADLINE_SECONDS)
        receiver.join(DEADLINE_SECONDS)
    if not seconds:
        raise TimeoutError("the node's bytes did not arrive")
    return _NUM_BYTES / 1e6 / seconds[0]


def _receive(server: socket.socket, token: bytes, seconds: list[float]) -> None:
    with suppress(OSError):
        connection, _ = server.accept()
        with connection:
            connection.settimeout(DEADLINE_SECONDS)
            if not secrets.compare_digest(connection.recv(16, socket.MSG_WAITALL), token):
                return
            buffer, left, started = bytearray(2**20), _NUM_BYTES, time.perf_counter()
            while left and (number := connection.recv_into(buffer)):
                left -= number
            if not left:
                seconds.append(time.perf_counter() - started)


def _send(where: tuple[str, int], token: bytes) -> None:
    block = bytes(2**20)
    with socket.create_connection(where, timeout=DEADLINE_SECONDS) as connection:
        connection.sendall(token)
        for _ in range(_NUM_BYTES // len(block)):
            connection.sendall(block)
