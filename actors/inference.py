"""The policy worker: decides for many environment workers at once, in batches of whatever is ready
(Sample Factory, arXiv 2006.11751, section 3; SEED RL, arXiv 1910.06591).

    environment worker --obs, reward, flags--> slot <--action, logp, state-- policy worker

One slot is one unroll of one group of environments. The environment worker writes into the very
slot that the policy worker reads and writes, and that the learner reads in the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from unirl.actors.env_worker import group_seed
from unirl.actors.sampler import SamplerConfig
from unirl.actors.stepping import Rows
from unirl.actors.vector import VectorActor
from unirl.core.actor import ActorContext
from unirl.core.device import usable_device
from unirl.core.exchange import (
    ACT,
    BEGIN,
    HELLO,
    LOST,
    OBS,
    ROW,
    SEED,
    SINCE_US,
    SLOT,
    TURN,
    Exchange,
    micros,
)
from unirl.core.sample import Slot
from unirl.core.seeding import derive_seed
from unirl.core.slot_queue import SlotQueue
from unirl.core.slot_table import REASONS
from unirl.core.timers import Timers
from unirl.core.tree import tree_map
from unirl.core.waiters import LOOK_AGAIN_SECONDS
from unirl.envs.config import EnvConfig
from unirl.envs.make import make_vec, spaces
from unirl.errors import QueueClosed
from unirl.policy import Policy, PolicyConfig, zero_state
from unirl.policy.precision import warn_if_emulated
from unirl.policy.recurrent import State


@dataclass
class _Part:
    """What a policy worker knows of its part of one group."""

    number: int
    row: int
    """Where its words lie in the exchange."""
    worker: int
    state: State
    generator: torch.Generator
    slot: Slot | None = None
    rows: Rows | None = None
    t: int = 0
    """The row that is decided next."""
    stash: Any = None
    """The observation the next unroll begins with, while no place is free for it."""
    parked_us: int = 0
    started_us: int = 0
    is_ready: bool = False
    """Row t can be decided."""
    history: dict[int, Rows] = field(default_factory=dict)


class PolicyWorker:
    """See StreamingActor. Fills as many slots at a time as there are parts."""

    def __init__(
        self,
        context: ActorContext,
        policy: Policy,
        exchange: Exchange,
        config: SamplerConfig,
    ) -> None:
        self._index, self._policy, self._weights = context.index, policy, context.weights
        self._exchange, self._config, self._version = exchange, config, -1
        self._number = context.policy * exchange.layout.num_actors + context.index
        self._num_rows = len(config.rows_of(context.policy))
        self._device = torch.device(config.device)
        self._parts = [
            _Part(
                number,
                exchange.row(number),
                exchange.layout.worker_of(number),
                self._policy.initial_state(self._num_rows),
                torch.Generator(device=self._device),
            )
            for number in exchange.layout.parts_of_actor(self._number)
        ]
        self._queue_is_full = False

    def serve(self, queue: SlotQueue) -> None:
        """See StreamingActor."""
        exchange, max_parts = self._exchange, len(self._parts)
        if self._config.batch_rows:
            max_parts = self._config.batch_rows // self._config.num_envs
        wait_us = self._config.batch_wait_ms * 1e3
        while True:
            exchange.beat(self._number)
            self._queue_is_full = False
            for part in self._parts:
                self._look_at(part, queue)
            ready = [part for part in self._parts if part.is_ready]
            if not ready:
                self._sleep(queue, LOOK_AGAIN_SECONDS)
                continue
            if wait_us and len(ready) < max_parts and self._others_step(ready):
                oldest = min(exchange.words[part.row + SINCE_US] for part in ready)
                left_us = wait_us - (micros() - oldest)
                if left_us > 0:
                    self._sleep(queue, left_us / 1e6)
                    continue
            for start in range(0, len(ready), max_parts):
                self._decide(ready[start : start + max_parts])

    def close(self) -> None:
        """Nothing to let go of: the environments belong to their workers."""

    # -- whose turn it is --------------------------------------------------------------------------

    def _look_at(self, part: _Part, queue: SlotQueue) -> None:
        """Move the part on as far as it goes without a decision."""
        words = self._exchange.words
        if words[part.row + LOST]:
            self._bury(part, queue)
            return
        turn = words[part.row + TURN]
        if turn == HELLO:
            self._welcome(part, queue)
        elif turn == OBS and not part.is_ready:
            if part.stash is not None:
                part.is_ready = self._begin_parked(part, queue)
            elif part.t < 0:  # the answer to BEGIN: row 0 is there
                part.t, part.is_ready = 0, True
            else:
                part.is_ready = self._advance(part, queue)

    def _advance(self, part: _Part, queue: SlotQueue) -> bool:
        """The environments have answered row t: go on to the next, perhaps in another slot."""
        rows = part.rows
        assert rows is not None
        if part.state and not rows.mask[part.t].all():
            fillers = torch.from_numpy(~rows.mask[part.t]).to(self._device)
            part.state = zero_state(part.state, fillers)
        part.t += 1
        return part.t < self._config.unroll_length or self._turn_over(part, queue)

    def _turn_over(self, part: _Part, queue: SlotQueue) -> bool:
        """The unroll is complete: commit it and begin the next with its last observation."""
        finished, rows = part.slot, part.rows
        assert finished is not None and rows is not None
        finished.work_seconds = (micros() - part.started_us) / 1e6
        last = rows.obs[part.t]
        found = self._acquire(part, queue)
        if found:
            assert part.rows is not None
            _copy(last, part.rows.obs[0])
        else:
            # Once committed, the slot may be learned and written anew at any moment.
            part.stash, part.parked_us = tree_map(torch.clone, last), micros()
        queue.commit(finished)
        return found

    def _begin_parked(self, part: _Part, queue: SlotQueue) -> bool:
        if not self._acquire(part, queue):
            return False
        assert part.slot is not None and part.rows is not None
        _copy(part.stash, part.rows.obs[0])
        part.stash = None
        part.slot.wait_seconds = (micros() - part.parked_us) / 1e6
        return True

    def _acquire(self, part: _Part, queue: SlotQueue) -> bool:
        """A new slot for the part, if a place is free."""
        part.slot = part.rows = None
        slot = None if self._queue_is_full else queue.try_acquire(self._index)
        if slot is None:
            self._queue_is_full = True
            return False
        rows = part.history.get(slot.index)
        if rows is None:
            rows = part.history[slot.index] = Rows(slot.data, self._config.unroll_length)
        part.slot, part.rows, part.t, part.started_us = slot, rows, 0, micros()
        return True

    def _welcome(self, part: _Part, queue: SlotQueue) -> None:
        """A worker has reset this part's environments: give it a slot."""
        if not self._acquire(part, queue):
            return
        assert part.slot is not None
        words = self._exchange.words
        part.generator.manual_seed(derive_seed(words[part.row + SEED], "actions"))
        part.state = self._policy.initial_state(self._num_rows)
        part.t = -1
        words[part.row + SLOT] = part.slot.index
        self._exchange.give_turn(part.number, BEGIN)
        self._exchange.ring_worker(part.worker)

    def _bury(self, part: _Part, queue: SlotQueue) -> None:
        """The worker died: what it left unfinished is discarded."""
        if part.slot is not None:
            queue.discard(part.slot, REASONS[self._exchange.words[part.row + LOST] - 1])
        part.slot = part.rows = part.stash = None
        part.is_ready = False
        self._exchange.clear(part.number)
        self._exchange.ring_worker(part.worker)

    def _others_step(self, ready: Sequence[_Part]) -> bool:
        """Whether a worker that has no group in `ready` is stepping one."""
        words, have = self._exchange.words, {part.worker for part in ready}
        return any(
            part.worker not in have and words[part.row + TURN] == ACT for part in self._parts
        )

    def _sleep(self, queue: SlotQueue, seconds: float) -> None:
        if queue.closed:
            raise QueueClosed
        queue.wait_as_actor(self._index, seconds)

    # -- deciding ----------------------------------------------------------------------------------

    def _decide(self, parts: Sequence[_Part]) -> None:
        """One forward pass over the rows of these parts; each environment worker is rung once."""
        started, exchange = micros(), self._exchange
        self._version = self._weights.pull(self._policy, self._version)
        for part in parts:
            assert part.slot is not None
            part.slot.last_version = self._version
            if part.t == 0:
                part.slot.first_version = self._version
                for name, value in part.state.items():
                    part.slot.data["state"][name].copy_(value)
        self._act(parts)
        words = exchange.words
        for part in parts:
            assert part.slot is not None
            part.is_ready = False
            words[part.row + SLOT] = part.slot.index
            words[part.row + ROW] = part.t
            exchange.give_turn(part.number, ACT)
        for worker in {part.worker for part in parts}:
            exchange.ring_worker(worker)
        exchange.count_forward(self._number, started, len(parts) * self._num_rows)

    def _act(self, parts: Sequence[_Part]) -> None:
        obs = _join([part.rows.obs[part.t] for part in parts if part.rows is not None])
        if self._device.type != "cpu":
            obs = tree_map(lambda leaf: leaf.to(self._device, non_blocking=True), obs)
        state = _join([part.state for part in parts])
        results = self._policy.act_groups(obs, state, [part.generator for part in parts])
        actions, logps = [one.action for one in results], [one.logp for one in results]
        if self._device.type != "cpu":
            # device -> host, once for all parts: every copy waits for the device
            actions = list(torch.cat(actions).cpu().chunk(len(parts)))
            logps = list(torch.cat(logps).cpu().chunk(len(parts)))
        for part, result, action, logp in zip(parts, results, actions, logps, strict=True):
            assert part.rows is not None
            part.rows.action[part.t].copy_(action)
            part.rows.logp[part.t].copy_(logp)
            part.state = result.state


