"""Every supported kind of space goes through a whole training: probe, slots, policy, updates."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

import unirl

OBS: dict[str, Space[Any]] = {
    "box": Box(-1, 1, (3,), np.float64),
    "scalar box": Box(-1, 1, (), np.float32),
    "discrete from 5": Discrete(3, start=5),
    "multi-discrete": MultiDiscrete([3, 4]),
    "multi-binary": MultiBinary(4),
    "image": Box(0, 255, (3, 40, 40), np.uint8),
    "dict": Dict({"where": Box(-1, 1, (2,), np.float32), "what": Discrete(4)}),
    "tuple": Tuple((Box(-1, 1, (2,), np.float32), MultiDiscrete([2, 2]))),
    "nested": Dict({"a": Tuple((Discrete(2), Box(0, 1, (2, 2), np.float32)))}),
}
WITH_FLOATS = ("box", "scalar box", "dict", "tuple", "nested")
ACTION: dict[str, Space[Any]] = {
    "discrete from -1": Discrete(3, start=-1),
    "multi-discrete": MultiDiscrete([3, 4, 2]),
    "box": Box(-2, 2, (3,), np.float32),
    "matrix box": Box(-2, 2, (2, 2), np.float32),
}


class Sampler(gymnasium.Env[Any, Any]):
    """Observations drawn from a space; takes only actions of its other space."""

    def __init__(self, obs: str, action: str) -> None:
        self.observation_space, self.action_space = OBS[obs], ACTION[action]
        self._step = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self._step += 1
        return self.observation_space.sample(), 1.0, self._step % 5 == 0, False, {}


@pytest.fixture
def sampler() -> Iterator[str]:
    gymnasium.register("unirl-test/Sampler-v0", Sampler)
    yield "unirl-test/Sampler-v0"
    del gymnasium.registry["unirl-test/Sampler-v0"]


@pytest.mark.parametrize(
    ("obs", "action"),
    [*((obs, "discrete from -1") for obs in OBS), *(("dict", action) for action in ACTION)],
    ids=str,
)
def test_a_training_takes_legal_actions_and_its_losses_are_finite(
    obs: str, action: str, sampler: str, tmp_path: Path
) -> None:
    plan = unirl.make_plan(
        "impala",
        **{
            "env.id": sampler,
            "env.kwargs": {"obs": obs, "action": action},
            "actor.num_envs": 2,
            "actor.unroll_length": 7,
            "policy.hidden": (8,),
            "policy.feature_size": 8,
            "policy.normalize_obs": obs in WITH_FLOATS,
            "queue.max_staleness": 0,
            "run.total_steps": 40,
            "run.log_seconds": 0.0,
        },
    )
    result = unirl.run(plan, tmp_path / "run", console=False)
    assert result.reason == "total_steps"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    losses = [v for row in rows for k, v in row.items() if k.startswith("losses/")]
    assert losses and all(math.isfinite(loss) for loss in losses)
