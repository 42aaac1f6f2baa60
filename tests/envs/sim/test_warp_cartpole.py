"""What every task on MuJoCo Warp shares, shown on its smallest model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from unirl.envs.config import EnvConfig
from unirl.envs.device import POLICY
from unirl.envs.sim.warp.tasks import known_ids, make_sim
from unirl.errors import UniRLError

CPU = torch.device("cpu")
NUM_ENVS = 32


@pytest.fixture(scope="module")
def warp() -> Any:
    pytest.importorskip("mujoco_warp", reason="needs the extra warp")
    return pytest.importorskip("warp", reason="needs the extra warp")


@pytest.fixture(scope="module")
def env(warp: Any) -> Any:
    return make_sim(EnvConfig(id="warp/Cartpole"), NUM_ENVS, CPU)


def actions(steps: int, num_envs: int = NUM_ENVS, size: int = 1) -> torch.Tensor:
    return 2 * torch.rand(steps, num_envs, size, generator=torch.Generator().manual_seed(1)) - 1


def test_ids_are_known_without_warp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "warp", None)
    assert "warp/Ant-isaac" in known_ids()


@pytest.mark.parametrize("package", ["warp", "mujoco_warp"])
def test_a_missing_package_is_named_with_its_remedy(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UniRLError, match=r"pip install 'unirl\[warp\]'"):
        make_sim(EnvConfig(id="warp/Cartpole"), 1, CPU)


def test_an_unknown_task_is_answered_with_a_similar_one() -> None:
    with pytest.raises(UniRLError, match='Did you mean "warp/Ant-isaac"'):
        make_sim(EnvConfig(id="warp/Ant-isac"), 1, CPU)


@pytest.mark.parametrize(
    "kwargs", [{"njmx": 8}, {"njmax": 0}, {"nconmax": "many"}, {"record": 1}, {"njmax": True}]
)
def test_a_bad_setting_is_refused_before_anything_is_compiled(kwargs: dict[str, Any]) -> None:
    with pytest.raises(UniRLError, match=next(iter(kwargs))):
        make_sim(EnvConfig(id="warp/Cartpole", kwargs=kwargs), 1, CPU)


def test_actions_of_another_shape_are_refused(env: Any) -> None:
    env.reset(0)
    with pytest.raises(UniRLError, match=r"\[32, 1\]"):
        env.step(torch.zeros(NUM_ENVS))


def test_recording_and_single_launches_agree_bit_for_bit(env: Any) -> None:
    plain = make_sim(EnvConfig(id="warp/Cartpole", kwargs={"record": False}), NUM_ENVS, CPU)
    assert torch.equal(env.reset(3)[POLICY], plain.reset(3)[POLICY])
    num_dones = 0
    for action in actions(120):
        ours, theirs = env.step(3 * action), plain.step(3 * action)  # clipped: full force
        assert torch.equal(ours.obs[POLICY], theirs.obs[POLICY])
        assert torch.equal(ours.final_obs[POLICY], theirs.final_obs[POLICY])
        assert torch.equal(ours.reward, theirs.reward)
        assert torch.equal(ours.terminated, theirs.terminated)
        num_dones += int(ours.terminated.sum())
    assert num_dones > 0, "resets were to be compared, too"


def test_the_same_seed_gives_the_same_trajectories(env: Any) -> None:
    def run(seed: int) -> list[torch.Tensor]:
        env.reset(seed, random_phases=True)
        rows = []
        for action in actions(50):
            step = env.step(action)
            rows.append(torch.cat([step.obs[POLICY], step.reward[:, None]], dim=1))
        return rows

    first, again, other = run(5), run(5), run(6)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_motion_is_that_of_c_mujoco(env: Any) -> None:
    mujoco = pytest.importorskip("mujoco")
    import unirl.envs.sim.warp

    path = Path(unirl.envs.sim.warp.__file__).parent / "assets" / "cartpole.xml"
    model = mujoco.MjModel.from_xml_path(str(path))
    data = mujoco.MjData(model)
    first = env.reset(0)[POLICY][0]
    data.qpos[:], data.qvel[:] = first[0::2].numpy(), first[1::2].numpy()
    for action in 0.05 * actions(30):
        step = env.step(action)
        data.ctrl[:] = action[0].numpy()
        mujoco.mj_step(model, data, nstep=2)
        expected = torch.tensor(
            [data.qpos[0], data.qvel[0], data.qpos[1], data.qvel[1]], dtype=torch.float32
        )
        torch.testing.assert_close(step.final_obs[POLICY][0], expected, rtol=1e-4, atol=1e-5)


def test_reward_and_end_follow_the_formula(env: Any) -> None:
    env.reset(0)
    qpos = env.worlds.qpos
    seen_far, seen_steep = False, False
    for index, action in enumerate(actions(100)):
        if index % 10 == 0:
            qpos[0, 0], qpos[1, 1] = 3.2, 1.7
        # The recorded step resets the state in place, so the true one is read from final_obs; no
        # velocity here comes near the clipping at 5 but those of worlds that are left out.
        step = env.step(0.02 * action)
        x, x_dot, angle, angle_dot = step.final_obs[POLICY].unbind(1)
        over = (x.abs() > 3) | (angle.abs() > torch.pi / 2)
        alive = 1 - angle**2 - 0.01 * x_dot.abs() - 0.005 * angle_dot.abs()
        inside = step.final_obs[POLICY].abs().amax(1) < 5
        expected = torch.where(over, torch.full_like(alive, -2.0), alive)
        torch.testing.assert_close(step.reward[inside | over], expected[inside | over])
        assert torch.equal(step.terminated, over)
        seen_far |= bool(step.terminated[0])
        seen_steep |= bool(step.terminated[1])
    assert seen_far
    assert seen_steep


def test_only_worlds_that_are_done_are_reset(env: Any) -> None:
    env.reset(0)
    env.worlds.qpos[3, 0], env.worlds.qpos[17, 0] = 3.5, -3.5
    step = env.step(torch.zeros(NUM_ENVS, 1))
    done = torch.zeros(NUM_ENVS, dtype=torch.bool)
    done[[3, 17]] = True
    assert torch.equal(step.terminated, done)
    obs, final_obs = step.obs[POLICY], step.final_obs[POLICY]
    assert torch.equal(obs[~done], final_obs[~done])
    assert (final_obs[done][:, 0].abs() > 3).all()
    assert (obs[done][:, [0, 2]].abs() <= 0.1).all()
    assert (obs[done][:, [1, 3]].abs() <= 0.25).all()
    assert torch.equal(env.worlds.qpos[:, 0], obs[:, 0])
    assert (env.worlds.episode_steps[done] == 0).all()
    assert (env.worlds.episode_steps[~done] == 1).all()


def test_a_state_that_is_not_finite_is_reset_and_counted(env: Any) -> None:
    env.reset(0)
    before = int(env.counters()["nan_states"])
    env.worlds.qpos[2, 0] = float("nan")
    env.worlds.qvel[9, 1] = float("inf")
    env.worlds.qvel[11, 0] = 1e12
    step = env.step(torch.zeros(NUM_ENVS, 1))
    bad = torch.zeros(NUM_ENVS, dtype=torch.bool)
    bad[[2, 9, 11]] = True
    assert torch.equal(step.valid, ~bad)
    assert not step.terminated[bad].any()
    assert not step.truncated[bad].any()
    assert (step.reward[bad] == 0).all()
    assert torch.isfinite(step.final_obs[POLICY]).all()
    assert torch.isfinite(step.obs[POLICY]).all()
    assert int(env.counters()["nan_states"]) == before + 3
    assert env.step(torch.zeros(NUM_ENVS, 1)).valid.all()


def test_an_action_that_is_not_a_number_costs_one_episode(env: Any) -> None:
    env.reset(0)
    action = torch.zeros(NUM_ENVS, 1)
    action[4] = float("nan")
    assert env.step(action).valid.tolist() == [i != 4 for i in range(NUM_ENVS)]
    assert env.step(torch.zeros(NUM_ENVS, 1)).valid.all()


def test_time_limits_truncate_and_do_not_terminate(warp: Any) -> None:
    env = make_sim(EnvConfig(id="warp/Cartpole", max_episode_steps=7), 4, CPU)
    assert env.spec.max_episode_length == 7
    env.reset(0)
    for index in range(1, 15):
        step = env.step(torch.zeros(4, 1))
        assert not step.terminated.any()
        assert step.truncated.tolist() == [index % 7 == 0] * 4


def test_random_phases_spread_the_time_limits(env: Any) -> None:
    env.reset(0, random_phases=True)
    steps = env.worlds.episode_steps
    assert int(steps.min()) >= 0
    assert int(steps.max()) < env.spec.max_episode_length
    assert len(steps.unique()) > NUM_ENVS // 2


def test_a_step_waits_for_nothing_prints_nothing_and_keeps_its_pointers(
    env: Any,
    no_host_sync: Callable[[], AbstractContextManager[Any]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    obs = env.reset(0)[POLICY]
    action = torch.zeros(NUM_ENVS, 1)
    capfd.readouterr()
    with no_host_sync():
        step = env.step(action)
    assert step.obs[POLICY].data_ptr() == obs.data_ptr()
    assert capfd.readouterr() == ("", "")


def test_closing_twice_is_fine(warp: Any) -> None:
    env = make_sim(EnvConfig(id="warp/Cartpole"), 1, CPU)
    env.close()
    env.close()
