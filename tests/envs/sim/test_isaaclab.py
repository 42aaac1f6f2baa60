"""Isaac Lab's tasks as simulators on a device: final observations are those before the reset, time
limits are no failures, and what a step returned does not change under its reader."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

import gymnasium
import pytest
import torch

from tests.envs.sim import fake_isaaclab
from tests.envs.sim.fake_isaaclab import LIMIT, NEVER, fails_at
from unirl.envs.config import EnvConfig
from unirl.envs.device import CRITIC, POLICY, SimStep
from unirl.envs.sim.adapters import isaaclab
from unirl.envs.sim.adapters.isaaclab import IsaacLabSim
from unirl.envs.sim.make import make_device_env
from unirl.errors import UniRLError

CPU = torch.device("cpu")


class Row(NamedTuple):
    """What a row must be: where its observation and its final one stand, and how the step ended."""

    now: tuple[int, int]
    final: tuple[int, int]
    terminated: bool
    truncated: bool


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> fake_isaaclab.Started:
    return fake_isaaclab.install(monkeypatch)


def make(task: str = "Isaac-Fake", num_envs: int = 16, **fields: Any) -> IsaacLabSim:
    return isaaclab.make_sim(EnvConfig(id=f"isaaclab/{task}", **fields), num_envs, CPU)


def fake(env: IsaacLabSim) -> fake_isaaclab.RLEnv:
    lab: fake_isaaclab.RLEnv = env.env.unwrapped
    return lab


def act(env: IsaacLabSim, value: float = 0.0) -> SimStep:
    return env.step(torch.full((env.spec.num_envs, 2), value))


def rows(env: int, limit: int) -> Iterator[Row]:
    """The rows of one environment, from its first step on."""
    episode, step = 0, 0
    while True:
        step += 1
        final = (episode, step)
        failed, late = step == fails_at(env, episode), step >= limit
        if failed or late:
            episode, step = episode + 1, 0
        yield Row((episode, step), final, failed, late and not failed)


def assert_rows(env: IsaacLabSim, limit: int, num_steps: int) -> int:
    """Step and compare every row with the truth; returns how many episodes ended."""
    expected = [rows(row, limit) for row in range(env.spec.num_envs)]
    assert not env.reset(seed=3)[POLICY][:, :2].any()
    num_episodes = 0
    for _ in range(num_steps):
        step = act(env)
        assert step.valid.all()
        now = step.obs[POLICY][:, :2].tolist()
        ends = torch.stack([step.terminated, step.truncated], dim=1).tolist()
        final = None if step.final_obs is None else step.final_obs[POLICY][:, :2].tolist()
        for row, truth in enumerate(expected):
            wanted = next(truth)
            assert now[row] == list(wanted.now)
            assert ends[row] == [wanted.terminated, wanted.truncated]
            assert final is None or final[row] == list(wanted.final)
        num_episodes += int((step.terminated | step.truncated).sum())
    return num_episodes


def test_thousands_of_episodes_with_their_true_final_observations() -> None:
    env = make(num_envs=64)
    assert (env.spec.autoreset, env.spec.gives_final_obs) == ("same_step", True)
    assert assert_rows(env, LIMIT, 400) > 3000


def test_a_direct_task_counts_its_own_limit() -> None:
    env = make("Isaac-Fake-Direct", num_envs=64)
    assert list(env.spec.observation) == [POLICY]
    assert assert_rows(env, LIMIT - 1, 200) > 1500


def test_final_observations_are_true_in_rows_that_continue_too() -> None:
    # extras["final_obs"] is stale in steps in which no episode ends.
    env = make(num_envs=1)
    env.reset(seed=0)
    for _ in range(60):
        step = act(env)
        assert step.final_obs is not None
        if not (step.terminated | step.truncated)[0]:
            assert torch.equal(step.final_obs[POLICY], step.obs[POLICY])
            assert torch.equal(step.final_obs[CRITIC], step.obs[CRITIC])


def test_a_failure_in_the_step_of_the_time_limit_is_a_failure() -> None:
    env = make(num_envs=64)
    env.reset(seed=0)
    both = 0
    for _ in range(200):
        step = act(env)
        assert step.final_obs is not None
        assert not (step.terminated & step.truncated).any()
        at_limit = step.final_obs[POLICY][:, 1] == LIMIT
        episode = step.final_obs[POLICY][:, 0].long()
        failed = fails_at(torch.arange(64), episode) == LIMIT
        assert torch.equal(step.terminated[at_limit], failed[at_limit])
        assert torch.equal(step.truncated[at_limit], ~failed[at_limit])
        both += int((at_limit & failed).sum())
    assert both > 20


def test_a_limit_that_belongs_to_the_task_terminates(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = sys.modules["isaaclab_tasks.utils.parse_cfg"]
    real = parse.parse_env_cfg

    def finite(*args: Any, **kwargs: Any) -> Any:
        cfg = real(*args, **kwargs)
        cfg.is_finite_horizon = True
        return cfg

    monkeypatch.setattr(parse, "parse_env_cfg", finite)
    env = make(num_envs=64)
    env.reset(seed=0)
    steps = [act(env) for _ in range(50)]
    assert not any(step.truncated.any() for step in steps)
    assert any((s.terminated & (s.final_obs[POLICY][:, 1] == LIMIT)).any() for s in steps)  # type: ignore[index]


def test_version_2_has_no_final_observations_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    started = fake_isaaclab.install(monkeypatch, version=2)
    env = make(num_envs=64)
    assert started == [{"headless": True, "device": "cpu"}]
    assert env.spec.gives_final_obs is False
    assert assert_rows(env, LIMIT, 100) > 700
    assert act(env).final_obs is None
    make()  # the app is running: it must not start again
    assert len(started) == 1
    with pytest.raises(UniRLError, match="needs Isaac Lab 3"):
        make(kwargs={"overrides": ["physics=newton_mjwarp"]})


def test_version_3_launches_what_the_configuration_needs(started: fake_isaaclab.Started) -> None:
    env = make(kwargs={"overrides": ["physics=newton_mjwarp"]})
    [(cfg, arguments)] = started
    assert arguments == {"headless": True, "device": "cpu"}
    assert cfg.overrides == ["physics=newton_mjwarp"]
    assert cfg is fake(env).cfg
    assert cfg.autoreset_mode == gymnasium.vector.AutoresetMode.SAME_STEP


def test_groups_reach_policy_and_critic_in_the_order_of_the_space() -> None:
    env = make(num_envs=8)
    assert dict(env.spec.observation) == {POLICY: 3, CRITIC: 3}
    groups = env.reset(seed=0)
    for _ in range(30):
        assert list(groups) == [POLICY, CRITIC]
        assert groups[CRITIC][:, 0].tolist() == list(range(8))
        assert torch.equal(groups[CRITIC][:, 1:], groups[POLICY][:, :2])
        groups = act(env).obs


def test_what_a_step_returned_does_not_change_under_its_reader() -> None:
    env = make()
    kept = [env.reset(seed=0)[POLICY]]
    copies = [kept[0].clone()]
    for _ in range(30):
        step = act(env)
        assert step.final_obs is not None
        for tensor in (
            *step.obs.values(),
            *step.final_obs.values(),
            *(step.reward, step.terminated, step.truncated, step.valid),
            *step.extras.values(),
        ):
            kept.append(tensor)
            copies.append(tensor.clone())
    assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))


def test_rewards_are_the_tasks_own() -> None:
    env = make()
    env.reset(seed=0)
    for _ in range(30):
        step = act(env)
        assert step.final_obs is not None
        truth = 100 * step.final_obs[POLICY][:, 0] + step.final_obs[POLICY][:, 1]
        assert torch.equal(step.reward, truth)


def test_the_same_seed_gives_the_same_trajectory() -> None:
    env = make()
    starts = []
    for seed in (5, 5, 6):
        env.reset(seed=seed)
        fake(env).episode.zero_()
        starts.append(torch.stack([act(env).obs[POLICY][:, 2] for _ in range(20)]))
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[1], starts[2])


def test_random_phases_spread_the_first_time_limits_over_all_steps() -> None:
    env = make(num_envs=2000)
    env.reset(seed=1, random_phases=True)
    lives = torch.tensor([fails_at(row, 0) == NEVER for row in range(2000)])
    cut = torch.zeros(2000, dtype=torch.long)
    for number in range(1, LIMIT + 1):
        step = act(env)
        cut[step.truncated & (cut == 0)] = number
    shares = torch.bincount(cut[lives], minlength=LIMIT + 1)[1:] / lives.sum()
    assert (shares - 1 / LIMIT).abs().max() < 0.05


@pytest.mark.parametrize("steps", [1, 3, 7, 49, 1000])
def test_max_episode_steps_survives_the_way_through_seconds(steps: int) -> None:
    env = make(max_episode_steps=steps)
    assert env.spec.max_episode_length == steps
    if steps < LIMIT:
        assert_rows(env, steps, 50)


@pytest.mark.parametrize("pays", [False, True])
@pytest.mark.parametrize("version", [2, 3])
def test_a_state_that_is_no_number_is_masked_counted_and_reset(
    version: Any, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_isaaclab.install(monkeypatch, version=version)
    env = make(num_envs=8)
    env.reset(seed=0)
    act(env)
    assert fails_at(4, 0) > 3
    fake(env).poison, fake(env).pays = [4], pays
    lost = act(env)
    fake(env).poison = []
    assert not lost.valid[4] and lost.valid.sum() == 7
    assert not (lost.terminated | lost.truncated)[4]
    assert lost.reward[4] == 0
    assert_finite(lost)
    assert int(env.counters()["nan_states"]) == 1
    again = act(env)
    assert again.obs[POLICY][4, :2].tolist() == [1, 0]
    assert not again.valid[4] and not (again.terminated | again.truncated)[4]
    assert_finite(again)
    first = act(env)
    assert first.valid[4] and first.obs[POLICY][4, :2].tolist() in ([1, 1], [2, 0])
    assert int(env.counters()["nan_states"]) == 1


@pytest.mark.parametrize("pays", [False, True])
def test_a_state_lost_in_the_step_of_the_limit_costs_one_row_only(pays: bool) -> None:
    env = make(num_envs=8, max_episode_steps=2)
    env.reset(seed=0)
    assert fails_at(4, 0) > 2
    act(env)
    fake(env).poison, fake(env).pays = [4], pays
    lost = act(env)
    fake(env).poison = []
    assert not lost.valid[4] and not lost.truncated[4]
    assert_finite(lost)
    assert act(env).valid[4]  # the task had reset it already
    assert int(env.counters()["nan_states"]) == 1


def test_a_state_that_stays_lost_is_counted_each_time() -> None:
    env = make(num_envs=8)
    env.reset(seed=0)
    fake(env).poison = [5]
    for _ in range(20):
        step = act(env)
        assert not step.valid[5]
        assert_finite(step)
    assert int(env.counters()["nan_states"]) == 10  # each is followed by its reset


def assert_finite(step: SimStep) -> None:
    for group in (*step.obs.values(), *(step.final_obs or {}).values(), step.reward):
        assert torch.isfinite(group).all()


def test_the_log_of_a_reset_is_reported_once() -> None:
    env = make(num_envs=1)
    env.reset(seed=0)
    logged = act(env).extras  # of the first reset
    assert sorted(logged) == ["Episode_Reward/alive", "Episode_Termination/time_out"]
    assert all(value.shape == () for value in logged.values())
    for _ in range(50):
        step = act(env)
        assert bool(step.extras) == bool((step.terminated | step.truncated)[0])


def test_step_takes_nothing_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make()
    env.reset(seed=0)
    result = fake(env).step(torch.zeros(16, 2))
    monkeypatch.setattr(fake(env), "step", lambda action: result)

    def forbid(name: str) -> Callable[..., Any]:
        def stop(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"Tensor.{name} waits for the device")

        return stop

    for name in ("item", "tolist", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, forbid(name))
    env.step(torch.zeros(16, 2))


def test_times_of_the_simulation() -> None:
    spec = make().spec
    assert spec.step_dt == pytest.approx(0.02) and spec.physics_steps == 4
    assert spec.max_episode_length == LIMIT and spec.id == "isaaclab/Isaac-Fake"


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(UniRLError) as found:
        call()
    return str(found.value)


def test_a_missing_package_is_named_with_what_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_isaaclab.remove(monkeypatch)
    message = error_of(make)
    assert '"isaaclab' in message and "Python 3.12" in message and "IsaacLab" in message
    fake_isaaclab.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "isaaclab_tasks")
    assert '"isaaclab_tasks"' in error_of(make)


def test_an_unknown_task_gets_a_suggestion_from_the_registry() -> None:
    assert '"isaaclab/Isaac-Fake-Direct"' in error_of(lambda: make("Isaac-Fake-Direkt-v0"))


def test_known_ids_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "isaaclab/Isaac-Fake" in isaaclab.known_ids()
    fake_isaaclab.remove(monkeypatch)
    assert isaaclab.known_ids() == []


def test_tasks_of_ones_own_are_registered_by_import_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "my_tasks", ModuleType("my_tasks"))
    assert make(import_module="my_tasks").spec.num_envs == 16


def test_make_device_env_finds_the_family() -> None:
    config = EnvConfig(id="isaaclab/Isaac-Fake")
    assert make_device_env(config, 4, CPU).reset(seed=0)[POLICY].shape == (4, 3)


def test_several_agents_are_refused() -> None:
    assert "several agents" in error_of(lambda: make("Isaac-Fake-Several"))


def test_another_number_of_environments_than_asked_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change_cfg(monkeypatch, lambda cfg: setattr(cfg.scene, "num_envs", 7))
    message = error_of(make)
    assert "must be 16" in message and "found 7" in message


def test_a_simulation_on_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    change_cfg(monkeypatch, lambda cfg: setattr(cfg.sim, "device", "cuda:0"))
    message = error_of(make)
    assert 'simulates on "cuda:0"' in message and '"cpu"' in message


def change_cfg(patch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    """A task whose configuration does not keep what it was given."""
    parse = sys.modules["isaaclab_tasks.utils.parse_cfg"]
    real = parse.parse_env_cfg

    def changed(*args: Any, **kwargs: Any) -> Any:
        cfg = real(*args, **kwargs)
        change(cfg)
        return cfg

    patch.setattr(parse, "parse_env_cfg", changed)


def test_observations_that_are_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def configure(self: Any) -> None:
        self.single_observation_space = gymnasium.spaces.Dict()
        self.single_observation_space["policy"] = gymnasium.spaces.Box(0, 1, (4, 4, 3))

    monkeypatch.setattr(fake_isaaclab.Direct, "_configure_spaces", configure)
    assert "no vectors" in error_of(lambda: make("Isaac-Fake-Direct"))


def test_unknown_settings_are_refused_with_the_known_ones() -> None:
    assert 'did you mean "headless"' in error_of(lambda: make(kwargs={"headles": True}))


def test_close_is_idempotent() -> None:
    env = make()
    env.close()
    env.close()
    assert fake(env).num_closed == 1


def test_what_cannot_be_used_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(fake_isaaclab.RLEnv, "close", lambda self: closed.append(self))
    error_of(lambda: make("Isaac-Fake-Several"))
    assert len(closed) == 1
