"""The environment worker: a process that steps environments and holds no policy (Sample Factory,
arXiv 2006.11751, section 3).

Its environments come in groups. While a policy worker decides for one group, it steps another.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from unirl.actors.exchange import (
    ACT,
    BEGIN,
    EMPTY,
    HELLO,
    OBS,
    ROW,
    SEED,
    SLOT,
    TURN,
    SharedExchange,
)
from unirl.actors.stepping import Rows, SteppedEnvs
from unirl.core.errors import QueueClosed, UniRLError
from unirl.core.exchange import WorkerContext
from unirl.core.queue import LOOK_AGAIN_SECONDS, SlotQueue
from unirl.core.seeding import derive_seed
from unirl.envs.config import EnvConfig
from unirl.envs.make import make_vec
from unirl.envs.vector import VectorEnv

_OWED = (ACT, BEGIN)


@dataclass
class _Group:
    number: int
    envs: SteppedEnvs
    rows: dict[int, Rows] = field(default_factory=dict)


def serve_environments(
    context: WorkerContext,
    *,
    env: EnvConfig,
    num_envs: int,
    unroll_length: int,
    gamma: float,
) -> None:
    """The main function of a worker: bind all but `context` with functools.partial.

    num_envs: of each group. Runs until QueueClosed.
    """
    exchange = context.exchange
    assert isinstance(exchange, SharedExchange)
    groups: list[_Group] = []
    try:
        for number in exchange.layout.groups_of_worker(context.index):
            vector_env = _require_next_step(make_vec(env, num_envs), env)
            groups.append(_Group(number, SteppedEnvs(vector_env, gamma=gamma, env_id=env.id)))
        worker = _Worker(context.index, exchange, context.queues[0], groups, unroll_length)
        worker.greet(context.seed)
        worker.run()
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


def group_seed(worker_seed: int, group: int) -> int:
    """The seed of a worker's group, counted from 0 within the worker."""
    return derive_seed(worker_seed, "group", group)


class _Worker:
    def __init__(
        self,
        index: int,
        exchange: SharedExchange,
        queue: SlotQueue,
        groups: list[_Group],
        unroll_length: int,
    ) -> None:
        self._index, self._exchange, self._queue = index, exchange, queue
        self._groups, self._length = groups, unroll_length
        self._actor = exchange.actors_of(index)[0]

    def greet(self, seed: int) -> None:
        """Reset all groups and say so."""
        words = self._exchange.words
        for i, group in enumerate(self._groups):
            own = group_seed(seed, i)
            group.envs.restart(own)
            row = self._exchange.row(group.number)
            while words[row + TURN] != EMPTY:  # the policy worker still clears up after another
                self._sleep()
            words[row + SEED] = own
            self._exchange.give_turn(group.number, HELLO)
            self._queue.ring_actor(self._actor)

    def run(self) -> None:
        """Step whichever group has its actions, in turn, until the queue closes."""
        exchange, words = self._exchange, self._exchange.words
        rows = [exchange.row(group.number) for group in self._groups]
        while True:
            idle = True
            for group, row in zip(self._groups, rows, strict=True):
                turn = words[row + TURN]
                if turn in _OWED:
                    idle = False
                    self._step(group, row, turn)
            if idle:
                self._sleep()

    def _step(self, group: _Group, row: int, turn: int) -> None:
        started = self._exchange.begin_work(self._index)
        words = self._exchange.words
        slot = words[row + SLOT]
        rows = group.rows.get(slot)
        if rows is None:
            rows = group.rows[slot] = Rows(self._queue.slot_data(slot), self._length)
        if turn == BEGIN:
            group.envs.write_first(rows)
        else:
            group.envs.step(rows, words[row + ROW])
        self._exchange.end_work(self._index, started)
        self._exchange.give_turn(group.number, OBS)
        self._queue.ring_actor(self._actor)

    def _sleep(self) -> None:
        if self._queue.closed:
            raise QueueClosed
        self._exchange.wait_as_worker(self._index, LOOK_AGAIN_SECONDS)
