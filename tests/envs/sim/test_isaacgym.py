"""IsaacGymEnvs' tasks as simulators on a device: fillers are masked, time limits are no failures,
and what a step returned does not change under its reader."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.envs.sim import fake_isaacgym
from tests.envs.sim.fake_isaacgym import CLIP_OBS, LIMIT, NEVER, fails_at
from unirl.envs.config import EnvConfig
from unirl.envs.device import CRITIC, POLICY, SimStep
from unirl.envs.sim.adapters import isaacgym
from unirl.envs.sim.adapters.isaacgym import IsaacGymSim
from unirl.envs.sim.make import make_device_env
from unirl.errors import UniRLError

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]


class Row(NamedTuple):
    """What a row must be: where its observation stands, and what the step was."""

    episode: int
    step: int
    valid: bool
    terminated: bool = False
    truncated: bool = False


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_isaacgym.install(monkeypatch)


def make(task: str = "Cartpole", num_envs: int = 16, **fields: Any) -> IsaacGymSim:
    config = EnvConfig(id=f"isaacgym/{task}", **fields)
    return isaacgym.make_sim(config, num_envs, CPU)


def fake() -> fake_isaacgym.VecTask:
    return fake_isaacgym.LAST[0]


def act(env: IsaacGymSim, value: float = 0.0) -> SimStep:
    return env.step(torch.full((env.spec.num_envs, 2), value))


def ending(env: int, episode: int, step: int, limit: int) -> tuple[bool, bool]:
    """(terminated, truncated) as the task reports it: a failure in the step of the time limit is
    given as a time-out."""
    late = step >= limit
    failed = step == fails_at(env, episode)
    return failed and not late, late


def rows_with_fillers(env: int, first_step: int, limit: int = LIMIT - 1) -> Iterator[Row]:
    """The rows of a task that resets in the next step. first_step: where its first observations
    stand, 1 for tasks that reset before the physics."""
    episode = 0
    while True:
        yield Row(episode, first_step, valid=False)
        step = first_step
        over = any(ending(env, episode, step, limit))
        while not over:
            step += 1
            ends = ending(env, episode, step, limit)
            over = any(ends)
            yield Row(episode, step, True, *ends)
        episode += 1


def rows_at_once(env: int, limit: int = LIMIT - 1) -> Iterator[Row]:
    """The rows of a task that resets within the step; its constructor has begun episode 0, and
    `reset` begins the next."""
    episode = 1
    yield Row(episode, 0, valid=False)
    step = 0
    while True:
        step += 1
        ends = ending(env, episode, step, limit)
        if any(ends):
            episode, step = episode + 1, 0
        yield Row(episode, step, True, *ends)


def assert_rows(env: IsaacGymSim, truth: Callable[[int], Iterator[Row]], num_steps: int) -> int:
    """Step and compare every row with the truth; returns how many episodes ended."""
    expected = [truth(row) for row in range(env.spec.num_envs)]
    obs = env.reset(seed=3)[POLICY]
    for row, rows in enumerate(expected):
        first = next(rows)
        assert obs[row, :2].tolist() == [first.episode, first.step]
    num_episodes = 0
    for _ in range(num_steps):
        step = act(env)
        found = torch.stack([step.valid, step.terminated, step.truncated], dim=1).tolist()
        places = step.obs[POLICY][:, :2].tolist()
        for row, rows in enumerate(expected):
            wanted = next(rows)
            assert places[row] == [wanted.episode, wanted.step]
            assert found[row] == [wanted.valid, wanted.terminated, wanted.truncated]
        num_episodes += int((step.terminated | step.truncated).sum())
    return num_episodes


def test_thousands_of_episodes_with_a_filler_after_each_end() -> None:
    env = make(num_envs=64)
    assert env.spec.autoreset == "next_step"
    assert assert_rows(env, lambda row: rows_with_fillers(row, 0), 400) > 3000


def test_a_task_that_resets_before_the_physics_has_its_filler_too() -> None:
    env = make("BallBalance", num_envs=64)
    assert assert_rows(env, lambda row: rows_with_fillers(row, 1), 400) > 3000


def test_a_task_that_resets_within_the_step_has_no_filler_and_tells_no_final_observation() -> None:
    env = make("AnymalTerrain", num_envs=64)
    assert (env.spec.autoreset, env.spec.gives_final_obs) == ("same_step", False)
    assert assert_rows(env, rows_at_once, 400) > 3000


def test_an_episode_that_is_over_at_its_first_observation_is_two_fillers() -> None:
    env = make(num_envs=64)
    env.reset(seed=0)
    again = [row for row in range(64) if fails_at(row, 0) == 0]
    assert again
    step = act(env)
    assert not step.valid[again].any()
    assert not (step.terminated | step.truncated)[again].any()
    assert (step.obs[POLICY][again, 0] == 1).all()


@pytest.mark.parametrize("task", ["Cartpole", "BallBalance", "AnymalTerrain"])
def test_a_time_limit_is_never_a_failure(task: str) -> None:
    env = make(task, num_envs=64)
    env.reset(seed=0)
    before = torch.zeros(64)
    num_limits = 0
    for _ in range(300):
        step = act(env)
        at_limit = step.truncated
        # One row per environment stands one step before its limit when it is cut off.
        assert (before[at_limit] == LIMIT - 2).all()
        assert not (step.terminated & step.truncated).any()
        num_limits += int(at_limit.sum())
        before = step.obs[POLICY][:, 1]
    assert num_limits > 300


def test_final_observations_are_those_that_come_with_the_end() -> None:
    env = make(num_envs=64)
    env.reset(seed=0)
    for _ in range(100):
        step = act(env)
        assert step.final_obs is None
        for row in step.terminated.nonzero().flatten().tolist():
            episode, at = step.obs[POLICY][row, :2].tolist()
            assert at == fails_at(row, int(episode)) != NEVER


def test_fillers_have_no_reward_and_other_rows_their_own() -> None:
    env = make(num_envs=16)
    env.reset(seed=0)
    for _ in range(50):
        step = act(env)
        truth = 100 * step.obs[POLICY][:, 0] + step.obs[POLICY][:, 1]
        assert torch.equal(step.reward, torch.where(step.valid, truth, 0.0))
        assert step.reward.dtype == torch.float32


def test_reset_shows_the_first_observation_and_not_what_stood_in_the_buffer() -> None:
    env = make(num_envs=4)
    fake().obs_buf.fill_(-5)
    obs = env.reset(seed=0)[POLICY]
    assert obs[:, 0].tolist() == [0, 0, 0, 0] and obs[:, 1].tolist() == [0, 0, 0, 0]
    for _ in range(5):
        act(env)
    episodes = fake().episode.clone()
    again = env.reset(seed=0)[POLICY]
    assert again[:, 0].tolist() == (episodes + 1).tolist() and not again[:, 1].any()


@pytest.mark.parametrize("task", ["Cartpole", "AnymalTerrain"])
def test_the_same_seed_gives_the_same_trajectory(task: str) -> None:
    env = make(task)
    starts = []
    for seed in (5, 5, 6):
        first = env.reset(seed=seed)[POLICY][:, 2]
        starts.append(torch.stack([first, *(act(env).obs[POLICY][:, 2] for _ in range(3))]))
    assert torch.equal(starts[0][0], starts[1][0]) and not torch.equal(starts[1][0], starts[2][0])


@pytest.mark.parametrize("task", ["ShadowHand", "AnymalTerrain"])
def test_what_a_step_returned_does_not_change_under_its_reader(task: str) -> None:
    env = make(task)
    kept = [env.reset(seed=0)[POLICY]]
    copies = [kept[0].clone()]
    for _ in range(30):
        step = act(env)
        for tensor in (*step.obs.values(), *step[1:4], step.valid, *step.extras.values()):
            kept.append(tensor)
            copies.append(tensor.clone())
    assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))


def test_states_reach_the_critic_and_are_clipped_as_the_task_says() -> None:
    env = make("ShadowHand", num_envs=8)
    assert dict(env.spec.observation) == {POLICY: 4, CRITIC: 3}
    groups = env.reset(seed=0)
    for _ in range(20):
        place = groups[POLICY][:, :2]
        assert torch.equal(groups[CRITIC][:, 0], 10 * place[:, 0] + place[:, 1])
        assert groups[CRITIC][:, 1].tolist() == list(range(8))
        assert (groups[CRITIC][:, 2] == CLIP_OBS).all()
        groups = act(env).obs


def test_a_task_without_states_has_no_critic_group() -> None:
    env = make()
    assert list(env.spec.observation) == [POLICY] and list(env.reset(seed=0)) == [POLICY]


def test_actions_are_clipped_by_the_task_to_the_bounds_of_the_space() -> None:
    env = make()
    assert float(env.spec.action_space.high[0]) == 1.0  # type: ignore[attr-defined]
    env.reset(seed=0)
    assert (act(env, 7.0).obs[POLICY][:, 3] == 1.0).all()
    fake_isaacgym.BASE.EXISTING_SIM = None  # type: ignore[attr-defined]
    wide = make(kwargs={"clip_actions": 5.0})
    assert float(wide.spec.action_space.high[0]) == 5.0  # type: ignore[attr-defined]
    wide.reset(seed=0)
    assert (act(wide, 7.0).obs[POLICY][:, 3] == 5.0).all()


@pytest.mark.parametrize("task", ["Cartpole", "AnymalTerrain"])
def test_max_episode_steps_is_the_number_of_steps_of_an_episode(task: str) -> None:
    env = make(task, num_envs=64, max_episode_steps=5)
    assert env.spec.max_episode_length == 5
    if task == "Cartpole":
        assert_rows(env, lambda row: rows_with_fillers(row, 0, limit=5), 100)
    else:
        assert_rows(env, lambda row: rows_at_once(row, limit=5), 100)


@pytest.mark.parametrize("task", ["Cartpole", "AnymalTerrain"])
def test_random_phases_spread_the_first_time_limits_over_all_steps(task: str) -> None:
    env = make(task, num_envs=2000)
    env.reset(seed=1, random_phases=True)
    rows = torch.tensor([fails_at(row, int(fake().episode[row])) == NEVER for row in range(2000)])
    assert int(rows.sum()) > 500
    cut = torch.zeros(2000, dtype=torch.long)
    for number in range(1, LIMIT):
        step = act(env)
        cut[step.truncated & (cut == 0)] = number
    shares = torch.bincount(cut[rows], minlength=LIMIT)[1:] / rows.sum()
    assert (shares - 1 / (LIMIT - 1)).abs().max() < 0.05


def test_without_random_phases_no_time_limit_falls_early() -> None:
    env = make(num_envs=64)
    env.reset(seed=1)
    assert not any(act(env).truncated.any() for _ in range(LIMIT - 2))


@pytest.mark.parametrize("task", ["Cartpole", "BallBalance", "AnymalTerrain"])
def test_a_state_that_is_no_number_is_masked_counted_and_reset(task: str) -> None:
    env = make(task, num_envs=8)
    env.reset(seed=0)
    act(env)
    fake().poison = [7]
    episode = int(fake().episode[7])
    lost = act(env)
    fake().poison = []
    assert lost.valid.tolist()[7] is False
    assert not (lost.terminated | lost.truncated)[7]
    assert lost.reward[7] == 0 and torch.isfinite(lost.obs[POLICY]).all()
    assert int(env.counters()["nan_states"]) == 1
    filler = act(env)
    first_step = 1 if task == "BallBalance" else 0
    assert filler.obs[POLICY][7, :2].tolist() == [episode + 1, first_step]
    assert not filler.valid[7] and not (filler.terminated | filler.truncated)[7]
    assert act(env).valid[7] or fails_at(7, episode + 1) <= first_step
    assert int(env.counters()["nan_states"]) == 1
    assert env.counters()["nan_states"].dtype == torch.int64


def test_other_rows_do_not_notice_that_one_is_no_number() -> None:
    env = make(num_envs=8)
    env.reset(seed=0)
    quiet = [act(env) for _ in range(20)]
    fake().episode.fill_(-1)
    env.reset(seed=0)
    fake().poison = [3]
    rows = [row for row in range(8) if row != 3]
    for other in quiet:
        step = act(env)
        assert torch.equal(step.obs[POLICY][rows, :2], other.obs[POLICY][rows, :2])
        assert torch.equal(step.valid[rows], other.valid[rows])
        assert not step.valid[3]
    # Every second step is the filler that the reset before it asked for.
    assert int(env.counters()["nan_states"]) == 10


def test_counts_of_what_was_simulated() -> None:
    spec = make().spec
    assert spec.step_dt == pytest.approx(2 / 60) and spec.physics_steps == 4
    assert spec.max_episode_length == LIMIT - 1 and spec.id == "isaacgym/Cartpole"


def test_scalars_of_the_task_are_logged() -> None:
    env = make(num_envs=1)
    env.reset(seed=0)
    assert list(act(env).extras) == ["consecutive_successes"]
    assert act(env).extras["consecutive_successes"].shape == ()


def test_step_takes_nothing_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make("ShadowHand")
    env.reset(seed=0)
    task = fake()
    result = task.step(task.zero_actions())
    monkeypatch.setattr(task, "step", lambda action: result)

    def forbid(name: str) -> Callable[..., Any]:
        def stop(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"Tensor.{name} waits for the device")

        return stop

    for name in ("item", "tolist", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, forbid(name))
    action = torch.zeros(16, 2)
    env.step(action)


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(UniRLError) as found:
        call()
    return str(found.value)


def test_a_missing_package_is_named_with_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_isaacgym.remove(monkeypatch)
    message = error_of(make)
    assert "Isaac Gym Preview 4" in message and "Python 3.6 to 3.8" in message
    monkeypatch.setitem(sys.modules, "isaacgym", type(sys)("isaacgym"))
    assert "isaac-sim/IsaacGymEnvs" in error_of(make)


def test_torch_before_isaacgym_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_isaacgym.remove(monkeypatch)
    fake_isaacgym.write_packages(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    message = error_of(make)
    assert "torch came first" in message and isaacgym.FIRST in message
    assert "Python 3.6 to 3.8" in message  # or who follows the advice meets the next wall


def test_a_python_without_a_binding_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_isaacgym.remove(monkeypatch)
    fake_isaacgym.write_packages(tmp_path, supports_python=False)
    monkeypatch.syspath_prepend(tmp_path)
    # As after an earlier attempt to import it, before torch.
    monkeypatch.setitem(sys.modules, "isaacgym.gymdeps", type(sys)("isaacgym.gymdeps"))
    message = error_of(make)
    assert "cannot run in Python" in message and "3.6 to 3.8" in message


def test_isaacgym_first_is_all_it_takes(tmp_path: Path) -> None:
    fake_isaacgym.write_packages(tmp_path)
    assert run_script(tmp_path, "import isaacgym\n") == "16 rows"


def test_the_command_line_that_is_advised_imports_isaacgym_before_torch(tmp_path: Path) -> None:
    fake_isaacgym.write_packages(tmp_path)
    code = isaacgym.FIRST.split('"')[1]
    done = subprocess.run(
        [sys.executable, "-c", code, "--help"],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "train" in done.stdout


def run_script(folder: Path, first_lines: str) -> str:
    """What a process prints that makes the environments after `first_lines`, error or not."""
    code = first_lines + (
        "import torch\n"
        "from unirl.errors import UniRLError\n"
        "from unirl.envs.config import EnvConfig\n"
        "from unirl.envs.sim.adapters.isaacgym import make_sim\n"
        "try:\n"
        "    env = make_sim(EnvConfig(id='isaacgym/Cartpole'), 16, torch.device('cpu'))\n"
        "    print(len(env.reset(0)['policy']), 'rows')\n"
        "except UniRLError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{folder}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_unknown_task_gets_a_suggestion_from_the_package() -> None:
    assert '"isaacgym/Cartpole"' in error_of(lambda: make("CartPole"))
    tasks = sys.modules["isaacgymenvs.tasks"]
    tasks.isaacgym_task_map["MyRobot"] = object
    assert '"isaacgym/MyRobot"' in error_of(lambda: make("MyRobott"))


def test_make_device_env_finds_the_family_and_tasks_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my_tasks.py").write_text(
        "import isaacgym\n"
        "from isaacgymenvs.tasks import isaacgym_task_map\n"
        "isaacgym_task_map['Mine'] = isaacgym_task_map['Cartpole']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_tasks", raising=False)
    monkeypatch.setitem(fake_isaacgym.isaacgym_task_map, "Mine", fake_isaacgym.Cartpole)
    config = EnvConfig(id="isaacgym/Mine", import_module="my_tasks")
    assert make_device_env(config, 4, CPU).reset(seed=0)[POLICY].shape == (4, 4)


def test_known_ids_need_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_isaacgym.remove(monkeypatch)
    known = isaacgym.known_ids()
    assert "isaacgym/Ant" in known and known == sorted(known)
    assert not any("AMP" in name for name in known)


def test_a_second_simulation_in_one_process_is_refused() -> None:
    make()
    assert "one simulation per process" in error_of(make)


def test_another_number_of_environments_than_asked_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = fake_isaacgym.make
    monkeypatch.setattr(
        sys.modules["isaacgymenvs"], "make", lambda **kwargs: real(**{**kwargs, "num_envs": 7})
    )
    message = error_of(make)
    assert "must be 16" in message and "found 7" in message


def test_a_simulation_on_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a task does whose configuration switches the GPU pipeline off.
    real = fake_isaacgym.make
    monkeypatch.setattr(
        sys.modules["isaacgymenvs"],
        "make",
        lambda **kwargs: real(**{**kwargs, "sim_device": "cpu"}),
    )
    config = EnvConfig(id="isaacgym/Cartpole")
    message = error_of(lambda: isaacgym.make_sim(config, 16, torch.device("cuda")))
    assert 'simulates on "cpu"' in message and '"cuda:0"' in message


def test_unknown_settings_are_refused_with_the_known_ones() -> None:
    assert 'did you mean "headless"' in error_of(lambda: make(kwargs={"headles": True}))
    assert '"next_step" or "same_step"' in error_of(lambda: make(kwargs={"autoreset": "never"}))


def test_a_task_of_ones_own_that_resets_within_the_step_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = sys.modules["isaacgymenvs.tasks"]
    tasks.isaacgym_task_map["MyTerrain"] = fake_isaacgym.AnymalTerrain
    monkeypatch.setitem(fake_isaacgym.isaacgym_task_map, "MyTerrain", fake_isaacgym.AnymalTerrain)
    env = make("MyTerrain", num_envs=64, kwargs={"autoreset": "same_step"})
    assert assert_rows(env, rows_at_once, 100) > 500


def test_a_task_that_is_no_vectask_of_this_version_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    env = make()
    task = fake()
    real = task.step

    def step(action: torch.Tensor) -> Any:
        raw, reward, ended, _ = real(action)
        return raw, reward, ended, {}

    monkeypatch.setattr(task, "step", step)
    assert "time_outs" in error_of(lambda: env.reset(seed=0))


def test_close_twice_is_nothing() -> None:
    env = make()
    env.close()
    env.close()
