"""The running task that IsaacGymEnvs' ant and humanoid share: observation, reward and end of an
episode as Warp kernels. (Makoviychuk et al. 2021, arXiv 2108.10470; IsaacGymEnvs' ant.py and
humanoid.py.)
"""

# mypy: disable-error-code="index, no-any-return, untyped-decorator"
from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
import warp as wp
from mujoco_warp import ConeType

from unirl.envs.sim.warp.worlds import Start, Worlds

TARGET_X = wp.constant(1000.0)
"""Where the robot is to run to, on the x axis, m."""
TWO_PI = wp.constant(2.0 * np.pi)
ROOT_QPOS, ROOT_QVEL = 7, 6
"""Coordinates of the free joint, which come first."""


@wp.struct
class LocomotionRules:
    """Numbers of one robot's task, named as in IsaacGymEnvs' settings."""

    dt: float
    alive_reward: float
    up_weight: float
    heading_weight: float
    actions_cost: float
    energy_cost: float
    joints_at_limit_cost: float
    death_cost: float
    termination_height: float
    dof_velocity_scale: float
    angular_velocity_scale: float
    contact_force_scale: float
    is_humanoid: int
    """1: limits cost in proportion on both sides, costs weighted by motor strength, angles in
    [-pi, pi], joint forces observed. 0: a constant for the upper limit, angles in [0, 2 pi)."""


def runner_start(mjm: Any) -> Start:
    """Joints at zero, or at the limit nearest to it, +- 0.2 rad within their ranges; joint
    velocities +- 0.1 rad/s; the body upright and at rest.
    """
    qpos = np.array(mjm.qpos0, dtype=np.float64)
    low, high = np.full(mjm.nq, -np.inf), np.full(mjm.nq, np.inf)
    low[ROOT_QPOS:], high[ROOT_QPOS:] = mjm.jnt_range[1:].T
    qpos[ROOT_QPOS:] = np.clip(0.0, low[ROOT_QPOS:], high[ROOT_QPOS:])
    qpos_noise, qvel_noise = np.zeros(mjm.nq), np.zeros(mjm.nv)
    qpos_noise[ROOT_QPOS:], qvel_noise[ROOT_QVEL:] = 0.2, 0.1
    return Start(qpos, qpos_noise, low, high, qvel_noise)


class RunnerKernels:
    """`feet`: bodies with a force sensor, in the observation's order."""

    def __init__(self, worlds: Worlds, rules: Any, feet: tuple[str, ...]) -> None:
        self._worlds, self._rules = worlds, rules
        mjm = worlds.mjm
        slot = np.full(mjm.nbody, -1, dtype=np.int32)
        for index, name in enumerate(feet):
            slot[mujoco.mj_name2id(mjm, mujoco.mjtObj.mjOBJ_BODY, name)] = index
        low, high = mjm.jnt_range[1:].T
        gear = mjm.actuator_gear[:, 0]
        if list(mjm.actuator_trnid[:, 0]) != list(range(1, mjm.njnt)):
            raise ValueError("motors must stand in the order of the joints")
        self._foot_of_body = wp.array(slot, dtype=int)
        self._low, self._high = wp.array(low, dtype=float), wp.array(high, dtype=float)
        self._effort = wp.array(gear / gear.max(), dtype=float)
        self._last_xy = wp.zeros(worlds.num_worlds, dtype=wp.vec2)
        self._wrench = wp.zeros((worlds.num_worlds, 6 * len(feet)), dtype=float)

    def before(self) -> None:
        w = self._worlds
        w.launch(remember, [w.data.qpos, self._last_xy, self._wrench])

    def score(self) -> None:
        w, d, contact = self._worlds, self._worlds.data, self._worlds.data.contact
        w.launch(
            feel,
            [
                int(w.model.opt.cone == ConeType.PYRAMIDAL),
                self._foot_of_body,
                w.model.geom_bodyid,
                d.nacon,
                contact.worldid,
                contact.geom,
                contact.dim,
                contact.pos,
                contact.frame,
                contact.friction,
                contact.efc_address,
                d.efc.force,
                d.njmax,
                d.xpos,
                d.xmat,
                self._wrench,
            ],
            dim=d.naconmax,
        )
        w.launch(
            score_runner,
            [
                *(self._rules, *self._read(), self._last_xy, self._effort),
                *(w.wp_final_obs, w.wp_reward, w.wp_terminated),
            ],
        )

    def observe(self) -> None:
        w = self._worlds
        w.launch(
            observe_runner,
            [self._rules, *self._read(), w.wp_done, w.wp_valid, w.wp_final_obs, w.wp_obs],
        )

    def _read(self) -> list[Any]:
        d = self._worlds.data
        force = [d.qfrc_actuator, d.qfrc_passive]
        return [d.qpos, d.qvel, d.ctrl, *force, self._wrench, self._low, self._high]


