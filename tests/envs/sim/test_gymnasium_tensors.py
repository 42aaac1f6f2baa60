"""Gymnasium vector environments of tensors as simulators on a device, in both autoreset modes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from unirl.envs.config import EnvConfig
from unirl.envs.device import CRITIC, POLICY, SimStep
from unirl.envs.sim.adapters import gymnasium as gymnasium_tensors
from unirl.envs.sim.adapters.gymnasium import GymnasiumTensors
from unirl.envs.sim.make import make_device_env
from unirl.errors import UniRLError

CPU = torch.device("cpu")
LIMIT = 8
NEVER = 1000
NEXT, SAME = "NextStep", "SameStep"


def fails_at(env: Any, episode: Any) -> Any:
    """The step at which an episode fails, for ints or tensors: 1 to LIMIT (together with the time
    limit), or NEVER."""
    number = 1 + (7 * env + 5 * episode + env * episode) % 12
    if isinstance(number, int):
        return number if number <= LIMIT else NEVER
    return torch.where(number <= LIMIT, number, NEVER)


class Tensors(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """N environments whose observations are (episode, step, start, action), in one memory that is
    written to at each step. Both flags are raised where a failure meets the time limit."""

    def __init__(
        self,
        num_envs: int,
        mode: str = NEXT,
        max_episode_steps: int = LIMIT,
        rows: int | None = None,
        device: str = "cpu",
        groups: bool = False,
        tells_final: bool = True,
        has_buffer: bool = True,
    ) -> None:
        self.num_envs = num_envs if rows is None else rows
        n = self.num_envs
        self.metadata = {"autoreset_mode": AutoresetMode(mode)}
        self.limit, self.mode, self.groups, self.tells_final = (
            max_episode_steps,
            mode,
            groups,
            tells_final,
        )
        self.device = torch.device(device)
        box = spaces.Box(-np.inf, np.inf, (4,))
        self.single_observation_space: Any = box
        if groups:
            parts = {"privileged": spaces.Box(-1, 1, (1,)), "place": spaces.Box(-1, 1, (2,))}
            critic = spaces.Dict(parts)
            self.single_observation_space = spaces.Dict({POLICY: box, CRITIC: critic})
        self.single_action_space = spaces.Box(-1.0, 1.0, (2,))
        self.buf = torch.zeros(n, 4, device=self.device)
        self.reward = torch.zeros(n, device=self.device)
        self.mean = torch.zeros((), device=self.device)
        self.flags = torch.zeros(2, n, dtype=torch.bool, device=self.device)
        self.row = torch.arange(n)
        self.episode, self.steps = torch.full((n,), -1), torch.zeros(n)
        self.over = torch.zeros(n, dtype=torch.bool)
        self.count = torch.zeros(n, dtype=torch.long)
        if has_buffer:
            self.episode_length_buf = self.count
        self.poison: list[int] = []
        self.pays = False  # a reward that does not show a lost state
        self.num_closed = 0
        self.generator = torch.Generator()

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.generator.manual_seed(seed)
        self.episode.fill_(-1)
        self.over.fill_(False)
        self._begin(torch.ones(self.num_envs, dtype=torch.bool))
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        resets = self.over.clone() if self.mode == NEXT else torch.zeros_like(self.over)
        self.steps += 1
        self.count += 1
        self.steps[self.poison] = float("nan")
        self._begin(resets)
        terminated = (self.steps == fails_at(self.row, self.episode)) & ~resets
        truncated = (self.count >= self.limit) & ~resets
        self.over = terminated | truncated
        self.reward[:] = 1.0 if self.pays else 100 * self.episode + self.steps
        self.flags[0], self.flags[1] = terminated, truncated
        self.buf[:, 3] = actions[:, 0]
        self.mean.copy_(self.steps.mean())
        info: dict[str, Any] = {"mean_step": self.mean}
        if self.mode == SAME and self.over.any():
            if self.tells_final:
                info["final_obs"] = copied(self._observe())
            self._begin(self.over)
        return self._observe(), self.reward, self.flags[0], self.flags[1], info

    def close(self, **kwargs: Any) -> None:
        self.num_closed += 1

    def _begin(self, rows: torch.Tensor) -> None:
        self.episode += rows
        self.steps[rows] = 0
        self.count[rows] = 0
        start = torch.rand(self.num_envs, generator=self.generator).to(self.device)
        self.buf[:, 2] = torch.where(rows.to(self.device), start, self.buf[:, 2])

    def _observe(self) -> Any:
        self.buf[:, 0], self.buf[:, 1] = self.episode, self.steps
        if not self.groups:
            return self.buf
        place = self.buf[:, :2]
        return {CRITIC: {"place": place, "privileged": self.row[:, None]}, POLICY: self.buf}


def copied(obs: Any) -> Any:
    return {k: copied(v) for k, v in obs.items()} if isinstance(obs, dict) else obs.clone()


class Arrays(Tensors):
    """The same with NumPy observations."""

    def _observe(self) -> Any:
        return super()._observe().numpy()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, entry_point in (("test/Tensors-v0", Tensors), ("test/Arrays-v0", Arrays)):
        spec = gymnasium.envs.registration.EnvSpec(
            id=name, vector_entry_point=entry_point, max_episode_steps=LIMIT
        )
        monkeypatch.setitem(gymnasium.registry, name, spec)


def make(num_envs: int = 16, name: str = "test/Tensors-v0", **fields: Any) -> GymnasiumTensors:
    config = EnvConfig(id=f"gymnasium/{name}", **fields)
    return gymnasium_tensors.make_sim(config, num_envs, CPU)


def toy(env: GymnasiumTensors) -> Tensors:
    found: Tensors = env.env.unwrapped
    return found


def act(env: GymnasiumTensors, value: float = 0.0) -> SimStep:
    return env.step(torch.full((env.spec.num_envs, 2), value))


Truth = tuple[tuple[int, int], tuple[int, int], tuple[bool, bool, bool]]


def rows(env: int, limit: int, mode: str) -> Iterator[Truth]:
    """Where the observation and the final one stand; valid, terminated, truncated."""
    episode, step = 0, 0
    while True:
        step += 1
        final = (episode, step)
        failed, late = step == fails_at(env, episode), step >= limit
        over = failed or late
        if over and mode == SAME:
            episode, step = episode + 1, 0
        yield (episode, step), final, (True, failed, late and not failed)
        if over and mode == NEXT:
            episode, step = episode + 1, 0
            yield (episode, step), (episode, step), (False, False, False)


def assert_rows(env: GymnasiumTensors, mode: str, limit: int, num_steps: int) -> int:
    """Step and compare every row with the truth; returns how many episodes ended."""
    expected = [rows(row, limit, mode) for row in range(env.spec.num_envs)]
    assert not env.reset(seed=3)[POLICY][:, :2].any()
    num_episodes = 0
    for _ in range(num_steps):
        step = act(env)
        now = step.obs[POLICY][:, :2].tolist()
        found = torch.stack([step.valid, step.terminated, step.truncated], dim=1).tolist()
        final = None if step.final_obs is None else step.final_obs[POLICY][:, :2].tolist()
        assert (final is None) == (mode == NEXT)
        for row, truth in enumerate(expected):
            place, last, flags = next(truth)
            assert now[row] == list(place)
            assert tuple(found[row]) == flags
            assert final is None or final[row] == list(last)
        num_episodes += int((step.terminated | step.truncated).sum())
    return num_episodes


@pytest.mark.parametrize("mode", [NEXT, SAME])
def test_thousands_of_episodes_in_both_modes(mode: str) -> None:
    env = make(64, kwargs={"mode": mode})
    assert env.spec.autoreset == ("next_step" if mode == NEXT else "same_step")
    assert env.spec.gives_final_obs == (mode == SAME)
    assert assert_rows(env, mode, LIMIT, 400) > 3000


@pytest.mark.parametrize("mode", [NEXT, SAME])
def test_a_failure_in_the_step_of_the_time_limit_is_a_failure(mode: str) -> None:
    env = make(64, kwargs={"mode": mode})
    env.reset(seed=0)
    both = 0
    for _ in range(100):
        step = act(env)
        assert not (step.terminated & step.truncated).any()
        raised = toy(env).flags[0] & toy(env).flags[1]
        assert step.terminated[raised].all()
        both += int(raised.sum())
    assert both > 20


@pytest.mark.parametrize("mode", [NEXT, SAME])
def test_what_a_step_returned_does_not_change_under_its_reader(mode: str) -> None:
    env = make(kwargs={"mode": mode, "groups": True})
    kept = list(env.reset(seed=0).values())
    copies = [tensor.clone() for tensor in kept]
    for _ in range(30):
        step = act(env)
        final = list((step.final_obs or {}).values())
        for tensor in (*step.obs.values(), *final, *step[1:4], step.valid, *step.extras.values()):
            kept.append(tensor)
            copies.append(tensor.clone())
    assert all(torch.equal(one, other) for one, other in zip(kept, copies, strict=True))


@pytest.mark.parametrize("mode", [NEXT, SAME])
def test_groups_reach_policy_and_critic_in_the_order_of_the_space(mode: str) -> None:
    env = make(8, kwargs={"mode": mode, "groups": True})
    assert dict(env.spec.observation) == {POLICY: 4, CRITIC: 3}
    step_groups = [env.reset(seed=0)]
    for _ in range(30):
        step = act(env)
        step_groups += [step.obs, *([step.final_obs] if step.final_obs else [])]
    for groups in step_groups:
        assert groups[CRITIC].dtype == torch.float32
        # Gymnasium sorts the keys of a Dict that is made from a mapping: "place" comes first.
        assert torch.equal(groups[CRITIC][:, :2], groups[POLICY][:, :2])
        assert groups[CRITIC][:, 2].tolist() == list(range(8))


@pytest.mark.parametrize("mode", [NEXT, SAME])
def test_fillers_have_no_reward_and_other_rows_their_own(mode: str) -> None:
    env = make(kwargs={"mode": mode})
    env.reset(seed=0)
    for _ in range(50):
        step = act(env)
        final = step.obs if step.final_obs is None else step.final_obs
        truth = 100 * final[POLICY][:, 0] + final[POLICY][:, 1]
        assert torch.equal(step.reward, torch.where(step.valid, truth, 0.0))


def test_actions_are_clipped_to_the_space() -> None:
    env = make()
    env.reset(seed=0)
    assert (act(env, 7.0).obs[POLICY][:, 3] == 1.0).all()
    assert (act(env, -0.5).obs[POLICY][:, 3] == -0.5).all()


def test_the_same_seed_gives_the_same_trajectory() -> None:
    env = make()
    starts = []
    for seed in (5, 5, 6):
        env.reset(seed=seed)
        starts.append(torch.stack([act(env).obs[POLICY][:, 2] for _ in range(20)]))
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[1], starts[2])


@pytest.mark.parametrize("mode", [NEXT, SAME])
def test_random_phases_spread_the_first_time_limits_over_all_steps(mode: str) -> None:
    env = make(2000, kwargs={"mode": mode})
    env.reset(seed=1, random_phases=True)
    lives = torch.tensor([fails_at(row, 0) == NEVER for row in range(2000)])
    cut = torch.zeros(2000, dtype=torch.long)
    for number in range(1, LIMIT + 1):
        step = act(env)
        cut[step.truncated & (cut == 0)] = number
    shares = torch.bincount(cut[lives], minlength=LIMIT + 1)[1:] / lives.sum()
    assert (shares - 1 / LIMIT).abs().max() < 0.05


def test_phases_that_cannot_be_set_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    env = make(kwargs={"has_buffer": False})
    with caplog.at_level(logging.WARNING):
        env.reset(seed=0, random_phases=True)
    assert "episode_length_buf" in caplog.text


def test_max_episode_steps_reaches_the_environment() -> None:
    env = make(kwargs={"mode": SAME}, max_episode_steps=3)
    assert env.spec.max_episode_length == 3
    assert_rows(env, SAME, 3, 30)
    assert make().spec.max_episode_length == LIMIT


@pytest.mark.parametrize("mode", [NEXT, SAME])
def test_a_state_that_is_no_number_is_masked_and_counted_until_its_episode_ends(mode: str) -> None:
    env = make(8, kwargs={"mode": mode})
    env.reset(seed=0)
    act(env)
    assert fails_at(4, 0) > 3
    toy(env).poison = [4]
    steps = [act(env)]
    toy(env).poison = []
    while not toy(env).over[4]:
        steps.append(act(env))
    for step in steps:
        assert not step.valid[4] and not (step.terminated | step.truncated)[4]
        assert step.reward[4] == 0
        for group in (*step.obs.values(), *(step.final_obs or {}).values()):
            assert torch.isfinite(group).all()
        assert step.valid.sum() >= (7 if mode == SAME else 1)
    assert len(steps) == LIMIT - 1
    # In the same-step mode the step of the time limit follows a lost state and is counted with it.
    lost = len(steps) - (mode == SAME)
    assert int(env.counters()["nan_states"]) == lost
    following = act(env)
    assert following.valid[4] == (mode == SAME)
    assert int(env.counters()["nan_states"]) == lost
    assert env.counters()["nan_states"].dtype == torch.int64


def test_a_final_observation_that_is_no_number_is_masked_and_counted() -> None:
    env = make(8, kwargs={"mode": SAME}, max_episode_steps=2)
    env.reset(seed=0)
    act(env)
    toy(env).poison, toy(env).pays = [4], True
    lost = act(env)
    toy(env).poison = []
    assert toy(env).flags[1, 4] and not lost.truncated[4] and not lost.valid[4]
    assert lost.final_obs is not None and torch.isfinite(lost.final_obs[POLICY]).all()
    assert int(env.counters()["nan_states"]) == 1
    assert act(env).valid[4]


def test_a_truncation_without_its_final_observation_is_masked_and_counted() -> None:
    env = make(64, kwargs={"mode": SAME, "tells_final": False})
    env.reset(seed=0)
    truncated = terminated = 0
    for _ in range(60):
        step = act(env)
        raw = toy(env).flags
        cut = raw[1] & ~raw[0]
        assert not step.valid[cut].any() and not step.truncated.any()
        assert torch.equal(step.terminated, raw[0]) and step.valid[~cut].all()
        truncated, terminated = truncated + int(cut.sum()), terminated + int(raw[0].sum())
    assert truncated > 50 and terminated > 50
    assert int(env.counters()["missing_final_obs"]) == truncated
    assert int(env.counters()["nan_states"]) == 0


def test_discrete_actions_are_counted_from_the_start_of_the_space() -> None:
    write = gymnasium_tensors.action_writer(spaces.Discrete(3, start=-1), CPU, "x")
    assert write(torch.tensor([0, 1, 2])).tolist() == [-1, 0, 1]
    with pytest.raises(UniRLError, match="not supported on a device"):
        gymnasium_tensors.action_writer(spaces.MultiBinary(3), CPU, "x")


@pytest.mark.parametrize("mode", [NEXT, SAME])
def test_step_takes_nothing_to_the_host(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make(kwargs={"mode": mode})
    env.reset(seed=0)
    act(env)
    while not toy(env).over.any():
        act(env)
    result = toy(env).step(torch.zeros(16, 2))
    monkeypatch.setattr(toy(env), "step", lambda action: result)

    def forbid(name: str) -> Callable[..., Any]:
        def stop(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"Tensor.{name} waits for the device")

        return stop

    for name in ("item", "tolist", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, forbid(name))
    env.step(torch.zeros(16, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [NEXT, SAME])
def test_step_never_waits_for_the_gpu(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EnvConfig(id="gymnasium/test/Tensors-v0", kwargs={"mode": mode, "device": "cuda:0"})
    env = gymnasium_tensors.make_sim(config, 16, torch.device("cuda"))
    env.reset(seed=0)
    action = torch.zeros(16, 2, device="cuda")
    act_result = env.step(action)
    assert act_result.valid.device == env.spec.device == torch.device("cuda:0")
    result = toy(env).step(action)  # the toy itself may wait
    monkeypatch.setattr(toy(env), "step", lambda action: result)
    torch.cuda.set_sync_debug_mode("error")
    try:
        env.step(action)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_make_device_env_finds_the_family() -> None:
    config = EnvConfig(id="gymnasium/test/Tensors-v0")
    assert make_device_env(config, 4, CPU).reset(seed=0)[POLICY].shape == (4, 4)


def test_scalars_of_info_are_logged() -> None:
    env = make(1)
    env.reset(seed=0)
    assert list(act(env).extras) == ["mean_step"]


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(UniRLError) as found:
        call()
    return str(found.value)


@pytest.mark.parametrize("name", ["test/Arrays-v0", "CartPole-v1", "Pendulum-v1"])
def test_numpy_environments_are_sent_off_the_device(name: str) -> None:
    message = error_of(lambda: make(name=name))
    assert "torch tensors" in message and f"unirl train ppo --env.id {name}" in message


def test_an_unknown_id_gets_a_suggestion() -> None:
    assert '"gymnasium/test/Tensors-v0"' in error_of(lambda: make(name="test/Tensor-v0"))
    assert gymnasium_tensors.known_ids() == []


def test_another_number_of_environments_than_asked_for_is_refused() -> None:
    message = error_of(lambda: make(kwargs={"rows": 7}))
    assert "16 environments" in message and "found [7, 4]" in message


def test_a_simulation_on_another_device_is_refused() -> None:
    message = error_of(lambda: make(kwargs={"device": "meta"}))
    assert 'simulates on "meta"' in message and '"cpu"' in message


def test_unknown_arguments_are_refused() -> None:
    assert "['colour']" in error_of(lambda: make(kwargs={"colour": 1}))


def test_an_environment_that_does_not_reset_by_itself_is_refused() -> None:
    assert "NEXT_STEP or SAME_STEP, found Disabled" in error_of(
        lambda: make(kwargs={"mode": "Disabled"})
    )


def test_close_is_idempotent() -> None:
    env = make()
    env.close()
    env.close()
    assert toy(env).num_closed == 1


def test_what_cannot_be_used_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(Tensors, "close", lambda self, **kwargs: closed.append(self))
    error_of(lambda: make(kwargs={"rows": 7}))
    assert len(closed) == 1
