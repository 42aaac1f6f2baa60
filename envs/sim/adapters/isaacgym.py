"""IsaacGymEnvs' tasks, "isaacgym/<Task>", as simulators on a device. Source: IsaacGymEnvs 1.5.1 on
Isaac Gym Preview 4 (tasks/base/vec_task.py and the tasks built on it).

Isaac Gym must be imported before torch. UniRL's command line imports torch only when a command
needs it, so the order is right when isaacgym comes first:

    python -c "import sys, isaacgym; from unirl.cli import main; sys.exit(main())" train ppo ...

and, in a script of one's own, when `import isaacgym` is its first line. env.import_module comes too
late for that.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from unirl.device import with_index
from unirl.envs import catalog
from unirl.envs.config import EnvConfig
from unirl.envs.device import CRITIC, POLICY, Groups, SimSpec, SimStep
from unirl.envs.sim.adapters.tensors import (
    check_placement,
    finite_rows,
    keep_rows,
    random_steps,
    scalars,
)
from unirl.envs.sim.settings import read_settings
from unirl.errors import UniRLError

FAMILY = "isaacgym/"
FIRST = 'python -c "import sys, isaacgym; from unirl.cli import main; sys.exit(main())" train ...'
"""The command line with the imports in the order that Isaac Gym wants."""

TASKS = (
    *("AllegroHand", "AllegroHandDextremeADR", "AllegroHandDextremeManualDR", "AllegroHandFF"),
    *("AllegroHandLSTM", "AllegroKuka", "AllegroKukaLSTM", "AllegroKukaTwoArmsLSTM"),
    *("Ant", "AntSAC", "Anymal", "AnymalTerrain", "BallBalance", "Cartpole"),
    *("FactoryTaskGears", "FactoryTaskInsertion", "FactoryTaskNutBoltPick"),
    *("FactoryTaskNutBoltPlace", "FactoryTaskNutBoltScrew", "FrankaCabinet", "FrankaCubeStack"),
    *("Humanoid", "HumanoidSAC", "IndustRealTaskGearsInsert", "IndustRealTaskPegsInsert"),
    *("Ingenuity", "Quadcopter", "ShadowHand", "ShadowHandOpenAI_FF", "ShadowHandOpenAI_LSTM"),
    *("ShadowHandTest", "Trifinger"),
)
"""The configurations that `isaacgymenvs.make` finds by name (cfg/task), without the adversarial
ones (HumanoidAMP), whose reward is learned."""
SAME_STEP = ("AnymalTerrain",)
"""Tasks that reset within the step that ends an episode, unlike all others: their final
observations are lost, and their time_outs are always False, since the reset clears the step count
that they are computed from."""

SETTINGS: Mapping[str, bool | int | str | None] = {
    "autoreset": None,
    "clip_actions": None,
    "force_render": False,
    "graphics_device_id": -1,
    "headless": True,
    "virtual_screen_capture": False,
}
"""What env.kwargs may hold, with defaults. autoreset: "next_step" or "same_step", for a task of
one's own that does as AnymalTerrain does. clip_actions: bound of the actions, if not the task's."""


def known_ids() -> list[str]:
    """The ids of IsaacGymEnvs' tasks, and of those that others have added to its list."""
    names = {*TASKS, *getattr(sys.modules.get("isaacgymenvs.tasks"), "isaacgym_task_map", {})}
    return sorted(FAMILY + name for name in names if not name.endswith("AMP"))


def make_sim(config: EnvConfig, num_envs: int, device: torch.device) -> IsaacGymSim:
    """`num_envs` environments of a task, as its YAML file configures it; one per process."""
    settings = _read_settings(config)
    device = with_index(device)
    isaacgymenvs = _import(config)
    catalog.import_registering_module(config)
    if config.id not in known_ids():
        raise catalog.unknown_id(config.id, known_ids())
    base = sys.modules.get("isaacgymenvs.tasks.base.vec_task")
    if getattr(base, "EXISTING_SIM", None) is not None:
        raise UniRLError(
            f'env "{config.id}" cannot be made a second time in this process',
            "Isaac Gym has one simulation per process, and a second task would share it",
            "evaluate in a process of its own",
        )
    task = config.id.removeprefix(FAMILY)
    env = isaacgymenvs.make(
        seed=0,  # make() does nothing with it; reset(seed) seeds what the tasks draw from
        task=task,
        num_envs=num_envs,
        sim_device=str(device),
        rl_device=str(device),
        graphics_device_id=settings["graphics_device_id"],
        headless=settings["headless"],
        virtual_screen_capture=settings["virtual_screen_capture"],
        force_render=settings["force_render"],
    )
    return IsaacGymSim(config, env, num_envs, device, settings)


