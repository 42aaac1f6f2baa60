"""What kind of environment a config names: how it is stepped, what it shows, what a step costs.

Known families have a fixed kind. Of others a few dozen steps are timed, once, and the time falls
into one of three coarse classes, so that a machine comes to the same answer again.
"""

from __future__ import annotations

import logging
import re
import resource
import statistics
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import Space, spaces

from unirl.descendants import descendants_ended
from unirl.envs import catalog
from unirl.envs.config import EnvConfig
from unirl.envs.make import agents_of, make_vec, settle_mask
from unirl.envs.make import spaces as env_spaces
from unirl.envs.vector import VectorEnv
from unirl.errors import format_error
from unirl.policy import PolicyConfig
from unirl.policy.inputs import ObservationInputs, space_leaves

log = logging.getLogger(__name__)

Stepping = Literal["simulator", "vectorised", "atari", "quick", "slow", "waiting"]
"""simulator: tensors on a device. vectorised: a vector class, or EnvPool. atari: C++ threads. The
others are stepped one after the other: quick ones take less than SLOW_SECONDS, slow ones compute
for longer than that, waiting ones sleep most of the time.
"""
SLOW_SECONDS = 0.0003
_QUICK_FAMILIES = (
    "gymnasium.envs.box2d",
    "gymnasium.envs.classic_control",
    "gymnasium.envs.mujoco",
    "gymnasium.envs.tabular",
    "gymnasium.envs.toy_text",
    "minatar",
    "unirl.envs.games",
)
"""How their entry points begin: 10 to 200 microseconds a step."""
_TIMED_STEPS, _TIMED_SECONDS = 60, 0.4
_SMALL_OBS = 32
_LARGE_NUMBER = 10.0


@dataclass(frozen=True)
class EnvKind:
    """What defaults depend on."""

    stepping: Stepping
    why: str
    """How that is known, in words."""
    images: bool = False
    """It shows images that are large enough for convolutions."""
    num_numbers: int = 0
    """In an observation, besides images."""
    unscaled: bool = False
    """Some of them have no bounds, or wide ones."""
    continuous: bool = False
    """Some actions are real numbers."""
    family: str = ""
    """Of Gymnasium's own ones: box2d, classic_control, mujoco, toy_text."""
    num_agents: int = 1

    @property
    def is_small(self) -> bool:
        """Whether a small network reads what there is to see."""
        return not self.images and self.num_numbers <= _SMALL_OBS


def kind_of(env: EnvConfig, *, may_time: bool = True, deadline_seconds: float = 20.0) -> EnvKind:
    """Make an environment, ask it, step it where nothing is known of it, and let it go.

    One that fails while it is timed counts as quick: its actors will say what is wrong. One that
    hangs counts as slow. may_time: else what is unknown counts as quick. deadline_seconds: of all
    its steps. Raises UniRLError for one that cannot be made.
    """
    if env.is_sim:
        return EnvKind("simulator", "its environments are tensors on one device")
    env = settle_mask(env)  # as a plan does it, which asks the same
    num_agents = max(1, len(agents_of(env)))
    observation, action = env_spaces(env)
    stepping, why = _known(env) or ("quick", "nothing is known of it")
    if may_time and _known(env) is None:
        stepping, why = _timed(env, num_agents, deadline_seconds)
    inputs = ObservationInputs(observation, PolicyConfig(), torch.Generator())
    return EnvKind(
        stepping,
        why,
        images=bool(inputs.images),
        num_numbers=inputs.vector_size,
        unscaled=bool(inputs.num_normalized)
        and any(_is_unscaled(leaf) for _, leaf in space_leaves(observation)),
        continuous=any(isinstance(leaf, spaces.Box) for _, leaf in space_leaves(action)),
        family=next(iter(re.findall(r"^gymnasium\.envs\.(\w+)", _entry_point(env))), ""),
        num_agents=num_agents,
    )


