"""One step API for every engine: next-step autoreset, true final observations, fillers marked by a
mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import concatenate, create_empty_array
from numpy.typing import NDArray

from unirl.envs.guard import check_arrays, making
from unirl.envs.spaces import action_writer, obs_reader
from unirl.errors import UniRLError

Bools = NDArray[np.bool_]
MAX_FILLERS = 1000
"""Fillers in a row after which a same-step engine is given up."""
EngineStep = tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]


@dataclass(slots=True)
class EnvStep:
    """What one step of B environments gave.

    Copy `obs` before the next step: an environment's own vector class may reuse its arrays.
    """

    obs: Any
    """Tree of arrays [B, ...] for the slot: on done it is the episode's true final observation."""
    acting_obs: Any
    """What the policy acts on next. The same object as `obs`, except after an episode's end in a
    same-step engine."""
    reward: NDArray[np.float32]
    """Raw reward [B]; 0 in filler rows."""
    terminated: Bools
    """The episode ended by its own rules [B]; False in filler rows."""
    truncated: Bools
    """The episode was cut off by a limit [B]; False in filler rows. Both may be True where an
    engine reports both."""
    mask: Bools
    """False where this row was a filler: it only led to the first observation of the next episode
    [B]."""


class VectorEnv(Protocol):
    """B environments stepped together, with next-step autoreset.

    A row with terminated or truncated brings the final observation. The row after it is a filler:
    its action is ignored, its reward is 0, its mask False, and its observation is the first of the
    next episode.
    """

    num_envs: int
    observation_space: Space[Any]
    """Of one environment."""
    action_space: Space[Any]
    """Of one environment."""
    hides_first_obs: bool
    """True where the first observations of later episodes are acted on but come into no row: not
    for a policy with memory."""

    def reset(self, seed: int) -> Any:
        """Start new episodes everywhere; a tree of arrays [B, ...]. The same seed gives the same
        trajectories."""

    def step(self, action: Any) -> EnvStep:
        """Take one action per environment: int64 [B] or [B, n], float32 [B, ...], or a dictionary
        of such parts. What an env raises propagates."""

    def close(self) -> None:
        """Release processes, threads and memory; a second call does nothing."""


class VectorEngine(Protocol):
    """What an engine's file provides: Gymnasium's vector interface with one seed and the spaces of
    one environment."""

    observation_space: Space[Any]
    action_space: Space[Any]

    @property
    def autoreset_mode(self) -> AutoresetMode:
        """When the engine starts the next episode."""

    def reset(self, seed: int) -> Any:
        """First observations."""

    def step(self, action: Any) -> EngineStep:
        """Observation, reward, terminated, truncated, info."""

    def close(self) -> None:
        """Release everything."""


def env_seeds(seed: int, num_envs: int) -> list[int]:
    """Distinct 31-bit seeds, one per environment, all derived from `seed`; seed i does not depend
    on num_envs."""
    # Engines read seeds as int32.
    state = np.random.SeedSequence(seed).generate_state(2 * num_envs + 8) >> 1
    return list(dict.fromkeys(state.tolist()))[:num_envs]


