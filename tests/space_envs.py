"""Environments whose observations tell which action is wanted, for every kind of action space; with
masks, which they enforce.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from gymnasium.spaces.utils import flatdim, flatten

ACTIONS: dict[str, Space[Any]] = {
    "choice": Discrete(5, start=2),
    "choices": MultiDiscrete([3, 4]),
    "bits": MultiBinary(4),
    "matrix of bits": MultiBinary([2, 2]),
    "hybrid": Dict(
        {
            "tools": Tuple((MultiBinary(2), Dict({"cards": MultiDiscrete([2, 3])}))),
            "move": Discrete(3, start=-1),
            "aim": Box(np.float32([-2, -1]), np.float32([2, 1]), dtype=np.float32),
        }
    ),
    "tuple": Tuple((Discrete(3), Box(-1, 1, (1,), np.float64))),
}


class Match(gymnasium.Env[Any, Any]):
    """Reward is the share of the parts of an action that are as the observation says; episodes of 6
    steps. mask: "info" or "obs": each Discrete and MultiDiscrete part may take the wanted option
    and one more, which the observation does not tell apart from others; what else comes fails. The
    mask of an episode's end allows nothing.
    """

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(
        self, action: str = "hybrid", mask: str = "", render_mode: str | None = None
    ) -> None:
        self.render_mode = render_mode
        self.action_space, self._mask = deepcopy(ACTIONS[action]), mask
        shown = Box(-2, 2, (flatdim(self.action_space),), np.float32)
        self.observation_space: Space[Any] = shown
        if mask == "obs":
            number = {"choice": 5, "choices": 7}[action]
            self.observation_space = Dict(
                {"observation": shown, "action_mask": Box(0, 1, (number,), np.int8)}
            )
        self._allowed: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.action_space.seed(seed)
        self._step = 0
        return self._next(False)

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        check_structure(self.action_space, action)
        assert legal(self.action_space, action, self._allowed), f"{action!r} is not allowed"
        reward = score(self.action_space, self._wanted, action)
        self._step += 1
        over = self._step == 6
        obs, info = self._next(over)
        return obs, reward, over, False, info

    def render(self) -> Any:
        return np.zeros((4, 4, 3), np.uint8)

    def _next(self, over: bool) -> Any:
        self._wanted = self.action_space.sample()
        obs = flatten(self.action_space, self._wanted).astype(np.float32)
        if not self._mask:
            return obs, {}
        self._allowed = self._masks(self.action_space, self._wanted)
        given = empty(self._allowed) if over else self._allowed
        if self._mask == "info":
            return obs, {"action_mask": given}
        flat = np.concatenate(given) if isinstance(given, tuple) else given
        return {"observation": obs, "action_mask": flat}, {}

    def _masks(self, space: Space[Any], wanted: Any) -> Any:
        if isinstance(space, Dict):
            return {key: self._masks(part, wanted[key]) for key, part in space.spaces.items()}
        if isinstance(space, Tuple):
            return tuple(
                self._masks(part, one) for part, one in zip(space.spaces, wanted, strict=True)
            )
        if isinstance(space, MultiDiscrete):
            sizes = zip(space.nvec, wanted, strict=True)
            return tuple(self._mask_of(size, one) for size, one in sizes)
        return self._mask_of(space.n, wanted - space.start) if isinstance(space, Discrete) else None

    def _mask_of(self, size: int, wanted: int) -> Any:
        mask = np.zeros(size, np.int8)
        mask[wanted] = mask[self.np_random.integers(size)] = 1
        return mask


def empty(masks: Any) -> Any:
    if isinstance(masks, dict):
        return {key: empty(mask) for key, mask in masks.items()}
    if isinstance(masks, tuple):
        return tuple(empty(mask) for mask in masks)
    return None if masks is None else masks * 0


def check_structure(space: Space[Any], action: Any) -> None:
    """The environment's own structure, order of keys and dtypes."""
    if isinstance(space, Dict):
        assert list(action) == list(space.spaces), list(action)
        for key, part in space.spaces.items():
            check_structure(part, action[key])
    elif isinstance(space, Tuple):
        assert isinstance(action, tuple)
        for part, one in zip(space.spaces, action, strict=True):
            check_structure(part, one)
    elif isinstance(space, MultiBinary | Box):
        assert action.dtype == space.dtype, action.dtype


