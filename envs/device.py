"""One interface for simulators whose state is tensors on one device: thousands of environments per
step, and nothing comes to the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from gymnasium import Space, spaces
from torch import Tensor

Groups: TypeAlias = dict[str, Tensor]
"""Observations by group, float32 [N, D] each. POLICY is what the actor sees; CRITIC, where there is
one, is what the value function sees instead."""

POLICY, CRITIC = "policy", "critic"


@dataclass(frozen=True)
class SimSpec:
    """What a simulator is, known before its first step."""

    id: str
    """Name as on the command line, such as "torch/Cartpole"."""
    num_envs: int
    """N: environments stepped together."""
    observation: Mapping[str, int]
    """Size D of each observation group; POLICY is always there."""
    action_space: Space[Any]
    """Of one environment: Discrete, or Box of float32 (actions are clipped to it by the simulator).
    """
    max_episode_length: int
    """Steps after which an episode is truncated."""
    device: torch.device
    """Where all tensors live."""
    step_dt: float
    """Simulated seconds per step; 0 where time has no unit."""
    physics_steps: int = 1
    """Physics steps per environment step."""
    autoreset: Literal["same_step", "next_step"] = "same_step"
    """same_step: `step` returns the first observation of the next episode where one ended.
    next_step: it returns the true final one, and the row after it is a filler (valid False).
    """
    gives_final_obs: bool = True
    """Whether a same_step simulator gives the observation an episode ended with."""
    follows_stream: bool = False
    """Whether all its work on CUDA goes to torch's current stream: only then may it run on a stream
    other than the default one.
    """
    single: bool = False
    """Whether a process can have only one of its kind."""
    truncates_early: bool = False
    """Whether limits other than max_episode_length may truncate an episode."""
    capturable: bool = False
    """Whether `step` may be recorded in a CUDA graph: fixed pointers, no host synchronisation, all
    randomness from `generators`.
    """

    @property
    def observation_space(self) -> Space[Any]:
        """Of one environment: a Box where there is one group, else a Dict of them."""
        boxes: dict[str, Space[Any]] = {
            name: spaces.Box(-float("inf"), float("inf"), (size,))
            for name, size in self.observation.items()
        }
        return boxes[POLICY] if len(boxes) == 1 else spaces.Dict(boxes)


class SimStep(NamedTuple):
    """What one step of N environments gave. The tensors are the simulator's own and change with the
    next step: copy what must last.
    """

    obs: Groups
    """What to act on next."""
    reward: Tensor
    """float32 [N]; meaningless where valid is False."""
    terminated: Tensor
    """bool [N]: the episode ended by its own rules. False where valid is False."""
    truncated: Tensor
    """bool [N]: cut off by a limit, and not terminated. False where valid is False."""
    final_obs: Groups | None
    """same_step: the observations before the reset, in every row, hence true final ones where an
    episode ended. None in a next_step simulator, and in one that does not give them.
    """
    valid: Tensor
    """bool [N]. False: the row is no transition, because it only led to the first observation of
    the next episode (next_step), or because the state was not finite and had to be reset.
    """
    extras: Mapping[str, Tensor]
    """More for the log: one number each."""


class DeviceEnv(Protocol):
    """N simulated environments on one device."""

    spec: SimSpec

    def reset(self, seed: int, *, random_phases: bool = False) -> Groups:
        """New episodes everywhere: the same seed gives the same trajectories.

        random_phases: pretend that the episodes have run for random times already, so that their
        time limits do not all fall on one step.
        """

    def step(self, action: Tensor) -> SimStep:
        """Take one action per environment: int64 [N], or float32 [N, *shape of the Box]. Never
        waits for the device.
        """

    def counters(self) -> Mapping[str, Tensor]:
        """Totals since the environments were made, int64 scalars on the device, read at log time:
        "nan_states" (environments reset because their state was not finite), and what else the
        simulator counts.
        """

    def generators(self) -> Sequence[torch.Generator]:
        """What a recorded graph must advance at each replay; () where nothing can be recorded."""

    def close(self) -> None:
        """Let go of the simulator; idempotent."""
