"""Episodes that a limit cut off continue in the value of their final observation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.learners.two_states import GAMMA, VALUES, TwoStates
from unirl.actors.device import DeviceActor, SimConfig, device_spec
from unirl.core.sample import Batch, Slot
from unirl.core.training_budget import TrainingBudget
from unirl.learners.impala import ImpalaLearnerConfig, ImpalaObjective
from unirl.learners.optimizer import OptimizerConfig
from unirl.learners.ppo import PpoLearnerConfig, PpoObjective
from unirl.learners.truncation import bootstrapped, spread
from unirl.learners.unroll import UnrollLearner
from unirl.policy import Policy, PolicyConfig
from unirl.transports.local import LocalWeightStore

UPDATES = 100


def test_the_value_enters_where_an_episode_was_cut_off_and_nowhere_else() -> None:
    reward = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    truncated = torch.tensor([[False, True], [False, False]])
    value = torch.tensor([[10.0, 20.0], [float("nan"), 40.0]])
    expected = torch.tensor([[1.0, 2.0 + 0.5 * 20.0], [3.0, 4.0]])
    assert torch.equal(bootstrapped(reward, truncated, value, 0.5), expected)


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_the_kth_value_belongs_to_the_kth_cut(num_rows: int) -> None:
    truncated = torch.zeros(6, 2, dtype=torch.bool)
    truncated[[1, 4], 0] = True
    truncated[2, 1] = True
    final = torch.arange(1.0, 1 + 2 * num_rows).view(num_rows, 2)
    found = spread(final, truncated)
    assert found.shape == truncated.shape
    assert found[1, 0] == final[0, 0] and found[2, 1] == final[0, 1]
    assert found[4, 0] == final[min(1, num_rows - 1), 0]


def learned_values(objective: str, **settings: Any) -> Tensor:
    """Values of both states after training in episodes of one step."""
    env = TwoStates(num_envs=64)
    policy = Policy(
        env.spec.observation_space,
        env.spec.action_space,
        PolicyConfig(hidden=(16,), shared_torso=False),
        seed=0,
    )
    weights = LocalWeightStore()
    weights.publish(policy.weights(), 0)
    actor = DeviceActor(env, policy, weights, sim=SimConfig(unroll_length=4), gamma=GAMMA, seed=0)
    spec = device_spec(env.spec, 4, env.counters())
    config_type, objective_type = {
        "ppo": (PpoLearnerConfig, PpoObjective),
        "impala": (ImpalaLearnerConfig, ImpalaObjective),
    }[objective]
    config: Any = config_type(
        optimizer=OptimizerConfig(lr=1e-2, lr_schedule="linear", max_grad_norm=10.0),
        gamma=GAMMA,
        **{
            "normalize_reward": False,
            "entropy_coef": 0.0,
            "epochs": 4,
            "minibatches": 1,
            **settings,
        },
    )
    learner = UnrollLearner(
        policy, objective_type(policy, config), spec, config,
        batch_size=1, budget=TrainingBudget(UPDATES * 256), seed=0,
    )  # fmt: skip
    slot = Slot(0, 0, spec.allocate())
    for _ in range(UPDATES):
        actor.produce(slot)
        learner.step(Batch([slot], learner.version))
        weights.publish(learner.weights(), learner.version)
    obs = torch.eye(2).unsqueeze(0)
    with torch.no_grad():
        value = policy.value(obs)[0]
    norm = getattr(learner.objective, "value_norm", None)
    return value if norm is None else norm.restore(value)


@pytest.mark.parametrize(
    ("objective", "settings"),
    [("ppo", {}), ("ppo", {"normalize_value": True}), ("impala", {})],
    ids=["ppo", "ppo-normalized", "impala"],
)
def test_with_final_observations_values_are_the_analytic_ones(
    objective: str, settings: dict[str, Any]
) -> None:
    assert learned_values(objective, **settings).tolist() == pytest.approx(VALUES, rel=0.02)


def test_with_the_observation_before_they_are_wrong() -> None:
    # Each state believes that it follows itself: 1 / (1 - gamma), and 0.
    values = learned_values("ppo", truncation="previous").tolist()
    assert values == pytest.approx([1 / (1 - GAMMA), 0.0], rel=0.02, abs=0.1)
    assert abs(values[0] - VALUES[0]) > 2.0
