"""Claims that hold for every task in pure torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from unirl.envs.config import EnvConfig
from unirl.envs.device import CRITIC, POLICY, DeviceEnv
from unirl.envs.sim.make import make_device_env
from unirl.envs.sim.torch.tasks import known_ids
from unirl.errors import UniRLError

TASKS = known_ids()
CPU = torch.device("cpu")
GUARD = Callable[[], AbstractContextManager[Any]]

# Group and columns of an observation, and how far from 0 they lie at the start of an episode.
FIRST_SPANS = {
    "torch/Cartpole": (POLICY, (0.1, 0.25, 0.1, 0.25)),
    "torch/CartPole-v1": (POLICY, (0.05,) * 4),
    "torch/Pendulum": (POLICY, (1.0, 1.0, 1.0)),
    "torch/PointMass": (CRITIC, (1.0, 1.0, 0.1, 0.1, 1.0, 1.0)),
}


def make(task: str, num_envs: int = 64, device: torch.device = CPU, **fields: Any) -> Any:
    return make_device_env(EnvConfig(id=task, **fields), num_envs, device)


def actions_of(env: DeviceEnv, generator: torch.Generator) -> Tensor:
    space, num_envs, device = env.spec.action_space, env.spec.num_envs, env.spec.device
    if isinstance(space, spaces.Discrete):
        return torch.randint(0, int(space.n), (num_envs,), generator=generator, device=device)
    shape = (num_envs, *(space.shape or ()))
    return torch.rand(shape, generator=generator, device=device) * 4 - 2


def seeded(seed: int, device: torch.device = CPU) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def rollout(env: DeviceEnv, seed: int, steps: int) -> Tensor:
    """Everything that `steps` steps gave, side by side."""
    rows = [*env.reset(seed, random_phases=True).values()]
    generator = seeded(7)
    for _ in range(steps):
        step = env.step(actions_of(env, generator))
        assert step.final_obs is not None
        rows += [*step.obs.values(), *step.final_obs.values()]
        flags = (step.reward, step.terminated, step.truncated, step.valid)
        rows.append(torch.stack([flag.float() for flag in flags], 1))
        rows = [torch.cat(rows, 1)]
    return rows[0]


def tensors_of(env: DeviceEnv) -> list[Tensor]:
    """Every tensor that a step gives."""
    step = env.step(actions_of(env, seeded(0)))
    assert step.final_obs is not None
    return [
        *step.obs.values(),
        *step.final_obs.values(),
        step.reward,
        step.terminated,
        step.truncated,
        step.valid,
    ]


@pytest.mark.parametrize("task", TASKS)
def test_a_step_has_the_shapes_and_types_of_the_interface(task: str) -> None:
    env = make(task, 5)
    first = env.reset(0)
    step = env.step(actions_of(env, seeded(0)))
    for groups in (first, step.obs, step.final_obs):
        assert {name: tuple(group.shape) for name, group in groups.items()} == {
            name: (5, size) for name, size in env.spec.observation.items()
        }
        assert all(group.dtype == torch.float32 for group in groups.values())
    assert (step.reward.shape, step.reward.dtype) == ((5,), torch.float32)
    for flag in (step.terminated, step.truncated, step.valid):
        assert (flag.shape, flag.dtype) == ((5,), torch.bool)


@pytest.mark.parametrize("task", TASKS)
def test_a_step_never_waits_for_the_device(task: str, no_host_sync: GUARD) -> None:
    env = make(task, max_episode_steps=7)
    env.reset(0)
    actions = [actions_of(env, seeded(i)) for i in range(20)]
    with no_host_sync():
        for action in actions:
            env.step(action)
    assert env.counters()["nan_states"] == 0


def test_the_guard_notices_what_waits(no_host_sync: GUARD) -> None:
    numbers = torch.arange(3)
    waits: list[Callable[[], Any]] = [
        lambda: numbers[1].item(),
        lambda: bool(numbers[0]),
        numbers.nonzero,
        lambda: numbers[numbers > 1],
        lambda: numbers.to("meta"),
    ]
    for wait in waits:
        with pytest.raises(AssertionError), no_host_sync():
            wait()


@pytest.mark.parametrize("task", TASKS)
def test_tensors_stay_where_they_are(task: str) -> None:
    env = make(task, max_episode_steps=7)
    first = env.reset(0)
    before = [tensor.data_ptr() for tensor in tensors_of(env)]
    for _ in range(20):
        assert [tensor.data_ptr() for tensor in tensors_of(env)] == before
    again = env.reset(1)
    assert all(first[name].data_ptr() == again[name].data_ptr() for name in first)
    assert [tensor.data_ptr() for tensor in tensors_of(env)] == before


@pytest.mark.parametrize("task", TASKS)
def test_the_same_seed_gives_the_same_trajectory(task: str) -> None:
    env = make(task)
    once = rollout(env, 3, 120)
    assert torch.equal(once, rollout(env, 3, 120))
    assert torch.equal(once, rollout(make(task), 3, 120))
    assert not torch.equal(once, rollout(env, 4, 120))


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_independent_of_each_other(task: str) -> None:
    env = make(task, 4096)
    obs = torch.cat([*env.reset(0).values()], 1)
    assert len(torch.unique(obs, dim=0)) > 4090


@pytest.mark.parametrize("task", TASKS)
def test_random_phases_spread_the_time_limits(task: str) -> None:
    env = make(task, 1500, max_episode_steps=6)
    truncated = torch.zeros(6)
    env.reset(0, random_phases=True)
    for i in range(6):  # too short for any rule but the time limit
        step = env.step(torch.zeros_like(actions_of(env, seeded(0))))
        assert not step.terminated.any()
        truncated[i] = step.truncated.sum()
    assert truncated.sum() == 1500
    assert (truncated - 250).abs().max() < 75  # five standard deviations


@pytest.mark.parametrize("task", TASKS)
def test_without_phases_the_time_limit_falls_on_its_step(task: str) -> None:
    env = make(task, 3, max_episode_steps=6)
    env.reset(0)
    for i in range(1, 25):
        step = env.step(torch.zeros_like(actions_of(env, seeded(0))))
        assert step.truncated.tolist() == [i % 6 == 0] * 3
        assert step.valid.all()


@pytest.mark.parametrize("task", TASKS)
def test_first_observations_lie_in_the_reset_range(task: str) -> None:
    env = make(task, 500, max_episode_steps=9)
    group, spans = FIRST_SPANS[task]
    span = torch.tensor(spans)
    first = [env.reset(0)[group].clone()]
    generator = seeded(1)
    for _ in range(40):
        step = env.step(actions_of(env, generator))
        first.append(step.obs[group][step.terminated | step.truncated])
    seen = torch.cat(first)
    assert len(seen) > 2000
    assert (seen.abs() <= span).all()
    assert (seen.abs().amax(0) > 0.98 * span).all()  # the whole range is used
    assert (seen.mean(0).abs() < 0.1 * span).all()


@pytest.mark.parametrize("task", TASKS)
def test_final_observations_are_those_the_episode_ended_with(task: str) -> None:
    """A twin with the same draws and no end at that step shows where the episode would have gone
    on."""
    short, long = make(task, max_episode_steps=6), make(task, max_episode_steps=100)
    short.reset(5)
    long.reset(5)
    generator = seeded(2)
    for i in range(6):
        action = actions_of(short, generator) * (0 if task == "torch/CartPole-v1" else 1)
        cut, going = short.step(action), long.step(action)
        for name in short.spec.observation:
            assert torch.equal(cut.final_obs[name], going.obs[name])
            assert torch.equal(going.final_obs[name], going.obs[name])
            changed = (cut.final_obs[name] != cut.obs[name]).any(1)
            assert changed.all() if i == 5 else not changed.any()
    assert cut.truncated.all()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e20])
def test_a_lost_state_is_reset_counted_and_not_valid(task: str, bad: float) -> None:
    env = make(task, 6)
    env.reset(0)
    for row in range(len(env.state)):
        env.reset(row)
        env.state[row, 2] = bad
        step = env.step(torch.zeros_like(actions_of(env, seeded(0))))
        # A speed limit may turn an infinite velocity into the largest one: no harm done.
        if step.valid.all():
            assert bad == bad and torch.isfinite(env.state).all()
            continue
        assert step.valid.tolist() == [True, True, False, True, True, True]
        assert not (step.terminated[2] or step.truncated[2])
        assert step.reward[2] == 0
        assert all(torch.isfinite(group).all() for group in step.final_obs.values())
        group, spans = FIRST_SPANS[task]
        assert (step.obs[group][2].abs() <= torch.tensor(spans)).all()
        assert env.episodes.steps.tolist() == [1, 1, 0, 1, 1, 1]
    assert env.counters()["nan_states"] > 0
    counted = env.counters()["nan_states"].item()
    assert env.step(torch.zeros_like(actions_of(env, seeded(0)))).valid.all()
    assert env.counters()["nan_states"] == counted


@pytest.mark.parametrize("task", [task for task in TASKS if task != "torch/CartPole-v1"])
def test_an_action_that_is_no_number_loses_its_row_only(task: str) -> None:
    env = make(task, 4)
    env.reset(0)
    action = torch.zeros_like(actions_of(env, seeded(0)))
    action[1] = float("nan")
    step = env.step(action)
    assert step.valid.tolist() == [True, False, True, True]
    assert env.counters()["nan_states"] == 1
    assert all(torch.isfinite(group).all() for group in step.obs.values())


@pytest.mark.parametrize("task", TASKS)
def test_settings_are_checked(task: str) -> None:
    with pytest.raises(UniRLError, match='has no setting "gravitas"'):
        make(task, kwargs={"gravitas": 1.0})


def test_a_setting_must_be_a_number() -> None:
    with pytest.raises(UniRLError, match="it must be a number"):
        make("torch/Cartpole", kwargs={"effort": "much"})
    assert make("torch/Pendulum", kwargs={"gravity": 9}).spec.id == "torch/Pendulum"


@pytest.mark.gpu
@pytest.mark.parametrize("task", TASKS)
def test_a_graph_of_the_step_on_cuda_equals_the_step_itself(task: str) -> None:
    device = torch.device("cuda")
    env = make(task, 256, device, max_episode_steps=9)
    plain = make(task, 256, device, max_episode_steps=9)
    action = actions_of(env, seeded(0, device))
    for each in (env, plain):
        each.reset(0)
        each.step(action)  # warm up
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for each in (env, plain):
            each.step(action)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    for generator in env.generators():
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        recorded = env.step(action)
    env.reset(1, random_phases=True)
    plain.reset(1, random_phases=True)
    for i in range(30):
        action.copy_(actions_of(env, seeded(i, device)))
        graph.replay()
        step = plain.step(action)
        assert torch.equal(recorded.reward, step.reward)
        assert torch.equal(recorded.truncated, step.truncated)
        assert torch.equal(recorded.obs[POLICY], step.obs[POLICY])