class GroupsActor:
    """See Actor. The groups of a policy worker in one process, one after the other: what the inline
    runner runs for debugging. Samples are those of the workers, bit for bit, where these decide for
    each group on its own.
    """

    def __init__(self, groups: Sequence[VectorActor], workers: Sequence[int]) -> None:
        self._groups, self._workers, self._next = groups, workers, 0
        self.timers = Timers()
        for group in groups:
            group.timers = self.timers

    def restart(self, seed: int) -> None:
        """See Actor."""
        num_groups = len(self._groups) // len(self._workers)
        seeds = _group_seeds(seed, self._workers, num_groups)
        for group, own in zip(self._groups, seeds, strict=True):
            group.restart(own)
        self._next = 0

    def produce(self, slot: Slot) -> None:
        """See Actor: the next group's unroll."""
        group = self._groups[self._next % len(self._groups)]
        self._next += 1
        group.produce(slot)

    def close(self) -> None:
        """See Actor."""
        for group in self._groups:
            group.close()


def make_policy_worker(
    context: ActorContext,
    *,
    env: EnvConfig,
    policy: PolicyConfig,
    sampler: SamplerConfig,
    gamma: float,
) -> PolicyWorker | GroupsActor:
    """The factory of a plan: bind all but `context` with functools.partial.

    With an exchange the policy worker; without (the inline runner) the same groups in this process.
    """
    if context.exchange is None:
        return _make_groups(context, env, policy, sampler, gamma)
    assert isinstance(context.exchange, Exchange)
    device = usable_device("sampler.device", sampler.device)
    if context.index == 0:
        warn_if_emulated(policy, device, "the policy worker")
    observation_space, action_space = spaces(env)
    module = Policy(observation_space, action_space, policy, seed=context.seed % 2**31)
    module = module.eval().to(device)
    return PolicyWorker(context, module, context.exchange, sampler)