class IsaacGymSim:
    """A VecTask; see DeviceEnv.

    The observation that comes with the end of an episode is its true last one. The row after it is
    a filler: the task resets there, before or after the physics, whatever the action. A failure in
    the very step of the time limit counts as truncated, because the task says no more than that.

    `reset` seeds the generators of Python, NumPy and torch, because tasks draw from them.
    """

    def __init__(
        self,
        config: EnvConfig,
        env: Any,
        num_envs: int,
        device: torch.device,
        settings: Mapping[str, Any],
    ) -> None:
        remedy = "let the task's configuration take numEnvs from num_envs"
        check_placement(config.id, num_envs, device, env, remedy)
        self._env, self._id = env, config.id
        task = config.id.removeprefix(FAMILY)
        default = "same_step" if task in SAME_STEP else "next_step"
        self._same_step = (settings["autoreset"] or default) == "same_step"
        if config.max_episode_steps is not None:
            env.max_episode_length = config.max_episode_steps + 1
        if settings["clip_actions"] is not None:
            env.clip_actions = float(settings["clip_actions"])
        observation = {POLICY: int(env.num_obs)}
        if env.num_states > 0:
            observation[CRITIC] = int(env.num_states)
        # The task itself clips, and only to this: its declared space says -1 to 1 in any case.
        bound = float(env.clip_actions)
        self._limit = int(env.max_episode_length) - 1
        self._due = torch.ones(num_envs, dtype=torch.bool, device=device)
        self._nan_states = torch.zeros((), dtype=torch.int64, device=device)
        self.spec = SimSpec(
            id=config.id,
            num_envs=num_envs,
            observation=observation,
            action_space=spaces.Box(-bound, bound, (int(env.num_actions),), np.float32),
            # Tasks end an episode when its count of steps reaches max_episode_length - 1; the count
            # is 0 at the first observation.
            max_episode_length=self._limit,
            device=device,
            step_dt=float(env.dt) * int(env.control_freq_inv),
            physics_steps=int(env.control_freq_inv) * int(getattr(env.sim_params, "substeps", 1)),
            autoreset="same_step" if self._same_step else "next_step",
            single=True,
            gives_final_obs=not self._same_step,
        )

    def reset(self, seed: int, *, random_phases: bool = False) -> Groups:
        """New episodes everywhere; see DeviceEnv. Costs one step of the simulation."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        # VecTask.reset() would return what stands in its buffers. What resets is a step.
        if self._same_step:
            self._env.progress_buf.fill_(self._limit)
        else:
            self._env.reset_buf.fill_(1)
        raw, _, ended, extras = self._env.step(self._env.zero_actions())
        self._check(raw, extras)
        obs = self._groups(raw)
        sound = finite_rows(*obs.values())
        lost = ~sound
        self._nan_states.add_(lost.sum())
        # A task may find an episode over at its first observation: then another filler follows.
        self._due = lost if self._same_step else (ended != 0) | lost
        self._ask_reset(lost)
        if random_phases:
            steps = random_steps(seed, self.spec.num_envs, self.spec)
            self._env.progress_buf.copy_(steps.masked_fill(lost, self._limit))
        return keep_rows(sound, obs)

    def step(self, action: Tensor) -> SimStep:
        last = self._env.progress_buf >= self._limit - 1 if self._same_step else None
        raw, reward, ended, extras = self._env.step(action)
        obs = self._groups(raw)
        sound_now = finite_rows(*obs.values())
        sound = sound_now & finite_rows(reward)
        # A copy, as `ended` is the buffer that `_ask_reset` writes to.
        over = ended != 0
        timed_out = extras["time_outs"] != 0 if last is None else last
        valid = sound & ~self._due
        lost = ~sound_now | (~sound & ~self._due)
        self._nan_states.add_(lost.sum())
        if last is None:
            self._due = over | lost
        else:  # a row that is over was reset already, unless what it was reset to is lost too
            lost = ~sound_now | (lost & ~over)
            self._due = lost
        self._ask_reset(lost)
        return SimStep(
            obs=keep_rows(sound_now, obs),
            reward=torch.where(valid, reward, 0.0),
            terminated=over & ~timed_out & valid,
            truncated=over & timed_out & valid,
            final_obs=None,
            valid=valid,
            extras=scalars(extras),
        )

    def counters(self) -> Mapping[str, Tensor]:
        return {"nan_states": self._nan_states}

    def close(self) -> None:
        """Nothing: Isaac Gym's simulation lives as long as its process."""

    def _groups(self, raw: Mapping[str, Tensor]) -> Groups:
        groups = {POLICY: raw["obs"]}
        if CRITIC in self.spec.observation:
            groups[CRITIC] = raw["states"]
        return groups

    def _ask_reset(self, rows: Tensor) -> None:
        """Have the next step reset `rows`. Buffers are looked up again: tasks may rebind them."""
        if self._same_step:
            self._env.progress_buf.masked_fill_(rows, self._limit)
        else:
            self._env.reset_buf.masked_fill_(rows, 1)

    def _check(self, raw: Mapping[str, Tensor], extras: Mapping[str, Any]) -> None:
        wanted = ("obs", "states") if CRITIC in self.spec.observation else ("obs",)
        missing = [name for name in wanted if name not in raw]
        if missing or "time_outs" not in extras:
            raise UniRLError(
                f'env "{self._id}" does not return what a VecTask of version 1.5 does',
                'observations must hold "obs" (and "states" where numStates > 0) and extras'
                f' "time_outs"; found {sorted(raw)} and {sorted(extras)}',
                "use IsaacGymEnvs 1.5, and tasks whose observations are one vector",
            )
        for name, size in zip(wanted, self.spec.observation.values(), strict=False):
            if tuple(raw[name].shape) != (self.spec.num_envs, size):
                raise UniRLError(
                    f'env "{self._id}" returned "{name}" of the wrong shape',
                    f"expected {[self.spec.num_envs, size]}, found {list(raw[name].shape)}",
                    "correct numObservations and numStates in the task's configuration",
                )


