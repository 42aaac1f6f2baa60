"""The policy worker: decides for many environment workers at once, in batches of all that wait
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

from unirl.actors.env_worker import LOOK_AGAIN_SECONDS
from unirl.actors.groups import GroupsActor, make_groups
from unirl.actors.sampler import SamplerConfig
from unirl.actors.stepping import UnrollRows
from unirl.core.actor import ActorContext
from unirl.core.queue import REASONS, QueueClient
from unirl.core.sample import Slot
from unirl.core.seeding import derive_seed
from unirl.core.tree import copy_tree, tree_map
from unirl.device import usable_device
from unirl.envs.config import EnvConfig
from unirl.envs.make import spaces
from unirl.errors import QueueClosed
from unirl.handshake.handshake import (
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
    Handshake,
)
from unirl.host import micros
from unirl.policy import Policy, PolicyConfig, zero_state
from unirl.policy.precision import warn_if_emulated
from unirl.policy.recurrent import State


@dataclass
class _Split:
    """What a policy worker knows of its split of one group."""

    number: int
    row: int
    """Where its cells are in the handshake."""
    worker: int
    state: State
    generator: torch.Generator
    slot: Slot | None = None
    rows: UnrollRows | None = None
    t: int = 0
    """The row that is decided next."""
    stash: Any = None
    """The observation the next unroll begins with, while no slot is free for it."""
    parked_us: int = 0
    started_us: int = 0
    is_due: bool = False
    """Row t can be decided."""
    history: dict[int, UnrollRows] = field(default_factory=dict)


class PolicyWorker:
    """See StreamingActor. Fills as many slots at a time as there are splits."""

    def __init__(
        self,
        context: ActorContext,
        policy: Policy,
        handshake: Handshake,
        config: SamplerConfig,
    ) -> None:
        self._policy, self._weights = policy, context.weights
        self._handshake, self._config, self._version = handshake, config, -1
        self._number = context.learner * handshake.layout.num_actors + context.index
        self._num_rows = len(config.rows_of(context.learner))
        self._device = torch.device(config.device)
        self._splits = [
            _Split(
                number,
                handshake.row(number),
                handshake.layout.worker_of(number),
                self._policy.initial_state(self._num_rows),
                torch.Generator(device=self._device),
            )
            for number in handshake.layout.splits_of_actor(self._number)
        ]
        self._queue_is_full = False

    def serve(self, queue: QueueClient) -> None:
        handshake, max_splits = self._handshake, len(self._splits)
        if self._config.batch_rows:
            max_splits = self._config.batch_rows // self._config.num_envs
        wait_us = self._config.batch_wait_ms * 1e3
        while True:
            queue.progress()
            self._queue_is_full = False
            for split in self._splits:
                self._look_at(split, queue)
            due = [split for split in self._splits if split.is_due]
            if not due:
                self._sleep(queue, LOOK_AGAIN_SECONDS)
                continue
            if wait_us and len(due) < max_splits and self._others_step(due):
                oldest = min(handshake.cells[split.row + SINCE_US] for split in due)
                left_us = wait_us - (micros() - oldest)
                if left_us > 0:
                    self._sleep(queue, left_us / 1e6)
                    continue
            for start in range(0, len(due), max_splits):
                self._decide(due[start : start + max_splits])

    def close(self) -> None:
        """Nothing to let go of: the environments belong to their workers."""

    # -- whose turn it is --------------------------------------------------------------------------

    def _look_at(self, split: _Split, queue: QueueClient) -> None:
        """Move the split on as far as it goes without a decision."""
        cells = self._handshake.cells
        if cells[split.row + LOST]:
            self._drop(split, queue)
            return
        turn = cells[split.row + TURN]
        if turn == HELLO:
            self._begin_group(split, queue)
        elif turn == OBS and not split.is_due:
            if split.stash is not None:
                split.is_due = self._begin_parked(split, queue)
            elif split.t < 0:  # the answer to BEGIN: row 0 is there
                split.t, split.is_due = 0, True
            else:
                split.is_due = self._advance(split, queue)

    def _advance(self, split: _Split, queue: QueueClient) -> bool:
        """The environments have answered row t: continue with the next, perhaps in another slot."""
        rows = split.rows
        assert rows is not None
        if split.state and not rows.mask[split.t].all():
            fillers = torch.from_numpy(~rows.mask[split.t]).to(self._device)
            split.state = zero_state(split.state, fillers)
        split.t += 1
        return split.t < self._config.unroll_length or self._turn_over(split, queue)

    def _turn_over(self, split: _Split, queue: QueueClient) -> bool:
        """The unroll is complete: commit it and begin the next with its last observation."""
        finished, rows = split.slot, split.rows
        assert finished is not None and rows is not None
        finished.work_seconds = (micros() - split.started_us) / 1e6
        last = rows.obs[split.t]
        found = self._acquire(split, queue)
        if found:
            assert split.rows is not None
            copy_tree(last, split.rows.obs[0])
        else:
            # Once committed, the slot may be learned and written again at any moment.
            split.stash, split.parked_us = tree_map(torch.clone, last), micros()
        queue.commit(finished)
        return found

    def _begin_parked(self, split: _Split, queue: QueueClient) -> bool:
        if not self._acquire(split, queue):
            return False
        assert split.slot is not None and split.rows is not None
        copy_tree(split.stash, split.rows.obs[0])
        split.stash = None
        split.slot.wait_seconds = (micros() - split.parked_us) / 1e6
        return True

    def _acquire(self, split: _Split, queue: QueueClient) -> bool:
        split.slot = split.rows = None
        slot = None if self._queue_is_full else queue.try_acquire()
        if slot is None:
            self._queue_is_full = True
            return False
        rows = split.history.get(slot.index)
        if rows is None:
            rows = split.history[slot.index] = UnrollRows(slot.data, self._config.unroll_length)
        split.slot, split.rows, split.t, split.started_us = slot, rows, 0, micros()
        return True

    def _begin_group(self, split: _Split, queue: QueueClient) -> None:
        """A worker has reset this split's environments: give it a slot."""
        if not self._acquire(split, queue):
            return
        assert split.slot is not None
        cells = self._handshake.cells
        split.generator.manual_seed(derive_seed(cells[split.row + SEED], "actions"))
        split.state = self._policy.initial_state(self._num_rows)
        split.t = -1
        cells[split.row + SLOT] = split.slot.index
        self._handshake.give_turn(split.number, BEGIN)
        self._handshake.worker_events[split.worker].set()

    def _drop(self, split: _Split, queue: QueueClient) -> None:
        """The worker died: what it left unfinished is discarded."""
        if split.slot is not None:
            queue.discard(split.slot, REASONS[self._handshake.cells[split.row + LOST] - 1])
        split.slot = split.rows = split.stash = None
        split.is_due = False
        self._handshake.clear(split.number)
        self._handshake.worker_events[split.worker].set()

    def _others_step(self, due: Sequence[_Split]) -> bool:
        """Whether a worker that has no group in `due` is stepping one."""
        cells, have = self._handshake.cells, {split.worker for split in due}
        return any(
            split.worker not in have and cells[split.row + TURN] == ACT for split in self._splits
        )

    def _sleep(self, queue: QueueClient, seconds: float) -> None:
        if queue.closed:
            raise QueueClosed
        event = self._handshake.actor_events[self._number]
        if self._queue_is_full:  # some split has no slot: a free one is of interest, too
            queue.wait(seconds, event)
        else:
            event.wait(seconds)

    # -- deciding ----------------------------------------------------------------------------------

    def _decide(self, splits: Sequence[_Split]) -> None:
        """One forward pass over the rows of these splits; each worker is notified once."""
        started, handshake = micros(), self._handshake
        self._version = self._weights.pull(self._policy, self._version)
        for split in splits:
            assert split.slot is not None
            split.slot.last_version = self._version
            if split.t == 0:
                split.slot.first_version = self._version
                for name, value in split.state.items():
                    split.slot.data["state"][name].copy_(value)
        self._act(splits)
        cells = handshake.cells
        for split in splits:
            assert split.slot is not None
            split.is_due = False
            cells[split.row + SLOT] = split.slot.index
            cells[split.row + ROW] = split.t
            handshake.give_turn(split.number, ACT)
        for worker in {split.worker for split in splits}:
            handshake.worker_events[worker].set()
        handshake.count_forward(self._number, started, len(splits) * self._num_rows)

    def _act(self, splits: Sequence[_Split]) -> None:
        obs = _join([split.rows.obs[split.t] for split in splits if split.rows is not None])
        if self._device.type != "cpu":
            obs = tree_map(lambda leaf: leaf.to(self._device, non_blocking=True), obs)
        state = _join([split.state for split in splits])
        results = self._policy.act_groups(obs, state, [split.generator for split in splits])
        actions, logps = [one.action for one in results], [one.logp for one in results]
        if self._device.type != "cpu":
            # device -> host, once for all splits: every copy waits for the device
            num, rows, joined = len(splits), self._num_rows, _join(actions)
            host = tree_map(lambda leaf: leaf.cpu(), joined)
            starts = range(0, num * rows, rows)
            actions = [tree_map(lambda leaf, i=i: leaf[i : i + rows], host) for i in starts]
            logps = list(torch.cat(logps).cpu().chunk(num))
        for split, result, action, logp in zip(splits, results, actions, logps, strict=True):
            assert split.rows is not None
            copy_tree(action, split.rows.action[split.t])
            split.rows.logp[split.t].copy_(logp)
            split.state = result.state


def make_policy_worker(
    context: ActorContext,
    *,
    env: EnvConfig,
    policy: PolicyConfig,
    sampler: SamplerConfig,
    gamma: float,
) -> PolicyWorker | GroupsActor:
    """The factory of a plan: bind all but `context` with functools.partial.

    With a handshake the policy worker; without (the inline runner) the same groups in this
    process.
    """
    if context.handshake is None:
        return make_groups(context, env=env, policy=policy, sampler=sampler, gamma=gamma)
    assert isinstance(context.handshake, Handshake)
    device = usable_device("sampler.device", sampler.device)
    if context.index == 0:
        warn_if_emulated(policy, device, "the policy worker")
    observation_space, action_space = spaces(env)
    module = Policy(observation_space, action_space, policy, seed=context.seed % 2**31)
    module = module.eval().to(device)
    return PolicyWorker(context, module, context.handshake, sampler)


def _join(trees: Sequence[Any]) -> Any:
    """Trees of [B, ...] as one of [sum of B, ...]; a single one is itself, uncopied."""
    if len(trees) == 1:
        return trees[0]
    first = trees[0]
    if isinstance(first, Mapping):
        return {key: _join([tree[key] for tree in trees]) for key in first}
    return torch.cat(list(trees))
