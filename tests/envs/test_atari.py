"""Atari on ale-py and EnvPool: the same conventions, raw rewards, and lives that do not restart the
game."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from unirl.envs.config import EnvConfig
from unirl.envs.make import make_vec, spaces
from unirl.errors import UniRLError

pytest.importorskip("ale_py", reason="the extra atari is not installed")
ENGINES = ["ale", "envpool"]


def need(engine: str) -> None:
    if engine == "envpool":
        pytest.importorskip("envpool", reason="the extra envpool is not installed")
    if engine == "sync":
        pytest.importorskip("cv2", reason="OpenCV is not installed")


def noop(num_envs: int) -> Any:
    return np.zeros(num_envs, dtype=np.int64)


def is_first(frames: Any) -> bool:
    """A stack as it is after a reset: ale-py pads with black frames, EnvPool with the same one."""
    return bool(not frames[:3].any() or (frames == frames[3]).all())


@pytest.mark.parametrize("engine", ENGINES)
def test_pong_is_cut_off_at_its_limit_with_its_true_final_observation(engine: Any) -> None:
    need(engine)
    limit = 7
    env = make_vec(EnvConfig("ALE/Pong-v5", engine, max_episode_steps=limit, num_threads=1), 2)
    first = env.reset(0)
    assert first.shape == (2, 4, 84, 84)
    assert first.dtype == np.uint8
    kept: list[tuple[Any, Any]] = [(first, first.copy())]
    for t in range(3 * (limit + 1)):
        step = env.step(noop(2))
        filler = t % (limit + 1) == limit
        ends = t % (limit + 1) == limit - 1
        assert (step.mask == (not filler)).all()
        assert (step.truncated == ends).all()
        assert not step.terminated.any()
        previous = kept[-1][1]
        for i in range(2):
            if filler:
                assert is_first(step.obs[i])
            else:  # the stack moved by one frame, at an end too: nothing was reset
                assert (step.obs[i, :-1] == previous[i, 1:]).all()
        kept.append((step.obs, step.obs.copy()))
    assert all((now == then).all() for now, then in kept), "the engine must not reuse its arrays"
    env.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_lost_game_of_pong_terminates_after_21_points(engine: Any) -> None:
    need(engine)
    env = make_vec(EnvConfig("ALE/Pong-v5", engine, num_threads=1, frame_skip=8), 1)
    env.reset(0)
    score = 0.0
    for _ in range(2000):
        step = env.step(noop(1))
        score += float(step.reward[0])
        if step.terminated[0] or step.truncated[0]:
            break
    assert step.terminated[0] and not step.truncated[0]
    assert score == -21
    filler = env.step(noop(1))
    assert not filler.mask[0] and filler.reward[0] == 0
    assert is_first(filler.obs[0])
    env.close()


@pytest.mark.parametrize("engine", [*ENGINES, "sync"])
def test_a_lost_life_ends_the_episode_but_not_the_game(engine: Any) -> None:
    need(engine)
    config = EnvConfig("ALE/Breakout-v5", engine, num_threads=1, repeat_action_probability=0.0)
    for episodic, expected in ((False, 1), (True, 5)):
        env = make_vec(replace(config, episodic_life=episodic), 1)
        env.reset(0)
        ends, new_games, frames = 0, 0, []
        for _ in range(2000):
            step = env.step(np.ones(1, dtype=np.int64))  # FIRE serves the ball
            ended = bool(step.terminated[0] | step.truncated[0])
            ends += ended
            if not step.mask[0]:
                frames.append(step.obs[0, -1])
                if is_first(step.obs[0]):
                    new_games += 1
                    break
        assert ends == expected, "Breakout has 5 lives"
        assert new_games == 1
        assert len(frames) == expected, "one filler after each end"
        env.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_rewards_are_raw(engine: Any) -> None:
    need(engine)
    env = make_vec(EnvConfig("ALE/MsPacman-v5", engine, num_threads=1), 4)
    env.reset(0)
    rng = np.random.default_rng(0)
    for _ in range(150):
        reward = env.step(rng.integers(0, 9, 4)).reward
        assert reward.dtype == np.float32
        if reward.max() >= 10:
            break
    assert reward.max() >= 10, "a pill is worth 10 points"
    env.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_seed_gives_one_trajectory_on_any_number_of_threads(engine: Any) -> None:
    need(engine)

    def frames(seed: int, num_threads: int) -> Any:
        config = EnvConfig("ALE/Breakout-v5", engine, num_threads=num_threads)
        env = make_vec(config, 3)
        rng = np.random.default_rng(1)
        start = env.reset(seed)
        obs = np.stack([start, *(env.step(rng.integers(0, 4, 3)).obs for _ in range(20))])
        env.close()
        return obs

    one = frames(4, 1)
    assert (one == frames(4, 2)).all()
    assert (one != frames(5, 1)).any()
    assert (one[:, 0] != one[:, 1]).any(), "environments have seeds of their own"


def test_envpools_own_id_of_a_game_is_refused_because_atari_fields_would_not_count() -> None:
    need("envpool")
    with pytest.raises(UniRLError, match=r'write env\.id "ALE/Pong-v5"') as caught:
        make_vec(EnvConfig("Pong-v5", "envpool", frame_stack=2), 1)
    assert len(caught.value.parts) == 3
    with pytest.raises(UniRLError, match="no Atari game") as caught:
        make_vec(EnvConfig("ALE/CartPole-v1", "envpool"), 1)
    assert len(caught.value.parts) == 3
    obs, _ = spaces(EnvConfig("ALE/Pong-v5", "envpool", frame_stack=2))
    assert obs.shape == (2, 84, 84)
    obs, _ = spaces(EnvConfig("ALE/Pong-v5", "envpool", frame_size=42))
    assert obs.shape == (4, 42, 42)


def test_spaces_follow_the_config() -> None:
    obs, action = spaces(EnvConfig("ALE/Pong-v5"))
    assert obs.shape == (4, 84, 84)
    assert action.n == 6  # type: ignore[attr-defined]
    obs, action = spaces(
        EnvConfig(
            "ALE/Pong-v5",
            frame_stack=2,
            full_action_space=True,
            kwargs={"img_height": 64, "img_width": 96},
        )
    )
    assert obs.shape == (2, 64, 96)
    assert action.n == 18  # type: ignore[attr-defined]


def test_small_frames_are_the_large_ones_with_four_pixels_made_one() -> None:
    large, small = (
        make_vec(EnvConfig("ALE/Pong-v5", num_threads=1, frame_size=size), 1) for size in (84, 42)
    )
    one, other = large.reset(3), small.reset(3)
    for _ in range(60):
        one, other = large.step(noop(1)).obs, small.step(noop(1)).obs
    assert other.shape == (1, 4, 42, 42)
    pooled = one.reshape(1, 4, 42, 2, 42, 2).mean(axis=(3, 5))
    assert np.abs(pooled - other).max() <= 1, "both are means over the screen's areas, rounded"
    assert other.std() > 1
    large.close()
    small.close()


def test_ale_in_same_step_mode_is_converted() -> None:
    limit = 5
    kwargs = {"autoreset_mode": "SameStep"}
    config = EnvConfig("ALE/Pong-v5", max_episode_steps=limit, num_threads=1, kwargs=kwargs)
    env = make_vec(config, 2)
    env.reset(0)
    masks, last = [], None
    for t in range(2 * limit):
        step = env.step(noop(2))
        masks.append(bool(step.mask.all()))
        if step.truncated.all():
            assert step.acting_obs is not step.obs
            assert is_first(step.acting_obs[0])
            assert last is not None and (step.obs[:, :-1] == last[:, 1:]).all()
        else:
            assert step.acting_obs is step.obs, t
        last = step.obs
    assert masks == [True] * limit + [False] + [True] * (limit - 1)


@pytest.mark.skipif(
    importlib.util.find_spec("cv2") is not None, reason="OpenCV is installed here, nothing to miss"
)
def test_atari_in_sync_without_opencv_names_the_extra() -> None:
    with pytest.raises(UniRLError, match=r"unirl\[atari\]"):
        make_vec(EnvConfig("ALE/Pong-v5", "sync"), 1)


@pytest.mark.skipif(importlib.util.find_spec("cv2") is None, reason="OpenCV is not installed")
def test_atari_in_sync_has_the_same_shape_and_limit_as_the_engine() -> None:
    env = make_vec(EnvConfig("ALE/Pong-v5", "sync", max_episode_steps=6), 1)
    assert env.reset(0).shape == (1, 4, 84, 84)
    assert [bool(env.step(noop(1)).truncated[0]) for _ in range(7)] == [False] * 5 + [True, False]
    env.close()
    obs, _ = spaces(EnvConfig("ALE/Pong-v5", "sync", frame_size=42))
    assert obs.shape == (4, 42, 42)
