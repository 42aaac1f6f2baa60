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
from unirl.actors.exchange import (
    ACT,
    BEGIN,
    EMPTY,
    HELLO,
    LOST,
    OBS,
    REASON,
    ROW,
    SEED,
    SINCE_US,
    SLOT,
    TURN,
    Layout,
    SharedExchange,
    micros,
)
from unirl.actors.stepping import Rows
from unirl.actors.vector import VectorActor
from unirl.core.actor import ActorContext
from unirl.core.errors import QueueClosed, UniRLError
from unirl.core.queue import LOOK_AGAIN_SECONDS, REASONS, SlotQueue
from unirl.core.sample import Slot
from unirl.core.seeding import derive_seed
from unirl.core.tree import tree_map
from unirl.core.weights import WeightStore
from unirl.envs.config import EnvConfig
from unirl.envs.make import make_vec, spaces
from unirl.policy import Policy, PolicyConfig, zero_state
from unirl.policy.recurrent import State


@dataclass(frozen=True)
class SamplerConfig:
    """How many environments there are, who steps them and who decides for them."""

    num_workers: int = 2
    """Environment workers: processes that step environments and hold no policy. More than cores
    only helps where environments wait.
    """
    num_groups: int = 2
    """Groups of each worker: one steps while another waits for its actions. 1: worker and policy
    take turns; more than 2 helps where one group is much slower than the others.
    """
    num_envs: int = 16
    """Environments of each group, in one slot together. More: cheaper steps, larger slots."""
    unroll_length: int = 32
    """Steps per environment in one slot. More: longer credit assignment, fewer updates."""
    num_policy_workers: int = 1
    """Processes that hold a policy copy and decide. More helps only where one cannot keep up."""
    batch_rows: int = 0
    """Environments of one forward pass at most. 0: all that are ready. With num_envs every group is
    decided for on its own, and samples are bit for bit those of the inline runner.
    """
    batch_wait_ms: float = 0.0
    """How long the first ready group waits for others to fill the batch. More: larger batches, more
    latency.
    """
    device: str = "cpu"
    """Where policies act: cpu or cuda."""

    def __post_init__(self) -> None:
        for name in (
            "num_workers", "num_groups", "num_envs", "unroll_length", "num_policy_workers",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise UniRLError(
                    f"sampler.{name} is {getattr(self, name)}",
                    f"sampler.{name} >= 1 must hold",
                    "set it to 1 or more",
                )
        if self.num_policy_workers > self.num_workers:
            raise UniRLError(
                f"{self.num_policy_workers} policy workers share {self.num_workers} workers",
                "sampler.num_policy_workers <= sampler.num_workers must hold",
                f"set sampler.num_policy_workers to {self.num_workers}, or use more workers",
            )
        if self.batch_rows and self.batch_rows < self.num_envs:
            raise UniRLError(
                f"sampler.batch_rows is {self.batch_rows} and sampler.num_envs {self.num_envs}",
                "batch_rows >= num_envs must hold: a group is decided for as a whole",
                f"set sampler.batch_rows to {self.num_envs}, or to 0",
            )
        if self.batch_wait_ms < 0:
            raise UniRLError(
                f"sampler.batch_wait_ms is {self.batch_wait_ms}", "it must be >= 0", "set it to 0"
            )

    @property
    def total_groups(self) -> int:
        """Groups of all workers: as many slots are being filled at a time."""
        return self.num_workers * self.num_groups

    def layout(self) -> Layout:
        """Which worker has which groups, and who decides for them."""
        return Layout(self.num_workers, self.num_groups, self.num_policy_workers)


@dataclass
class _Group:
    """What a policy worker knows of one group."""

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
    history: dict[int, Rows] = field(default_factory=dict)


class PolicyWorker:
    """See StreamingActor. Fills as many slots at a time as there are groups."""

    def __init__(
        self,
        index: int,
        policy: Policy,
        weights: WeightStore,
        exchange: SharedExchange,
        config: SamplerConfig,
    ) -> None:
        self._index, self._policy, self._weights = index, policy, weights
        self._exchange, self._config, self._version = exchange, config, -1
        self._device = torch.device(config.device)
        self._groups = [
            _Group(
                number,
                exchange.row(number),
                exchange.layout.worker_of(number),
                self._policy.initial_state(config.num_envs),
                torch.Generator(device=self._device),
            )
            for number in exchange.layout.groups_of_actor(index)
        ]
        self._queue_is_full = False

    def serve(self, queue: SlotQueue) -> None:
        """See StreamingActor."""
        exchange, max_groups = self._exchange, len(self._groups)
        if self._config.batch_rows:
            max_groups = self._config.batch_rows // self._config.num_envs
        wait_us = self._config.batch_wait_ms * 1e3
        while True:
            exchange.beat(self._index)
            self._queue_is_full = False
            ready = [group for group in self._groups if self._is_ready(group, queue)]
            if not ready:
                self._sleep(queue, LOOK_AGAIN_SECONDS)
                continue
            if wait_us and len(ready) < min(max_groups, self._num_expected()):
                oldest = min(exchange.words[group.row + SINCE_US] for group in ready)
                left_us = wait_us - (micros() - oldest)
                if left_us > 0:
                    self._sleep(queue, left_us / 1e6)
                    continue
            for start in range(0, len(ready), max_groups):
                self._decide(ready[start : start + max_groups])

    def close(self) -> None:
        """Nothing to let go of: the environments belong to their workers."""

    # -- whose turn it is --------------------------------------------------------------------------

    def _is_ready(self, group: _Group, queue: SlotQueue) -> bool:
        """Whether the group's next row can be decided; moves it on as far as it goes without."""
        turn = self._exchange.words[group.row + TURN]
        if turn == OBS:
            if group.stash is not None:
                return self._begin_parked(group, queue)
            if group.t < 0:  # the answer to BEGIN: row 0 is there
                group.t = 0
                return True
            return self._advance(group, queue)
        if turn == HELLO:
            self._welcome(group, queue)
        elif turn == LOST:
            self._bury(group, queue)
        return False

    def _advance(self, group: _Group, queue: SlotQueue) -> bool:
        """The environments have answered row t: go on to the next, perhaps in another slot."""
        rows = group.rows
        assert rows is not None
        if group.state and not rows.mask[group.t].all():
            fillers = torch.from_numpy(~rows.mask[group.t]).to(self._device)
            group.state = zero_state(group.state, fillers)
        group.t += 1
        return group.t < self._config.unroll_length or self._turn_over(group, queue)

    def _turn_over(self, group: _Group, queue: SlotQueue) -> bool:
        """The unroll is complete: commit it and begin the next with its last observation."""
        finished, rows = group.slot, group.rows
        assert finished is not None and rows is not None
        finished.work_seconds = (micros() - group.started_us) / 1e6
        last = rows.obs[group.t]
        found = self._acquire(group, queue)
        if found:
            assert group.rows is not None
            _copy(last, group.rows.obs[0])
        else:
            # Once committed, the slot may be learned and written anew at any moment.
            group.stash, group.parked_us = tree_map(torch.clone, last), micros()
        queue.commit(finished)
        return found

    def _begin_parked(self, group: _Group, queue: SlotQueue) -> bool:
        if not self._acquire(group, queue):
            return False
        assert group.slot is not None and group.rows is not None
        _copy(group.stash, group.rows.obs[0])
        group.stash = None
        group.slot.wait_seconds = (micros() - group.parked_us) / 1e6
        return True

    def _acquire(self, group: _Group, queue: SlotQueue) -> bool:
        """A new slot for the group, if a place is free."""
        group.slot = group.rows = None
        slot = None if self._queue_is_full else queue.try_acquire(self._index)
        if slot is None:
            self._queue_is_full = True
            return False
        rows = group.history.get(slot.index)
        if rows is None:
            rows = group.history[slot.index] = Rows(slot.data, self._config.unroll_length)
        group.slot, group.rows, group.t, group.started_us = slot, rows, 0, micros()
        return True

    def _welcome(self, group: _Group, queue: SlotQueue) -> None:
        """A worker has reset this group's environments: give it a slot."""
        if not self._acquire(group, queue):
            return
        assert group.slot is not None
        words = self._exchange.words
        group.generator.manual_seed(derive_seed(words[group.row + SEED], "actions"))
        group.state = self._policy.initial_state(self._config.num_envs)
        group.t = -1
        words[group.row + SLOT] = group.slot.index
        self._exchange.give_turn(group.number, BEGIN)
        self._exchange.ring_worker(group.worker)

    def _bury(self, group: _Group, queue: SlotQueue) -> None:
        """The worker died: what it left unfinished is discarded."""
        if group.slot is not None:
            queue.discard(group.slot, REASONS[self._exchange.words[group.row + REASON]])
        group.slot = group.rows = group.stash = None
        self._exchange.give_turn(group.number, EMPTY)
        self._exchange.ring_worker(group.worker)

    def _num_expected(self) -> int:
        """Groups that are or will soon be ready."""
        words = self._exchange.words
        return sum(words[group.row + TURN] in (OBS, ACT) for group in self._groups)

    def _sleep(self, queue: SlotQueue, seconds: float) -> None:
        if queue.closed:
            raise QueueClosed
        queue.wait_as_actor(self._index, seconds)

    # -- deciding ----------------------------------------------------------------------------------

    def _decide(self, groups: Sequence[_Group]) -> None:
        """One forward pass over the rows of these groups; each environment worker is rung once."""
        started, exchange = micros(), self._exchange
        self._version = self._weights.pull(self._policy, self._version)
        for group in groups:
            assert group.slot is not None
            group.slot.last_version = self._version
            if group.t == 0:
                group.slot.first_version = self._version
                for name, value in group.state.items():
                    group.slot.data["state"][name].copy_(value)
        self._act(groups)
        words = exchange.words
        for group in groups:
            assert group.slot is not None
            words[group.row + SLOT] = group.slot.index
            words[group.row + ROW] = group.t
            exchange.give_turn(group.number, ACT)
        for worker in {group.worker for group in groups}:
            exchange.ring_worker(worker)
        exchange.count_forward(self._index, started, len(groups) * self._config.num_envs)

    def _act(self, groups: Sequence[_Group]) -> None:
        obs = _join([group.rows.obs[group.t] for group in groups if group.rows is not None])
        if self._device.type != "cpu":
            obs = tree_map(lambda leaf: leaf.to(self._device, non_blocking=True), obs)
        state = _join([group.state for group in groups])
        results = self._policy.act_groups(obs, state, [group.generator for group in groups])
        for group, result in zip(groups, results, strict=True):
            assert group.rows is not None
            group.rows.action[group.t].copy_(result.action)
            group.rows.logp[group.t].copy_(result.logp)
            group.state = result.state


class GroupsActor:
    """See Actor. The groups of a policy worker in one process, one after the other: what the inline
    runner runs for debugging. Samples are those of the workers, bit for bit, where these decide for
    each group on its own.
    """

    def __init__(self, groups: Sequence[VectorActor], workers: Sequence[int]) -> None:
        self._groups, self._workers, self._next = groups, workers, 0

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
    assert isinstance(context.exchange, SharedExchange)
    observation_space, action_space = spaces(env)
    module = Policy(observation_space, action_space, policy, seed=context.seed % 2**31)
    return PolicyWorker(
        context.index,
        module.eval().to(sampler.device),
        context.weights,
        context.exchange,
        sampler,
    )


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
