"""Which member runs on which node."""

from __future__ import annotations

import pytest

import unirl
from unirl.core.pool import Resources
from unirl.errors import UniRLError
from unirl.runners.cluster.placement import Ask, Node, place, place_together, total
from unirl.runners.cluster.shares import asks_of, most_wanted


def asks(number: int, **resources: object) -> list[Ask]:
    wanted = Resources(**resources)  # type: ignore[arg-type]
    return [Ask(0, "actor", (i,), wanted) for i in range(number)]


def test_members_are_spread_and_what_they_take_is_taken() -> None:
    nodes = [Node("a", "a", 4.0), Node("b", "b", 2.0)]
    placed = place(asks(4), nodes)
    assert {node: len(found) for node, found in placed.items()} == {"a": 2, "b": 2}
    assert [node.cpus for node in nodes] == [2.0, 0.0]
    assert total(placed["a"]).cpus == 2.0
    assert [len(found) for found in place(asks(2), nodes).values()] == [2]


def test_gpus_memory_and_labels_decide_and_the_greedy_come_first() -> None:
    nodes = [Node("gpu", "gpu", 2.0, 1.0, 8.0), Node("spot", "spot", 8.0, labels={"spot": "yes"})]
    engine = Ask(1, "engine", (0,), Resources(cpus=2.0, gpus=1.0, memory_gib=4.0))
    spot = Ask(2, "actor", (0,), Resources(labels={"spot": "yes"}))
    placed = place([*asks(1), spot, engine], nodes)
    assert [ask.name for ask in placed["gpu"]] == ["engine"] and len(placed["spot"]) == 2


def test_what_belongs_together_goes_to_one_node_and_nothing_to_one_that_is_drained() -> None:
    drained, small = Node("gone", "gone", 8.0, is_drained=True), Node("small", "small", 2.0)
    nodes = [drained, small, Node("large", "large", 4.0)]
    assert [*place_together(asks(3), nodes)] == ["large"] and place_together(asks(5), nodes) == {}
    assert set(place(asks(5), nodes)) == {"small", "large"}
    with pytest.raises(UniRLError, match=r"gone has 8 CPUs, 0\.0 GiB, and is drained"):
        place(asks(2), nodes)


def test_environment_workers_are_counted_beside_the_policy_workers_that_they_work_for() -> None:
    sizes = {"sampler.num_workers": 5, "sampler.num_policy_workers": 2, "sampler.worker_cpus": 0.5}
    plan = unirl.make_plan("appo", **{**sizes, "env.id": "CartPole-v1", "queue.batch_size": 10})
    assert [(ask.numbers, ask.resources.cpus) for ask in asks_of(plan)] == [
        ((0,), 1 + 3 * 0.5), ((1,), 1 + 2 * 0.5)
    ]  # fmt: skip
    assert most_wanted(plan).cpus == 2 + 5 * 0.5


def test_members_ask_for_what_the_user_says_and_engines_of_one_gpu_are_beside_the_learner() -> None:
    given = {
        "model.path": "tiny", "task.name": "digits", "mode": "colocated", "runner.kind": "ray",
        "ray.member_gpus": 1.0, "ray.member_cpus": 2.0, "ray.labels": {"market-type": "spot"},
    }  # fmt: skip
    (ask,) = asks_of(unirl.make_plan("grpo", **given))
    wanted = ask.resources
    assert (wanted.gpus, wanted.cpus, wanted.labels) == (1.0, 2.0, {"market-type": "spot"})
    assert wanted.beside_learner
    spot = {"market-type": "spot"}
    nodes = [
        Node("far", "far", 8.0, 2.0, labels=spot),
        Node("plain", "plain", 8.0, 2.0, is_learners=True),
    ]
    with pytest.raises(UniRLError, match="market-type=spot, the learner's machine"):
        place([ask], nodes)
    nodes.append(Node("own", "own", 2.0, 1.0, labels=spot, is_learners=True))
    assert [*place([ask], nodes)] == ["own"]
    with pytest.raises(UniRLError, match=r"ray\.member_gpus"):
        unirl.make_plan("grpo", **{**given, "ray.member_gpus": -1.0})


def test_what_finds_no_place_is_said_beside_what_is_left() -> None:
    nodes = [Node("a", "10.0.0.7", 3.0, labels={"spot": "no"})]
    with pytest.raises(UniRLError) as error:
        place(asks(2, cpus=2.0), nodes)
    what, rule, remedy = error.value.parts
    assert what == "1 of 2 members find no place: actor 1 asks for 2 CPUs"
    assert "10.0.0.7 has 1 CPUs" in rule and "spot=no" in rule and "fewer members" in remedy
