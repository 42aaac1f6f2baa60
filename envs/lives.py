"""Atari lives as episodes (Mnih et al. 2015, Nature 518): a lost life ends the episode, not the
game."""

from __future__ import annotations

from typing import Any

import gymnasium


class EpisodicLife(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Reports a lost life as terminated; the reset after it continues the same game.

    That reset is one no-op step, whose reward is lost, like the filler row of the ale engine. A
    seed, a truncation and the end of the game start a new game. Put it outside of frame skip and
    stack, which then continue over a lost life too. (AtariPreprocessing has terminal_on_life_loss,
    but its reset starts the whole game again: what comes after the first life would not be seen.)
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._lives = 0
        self._continues = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """A no-op while lives remain, else a new game."""
        if self._continues and seed is None:
            obs, _, terminated, truncated, info = self.env.step(0)
            if not (terminated or truncated):
                self._lives = self._count()
                return obs, info
        obs, info = self.env.reset(seed=seed, options=options)
        self._lives, self._continues = self._count(), False
        return obs, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        lives = self._count()
        lost, self._lives = lives < self._lives, lives
        self._continues = lost and not (terminated or truncated)
        return obs, reward, terminated or lost, truncated, info

    def _count(self) -> int:
        game: Any = self.env.unwrapped
        lives: int = game.ale.lives()
        return lives
