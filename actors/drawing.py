"""Pictures of environments: what a simulator's own renderer draws, carts and poles as Gymnasium
draws them, and what to do where nothing can be drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import gymnasium
import numpy as np
from numpy.typing import NDArray

from unirl.envs.device import POLICY, DeviceEnv, Groups
from unirl.errors import UniRLError

_CARTS = {"torch/CartPole-v1": (2.4, 1.0), "torch/Cartpole": (3.0, -1.0)}
"""Metres from the middle to the rail's end, and the sign of an angle that tilts the pole towards
positive positions."""
_USUAL_FPS = 30.0


class Drawing(Protocol):
    """Draws environment 0 of a simulator."""

    def picture(self, obs: Groups) -> NDArray[np.uint8]:
        """[height, width, 3] of the present state. obs: the observations made of it."""

    def close(self) -> None:
        """Let go of what draws; idempotent."""


def drawing_of(env: DeviceEnv) -> Drawing:
    """How this simulator is drawn. Raises UniRLError where nothing can draw it."""
    env_id = env.spec.id
    frame = getattr(env, "frame", None)
    if frame is not None:
        return _OwnRenderer(env_id, frame)
    if env_id in _CARTS:
        return _Cart(env_id, *_CARTS[env_id])
    raise undrawable(
        env_id,
        "this simulator has no renderer",
        f"warp/ tasks draw themselves, and so do {' and '.join(_CARTS)}",
    )


def frames_per_second(env: DeviceEnv) -> float:
    """At which speed one picture per step looks right."""
    return 1 / env.spec.step_dt if env.spec.step_dt > 0 else _USUAL_FPS


def drawn(env_id: str, draw: Callable[[], Any]) -> NDArray[np.uint8]:
    """What `draw` returns; UniRLError, with what usually helps, when it is no picture."""
    try:
        picture = draw()
    except gymnasium.error.DependencyNotInstalled as error:
        raise undrawable(env_id, str(error), "pip install 'unirl[video]'") from error
    except Exception as error:  # drivers and simulators raise types of their own
        found = f"{type(error).__name__}: {error}"
        remedy = "without a display, MUJOCO_GL=egl or MUJOCO_GL=osmesa may help"
        raise undrawable(env_id, found, remedy) from error
    if not isinstance(picture, np.ndarray):
        raise undrawable(env_id, f"render() gave a {type(picture).__name__}")
    return picture.astype(np.uint8, copy=False)


def undrawable(env_id: str, found: str, remedy: str = "") -> UniRLError:
    """The error for an environment that gives no picture."""
    return UniRLError(
        f'env "{env_id}" cannot be drawn',
        f"a picture [height, width, 3] is needed, but {found}",
        remedy or 'the environment must support render_mode="rgb_array"',
    )


class _OwnRenderer:
    """Draws with the simulator's `frame(world)`."""

    def __init__(self, env_id: str, frame: Callable[[int], Any]) -> None:
        self._env_id, self._frame = env_id, frame

    def picture(self, obs: Groups) -> NDArray[np.uint8]:
        return drawn(self._env_id, lambda: self._frame(0))

    def close(self) -> None:
        """The simulator closes its renderer itself; see Drawing."""


class _Cart:
    """Draws with Gymnasium's CartPole, whose state is what these tasks observe."""

    def __init__(self, env_id: str, rail: float, sign: float) -> None:
        self._env_id, self._sign = env_id, sign
        env: Any = gymnasium.make("CartPole-v1", render_mode="rgb_array")
        self._env = env.unwrapped
        self._env.x_threshold = rail

    def picture(self, obs: Groups) -> NDArray[np.uint8]:
        position, velocity, angle, turning = obs[POLICY][0].tolist()
        self._env.state = (position, velocity, self._sign * angle, self._sign * turning)
        return drawn(self._env_id, self._env.render)

    def close(self) -> None:
        self._env.close()
