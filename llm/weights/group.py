"""A small process group beside torch's own, for one learner-side process and the workers of an
engine: torch's default group may be in use for something else. Source: torch.distributed.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from unirl.device import finish_on_host


class BroadcastGroup:
    """Members of one broadcast; every wait has the deadline given to `join`."""

    def __init__(self, group: Any, seconds: float) -> None:
        self._group, self._limit = group, timedelta(seconds=seconds)

    def broadcast(self, pieces: Iterable[Tensor]) -> None:
        """Rank 0's bytes to all others, in place; returns when they are there. All members give
        pieces of PIECE_BYTES and a last one that is smaller: each has the whole deadline for
        itself.

        Raises RuntimeError when a member is gone or the deadline passed.
        """
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        for piece in pieces:
            work = self._group.broadcast([piece], options)
            if piece.is_cuda:
                finish_on_host(work, self._limit.total_seconds())
            else:
                work.wait(self._limit)


def listen(host: str) -> socket.socket:
    """A free port of this address alone: torch itself would listen on all addresses of the machine,
    and every process that reaches its store can read and write it.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, 0), family=family)


def join(
    *,
    host: str,
    port: int,
    size: int,
    rank: int,
    backend: str,
    seconds: float,
    listener: socket.socket | None = None,
) -> BroadcastGroup:
    """Meet the others at host:port. listener: of rank 0, which is the one that listens; it is
    closed with the group.

    Raises RuntimeError when not all came within the deadline.
    """
    assert (listener is not None) == (rank == 0), "rank 0 alone listens"
    limit = timedelta(seconds=seconds)
    dist: Any = torch.distributed
    settings = {"master_listen_fd": listener.detach(), "use_libuv": True} if listener else {}
    store = dist.TCPStore(host, port, size, rank == 0, limit, **settings)
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        # Its watchdog ends the process: not before the wait on the host has given up.
        options._timeout = 2 * limit + timedelta(seconds=60)
        return BroadcastGroup(dist.ProcessGroupNCCL(store, rank, size, options), seconds)
    options = dist.ProcessGroupGloo._Options()
    # By address: a machine's own name often resolves to nothing, or to the wrong interface.
    here = host if rank == 0 or host.startswith("127.") else _own_address(host, port)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=here)]
    options._timeout = limit
    return BroadcastGroup(dist.ProcessGroupGloo(store, rank, size, options), seconds)


def _own_address(host: str, port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
