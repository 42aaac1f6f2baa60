"""Connections of ranks on nodes to the first one."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import threading
import time
from multiprocessing.connection import Connection

import pytest
import torch

from unirl.launch.ranks.orders import OrderPort, connect, read_order, send_order, use_network_of
from unirl.transports.remote.wire import ProtocolError


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ranks set in their own process is not to stay in this one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def test_the_network_of_an_address_is_used_unless_the_user_has_named_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not use_network_of("127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert not use_network_of("127.0.0.1") and os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert not use_network_of("192.0.2.1") and "GLOO_SOCKET_IFNAME" not in os.environ
    assert use_network_of("127.0.0.1") and os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_ranks_come_in_any_order() -> None:
    port, found = OrderPort("127.0.0.1"), {}

    def come(rank: int) -> None:
        found[rank] = connect(port.address, port.token.data, rank)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (3, 2, 1)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    orders: dict[int, Connection] = {rank: port.accept(rank, 10.0) for rank in (1, 2, 3)}
    for thread in threads:
        thread.join()
    for rank, connection in orders.items():
        send_order(connection, "continue", {"w": torch.ones(2)}, {}, None, 1.5, rank)
        order, tree, *facts = read_order(found[rank])
        assert order == "continue" and torch.equal(tree["w"], torch.ones(2))
        assert facts == [{}, None, 1.5, rank]
        connection.close()
        found[rank].close()
    port.close()


def test_an_order_runs_nothing_where_it_is_read() -> None:
    here, there = multiprocessing.Pipe()
    send_order(here, "continue", os.getcwd)
    with pytest.raises(pickle.UnpicklingError, match="weights_only"):
        read_order(there)


def test_who_does_not_know_the_token_is_sent_away_and_ranks_still_come() -> None:
    port = OrderPort("127.0.0.1")
    silent = socket.create_connection(port.address)
    silent.close()
    refused: list[Exception] = []

    def come(token: bytes) -> None:
        try:
            connect(port.address, token, 1).close()
        except (OSError, ProtocolError) as error:
            refused.append(error)

    stranger = threading.Thread(target=come, args=(bytes(32),))
    stranger.start()
    with pytest.raises(TimeoutError):
        port.accept(1, 0.5)
    stranger.join()
    rank = threading.Thread(target=come, args=(port.token.data,))
    rank.start()
    port.accept(1, 10.0).close()
    rank.join()
    assert len(refused) == 1
    port.close()
