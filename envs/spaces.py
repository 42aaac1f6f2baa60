"""Gymnasium spaces as trees of tensors: what an observation or action looks like in a slot, and how
it gets there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space, iterate
from numpy.typing import NDArray

from unirl.action_space import parts
from unirl.errors import UniRLError

Leaf: TypeAlias = "tuple[tuple[int, ...], torch.dtype]"
LeafTree: TypeAlias = "Leaf | dict[str, LeafTree]"
ObsReader: TypeAlias = Callable[[Any, int], Any]
ActionWriter: TypeAlias = Callable[[Any], Any]

SUPPORTED_OBS = "Box, Discrete, MultiDiscrete, MultiBinary, short Text, Dict, Tuple"
SUPPORTED_ACTION = "Discrete, MultiDiscrete (one axis), MultiBinary, Box (float), Dict, Tuple"

# What torch computes with: wide floats narrow to float32, unsigned integers widen, and only images
# stay uint8.
_BOX_DTYPES = {
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint16": torch.int32,
    "uint32": torch.int64,
    "uint64": torch.int64,
    "float16": torch.float32,
    "float32": torch.float32,
    "float64": torch.float32,
    "bool": torch.float32,
}


def obs_fields(space: Space[Any], num_envs: int, env_id: str = "", path: str = "") -> LeafTree:
    """The tree of (shape, dtype) of one row of observations; shapes begin with `num_envs`.

    Box, MultiDiscrete and MultiBinary keep their shape, Discrete is [B]; Dict and Tuple nest (keys
    "0", "1", ...). Raises UniRLError for other spaces.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return {
            name: obs_fields(child, num_envs, env_id, f"{path}/{name}" if path else name)
            for name, child in _children(space, env_id)
        }
    shape, dtype = _obs_leaf(space, env_id, path)
    return (num_envs, *shape), dtype


def action_fields(space: Space[Any], num_envs: int, env_id: str = "") -> LeafTree:
    """(shape, dtype) of one row of actions: int64 [B] or [B, n], or float32 [B, ...]; of a Dict or
    Tuple the tree of its parts.

    Raises UniRLError for other spaces.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple) and parts(space):
        return {
            name: action_fields(part, num_envs, env_id)
            for name, part in _children(space, env_id, "a part of its actions")
        }
    if isinstance(space, spaces.Discrete):
        return (num_envs,), torch.int64
    one_axis = isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1
    if one_axis or isinstance(space, spaces.MultiBinary):
        return (num_envs, *space.shape), torch.int64  # type: ignore[misc]
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return (num_envs, *space.shape), torch.float32
    raise _unsupported("action", space, SUPPORTED_ACTION, env_id)


def obs_reader(space: Space[Any], env_id: str = "") -> ObsReader:
    """A function (batch of an engine, num_envs) -> tree of arrays with the dtypes of `obs_fields`.

    It checks shapes, turns tuples into dictionaries, and counts Discrete and MultiDiscrete from 0
    whatever their `start`. Where nothing has to change the engine's array is handed through without
    a copy.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        keys: Any = space.spaces if isinstance(space, spaces.Dict) else range(len(space))
        readers = [obs_reader(child, env_id) for _, child in _children(space, env_id)]
        plan = [(str(key), key, reader) for key, reader in zip(keys, readers, strict=True)]

        def read_branch(obs: Any, num_envs: int) -> Any:
            try:
                return {name: reader(obs[key], num_envs) for name, key, reader in plan}
            except (KeyError, IndexError, TypeError) as error:
                received = sorted(obs) if isinstance(obs, Mapping) else type(obs).__name__
                raise UniRLError(
                    f'env "{env_id}" returned an observation of the wrong structure',
                    f"the observation space promises {space}, received {received}",
                    "correct the environment's observation_space or its observations",
                ) from error

        return read_branch

    shape, torch_dtype = _obs_leaf(space, env_id)
    dtype = torch.empty((), dtype=torch_dtype).numpy().dtype
    start = _start(space)

    def read_leaf(obs: Any, num_envs: int) -> NDArray[Any]:
        array = np.asarray(obs)
        if array.shape != (num_envs, *shape):
            raise wrong_shape(env_id, (num_envs, *shape), array.shape)
        if array.dtype != dtype:
            array = array.astype(dtype)
        return array if start is None else array - start

    return read_leaf


