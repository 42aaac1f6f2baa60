"""Pictures of environments: what a simulator's own renderer draws, carts and poles as Gymnasium
draws them, and what to do where nothing can be drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from numpy.typing import NDArray

from unirl.envs.device import POLICY, DeviceEnv, Groups
from unirl.errors import UniRLError

Picture: TypeAlias = NDArray[np.uint8]
"""[height, width, 3]."""
_CARTS = {"torch/CartPole-v1": (2.4, 1.0), "torch/Cartpole": (3.0, -1.0)}
"""Metres from the middle to the rail's end, and the sign of an angle that tilts the pole towards
positive positions."""
_USUAL_FPS = 30.0


@contextmanager
def drawing_of(env: DeviceEnv) -> Iterator[Callable[[Groups], Picture]]:
    """What draws environment 0 of this simulator, given the observations of its present state."""
    env_id = env.spec.id
    frame = getattr(env, "frame", None)
    if frame is not None:  # the simulator's own renderer, which it closes itself
        yield lambda obs: drawn(env_id, lambda: frame(0))
        return
    if env_id not in _CARTS:
        raise undrawable(
            env_id,
            "this simulator has no renderer",
            f"warp/ tasks draw themselves, and so do {' and '.join(_CARTS)}",
        )
    rail, sign = _CARTS[env_id]
    # Gymnasium's CartPole, whose state is what these tasks observe.
    cart: Any = gymnasium.make("CartPole-v1", render_mode="rgb_array").unwrapped
    cart.x_threshold = rail

    def draw(obs: Groups) -> Picture:
        position, velocity, angle, turning = obs[POLICY][0].tolist()
        cart.state = (position, velocity, sign * angle, sign * turning)
        return drawn(env_id, cart.render)

    try:
        yield draw
    finally:
        cart.close()


def frames_per_second(env: DeviceEnv) -> float:
    """At which speed one picture per step looks right."""
    return 1 / env.spec.step_dt if env.spec.step_dt > 0 else _USUAL_FPS


def drawn(env_id: str, draw: Callable[[], Any]) -> Picture:
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
    return UniRLError(
        f'env "{env_id}" cannot be drawn',
        f"a picture [height, width, 3] is needed, but {found}",
        remedy or 'the environment must support render_mode="rgb_array"',
    )
