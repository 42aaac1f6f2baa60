"""With frozen weights and equal seeds, members on nodes produce what processes produce, bit for
bit. Which member fills which ticket is a race in both runners, so samples are compared member by
member; in strict order none is too old, or a member's sequence would have gaps that differ.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import unirl
from tests.cluster.nodes import Each, ProcessCluster, make_runner
from unirl.core.learner import Learner, LearnerContext, LearnerState
from unirl.core.sample import Batch
from unirl.core.tree import leaves
from unirl.core.weights import Weights
from unirl.metrics.metrics import Metrics
from unirl.runners.plan import Plan
from unirl.runners.processes import ProcessesRunner

NUM_SAMPLES = 12


class Frozen:
    """Learns nothing, and remembers what each member sent."""

    def __init__(self, context: LearnerContext, make: Callable[..., Learner]) -> None:
        self._weights = {name: w.clone() for name, w in make(context).weights().items()}
        self.version = self.num_steps = 0
        self.sent: dict[int, list[str]] = defaultdict(list)

    def step(self, batch: Batch) -> Metrics:
        for slot in batch.slots:
            digest = hashlib.blake2b()
            for path, value in sorted(leaves(slot.data), key=lambda each: each[0]):
                # Rows of final_obs that no episode was cut off in are whatever was there before.
                if path[0] != "final_obs":
                    digest.update(value.numpy().tobytes())
            self.sent[slot.member].append(digest.hexdigest())
        self.version, self.num_steps = self.version + 1, self.num_steps + len(batch.slots)
        return Metrics()

    def weights(self) -> Weights:
        return self._weights

    def state_dict(self) -> LearnerState:
        return LearnerState({}, {})

    def load_state_dict(self, state: LearnerState) -> None:
        pass


def samples(runner: Any) -> list[list[str]]:
    """The first samples of each member; its number says only when it joined."""

    def stop(loop: Any) -> None:
        sent = loop.learner.sent.values()
        if len(sent) == 2 and min(map(len, sent)) >= NUM_SAMPLES:
            loop.stop("enough")

    runner.run([Each(stop)])
    return sorted(found[:NUM_SAMPLES] for found in runner.loop.learner.sent.values())


SETTINGS: dict[str, dict[str, Any]] = {
    "impala": {
        "env.id": "CartPole-v1", "actor.num_actors": 2, "actor.num_envs": 4,
        "actor.unroll_length": 8,
    },
    "appo": {
        "env.id": "CartPole-v1", "sampler.num_workers": 2, "sampler.num_policy_workers": 2,
        "sampler.num_groups": 1, "sampler.num_envs": 4, "sampler.unroll_length": 8,
        "sampler.worker_cpus": 0.0,
    },
    "ondevice": {
        "env.id": "torch/Cartpole", "sim.num_simulators": 2, "sim.num_envs": 8,
        "sim.unroll_length": 8, "sim.device": "cpu",
    },
}  # fmt: skip
"""Two members of each recipe, small."""


def plan_of(recipe: str, **more: Any) -> Plan:
    shared: dict[str, Any] = {
        "queue.batch_size": 2, "queue.max_staleness": 1, "queue.window": 1, "run.seed": 5,
        "policy.hidden": (16,), "runner.kind": "ray",
    }  # fmt: skip
    return unirl.make_plan(recipe, **{**shared, **SETTINGS[recipe], **more})


def freeze(plan: Plan) -> Plan:
    return plan.with_learner(make=partial(Frozen, make=plan.learner.make))


@pytest.mark.parametrize("recipe", SETTINGS)
def test_samples_of_nodes_are_those_of_processes(recipe: str) -> None:
    plan = freeze(plan_of(recipe))
    here = samples(ProcessesRunner(plan))
    there = samples(make_runner(plan, ProcessCluster(num_nodes=2, cpus=1.0)))
    assert here == there
    assert here[0] != here[1]
