"""IsaacGymEnvs' humanoid: 21 motors, 108 observations, 60 Hz. The task is the ant's with other
numbers; see locomotion.py.
"""

from __future__ import annotations

from unirl.envs.sim.warp.locomotion import LocomotionRules, RunnerKernels, runner_start
from unirl.envs.sim.warp.worlds import WarpTask, Worlds, own_model

FEET = ("right_foot", "left_foot")


def humanoid_isaac() -> WarpTask:
    """r = progress towards a far target + 2 + 0.1 upright + up to 0.5 for the heading - costs of
    action, energy and joints near their limits; -1 where the torso falls below 0.8 m.
    """
    return WarpTask(
        id="warp/Humanoid-isaac",
        load=own_model("humanoid.xml"),
        start=runner_start,
        kernels=_kernels,
        obs_size=108,
        physics_steps=2,
        max_episode_length=1000,
        njmax=128,
        nconmax=32,
    )


def _kernels(worlds: Worlds) -> RunnerKernels:
    rules = LocomotionRules()
    rules.dt = worlds.step_dt
    rules.alive_reward, rules.up_weight, rules.heading_weight = 2.0, 0.1, 0.5
    rules.actions_cost, rules.energy_cost, rules.joints_at_limit_cost = 0.01, 0.05, 0.25
    rules.death_cost, rules.termination_height = -1.0, 0.8
    rules.dof_velocity_scale, rules.angular_velocity_scale = 0.1, 0.25
    rules.contact_force_scale, rules.is_humanoid = 0.01, 1
    return RunnerKernels(worlds, rules, FEET)
