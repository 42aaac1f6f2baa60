"""torch/Cartpole: the physics and the rules of IsaacGymEnvs' cart and pole."""

from __future__ import annotations

import math

import pytest
import torch

from unirl.envs.config import EnvConfig
from unirl.envs.device import POLICY
from unirl.envs.sim.torch.cartpole import (
    CART_MASS,
    GRAVITY,
    POLE_CENTRE,
    POLE_INERTIA,
    POLE_MASS,
    STEP_DT,
    SUBSTEPS,
)
from unirl.envs.sim.torch.env import TorchEnv
from unirl.envs.sim.torch.tasks import make_sim


def make(num_envs: int = 1) -> TorchEnv:
    env = make_sim(EnvConfig(id="torch/Cartpole"), num_envs, torch.device("cpu"))
    env.reset(0)
    return env


def put(env: TorchEnv, *state: float) -> None:
    env.state[:, 0] = torch.tensor(state)


def slow_step(state: list[float], force: float) -> list[float]:
    """One step, by solving the 2 x 2 system of Lagrange's equations of cart and pole."""
    x, x_dot, angle, angle_dot = state
    for _ in range(SUBSTEPS):
        sin, cos = math.sin(angle), math.cos(angle)
        moment = POLE_MASS * POLE_CENTRE
        mass = torch.tensor(
            [
                [CART_MASS + POLE_MASS, -moment * cos],
                [-moment * cos, POLE_INERTIA + POLE_MASS * POLE_CENTRE**2],
            ],
            dtype=torch.float64,
        )
        right = [force - moment * sin * angle_dot**2, moment * GRAVITY * sin]
        x_acc, acc = torch.linalg.solve(mass, torch.tensor(right, dtype=torch.float64)).tolist()
        dt = STEP_DT / SUBSTEPS
        x_dot, angle_dot = x_dot + dt * x_acc, min(max(angle_dot + dt * acc, -8.0), 8.0)
        x, angle = x + dt * x_dot, angle + dt * angle_dot
    return [x, x_dot, angle, angle_dot]


def test_a_step_solves_the_equations_of_motion() -> None:
    env = make()
    random = torch.Generator().manual_seed(0)
    span = torch.tensor([1.0, 3.0, 1.3, 6.0])
    for _ in range(200):
        state = ((torch.rand(4, generator=random) * 2 - 1) * span).tolist()
        action = float(torch.rand((), generator=random) * 3 - 1.5)  # beyond the limits too
        put(env, *state)
        step = env.step(torch.tensor([[action]]))
        assert step.final_obs is not None
        expected = slow_step(state, 400.0 * min(max(action, -1.0), 1.0))
        torch.testing.assert_close(
            step.final_obs[POLICY][0], torch.tensor(expected), atol=2e-5, rtol=2e-5
        )


def test_a_pole_that_hangs_free_keeps_its_energy() -> None:
    env = make()
    total, moment = CART_MASS + POLE_MASS, POLE_MASS * POLE_CENTRE
    inertia = POLE_INERTIA + POLE_MASS * POLE_CENTRE**2

    def energy() -> float:
        _, v, angle, w = env.state[:, 0].tolist()
        kinetic = total * v**2 / 2 - moment * math.cos(angle) * v * w + inertia * w**2 / 2
        return kinetic + moment * GRAVITY * math.cos(angle)

    put(env, 0.0, 0.0, 0.3, 0.0)
    before = energy()
    for _ in range(25):
        step = env.step(torch.zeros(1, 1))
        assert not step.terminated.any()
        assert energy() == pytest.approx(before, rel=0.02)


def test_the_reward_is_that_of_isaac() -> None:
    env = make()
    put(env, 0.1, 0.5, 0.2, -0.4)
    step = env.step(torch.tensor([[0.01]]))
    assert step.final_obs is not None
    _, x_dot, angle, angle_dot = step.final_obs[POLICY][0].tolist()
    expected = 1 - angle**2 - 0.01 * abs(x_dot) - 0.005 * abs(angle_dot)
    assert step.reward[0].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("state", "ends"),
    [
        ((2.9, 0.0, 0.0, 0.0), False),
        ((3.01, 0.0, 0.0, 0.0), True),
        ((-3.01, 0.0, 0.0, 0.0), True),
        ((0.0, 0.0, 1.5, 0.0), False),
        ((0.0, 0.0, 1.6, 0.0), True),
        ((0.0, 0.0, -1.6, 0.0), True),
    ],
)
def test_it_ends_beyond_three_metres_or_when_the_pole_has_fallen(
    state: tuple[float, ...], ends: bool
) -> None:
    env = make(3)
    put(env, *state)
    step = env.step(torch.zeros(3, 1))
    assert step.terminated.tolist() == [ends, False, False]
    assert (step.reward[0].item() == -2.0) == ends
    assert env.episodes.steps.tolist() == [0 if ends else 1, 1, 1]


def test_an_end_on_the_last_step_is_no_time_limit() -> None:
    env = make(2)
    env.episodes.steps.fill_(499)
    put(env, 3.5, 0.0, 0.0, 0.0)
    step = env.step(torch.zeros(2, 1))
    assert step.terminated.tolist() == [True, False]
    assert step.truncated.tolist() == [False, True]


def test_settings_change_the_task() -> None:
    config = EnvConfig(id="torch/Cartpole", kwargs={"effort": 0.0, "reset_distance": 0.01})
    env = make_sim(config, 2, torch.device("cpu"))
    env.reset(0)
    env.state.zero_()
    env.step(torch.ones(2, 1))
    assert not env.state.any()  # no effort, no motion
    put(env, 0.02, 0.0, 0.0, 0.0)
    assert env.step(torch.ones(2, 1)).terminated.tolist() == [True, False]