def action_writer(space: Space[Any], num_envs: int, env_id: str = "") -> ActionWriter:
    """A function from actions as a policy samples them to actions as an engine takes them, checking
    their shape. Parts of a Dict or Tuple come in its own structure and order.

    Discrete and MultiDiscrete are shifted by `start`, MultiBinary is of its dtype. Box is clipped
    to its bounds: the slot keeps the sample as it was drawn, so its log-probability stays exact,
    and the environment sees the nearest legal action.
    """
    if isinstance(space, spaces.Dict | spaces.Tuple):
        writers = [(name, action_writer(part, num_envs, env_id)) for name, part in parts(space)]
        if isinstance(space, spaces.Tuple):
            return lambda action: tuple(write(action[name]) for name, write in writers)
        keyed = list(zip(space.spaces, writers, strict=True))
        return lambda action: {key: write(action[name]) for key, (name, write) in keyed}
    expected: Any = action_fields(space, num_envs, env_id)
    expected, start = expected[0], _start(space)

    def checked(action: NDArray[Any]) -> NDArray[Any]:
        if action.shape != expected:
            raise UniRLError(
                f'env "{env_id}" was given actions of the wrong shape',
                f"expected {expected}, received {tuple(action.shape)}",
                "one action per environment is needed, also for filler rows",
            )
        return action

    if isinstance(space, spaces.Box):
        # Of the space's dtype: a float32 0.1 is above a float64 bound of 0.1.
        low, high = space.low, space.high
        return lambda action: np.minimum(np.maximum(checked(action), low), high, dtype=low.dtype)
    if start is not None:
        return lambda action: checked(action) + start
    if isinstance(space, spaces.MultiBinary):
        return lambda action: checked(action).astype(space.dtype)
    return checked


def one_by_one(space: Space[Any], actions: Any) -> Any:
    """What an `action_writer` returned as a sequence of one environment's actions each."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return actions
    first = actions
    while not isinstance(first, np.ndarray):
        first = next(iter(first.values() if isinstance(first, Mapping) else first))
    return list(iterate(batch_space(space, len(first)), actions))


def write_obs(target: Any, obs: Any) -> None:
    """Copy a tree of arrays [B, ...] into a tree of tensors of the same shapes, for example a
    slot's row; one copy."""
    if isinstance(obs, Mapping):
        for key, child in obs.items():
            write_obs(target[key], child)
        return
    # torch warns about memory it may not write to, though it only reads here; such arrays are rare
    # (JAX).
    target.copy_(torch.from_numpy(obs if obs.flags.writeable else obs.copy()))


def wrong_shape(
    env_id: str, expected: tuple[int, ...], received: tuple[int, ...], where: str = ""
) -> UniRLError:
    return UniRLError(
        f'env "{env_id}" returned an observation of the wrong shape{where}',
        f"the observation space promises {tuple(expected)}, received {tuple(received)}",
        "correct the environment's observation_space or its observations",
    )


def _children(
    space: spaces.Dict | spaces.Tuple[Any], env_id: str, kind: str = "an observation"
) -> list[tuple[str, Space[Any]]]:
    for name, _ in parts(space):
        if "/" in name:
            raise UniRLError(
                f'env "{env_id}" has {kind} named {name!r}',
                'a name in a Dict space must not contain "/", which separates levels in a slot',
                "rename the key in a wrapper",
            )
    return parts(space)


def _obs_leaf(space: Space[Any], env_id: str, path: str = "") -> Leaf:
    if isinstance(space, spaces.Box) and space.dtype.name in _BOX_DTYPES:
        return space.shape, _BOX_DTYPES[space.dtype.name]
    if isinstance(space, spaces.Discrete):
        return (), torch.int64
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        return tuple(space.shape), torch.int64
    drop = f'leave it out: env.drop_observations = ["{path}"]; or ' if path else ""
    raise _unsupported("observation", space, SUPPORTED_OBS, env_id, drop)


def _start(space: Space[Any]) -> NDArray[np.int64] | None:
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return None
    start = np.asarray(space.start, dtype=np.int64)
    return start if start.any() else None


def _unsupported(
    kind: str, space: Space[Any], supported: str, env_id: str, remedy: str = ""
) -> UniRLError:
    return UniRLError(
        f'env "{env_id}" has an unsupported {kind} space: {space}',
        f"supported are {supported}; found {type(space).__name__}",
        f"{remedy}convert it in a wrapper (gymnasium.wrappers)",
    )