def _make_groups(
    context: ActorContext,
    env: EnvConfig,
    policy: PolicyConfig,
    sampler: SamplerConfig,
    gamma: float,
) -> GroupsActor:
    workers = sampler.layout().workers_of(context.index)
    seeds = _group_seeds(context.seed, workers, sampler.num_groups)
    observation_space, action_space = spaces(env)
    module = Policy(observation_space, action_space, policy, seed=context.seed % 2**31).eval()
    groups: list[VectorActor] = []
    try:
        for seed in seeds:
            vector_env = make_vec(env, sampler.num_envs)
            try:
                actor = VectorActor(
                    vector_env,
                    module,
                    context.weights,
                    unroll_length=sampler.unroll_length,
                    gamma=gamma,
                    seed=seed,
                    env_id=env.id,
                )
            except BaseException:
                vector_env.close()
                raise
            groups.append(actor)
    except BaseException:
        for group in groups:
            group.close()
        raise
    return GroupsActor(groups, workers)


def _group_seeds(actor_seed: int, workers: Sequence[int], num_groups: int) -> list[int]:
    """A seed for each group of these workers, as the processes runner's workers have them."""
    return [
        group_seed(derive_seed(actor_seed, "worker", worker), group)
        for worker in workers
        for group in range(num_groups)
    ]


def _join(trees: Sequence[Any]) -> Any:
    """Trees of [B, ...] as one of [sum of B, ...]; a single one is itself, uncopied."""
    if len(trees) == 1:
        return trees[0]
    first = trees[0]
    if isinstance(first, Mapping):
        return {key: _join([tree[key] for tree in trees]) for key in first}
    return torch.cat(list(trees))


def _copy(source: Any, into: Any) -> None:
    if isinstance(source, Mapping):
        for key, child in source.items():
            _copy(child, into[key])
    else:
        into.copy_(source)
