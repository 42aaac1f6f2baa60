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
from unirl.storage.checkpoint import load_checkpoint

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
    "multi-binary": MultiBinary([2, 2]),
    "tuple": Tuple((Discrete(2, start=4), Dict({"a": Box(-1, 1, (1,), np.float64)}))),
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


MATCH: dict[str, Any] = {
    "env.id": "unirl-test/Match-v0",
    "env.import_module": "tests.space_envs",
    "actor.num_envs": 16,
    "actor.unroll_length": 7,
    "policy.hidden": (64,),
    "policy.feature_size": 64,
    "policy.initial_std": 0.3,
    "learner.gamma": 0.0,
    "learner.entropy_coef": 0.003,
    "learner.optimizer.lr": 6e-3,
    "run.total_steps": 300_000,
}
MISSIONS = ["mission", "given/mission"]


@pytest.mark.parametrize(
    ("settings", "target"),
    [
        ({"env.kwargs": {"action": "hybrid", "mask": "info"}, "env.last_action": True}, 4.2),
        ({"env.kwargs": {"action": "tuple"}, "policy.core": "gru", "policy.core_size": 32}, 4.5),
        ({"env.kwargs": {"action": "bits"}}, 5.2),
        ({"env.kwargs": {"action": "choices", "mask": "obs"}}, 5.2),
        ({"env.id": "unirl-test/Words-v0", "env.drop_observations": MISSIONS}, 4.0),
    ],
    ids=["hybrid", "tuple", "bits", "mask", "text"],
)
def test_what_needs_each_part_of_an_action_is_learned_in_one_process(
    settings: dict[str, Any], target: float, tmp_path: Path
) -> None:
    plan = unirl.make_plan("impala", **{**MATCH, **settings, "run.target_return": target})
    run = tmp_path / "run"
    assert unirl.run(plan, run, console=False).reason == "target_return"
    evaluator = plan.learners[0].make_evaluator(seed=3)
    checkpoint = load_checkpoint(run / "checkpoints" / "latest")
    for deterministic in (True, False):  # the environment fails at an action that is not allowed
        played = evaluator.evaluate(checkpoint.model, 8, deterministic=deterministic)
        assert sum(played.returns) / 8 > target - 1.5
    if "Words" not in plan.config.env.id:
        assert len(list(evaluator.frames(checkpoint.model))) == 7


def test_policies_of_several_parts_play_against_each_other_by_turns(tmp_path: Path) -> None:
    plan = unirl.make_plan(
        "appo",
        **{
            "env.id": "pettingzoo/tests.space_envs:Turns",
            "sampler.agent_policies": (0, 1),
            "sampler.num_workers": 1,
            "sampler.num_groups": 1,
            "sampler.num_envs": 4,
            "sampler.unroll_length": 6,
            "queue.batch_size": 1,
            "learner.minibatches": 1,
            "runner.kind": "inline",
            "run.total_steps": 60,
        },
    )
    assert plan.config.env.action_mask == "action_mask"
    assert unirl.run(plan, tmp_path / "run", console=False).reason == "total_steps"


def test_masked_actions_of_several_parts_train_in_processes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"env.kwargs": {"mask": "info"}, "env.last_action": True}
    for recipe, shape in (
        ("impala", {"actor.num_envs": 4, "actor.unroll_length": 6}),
        (
            "appo",
            {
                "sampler.num_workers": 1,
                "sampler.num_envs": 4,
                "sampler.unroll_length": 6,
                "learner.minibatches": 2,
            },
        ),
    ):
        plan = unirl.make_plan(
            recipe,
            **shape,
            **settings,
            **{
                "env.id": MATCH["env.id"],
                "env.import_module": MATCH["env.import_module"],
                "runner.kind": "processes",
                "run.total_steps": 300,
            },
        )
        assert unirl.run(plan, tmp_path / recipe, console=False).reason == "total_steps"
