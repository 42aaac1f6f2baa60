"""What a run knows of its nodes, and what follows for those where agents were lost."""

from __future__ import annotations

from unirl.core.pool import Resources
from unirl.runners.cluster.node_history import NodeHistory
from unirl.runners.cluster.placement import Ask, Node, place_again


def asks(number: int) -> list[Ask]:
    return [Ask(0, "actor", (i,), Resources(cpus=1.0)) for i in range(number)]


def test_an_agent_has_less_time_to_connect_only_where_another_was_lost_and_the_run_knows_more() -> (
    None
):
    history = NodeHistory(limit=3, window_seconds=60.0, wait_seconds=30.0)
    history.lose("a")
    assert [history.patience(node) for node in "ab"] == [30.0, 30.0]
    for seconds in (1.0, 4.0, 2.0):
        history.connect(seconds)
    assert [history.patience(node) for node in "ab"] == [12.0, 30.0]
    history.connect(25.0)
    assert history.patience("a") == 30.0


def test_an_agent_whose_place_another_node_takes_does_not_count_as_a_failure_of_its_node() -> None:
    history = NodeHistory(limit=2, window_seconds=60.0, wait_seconds=30.0)
    assert not any(history.lose("a", is_failure=False) for _ in range(5))
    assert history.has_failed("a") and not history.is_left_out("a")
    assert [history.lose("a"), history.lose("a")] == [False, True]
    assert history.is_left_out("a") and not history.is_left_out("b")


def test_what_was_lost_goes_to_nodes_that_did_not_fail_in_parts_if_need_be() -> None:
    nodes = [Node("full", "full", 0.0), Node("x", "x", 1.0), Node("failed", "failed", 9.0)]
    nodes.append(Node("y", "y", 1.0))
    placed = place_again(asks(2), nodes, lambda node: node == "failed")
    assert {node: len(found) for node, found in placed.items()} == {"x": 1, "y": 1}
    placed = place_again(asks(3), nodes, lambda node: node == "failed")
    assert {node: len(found) for node, found in placed.items()} == {"failed": 3}


def test_no_more_is_left_of_a_node_than_the_runs_own_agents_leave_whatever_its_cluster_says() -> (
    None
):
    node = Node("a", "a", 4.0, 1.0, 8.0, total=Resources(4.0, 1.0, 8.0))
    node.reserve([Resources(1.0, memory_gib=2.0), Resources(2.0, gpus=1.0)])
    assert (node.cpus, node.gpus, node.memory_gib) == (1.0, 0.0, 6.0)
    busy = Node("b", "b", 0.5, total=Resources(4.0))
    busy.reserve([Resources(1.0)])
    assert busy.cpus == 0.5  # others use the rest