def _known(env: EnvConfig) -> tuple[Stepping, str] | None:
    """What is known without a step, and how."""
    if env.is_atari and env.engine not in ("sync", "async"):
        return "atari", "Atari in C++ threads"
    if env.is_atari or env.is_multi_agent:
        return None
    if env.engine == "envpool":
        return "vectorised", "EnvPool steps many together in C++ threads"
    if env.engine in ("auto", "vector") and catalog.find_spec(env).vector_entry_point is not None:
        return "vectorised", "its vector class steps many as arrays"
    entry = _entry_point(env)
    if entry.startswith(_QUICK_FAMILIES):
        return "quick", f"those of {entry.partition(':')[0]} are known to be quick"
    return None


def _entry_point(env: EnvConfig) -> str:
    """Where the class of an id is; "" where Gymnasium does not know."""
    spec = gymnasium.registry.get(env.id)
    return spec.entry_point if spec is not None and isinstance(spec.entry_point, str) else ""


def _timed(env: EnvConfig, num_envs: int, deadline_seconds: float) -> tuple[Stepping, str]:
    """The class of a few dozen steps; timed in a thread of their own, as one that hangs must not
    hang the command.
    """
    found: list[tuple[Stepping, str]] = []

    def work() -> None:
        # One environment needs no process of its own.
        one = replace(env, engine="sync") if env.engine == "async" else env
        try:
            found.append(_time_steps(make_vec(one, num_envs), num_envs))
        except Exception as error:
            log.debug("steps could not be timed", exc_info=error)
            found.append(("quick", f"its steps could not be timed: {format_error(error)}"))

    thread = threading.Thread(target=work, name="unirl-step-time", daemon=True)
    # Entered before there is a second thread: beside others it does nothing.
    with descendants_ended(keeper=False):
        thread.start()
        thread.join(deadline_seconds)
    return found[0] if found else ("slow", f"a few steps took more than {deadline_seconds:g} s")


def _time_steps(vec: VectorEnv, num_envs: int) -> tuple[Stepping, str]:
    try:
        space = vec.action_space
        space.seed(0)
        vec.reset(seed=0)
        vec.step(_actions(space, num_envs))  # the first one may compile or load
        wall: list[float] = []
        before, until = _usage(), time.monotonic() + _TIMED_SECONDS
        while len(wall) < _TIMED_STEPS and time.monotonic() < until:
            action, started = _actions(space, num_envs), time.perf_counter()
            vec.step(action)
            wall.append(time.perf_counter() - started)
        cpu, sleeps = (b - a for a, b in zip(before, _usage(), strict=True))
    finally:
        vec.close()
    # The median: another process may take the core for a moment.
    return classify(statistics.median(wall), cpu / len(wall), sleeps / len(wall))


def classify(wall_seconds: float, cpu_seconds: float, sleeps: float) -> tuple[Stepping, str]:
    """The class of a step that took so long, computed so long and went to sleep so often.

    A busy machine makes steps longer, but they compute no more, and go to sleep no more often.
    """
    ms = f"{1000 * SLOW_SECONDS:g} ms"
    if sleeps >= 0.5 and wall_seconds >= max(SLOW_SECONDS, 2 * cpu_seconds):
        return "waiting", f"a step, measured, takes more than {ms} and waits most of it"
    if min(wall_seconds, cpu_seconds) >= SLOW_SECONDS:
        return "slow", f"a step, measured, computes for more than {ms}"
    return "quick", f"a step, measured, takes less than {ms}"


def _usage() -> tuple[float, int]:
    """CPU seconds of this process, and how often this thread went to sleep."""
    return time.process_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _actions(space: Space[Any], num_envs: int) -> Any:
    """Random ones as a policy writes them: counted from 0, or float32."""
    drawn = np.stack([np.asarray(space.sample()) for _ in range(num_envs)])
    if isinstance(space, spaces.Box):
        return drawn.astype(np.float32)
    return drawn.astype(np.int64) - np.asarray(getattr(space, "start", 0))


def _is_unscaled(space: Space[Any]) -> bool:
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return False
    return bool(max(np.abs(space.low).max(), np.abs(space.high).max()) > _LARGE_NUMBER)
