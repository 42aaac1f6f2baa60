"""A game of two players that is over in a few steps and has an obvious best play, for self-play."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

Obs = NDArray[np.float32]


class Duel:
    """Two players on a line race for a coin: the first one there wins 1 and the other loses 1.

    Observation [2]: how far the coin is to the right of the player, and of the other one, in
    lengths of the line; both players see it from their own side. Actions: step left, stay, step
    right. Both terminate when the coin is taken, with 0 each if they arrive together, and both are
    truncated after max_steps. Walking to the coin is never worse than anything else, and better
    against a player that may hesitate. Coin and players begin in random cells, the players not on
    the coin. Has PettingZoo's parallel API.
    """

    metadata: dict[str, Any] = {"name": "Duel", "render_modes": []}  # noqa: RUF012 (its interface)

    def __init__(self, length: int = 7, max_steps: int = 20) -> None:
        self.possible_agents = ["left", "right"]
        self.agents: list[str] = []
        self._spaces = Box(-1.0, 1.0, (2,), np.float32), Discrete(3)
        self._length, self._max_steps = length, max_steps
        self._random = np.random.default_rng()
        self._coin, self._cells, self._step = 0, [0, 0], 0

    def observation_space(self, agent: str) -> Box:
        return self._spaces[0]

    def action_space(self, agent: str) -> Discrete:
        return self._spaces[1]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Obs], dict[str, dict[str, Any]]]:
        if seed is not None:
            self._random = np.random.default_rng(seed)
        self.agents, self._step = list(self.possible_agents), 0
        self._coin = int(self._random.integers(self._length))
        others = [cell for cell in range(self._length) if cell != self._coin]
        self._cells = [int(cell) for cell in self._random.choice(others, 2)]
        return self._obs(), self._by_agent({}, {})

    def step(
        self, actions: dict[str, Any]
    ) -> tuple[
        dict[str, Obs],
        dict[str, float],
        dict[str, bool],
        dict[str, bool],
        dict[str, dict[str, Any]],
    ]:
        self._step += 1
        for i, agent in enumerate(self.possible_agents):
            cell = self._cells[i] + int(actions[agent]) - 1
            self._cells[i] = min(max(cell, 0), self._length - 1)
        left, right = (cell == self._coin for cell in self._cells)
        win = float(left) - float(right)
        over = left or right
        late = not over and self._step == self._max_steps
        if over or late:
            self.agents = []
        return (
            self._obs(),
            self._by_agent(win, -win),
            self._by_agent(over, over),
            self._by_agent(late, late),
            self._by_agent({}, {}),
        )

    def close(self) -> None:
        """Nothing to let go of."""

    def _obs(self) -> dict[str, Obs]:
        left, right = ((self._coin - cell) / self._length for cell in self._cells)
        return self._by_agent(
            np.array([left, right], np.float32), np.array([right, left], np.float32)
        )

    def _by_agent(self, left: Any, right: Any) -> dict[str, Any]:
        return dict(zip(self.possible_agents, (left, right), strict=True))
