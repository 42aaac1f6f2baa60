"""The environment worker: a process that steps environments and holds no policy (Sample Factory,
arXiv 2006.11751, section 3).

Its environments come in groups. While a policy worker decides for one group, it steps another.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unirl.actors.sampler import SamplerConfig
from unirl.actors.stepping import ALL, Rows, Select, SteppedEnvs
from unirl.core.env_workers import WorkerContext
from unirl.core.exchange import (
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
    Exchange,
)
from unirl.core.seeding import derive_seed
from unirl.core.slot_queue import SlotQueue
from unirl.core.waiters import LOOK_AGAIN_SECONDS
from unirl.envs.config import EnvConfig
from unirl.envs.make import make_vec
from unirl.envs.spaces import action_field
from unirl.envs.vector import VectorEnv
from unirl.errors import QueueClosed, UniRLError


@dataclass
class _Part:
    """What one policy decides for in a group."""

    row: int
    """Where its words lie in the exchange."""
    number: int
    queue: SlotQueue
    actor: int
    """The policy worker, as its queue counts."""
    own: Select
    """Which of the group's rows."""
    rows: dict[int, Rows] = field(default_factory=dict)


@dataclass
class _Group:
    number: int
    envs: SteppedEnvs
    parts: list[_Part]
    action: NDArray[Any] | None = None
    """Where the parts' actions come together; None with a single part."""


def serve_environments(
    context: WorkerContext, *, env: EnvConfig, sampler: SamplerConfig, gamma: float
) -> None:
    """The main function of a worker: bind all but `context` with functools.partial.

    Runs until QueueClosed. Raises UniRLError for an engine that hides first observations.
    """
    exchange = context.exchange
    assert isinstance(exchange, Exchange)
    groups: list[_Group] = []
    try:
        for number in exchange.layout.groups_of(context.index):
            vector_env = _require_next_step(make_vec(env, sampler.num_envs), env)
            envs = SteppedEnvs(vector_env, gamma=gamma, env_id=env.id)
            group = _Group(number, envs, _parts(context, exchange, number, sampler))
            groups.append(group)
            if len(group.parts) > 1:
                shape, dtype = action_field(vector_env.action_space, sampler.num_envs)
                group.action = torch.empty(shape, dtype=dtype).numpy()
        worker = _Worker(context, exchange, groups, sampler.unroll_length)
        worker.greet(context.seed)
        worker.run_in_threads() if sampler.group_threads else worker.run()
    finally:
        for group in groups:
            group.envs.close()


def _require_next_step(vector_env: VectorEnv, env: EnvConfig) -> VectorEnv:
    """UniRLError for an engine whose policy acts on what stands in no row."""
    if vector_env.hides_first_obs:
        vector_env.close()
        raise UniRLError(
            f'env "{env.id}" resets within the step that ends an episode',
            "a policy worker acts on the rows of its slot, where first observations are hidden",
            'use env.engine "sync", or the vector actor (recipe impala or ppo)',
        )
    return vector_env


def _parts(
    context: WorkerContext, exchange: Exchange, group: int, sampler: SamplerConfig
) -> list[_Part]:
    actor = context.index % exchange.layout.num_actors
    numbers = exchange.layout.parts_of_group(group)
    if len(numbers) == 1:
        return [_Part(exchange.row(numbers[0]), numbers[0], context.queues[0], actor, ALL)]
    return [
        _Part(exchange.row(number), number, queue, actor, np.array(sampler.rows_of(policy)))
        for policy, (number, queue) in enumerate(zip(numbers, context.queues, strict=True))
    ]


def group_seed(worker_seed: int, group: int) -> int:
    """The seed of a worker's group, counted from 0 within the worker."""
    return derive_seed(worker_seed, "group", group)


class _Worker:
    def __init__(
        self,
        context: WorkerContext,
        exchange: Exchange,
        groups: list[_Group],
        unroll_length: int,
    ) -> None:
        self._index, self._exchange, self._queues = context.index, exchange, context.queues
        self._groups, self._length = groups, unroll_length

    def greet(self, seed: int) -> None:
        """Reset all groups, then say so: whoever is greeted asks for rows at once, and a group that
        is yet to be reset would count as late.
        """
        words = self._exchange.words
        seeds = [group_seed(seed, i) for i in range(len(self._groups))]
        for group, own in zip(self._groups, seeds, strict=True):
            group.envs.restart(own)
        for group, own in zip(self._groups, seeds, strict=True):
            for part in group.parts:
                while words[part.row + LOST] or words[part.row + TURN] != EMPTY:
                    self._sleep()  # a policy worker still clears up
                words[part.row + SEED] = own
                self._exchange.give_turn(part.number, HELLO)
                part.queue.ring_actor(part.actor)

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
                        stepping[group.number] = pool.submit(self._step_and_ring, group)
                self._sleep()

    def _owes(self, group: _Group) -> bool:
        turns = [self._exchange.words[part.row + TURN] for part in group.parts]
        return all(turn == ACT for turn in turns) or BEGIN in turns

    def _step_and_ring(self, group: _Group) -> None:
        try:
            self._step(group)
        finally:
            self._exchange.ring_worker(self._index)  # the main thread looks after what was raised

    def _step(self, group: _Group) -> None:
        self._exchange.begin_work(self._index, group.number)
        words = self._exchange.words
        begin = [part for part in group.parts if words[part.row + TURN] == BEGIN]
        for part in begin:
            group.envs.write_first(self._rows(part), part.own)
        if not begin:
            rows = [self._rows(part) for part in group.parts]
            steps = [words[part.row + ROW] for part in group.parts]
            if group.action is None:
                action = rows[0].action_array[steps[0]]
            else:
                action = group.action
                for part, own, t in zip(group.parts, rows, steps, strict=True):
                    action[part.own] = own.action_array[t]
            owns = [part.own for part in group.parts]
            group.envs.step_parts(action, list(zip(rows, steps, owns, strict=True)))
        self._exchange.end_work(self._index, group.number)
        for part in begin or group.parts:
            self._exchange.give_turn(part.number, OBS)
            part.queue.ring_actor(part.actor)

    def _rows(self, part: _Part) -> Rows:
        slot = self._exchange.words[part.row + SLOT]
        rows = part.rows.get(slot)
        if rows is None:
            rows = part.rows[slot] = Rows(part.queue.slot_data(slot), self._length)
        return rows

    def _sleep(self) -> None:
        if any(queue.closed for queue in self._queues):
            raise QueueClosed
        self._exchange.wait_as_worker(self._index, LOOK_AGAIN_SECONDS)