def _import(config: EnvConfig) -> ModuleType:
    """isaacgymenvs, with isaacgym before it; UniRLError where that cannot be."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    try:
        importlib.import_module("isaacgym")
        isaacgymenvs = importlib.import_module("isaacgymenvs")
        importlib.import_module("isaacgymenvs.tasks")
        return isaacgymenvs
    except ModuleNotFoundError as error:
        if error.name == "isaacgym":
            raise UniRLError(
                f'env "{config.id}" needs Isaac Gym, which is not installed',
                "Isaac Gym Preview 4 is a download behind NVIDIA's developer licence, not a package"
                f" of the index, and supports Python 3.6 to 3.8; this is Python {python}",
                "where that holds, run `pip install -e .` in the download's folder python/ and in a"
                ' checkout of IsaacGymEnvs; "torch/..." and "warp/..." tasks need neither',
            ) from error
        if error.name == "isaacgymenvs":
            raise UniRLError(
                f'env "{config.id}" needs IsaacGymEnvs, which is not installed',
                "Isaac Gym was found, its tasks are a repository of their own"
                " (isaac-sim/IsaacGymEnvs)",
                "run `pip install -e .` in a checkout of it",
            ) from error
        raise UniRLError(
            f'env "{config.id}" needs a package that is not installed',
            f"IsaacGymEnvs imports it ({error})",
            f"pip install {error.name}",
        ) from error
    except ImportError as error:
        if "PyTorch was imported before" not in str(error):
            raise UniRLError(
                f'env "{config.id}" cannot be imported',
                f"Isaac Gym Preview 4 supports Python 3.6 to 3.8, this is Python {python}; {error}",
                "repair the installation of Isaac Gym",
            ) from error
        raise UniRLError(
            f'env "{config.id}" cannot be imported: torch came first',
            "Isaac Gym insists on being imported before torch, in every process; Preview 4 itself"
            f" supports Python 3.6 to 3.8, and this is Python {python}",
            f"start it as {FIRST}, or make `import isaacgym` the first line of your script",
        ) from error
    except RuntimeError as error:  # it looks for a binding of this Python's version
        raise UniRLError(
            f'env "{config.id}" cannot run in Python {python}',
            f"Isaac Gym Preview 4 supports Python 3.6 to 3.8; {error}",
            'use Python 3.8, or a "warp/..." task',
        ) from error


def _read_settings(config: EnvConfig) -> dict[str, Any]:
    settings = read_settings(config, SETTINGS, "set it in the task's YAML file")
    if settings["autoreset"] not in (None, "next_step", "same_step"):
        raise UniRLError(
            f'setting "autoreset" of env "{config.id}" is {settings["autoreset"]!r}',
            'it must be "next_step" or "same_step"',
            "leave it out for IsaacGymEnvs' own tasks",
        )
    return settings
