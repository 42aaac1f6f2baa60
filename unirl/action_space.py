"""What an action space consists of: its parts, the choices that a mask says something of, and the
mask's own space beside an observation.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray


class ActionMask(spaces.Box):
    """Which options of an action space are allowed, as an entry of an observation: int8 [n], not 0
    where allowed, in the order of `num_options`. Networks do not read it: the action head does.
    """

    def __init__(self, num_options: int) -> None:
        super().__init__(0, 1, (num_options,), np.int8)

    def __repr__(self) -> str:
        return f"ActionMask({self.shape[0]})"


def parts(space: spaces.Dict | spaces.Tuple[Any]) -> list[tuple[str, Space[Any]]]:
    """The parts of a Dict or Tuple with their names in a slot: keys, or "0", "1", ..."""
    if isinstance(space, spaces.Tuple):
        return [(str(index), part) for index, part in enumerate(space.spaces)]
    return [(str(key), part) for key, part in space.spaces.items()]


def num_options(space: Space[Any]) -> list[int]:
    """How many options each choice of an action has, in the order of parts; a Box has no choice."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)]
    if isinstance(space, spaces.MultiDiscrete):
        return [int(size) for size in space.nvec.reshape(-1)]
    if isinstance(space, spaces.MultiBinary):
        return [2] * int(np.prod(space.shape))
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return [size for _, part in parts(space) for size in num_options(part)]
    return []


def first_options(space: Space[Any]) -> NDArray[np.intp]:
    """Where the options of each choice begin in a mask."""
    sizes = num_options(space)
    return np.array(list(accumulate(sizes, initial=0))[:-1], dtype=np.intp)


def find_mask(space: Space[Any]) -> str | None:
    """The name of the mask among the entries of an observation, if it has one."""
    if not isinstance(space, spaces.Dict):
        return None
    return next((key for key, leaf in space.spaces.items() if isinstance(leaf, ActionMask)), None)
