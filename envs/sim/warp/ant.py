"""The four-legged ant in its two variants: IsaacGymEnvs' (60 observations, 60 Hz, light and strong)
and Gymnasium's Ant-v5 (105 observations, 20 Hz).
"""

# mypy: disable-error-code="index, no-any-return, untyped-decorator"
from __future__ import annotations

from typing import Any

import mujoco_warp as mjw
import numpy as np
import warp as wp

from unirl.envs.sim.warp.locomotion import LocomotionRules, RunnerKernels, runner_start
from unirl.envs.sim.warp.worlds import Start, WarpTask, Worlds, gymnasium_model, own_model

FEET = ("front_left_foot", "front_right_foot", "back_left_foot", "back_right_foot")
HEALTHY_LOW, HEALTHY_HIGH = wp.constant(0.2), wp.constant(1.0)
"""Heights of the torso, m, between which Ant-v5 continues."""


def ant_isaac() -> WarpTask:
    """r = progress towards a far target + 0.5 + 0.1 upright + up to 0.5 for the heading - costs of
    action, energy and joints at their limits; -2 where it falls below 0.31 m.
    """

    def kernels(worlds: Worlds) -> RunnerKernels:
        rules = LocomotionRules()
        rules.dt = worlds.step_dt
        rules.alive_reward, rules.up_weight, rules.heading_weight = 0.5, 0.1, 0.5
        rules.actions_cost, rules.energy_cost, rules.joints_at_limit_cost = 0.005, 0.05, 0.1
        rules.death_cost, rules.termination_height = -2.0, 0.31
        rules.dof_velocity_scale, rules.angular_velocity_scale = 0.2, 1.0
        rules.contact_force_scale, rules.is_humanoid = 0.1, 0
        return RunnerKernels(worlds, rules, FEET)

    return WarpTask(
        id="warp/Ant-isaac",
        load=own_model("ant.xml"),
        start=runner_start,
        kernels=kernels,
        obs_size=60,
        physics_steps=2,
        max_episode_length=1000,
        njmax=64,
        nconmax=24,
    )


def ant_v5() -> WarpTask:
    """r = 1 while healthy + forward velocity - 0.5 sum a^2 - 5e-4 sum clip(contact forces)^2; ends
    where the torso leaves [0.2, 1] m. Gymnasium's own model, Runge-Kutta, 5 steps of 0.01 s.
    """

    return WarpTask(
        id="warp/Ant-v5",
        load=gymnasium_model("ant.xml"),
        start=gymnasium_start,
        kernels=AntV5Kernels,
        obs_size=105,
        physics_steps=5,
        max_episode_length=1000,
        njmax=64,
        nconmax=24,
    )


def gymnasium_start(mjm: Any) -> Start:
    """Gymnasium's: every coordinate +- 0.1 (the quaternion, too, and unnormalised), every velocity
    0.1 times a standard normal number.
    """
    unbounded = np.full(mjm.nq, np.inf)
    return Start(
        np.array(mjm.qpos0),
        np.full(mjm.nq, 0.1),
        -unbounded,
        unbounded,
        np.full(mjm.nv, 0.1),
        normal_qvel=True,
    )


class AntV5Kernels:
    def __init__(self, worlds: Worlds) -> None:
        self._worlds = worlds
        self._last_x = wp.zeros(worlds.num_worlds, dtype=float)

    def before(self) -> None:
        self._worlds.launch(remember_torso, [self._worlds.data.xpos, self._last_x])

    def score(self) -> None:
        w, d = self._worlds, self._worlds.data
        mjw.rne_postconstraint(w.model, d)
        w.launch(
            score_ant_v5,
            [
                *(d.qpos, d.qvel, d.xpos, d.cfrc_ext, d.ctrl, self._last_x, w.step_dt),
                *(w.wp_final_obs, w.wp_reward, w.wp_terminated),
            ],
        )

    def observe(self) -> None:
        w, d = self._worlds, self._worlds.data
        w.launch(
            observe_ant_v5,
            [d.qpos, d.qvel, w.wp_done, w.wp_valid, w.wp_final_obs, d.xpos, w.wp_obs],
        )


@wp.kernel
def remember_torso(xpos: wp.array2d[wp.vec3], last_x: wp.array[float]) -> None:
    w = wp.tid()
    last_x[w] = xpos[w, 1][0]


@wp.kernel
def score_ant_v5(
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    xpos: wp.array2d[wp.vec3],
    cfrc_ext: wp.array2d[wp.spatial_vector],
    action: wp.array2d[float],
    last_x: wp.array[float],
    dt: float,
    obs: wp.array2d[float],
    reward: wp.array[float],
    terminated: wp.array[bool],
) -> None:
    w = wp.tid()
    num_qpos = qpos.shape[1] - 2  # x and y are hidden
    for i in range(num_qpos):
        obs[w, i] = qpos[w, i + 2]
    at = num_qpos
    for i in range(qvel.shape[1]):
        obs[w, at + i] = qvel[w, i]
    at = at + qvel.shape[1]
    contact = wp.float32(0.0)
    for body in range(1, cfrc_ext.shape[1]):
        for i in range(6):
            force = wp.clamp(cfrc_ext[w, body][i], -1.0, 1.0)
            contact += force * force
            obs[w, at + 6 * (body - 1) + i] = force
    control = wp.float32(0.0)
    for i in range(action.shape[1]):
        control += action[w, i] * action[w, i]
    # As in Gymnasium, the torso's position is the one of the last evaluation of the dynamics.
    velocity = (xpos[w, 1][0] - last_x[w]) / dt
    is_healthy = qpos[w, 2] >= HEALTHY_LOW and qpos[w, 2] <= HEALTHY_HIGH
    reward[w] = velocity + wp.where(is_healthy, 1.0, 0.0) - 0.5 * control - 0.0005 * contact
    terminated[w] = not is_healthy


@wp.kernel
def observe_ant_v5(
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    done: wp.array[bool],
    valid: wp.array[bool],
    final_obs: wp.array2d[float],
    xpos: wp.array2d[wp.vec3],
    obs: wp.array2d[float],
) -> None:
    """What the policy sees next; a fresh world feels no force."""
    w = wp.tid()
    if not done[w]:
        for i in range(obs.shape[1]):
            obs[w, i] = final_obs[w, i]
        return
    num_qpos = qpos.shape[1] - 2
    for i in range(num_qpos):
        obs[w, i] = qpos[w, i + 2]
    for i in range(qvel.shape[1]):
        obs[w, num_qpos + i] = qvel[w, i]
    for i in range(num_qpos + qvel.shape[1], obs.shape[1]):
        obs[w, i] = 0.0
    xpos[w, 1] = wp.vec3(qpos[w, 0], qpos[w, 1], qpos[w, 2])
    if not valid[w]:
        for i in range(obs.shape[1]):
            final_obs[w, i] = obs[w, i]
