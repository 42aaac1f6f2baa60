"""A plan in which everything only waits: actors for an unroll, the learner for an update. What a
simulated cluster is compared with.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import unirl
from unirl.bench.cluster_shape import ClusterShape
from unirl.core.learner import LearnerState

SPEC = unirl.SampleSpec({"nothing": unirl.Field((1,), torch.float32, batch_axis=0)})


class WaitingActor:
    """An unroll takes as long as in the simulation: gamma distributed."""

    def __init__(self, context: unirl.ActorContext, shape: ClusterShape) -> None:
        self._weights, self._version, self._shape = context.weights, -1, shape
        self._random = np.random.default_rng(context.seed)

    def load_weights(self, weights: Any) -> None:
        pass

    def produce(self, slot: unirl.Slot) -> None:
        self._version = self._weights.pull(into=self, have=self._version)
        slot.first_version = slot.last_version = self._version
        order = 1 / self._shape.unroll_spread**2
        time.sleep(self._random.gamma(order, self._shape.unroll_seconds / order))

    def close(self) -> None:
        pass


class WaitingLearner:
    """An update takes as long as in the simulation."""

    def __init__(self, context: unirl.LearnerContext, shape: ClusterShape) -> None:
        self.version = self.num_steps = 0
        self._shape = shape
        self._times: list[float] = []

    def step(self, batch: unirl.Batch) -> unirl.Metrics:
        slots = len(batch.slots)
        time.sleep(self._shape.learner_seconds + self._shape.learner_ms_per_slot / 1e3 * slots)
        self.version += 1
        self.num_steps += slots
        self._times.append(time.monotonic())
        metrics = unirl.Metrics()
        half = len(self._times) // 2
        if half:
            rate = slots * half / (self._times[-1] - self._times[-1 - half])
            metrics.last("charts/slots_per_second", rate)
        return metrics

    def weights(self) -> dict[str, torch.Tensor]:
        return {"nothing": torch.zeros(1)}

    def state_dict(self) -> LearnerState:
        return LearnerState({"nothing": torch.zeros(1)}, {}, {})

    def load_state_dict(self, state: LearnerState) -> None:
        pass


def slots_per_second(shape: ClusterShape, run_dir: Path) -> float:
    """Of a real run in the processes runner, in the second half of its updates."""
    plan = unirl.Plan(
        recipe="waiting",
        pools=[unirl.Pool(partial(WaitingActor, shape=shape), count=shape.members)],
        learners=[unirl.LearnerPlan(partial(WaitingLearner, shape=shape), SPEC, shape.queue)],
        runner=unirl.RunnerConfig(kind="processes"),
        run=unirl.RunConfig(total_steps=shape.updates * shape.queue.batch_size),
    )
    return unirl.run(plan, run_dir, console=False).scalars["charts/slots_per_second"]
