"""The environment worker: a process that steps environments and holds no policy (Sample Factory,
arXiv 2006.11751, section 3).

Its environments come in groups. While a policy worker decides for one group, it steps another.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unirl.actors.sampler import SamplerConfig
from unirl.actors.stepping import ALL, Select, SteppedEnvs, UnrollRows, no_actions, put
from unirl.core.pool import HelperContext
from unirl.core.queue import Event, SlotBuffers
from unirl.core.seeding import derive_seed
from unirl.envs.config import EnvConfig
from unirl.envs.make import make_vec
from unirl.envs.vector import VectorEnv
from unirl.errors import QueueClosed, UniRLError
from unirl.handshake.handshake import (
    ACT,
    BEGIN,
    EMPTY,
    HELLO,
    LOST,
    OBS,
    ROW,
    SEED,
    SLOT,
    TURN,
    Handshake,
)

LOOK_AGAIN_SECONDS = 0.1
"""A lost notification must never become a hang: every sleeper looks again after this long."""


@dataclass
class _Split:
    """What one policy decides for in a group."""

    row: int
    """Where its cells are in the handshake."""
    number: int
    slots: SlotBuffers
    actor_event: Event
    """Wakes its policy worker."""
    env_rows: Select
    """Which of the group's rows."""
    rows: dict[int, UnrollRows] = field(default_factory=dict)


@dataclass
class _Group:
    number: int
    envs: SteppedEnvs
    splits: list[_Split]
    action: Any = None
    """Where the splits' actions come together; None with a single split."""


def serve_environments(
    context: HelperContext, *, env: EnvConfig, sampler: SamplerConfig, gamma: float
) -> None:
    """The main function of a worker: bind all but `context` with functools.partial.

    Runs until QueueClosed. Raises UniRLError for an engine that hides first observations.
    """
    handshake = context.handshake
    assert isinstance(handshake, Handshake)
    groups: list[_Group] = []
    try:
        for number in handshake.layout.groups_of(context.index):
            vector_env = require_next_step(make_vec(env, sampler.num_envs), env)
            envs = SteppedEnvs(vector_env, gamma=gamma, env_id=env.id)
            group = _Group(number, envs, _splits(context, handshake, number, sampler))
            groups.append(group)
            if len(group.splits) > 1:
                group.action = no_actions(vector_env)
        worker = _Worker(context, handshake, groups, sampler.unroll_length)
        worker.greet(context.seed)
        worker.run_in_threads() if sampler.group_threads else worker.run()
    finally:
        for group in groups:
            group.envs.close()


def require_next_step(vector_env: VectorEnv, env: EnvConfig) -> VectorEnv:
    """UniRLError for an engine whose policy acts on what stands in no row."""
    if vector_env.hides_first_obs:
        vector_env.close()
        raise UniRLError(
            f'env "{env.id}" resets within the step that ends an episode',
            "a policy worker acts on the rows of its slot, where first observations are hidden",
            'use env.engine "sync", or the vector actor (recipe impala or ppo)',
        )
    return vector_env


def _splits(
    context: HelperContext, handshake: Handshake, group: int, sampler: SamplerConfig
) -> list[_Split]:
    numbers = handshake.layout.splits_of_group(group)
    return [
        _Split(
            handshake.row(number),
            number,
            slots,
            handshake.actor_events[handshake.layout.actor_of(number)],
            ALL if len(numbers) == 1 else np.array(sampler.rows_of(policy)),
        )
        for policy, (number, slots) in enumerate(zip(numbers, context.slots, strict=True))
    ]


def group_seed(worker_seed: int, group: int) -> int:
    return derive_seed(worker_seed, "group", group)


class _Worker:
    def __init__(
        self,
        context: HelperContext,
        handshake: Handshake,
        groups: list[_Group],
        unroll_length: int,
    ) -> None:
        self._index, self._handshake, self._slots = context.index, handshake, context.slots
        self._event = handshake.worker_events[context.index]
        self._groups, self._length = groups, unroll_length

    def greet(self, seed: int) -> None:
        """Reset all groups, then say so: a policy worker that is greeted asks for rows at once, and
        a group that is yet to be reset would count as late.
        """
        cells = self._handshake.cells
        seeds = [group_seed(seed, i) for i in range(len(self._groups))]
        for group, new_seed in zip(self._groups, seeds, strict=True):
            group.envs.restart(new_seed)
        for group, new_seed in zip(self._groups, seeds, strict=True):
            for split in group.splits:
                while cells[split.row + LOST] or cells[split.row + TURN] != EMPTY:
                    self._sleep()  # a policy worker still clears up
                cells[split.row + SEED] = new_seed
                self._handshake.give_turn(split.number, HELLO)
                split.actor_event.set()

    def run(self) -> None:
        """Step whichever group has its actions, in turn, until the queue closes."""
        while True:
            owed = [group for group in self._groups if self._owes(group)]
            for group in owed:
                self._step(group)
            if not owed:
                self._sleep()

    def run_in_threads(self) -> None:
        """The same with a thread for each group; raises what a thread raised."""
        stepping: dict[int, Future[None]] = {}
        with ThreadPoolExecutor(len(self._groups)) as pool:
            while True:
                for group in self._groups:
                    before = stepping.get(group.number)
                    if before is not None and before.done():
                        before.result()
                        del stepping[group.number]
                    if group.number not in stepping and self._owes(group):
                        stepping[group.number] = pool.submit(self._step_and_notify, group)
                self._sleep()

    def _owes(self, group: _Group) -> bool:
        turns = [self._handshake.cells[split.row + TURN] for split in group.splits]
        return all(turn == ACT for turn in turns) or BEGIN in turns

    def _step_and_notify(self, group: _Group) -> None:
        try:
            self._step(group)
        finally:
            self._event.set()  # the main thread looks after what was raised

    def _step(self, group: _Group) -> None:
        self._handshake.begin_work(self._index, group.number)
        cells = self._handshake.cells
        begin = [split for split in group.splits if cells[split.row + TURN] == BEGIN]
        for split in begin:
            group.envs.write_first(self._rows(split), split.env_rows)
        if not begin:
            rows = [self._rows(split) for split in group.splits]
            steps = [cells[split.row + ROW] for split in group.splits]
            if group.action is None:
                action = rows[0].action_array[steps[0]]
            else:
                action = group.action
                for split, unroll, t in zip(group.splits, rows, steps, strict=True):
                    put(action, split.env_rows, unroll.action_array[t])
            env_rows = [split.env_rows for split in group.splits]
            group.envs.step_splits(action, list(zip(rows, steps, env_rows, strict=True)))
        self._handshake.end_work(self._index, group.number)
        for split in begin or group.splits:
            self._handshake.give_turn(split.number, OBS)
            split.actor_event.set()

    def _rows(self, split: _Split) -> UnrollRows:
        slot = self._handshake.cells[split.row + SLOT]
        rows = split.rows.get(slot)
        if rows is None:
            rows = split.rows[slot] = UnrollRows(split.slots.buffer(slot), self._length)
        return rows

    def _sleep(self) -> None:
        if any(slots.closed for slots in self._slots):
            raise QueueClosed
        self._event.wait(LOOK_AGAIN_SECONDS)
