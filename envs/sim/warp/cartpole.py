"""The cart and pole of IsaacGymEnvs, its motion computed by MuJoCo Warp. (IsaacGymEnvs'
cartpole.py; the pure torch version is torch/Cartpole.)
"""

# mypy: disable-error-code="index, no-any-return, untyped-decorator"
from __future__ import annotations

from typing import Any

import numpy as np
import warp as wp

from unirl.envs.sim.warp.worlds import Start, WarpTask, Worlds, own_model

TOO_FAR = wp.constant(3.0)
"""Distance of the cart from the middle, m, at which an episode ends."""
TOO_STEEP = wp.constant(0.5 * np.pi)
"""Angle of the pole from upright, rad, at which an episode ends."""
OBS_LIMIT = wp.constant(5.0)
"""Observations are clipped to this, as in the original's settings; rewards see them unclipped."""


def cartpole() -> WarpTask:
    """r = 1 - angle^2 - 0.01 |cart velocity| - 0.005 |pole velocity|; -2 at the end of an episode
    by its own rule. Observation: position, velocity, angle, angular velocity.
    """
    return WarpTask(
        id="warp/Cartpole",
        load=own_model("cartpole.xml"),
        start=_start,
        kernels=CartpoleKernels,
        obs_size=4,
        physics_steps=2,
        max_episode_length=500,
        njmax=0,  # nothing to touch and no limits: there is no constraint to solve for
        nconmax=0,
    )


def _start(mjm: Any) -> Start:
    unbounded = np.full(mjm.nq, np.inf)
    return Start(
        np.zeros(mjm.nq), np.full(mjm.nq, 0.1), -unbounded, unbounded, np.full(mjm.nv, 0.25)
    )


class CartpoleKernels:
    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds

    def before(self) -> None:
        """Nothing to remember."""

    def score(self) -> None:
        w, d = self._worlds, self._worlds.data
        w.launch(score_cartpole, [d.qpos, d.qvel, w.wp_final_obs, w.wp_reward, w.wp_terminated])

    def observe(self) -> None:
        w, d = self._worlds, self._worlds.data
        w.launch(observe_cartpole, [d.qpos, d.qvel, w.wp_valid, w.wp_final_obs, w.wp_obs])


@wp.func
def write_cartpole(
    w: int, qpos: wp.array2d[float], qvel: wp.array2d[float], obs: wp.array2d[float]
) -> None:
    for i in range(2):
        obs[w, 2 * i] = wp.clamp(qpos[w, i], -OBS_LIMIT, OBS_LIMIT)
        obs[w, 2 * i + 1] = wp.clamp(qvel[w, i], -OBS_LIMIT, OBS_LIMIT)


@wp.kernel
def score_cartpole(
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    obs: wp.array2d[float],
    reward: wp.array[float],
    terminated: wp.array[bool],
) -> None:
    w = wp.tid()
    write_cartpole(w, qpos, qvel, obs)
    angle = qpos[w, 1]
    is_over = wp.abs(qpos[w, 0]) > TOO_FAR or wp.abs(angle) > TOO_STEEP
    total = 1.0 - angle * angle - 0.01 * wp.abs(qvel[w, 0]) - 0.005 * wp.abs(qvel[w, 1])
    reward[w] = wp.where(is_over, -2.0, total)
    terminated[w] = is_over


@wp.kernel
def observe_cartpole(
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    valid: wp.array[bool],
    final_obs: wp.array2d[float],
    obs: wp.array2d[float],
) -> None:
    w = wp.tid()
    write_cartpole(w, qpos, qvel, obs)
    if not valid[w]:
        write_cartpole(w, qpos, qvel, final_obs)
