"""A lost life ends an episode and the game continues; everything else starts a new one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest

from unirl.envs.lives import EpisodicLife


class Game(gymnasium.Env[Any, Any]):
    """A game by a script: at each step "." nothing, "x" a lost life, "t" a truncation, in which a
    life is lost too. Observation: (number of the game, step in it)."""

    def __init__(self, script: str) -> None:
        self.script, self.game, self.t, self.lives = script, -1, 0, 0
        self.actions: list[int] = []
        self.ale = SimpleNamespace(lives=lambda: self.lives)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.game, self.t, self.lives = self.game + 1, 0, self.script.count("x")
        return (self.game, self.t), {}

    def step(self, action: Any) -> Any:
        event = self.script[self.t]
        self.t += 1
        self.lives -= event in "xt"
        self.actions.append(action)
        return (self.game, self.t), 1.0, self.lives == 0, event == "t", {}


def play(env: EpisodicLife, num_steps: int) -> Any:
    for _ in range(num_steps):
        result = env.step(7)
    return result


def test_after_a_lost_life_a_no_op_continues_the_game() -> None:
    game = Game(".x...x")
    env = EpisodicLife(game)
    assert env.reset(seed=0)[0] == (0, 0)
    assert play(env, 2)[2], "a lost life terminates"
    assert env.reset()[0] == (0, 3)
    assert game.actions == [7, 7, 0]
    assert not play(env, 2)[2]
    assert play(env, 1)[2]
    assert env.reset()[0] == (1, 0), "no life is left"


@pytest.mark.parametrize(
    ("script", "num_steps", "kwargs"),
    [
        (".tx", 2, {}),
        (".xx", 2, {}),
        (".x.x", 2, {"seed": 1}),
        (".x.x", 1, {}),
        (".xtx", 2, {}),
    ],
    ids=["truncation", "game over in the no-op", "seed", "no life lost", "cut off in the no-op"],
)
def test_a_new_game_starts_after(script: str, num_steps: int, kwargs: dict[str, Any]) -> None:
    env = EpisodicLife(Game(script))
    env.reset(seed=0)
    play(env, num_steps)
    assert env.reset(**kwargs)[0] == (1, 0)
