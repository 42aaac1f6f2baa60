"""When episodes of worlds end and begin, as Warp kernels that every task shares."""

# mypy: disable-error-code="index, no-any-return, untyped-decorator"
from __future__ import annotations

import mujoco_warp as mjw
import warp as wp

TOO_LARGE = wp.constant(1.0e10)
"""Beyond this C MuJoCo calls a state diverged (mjMAXVAL)."""
CONSTRAINT_OVERFLOW = wp.constant(
    int(mjw.OverflowType.NEFC | mjw.OverflowType.NJMAX_NNZ | mjw.OverflowType.NVMAX)
)
CONTACT_OVERFLOW = wp.constant(
    int(mjw.OverflowType.BROADPHASE | mjw.OverflowType.NARROWPHASE | mjw.OverflowType.CCD)
)
SOLVER_LIMIT = wp.constant(int(mjw.OverflowType.ITERATIONS | mjw.OverflowType.LS_ITERATIONS))


@wp.kernel
def judge(
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    action: wp.array2d[float],
    overflow: wp.array[int],
    final_obs: wp.array2d[float],
    reward: wp.array[float],
    terminated: wp.array[bool],
    truncated: wp.array[bool],
    valid: wp.array[bool],
    done: wp.array[bool],
    episode_steps: wp.array[int],
    counts: wp.array[wp.int64],
    max_episode_length: int,
) -> None:
    """Ends episodes: by the task's own rule, by the limit of time, or for a state gone wrong."""
    w = wp.tid()
    sound = wp.isfinite(reward[w])
    for i in range(qpos.shape[1]):
        sound = sound and wp.abs(qpos[w, i]) < TOO_LARGE
    for i in range(qvel.shape[1]):
        sound = sound and wp.abs(qvel[w, i]) < TOO_LARGE
    # The physics clips actions, which would turn one that is no number into a number.
    for i in range(action.shape[1]):
        sound = sound and wp.isfinite(action[w, i])
    for i in range(final_obs.shape[1]):
        sound = sound and wp.isfinite(final_obs[w, i])
    steps = episode_steps[w] + 1
    ended = sound and terminated[w]
    cut = sound and not ended and steps >= max_episode_length
    if not sound:
        reward[w] = 0.0
        wp.atomic_add(counts, 0, wp.int64(1))
    terminated[w] = ended
    truncated[w] = cut
    valid[w] = sound
    over = ended or cut or not sound
    done[w] = over
    episode_steps[w] = wp.where(over, 0, steps)
    flags = overflow[w]
    if flags != 0:
        if (flags & CONSTRAINT_OVERFLOW) != 0:
            wp.atomic_add(counts, 1, wp.int64(1))
        if (flags & CONTACT_OVERFLOW) != 0:
            wp.atomic_add(counts, 2, wp.int64(1))
        if (flags & SOLVER_LIMIT) != 0:
            wp.atomic_add(counts, 3, wp.int64(1))
        overflow[w] = 0


@wp.kernel
def restart(
    done: wp.array[bool],
    mean: wp.array[float],
    qpos_noise: wp.array[float],
    qpos_low: wp.array[float],
    qpos_high: wp.array[float],
    qvel_noise: wp.array[float],
    qpos_draw: wp.array2d[float],
    qvel_draw: wp.array2d[float],
    qpos: wp.array2d[float],
    qvel: wp.array2d[float],
    qacc_warmstart: wp.array2d[float],
    time: wp.array[float],
    overflow: wp.array[int],
) -> None:
    w = wp.tid()
    if not done[w]:
        return
    for i in range(qpos.shape[1]):
        value = mean[i] + qpos_noise[i] * qpos_draw[w, i]
        qpos[w, i] = wp.clamp(value, qpos_low[i], qpos_high[i])
    for i in range(qvel.shape[1]):
        qvel[w, i] = qvel_noise[i] * qvel_draw[w, i]
        # The solver starts from the last acceleration, which a diverged world would hand on.
        qacc_warmstart[w, i] = 0.0
    time[w] = 0.0
    overflow[w] = 0