def legal(space: Space[Any], action: Any, allowed: Any) -> bool:
    if allowed is None:
        return True
    if isinstance(space, Dict):
        return all(legal(part, action[k], allowed[k]) for k, part in space.spaces.items())
    if isinstance(space, Tuple):
        return all(map(legal, space.spaces, action, allowed))
    if isinstance(space, MultiDiscrete):
        return all(mask[one] for mask, one in zip(allowed, action, strict=True))
    assert isinstance(space, Discrete)
    return bool(allowed[action - space.start])


def score(space: Space[Any], wanted: Any, action: Any) -> float:
    if isinstance(space, Dict):
        parts = [score(part, wanted[k], action[k]) for k, part in space.spaces.items()]
        return sum(parts) / len(parts)
    if isinstance(space, Tuple):
        return sum(map(score, space.spaces, wanted, action)) / len(space)
    if isinstance(space, Box):
        return 1.0 - min(1.0, float(np.abs(wanted - action).mean()))
    return float(np.mean(wanted == action))


class Mission(Space[str]):
    """Words in no space that is supported, as MiniGrid has them."""

    def __init__(self) -> None:
        super().__init__(dtype=str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        return "go there"

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)


class Words(gymnasium.Env[Any, Any]):
    """The action that is wanted is the second letter of a word of one to three letters; there is
    also a mission."""

    def __init__(self) -> None:
        letters = Dict({"word": Text(3, charset="dcba"), "mission": Mission()})
        self.observation_space = Dict({"given": letters, "mission": Mission()})
        self.action_space = Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._step = 0
        return self._next(), {}

    def step(self, action: Any) -> Any:
        reward = float("abcd"[action] == self._word[-2:][0])
        self._step += 1
        return self._next(), reward, self._step == 6, False, {}

    def _next(self) -> Any:
        size = self.np_random.integers(2, 4)
        self._word = "".join(self.np_random.choice(list("abcd"), size))
        return {"given": {"word": self._word, "mission": "x"}, "mission": "go there"}


class Turns:
    """Two agents in turns, as PettingZoo's games show them: who waits has an empty mask."""

    def __init__(self, action: Any = "hybrid") -> None:
        self.possible_agents, self.metadata = ["a", "b"], {"name": "Turns"}
        self._action = ACTIONS[action] if action == "hybrid" else Discrete(3)
        self._number = 12 if action == "hybrid" else 3

    def observation_space(self, agent: Any) -> Any:
        entries = {"observation": Box(0, 9, (1,), np.float32)}
        return Dict({**entries, "action_mask": Box(0, 1, (self._number,), np.int8)})

    def action_space(self, agent: Any) -> Any:
        return self._action

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.agents, self._turn = self.possible_agents[:], 0
        return self._obs(), {"a": {}, "b": {}}

    def step(self, actions: Any) -> Any:
        assert all(self._action.contains(action) for action in actions.values()), actions
        self._turn += 1
        over = dict.fromkeys(self.agents, self._turn == 3)
        obs, agents = self._obs(), self.agents
        self.agents = [] if self._turn == 3 else agents
        no = dict.fromkeys(agents, False)
        return obs, dict.fromkeys(agents, 0.0), over, no, {agent: {} for agent in agents}

    def _obs(self) -> Any:
        on_turn = np.eye(3, dtype=np.int8)[0] if self._number == 3 else np.ones(12, np.int8)
        masks = [on_turn * (self._turn % 2 == i) for i in range(2)]
        seen = np.float32([self._turn])
        names = zip(self.possible_agents, masks, strict=True)
        return {name: {"observation": seen, "action_mask": mask} for name, mask in names}

    def close(self) -> None:
        pass


for _name, _env in (("Match", Match), ("Words", Words)):
    if f"unirl-test/{_name}-v0" not in gymnasium.registry:
        gymnasium.register(f"unirl-test/{_name}-v0", _env)