@wp.kernel
def remember(
    qpos: wp.array2d[float], last_xy: wp.array[wp.vec2], wrench: wp.array2d[float]
) -> None:
    """Where each robot stood before the physics; feet feel nothing yet."""
    w = wp.tid()
    last_xy[w] = wp.vec2(qpos[w, 0], qpos[w, 1])
    for i in range(wrench.shape[1]):
        wrench[w, i] = 0.0


@wp.kernel
def feel(
    is_pyramidal: int,
    foot_of_body: wp.array[int],
    geom_bodyid: wp.array[int],
    num_contacts: wp.array[int],
    contact_world: wp.array[int],
    contact_geom: wp.array[wp.vec2i],
    contact_dim: wp.array[int],
    contact_pos: wp.array[wp.vec3],
    contact_frame: wp.array[wp.mat33],
    contact_friction: wp.array[wp.types.vector(5, float)],
    efc_address: wp.array2d[int],
    efc_force: wp.array2d[float],
    njmax: int,
    xpos: wp.array2d[wp.vec3],
    xmat: wp.array2d[wp.mat33],
    wrench: wp.array2d[float],
) -> None:
    """Adds up each foot's contact force and its moment about the foot's origin, in the foot's axes.
    One thread per contact.
    """
    c = wp.tid()
    if c >= num_contacts[0]:
        return
    row = efc_address[c, 0]
    if row < 0:
        return
    w = contact_world[c]
    # In the contact's axes: normal first, pointing from the first geom to the second.
    force = wp.vec3(0.0, 0.0, 0.0)
    if contact_dim[c] == 1:
        force[0] = efc_force[w, row]
    elif is_pyramidal != 0:
        # Two opposite edges of the friction pyramid per tangent.
        for i in range(2):
            if row + 2 * i + 1 < njmax:
                plus = efc_force[w, row + 2 * i]
                minus = efc_force[w, row + 2 * i + 1]
                force[0] += plus + minus
                force[i + 1] = (plus - minus) * contact_friction[c][i]
    else:
        for i in range(3):
            if efc_address[c, i] < njmax:
                force[i] = efc_force[w, efc_address[c, i]]
    world_force = wp.transpose(contact_frame[c]) * force
    for side in range(2):
        body = geom_bodyid[contact_geom[c][side]]
        foot = foot_of_body[body]
        if foot >= 0:
            sign = 2.0 * float(side) - 1.0
            turn = wp.transpose(xmat[w, body])
            push = turn * (sign * world_force)
            moment = wp.cross(turn * (contact_pos[c] - xpos[w, body]), push)
            for i in range(3):
                wp.atomic_add(wrench, w, 6 * foot + i, push[i])
                wp.atomic_add(wrench, w, 6 * foot + 3 + i, moment[i])


@wp.func
def turn_of(angle: float, is_humanoid: int) -> float:
    """The ant sees angles in [0, 2 pi), the humanoid in [-pi, pi]."""
    if is_humanoid != 0:
        return wp.atan2(wp.sin(angle), wp.cos(angle))
    return angle - TWO_PI * wp.floor(angle / TWO_PI)


