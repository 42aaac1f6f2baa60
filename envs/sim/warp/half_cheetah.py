"""Gymnasium's HalfCheetah-v5 on MuJoCo Warp: Gymnasium's own model, 5 steps of 0.01 s, 17
observations. (Wawrzynski 2009; Gymnasium's half_cheetah_v5.py.)
"""

# mypy: disable-error-code="index, no-any-return, untyped-decorator"
from __future__ import annotations

import warp as wp

from unirl.envs.sim.warp.ant import gymnasium_start
from unirl.envs.sim.warp.worlds import WarpTask, Worlds, gymnasium_model


def half_cheetah_v5() -> WarpTask:
    """r = forward velocity - 0.1 sum a^2. Only the limit of time ends an episode."""

    return WarpTask(
        id="warp/HalfCheetah-v5",
        load=gymnasium_model("half_cheetah.xml"),
        start=gymnasium_start,
        kernels=HalfCheetahKernels,
        obs_size=17,
        physics_steps=5,
        max_episode_length=1000,
        njmax=64,
        nconmax=16,
    )


class HalfCheetahKernels:
    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds
        self._last_x = wp.zeros(worlds.num_worlds, dtype=float)

    def before(self) -> None:
        self._worlds.launch(remember_x, [self._worlds.data.qpos, self._last_x])

    def score(self) -> None:
        w, d = self._worlds, self._worlds.data
        w.launch(
            score_half_cheetah,
            [
                *(d.qpos, d.qvel, d.ctrl, self._last_x, w.step_dt),
                *(w.wp_final_obs, w.wp_reward, w.wp_terminated),
            ],
        )

    def observe(self) -> None:
        w, d = self._worlds, self._worlds.data
        w.launch(observe_half_cheetah, [d.qpos, d.qvel, w.wp_valid, w.wp_final_obs, w.wp_obs])


@wp.func
def write_half_cheetah(
    w: int, qpos: wp.array2d[float], qvel: wp.array2d[float], obs: wp.array2d[float]
) -> None:
    """One row of the observation; x is hidden."""
    num_qpos = qpos.shape[1] - 1
    for i in range(num_qpos):
        obs[w, i] = qpos[w, i + 1]
    for i in range(qvel.shape[1]):
        obs[w, num_qpos + i] = qvel[w, i]


@wp.kernel
def remember_x(qpos: wp.array2d[float], last_x: wp.array[float]) -> None:
    w = wp.tid()
    last_x[w] = qpos[w, 0]


@wp.kernel
def score_half_cheetah(
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    action: wp.array2d[float],
    last_x: wp.array[float],
    dt: float,
    obs: wp.array2d[float],
    reward: wp.array[float],
    terminated: wp.array[bool],
) -> None:
    w = wp.tid()
    write_half_cheetah(w, qpos, qvel, obs)
    control = wp.float32(0.0)
    for i in range(action.shape[1]):
        control += action[w, i] * action[w, i]
    reward[w] = (qpos[w, 0] - last_x[w]) / dt - 0.1 * control
    terminated[w] = False


@wp.kernel
def observe_half_cheetah(
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    valid: wp.array[bool],
    final_obs: wp.array2d[float],
    obs: wp.array2d[float],
) -> None:
    w = wp.tid()
    write_half_cheetah(w, qpos, qvel, obs)
    if not valid[w]:
        write_half_cheetah(w, qpos, qvel, final_obs)
