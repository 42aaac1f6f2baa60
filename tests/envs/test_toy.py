"""The toys do what their docstrings say, so that other tests can rely on them."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from tests.toy_envs import Counting
from unirl.envs.config import EnvConfig
from unirl.envs.games.recall_cue import RecallCue
from unirl.envs.make import make_vec


@pytest.mark.parametrize("env", [RecallCue(), Counting()], ids=lambda e: type(e).__name__)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_toys_follow_gymnasiums_interface(env: RecallCue | Counting) -> None:
    check_env(env, skip_render_check=True)


@pytest.mark.parametrize("length", [1, 2, 8])
def test_recalling_the_cue_earns_one_and_forgetting_it_earns_chance(length: int) -> None:
    config = EnvConfig("unirl/RecallCue-v0", kwargs={"length": length, "num_cues": 3})
    env = make_vec(config, 16)
    obs = env.reset(0)
    cue = obs[:, :3].argmax(1)
    assert (obs[:, :3].sum(1) == 1).all()
    recalled, guessed = [], []
    for _ in range(40):
        for t in range(length):
            last = t == length - 1
            assert (obs[:, 3] == last).all(), "the last entry asks for the answer"
            assert t == 0 or not obs[:, :3].any(), "the cue is shown once"
            answer = cue.copy()
            answer[8:] = 0
            step = env.step(answer)
            assert (step.terminated == last).all()
            assert last or not step.reward.any()
            obs = step.obs
        recalled.append(step.reward[:8].mean())
        guessed.append(step.reward[8:].mean())
        obs = env.step(answer).obs  # the filler
        cue = obs[:, :3].argmax(1)
    assert np.mean(recalled) == 1.0
    assert abs(np.mean(guessed) - 1 / 3) < 0.1
