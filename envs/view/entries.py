"""Which entries of an observation are shown, and texts among them as numbers.

The tokeniser of a Text space is its characters: a text is max_length numbers, 0 where it has ended,
else 1 + the character's index among the space's characters in order. Policies read them as they
read any MultiDiscrete: one-hot where all positions have few values together, else embedded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from numpy.typing import NDArray

from unirl.errors import UniRLError

MAX_TEXT = 256
"""Longer texts are refused: the first layer reads every position."""

Read = Callable[[Any], Any]
"""From an observation as the environment gives it to what is shown of it."""


def shown_entries(
    space: Space[Any], dropped: Collection[str], env_id: str, reads_text: bool
) -> tuple[Space[Any], Read | None]:
    """The space without dropped entries and with texts as numbers, and what reads observations so;
    None where nothing changes. reads_text: else texts stay texts, for spaces.py to refuse.
    """
    left = set(dropped)

    def view(space: Space[Any], path: str) -> tuple[Space[Any], Read | None]:
        if reads_text and isinstance(space, spaces.Text) and space.max_length <= MAX_TEXT:
            return _tokens(space, path, env_id)
        if not isinstance(space, spaces.Dict | spaces.Tuple):
            return space, None
        shown: dict[Any, tuple[Space[Any], Read | None]] = {}
        keys: Any = range(len(space)) if isinstance(space, spaces.Tuple) else space.spaces
        for key in keys:
            name = f"{path}/{key}" if path else str(key)
            if isinstance(space, spaces.Dict) and name in dropped:
                left.discard(name)
            else:
                shown[key] = view(space[key], name)
        reads = [(key, read) for key, (_, read) in shown.items()]
        if len(shown) == len(space) and all(read is None for _, read in reads):
            return space, None
        if isinstance(space, spaces.Tuple):
            return spaces.Tuple([one for one, _ in shown.values()]), lambda obs: tuple(
                obs[key] if read is None else read(obs[key]) for key, read in reads
            )
        # What is missing, the check of the observation's structure names.
        return spaces.Dict({key: one for key, (one, _) in shown.items()}), lambda obs: {
            key: obs[key] if read is None else read(obs[key]) for key, read in reads if key in obs
        }

    shown, read = view(space, "")
    if left:
        raise UniRLError(
            f'env "{env_id}" has no observation {", ".join(sorted(left))}',
            f"env.drop_observations names entries of a Dict, its observations are {space}",
            'correct the names; levels are separated by "/"',
        )
    if dropped and isinstance(shown, spaces.Dict) and not shown.spaces:
        raise UniRLError(
            f'env "{env_id}" has nothing left to observe',
            f"env.drop_observations is {sorted(dropped)}, and these are all entries it has",
            "keep one",
        )
    return shown, read


def _tokens(text: spaces.Text, path: str, env_id: str) -> tuple[Space[Any], Read]:
    index = {character: i for i, character in enumerate(sorted(text.character_set), 1)}
    shown = spaces.MultiDiscrete([len(index) + 1] * text.max_length)

    def read(given: Any) -> NDArray[np.int64]:
        tokens = np.zeros(text.max_length, np.int64)
        known = isinstance(given, str) and len(given) <= len(tokens)
        if not known or not text.character_set.issuperset(given):
            raise UniRLError(
                f'env "{env_id}" returned a text outside of its space' + f" ({path})" * bool(path),
                f"the observation space promises {text}, received {given!r}",
                "correct the environment's observation_space or its observations",
            )
        tokens[: len(given)] = [index[character] for character in given]
        return tokens

    return shown, read