@wp.func
def write_obs(
    rules: LocomotionRules,
    w: int,
    is_fresh: bool,
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    action: wp.array2d[float],
    motor_force: wp.array2d[float],
    passive_force: wp.array2d[float],
    wrench: wp.array2d[float],
    low: wp.array[float],
    high: wp.array[float],
    obs: wp.array2d[float],
) -> None:
    """One row of the observation. A fresh world has taken no action and felt nothing."""
    qw = qpos[w, 3]
    qx = qpos[w, 4]
    qy = qpos[w, 5]
    qz = qpos[w, 6]
    turn = wp.quat(qx, qy, qz, qw)
    velocity = wp.quat_rotate_inv(turn, wp.vec3(qvel[w, 0], qvel[w, 1], qvel[w, 2]))
    heading = wp.quat_rotate(turn, wp.vec3(1.0, 0.0, 0.0))
    up = wp.quat_rotate(turn, wp.vec3(0.0, 0.0, 1.0))
    target = wp.normalize(wp.vec3(TARGET_X - qpos[w, 0], -qpos[w, 1], 0.0))
    roll = wp.atan2(2.0 * (qw * qx + qy * qz), qw * qw - qx * qx - qy * qy + qz * qz)
    yaw = wp.atan2(2.0 * (qw * qz + qx * qy), qw * qw + qx * qx - qy * qy - qz * qz)
    yaw_seen = turn_of(yaw, rules.is_humanoid)
    # The original takes the target's height where its y coordinate would be meant.
    bearing = wp.atan2(-qpos[w, 2], TARGET_X - qpos[w, 0]) - yaw_seen
    if rules.is_humanoid != 0:
        bearing = turn_of(bearing, 1)
    obs[w, 0] = qpos[w, 2]
    for i in range(3):
        obs[w, 1 + i] = velocity[i]
        # MuJoCo gives the angular velocity of a free joint in the body's axes already.
        obs[w, 4 + i] = qvel[w, 3 + i] * rules.angular_velocity_scale
    obs[w, 7] = yaw_seen
    obs[w, 8] = turn_of(roll, rules.is_humanoid)
    obs[w, 9] = bearing
    obs[w, 10] = up[2]
    obs[w, 11] = wp.dot(heading, target)
    n = low.shape[0]
    at = 12
    for i in range(n):
        obs[w, at + i] = (2.0 * qpos[w, 7 + i] - high[i] - low[i]) / (high[i] - low[i])
        obs[w, at + n + i] = qvel[w, 6 + i] * rules.dof_velocity_scale
    at = at + 2 * n
    felt = wp.where(is_fresh, 0.0, rules.contact_force_scale)
    if rules.is_humanoid != 0:
        for i in range(n):
            obs[w, at + i] = (motor_force[w, 6 + i] + passive_force[w, 6 + i]) * felt
            if is_fresh:  # zero times a diverged world's force would not be zero
                obs[w, at + i] = 0.0
        at = at + n
    for i in range(wrench.shape[1]):
        obs[w, at + i] = wrench[w, i] * felt
        if is_fresh:
            obs[w, at + i] = 0.0
    at = at + wrench.shape[1]
    for i in range(n):
        obs[w, at + i] = wp.where(is_fresh, 0.0, action[w, i])


@wp.kernel
def score_runner(
    rules: LocomotionRules,
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    action: wp.array2d[float],
    motor_force: wp.array2d[float],
    passive_force: wp.array2d[float],
    wrench: wp.array2d[float],
    low: wp.array[float],
    high: wp.array[float],
    last_xy: wp.array[wp.vec2],
    effort: wp.array[float],
    obs: wp.array2d[float],
    reward: wp.array[float],
    terminated: wp.array[bool],
) -> None:
    w = wp.tid()
    write_obs(
        rules, w, False, qpos, qvel, action, motor_force, passive_force, wrench, low, high, obs
    )
    # (|last| - |now|) / dt, written so that nothing near 1000 m is subtracted: in float32 this
    # would be wrong by a tenth of a millimetre, and the reward by sixty times as much.
    last = wp.vec2(TARGET_X - last_xy[w][0], -last_xy[w][1])
    now = wp.vec2(TARGET_X - qpos[w, 0], -qpos[w, 1])
    moved = wp.vec2(qpos[w, 0] - last_xy[w][0], qpos[w, 1] - last_xy[w][1])
    total = wp.dot(moved, last + now) / (wp.length(last) + wp.length(now)) / rules.dt
    total += rules.alive_reward
    if obs[w, 10] > 0.93:
        total += rules.up_weight
    total += rules.heading_weight * wp.min(obs[w, 11] / 0.8, 1.0)
    n = low.shape[0]
    for i in range(n):
        position = obs[w, 12 + i]
        power = wp.abs(action[w, i] * obs[w, 12 + n + i])
        if rules.is_humanoid != 0:
            total -= rules.energy_cost * power * effort[i]
            excess = (wp.abs(position) - 0.98) / 0.02
            total -= rules.joints_at_limit_cost * wp.max(excess, 0.0) * effort[i]
        else:
            total -= rules.energy_cost * power
            if position > 0.99:
                total -= rules.joints_at_limit_cost
        total -= rules.actions_cost * action[w, i] * action[w, i]
    fell = qpos[w, 2] < rules.termination_height
    reward[w] = wp.where(fell, rules.death_cost, total)
    terminated[w] = fell


@wp.kernel
def observe_runner(
    rules: LocomotionRules,
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    action: wp.array2d[float],
    motor_force: wp.array2d[float],
    passive_force: wp.array2d[float],
    wrench: wp.array2d[float],
    low: wp.array[float],
    high: wp.array[float],
    done: wp.array[bool],
    valid: wp.array[bool],
    final_obs: wp.array2d[float],
    obs: wp.array2d[float],
) -> None:
    w = wp.tid()
    if done[w]:
        write_obs(
            rules, w, True, qpos, qvel, action, motor_force, passive_force, wrench, low, high, obs
        )
        if not valid[w]:
            for i in range(obs.shape[1]):
                final_obs[w, i] = obs[w, i]
    else:
        for i in range(obs.shape[1]):
            obs[w, i] = final_obs[w, i]