class EngineEnv:
    """A VectorEngine as a VectorEnv: it adds the mask, and makes sure that fillers are empty.

    Next-step engines follow the convention already. One that reports an end inside a filler (a game
    that is over after its first no-op) gets another filler.

    Same-step engines reset within the step that ends an episode. At an end the row carries
    info["final_obs"], while the engine already stands at the first observation of the next episode:
    the policy acts on that (`acting_obs`). The engine cannot wait, so the filler row hides a real
    transition, the first one of each episode: its reward counts nowhere and it is never trained on.
    For episodes of n steps this loses one transition in n. If the hidden transition ends the
    episode too, the next row is a filler again. Not for a policy with memory: recurrent state
    begins after the filler, hence without the episode's first observation (`hides_first_obs`).
    """

    def __init__(
        self, engine: VectorEngine, num_envs: int, env_id: str, make_timeout: float = 120.0
    ) -> None:
        mode = engine.autoreset_mode
        if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            raise UniRLError(
                f'env "{env_id}" does not start the next episode by itself',
                f"its autoreset mode must be NextStep or SameStep, found {mode.value}",
                'use engine="sync" or change the mode in env.kwargs',
            )
        self.hides_first_obs = mode == AutoresetMode.SAME_STEP
        self.num_envs = num_envs
        self.observation_space, self.action_space = engine.observation_space, engine.action_space
        self.engine = engine
        self._env_id, self._make_timeout = env_id, make_timeout
        self._read = obs_reader(self.observation_space, env_id)
        self._write = action_writer(self.action_space, num_envs, env_id)
        self._done: Bools = np.zeros(num_envs, dtype=np.bool_)
        self._num_fillers = np.zeros(num_envs, np.int64)
        self._checked: Any = None
        """Types and shapes of rewards and flags that were looked at already."""

    def reset(self, seed: int) -> Any:
        self._done = np.zeros(self.num_envs, dtype=np.bool_)
        self._num_fillers[:] = 0
        with making(self._env_id, self._make_timeout, "reset"):
            obs = self.engine.reset(seed)
        return self._read(obs, self.num_envs)

    def step(self, action: Any) -> EnvStep:
        raw_obs, raw_reward, raw_terminated, raw_truncated, info = self.engine.step(
            self._write(action)
        )
        self._check(raw_reward, raw_terminated, raw_truncated)
        obs = acting_obs = self._read(raw_obs, self.num_envs)
        mask = ~self._done
        self._done = np.logical_or(raw_terminated, raw_truncated)
        if self.hides_first_obs:
            self._count_fillers(mask)
            ended = np.flatnonzero(self._done & mask)
            if len(ended):
                obs = self._with_final(acting_obs, ended, info)
        return EnvStep(
            obs=obs,
            acting_obs=acting_obs,
            reward=np.where(mask, raw_reward, 0).astype(np.float32, copy=False),
            terminated=np.logical_and(raw_terminated, mask),
            truncated=np.logical_and(raw_truncated, mask),
            mask=mask,
        )

    def close(self) -> None:
        self.engine.close()

    def _check(self, reward: Any, terminated: Any, truncated: Any) -> None:
        """UniRLError unless they are what a step must return; once for arrays that are alike."""
        try:
            kind = (
                reward.dtype, reward.shape, terminated.dtype, terminated.shape,
                truncated.dtype, truncated.shape,
            )  # fmt: skip
        except AttributeError:
            kind = None
        if kind is None or kind != self._checked:
            check_arrays(
                self._env_id,
                self.num_envs,
                reward=reward,
                terminated=terminated,
                truncated=truncated,
            )
            self._checked = kind

    def _count_fillers(self, mask: Bools) -> None:
        # Where every episode is one step long, every step is hidden: nothing would ever be learned.
        self._num_fillers = np.where(mask, 0, self._num_fillers + 1)
        if self._num_fillers.max() > MAX_FILLERS:
            raise UniRLError(
                f'env "{self._env_id}" ends every episode at its first step',
                "a same-step engine hides the first step of each episode, and no other came in"
                f" {MAX_FILLERS} episodes",
                'use engine="sync", or an autoreset mode of NextStep',
            )

    def _with_final(self, acting_obs: Any, ended: NDArray[np.intp], info: Mapping[str, Any]) -> Any:
        if "final_obs" not in info:
            raise UniRLError(
                f'env "{self._env_id}" ended an episode without its final observation',
                f'a same-step engine must put it in info["final_obs"], found {sorted(info)}',
                'use engine="sync", or an autoreset mode of NextStep',
            )
        final = info["final_obs"]
        # One observation per environment, or None.
        if isinstance(final, np.ndarray) and final.dtype == object:
            space = self.observation_space
            out: Any = create_empty_array(space, n=len(ended))
            rows = concatenate(space, list(final[ended]), out)
            return _replace_rows(acting_obs, ended, self._read(rows, len(ended)), slice(None))
        return _replace_rows(acting_obs, ended, self._read(final, self.num_envs), ended)


def _replace_rows(tree: Any, rows: NDArray[np.intp], source: Any, source_rows: Any) -> Any:
    if isinstance(tree, dict):
        return {
            key: _replace_rows(child, rows, source[key], source_rows) for key, child in tree.items()
        }
    replaced = tree.copy()
    replaced[rows] = source[source_rows]
    return replaced
