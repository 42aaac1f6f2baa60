"""What fills slots with stored groups of episodes, in place of engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from unirl.core.actor import ActorContext
from unirl.core.sample import Slot
from unirl.core.seeding import derive_seed
from unirl.core.weights import WeightStore
from unirl.errors import UniRLError
from unirl.llm.agents.rollout import counts_of
from unirl.llm.agents.sample import write_episodes
from unirl.llm.group import GroupShape
from unirl.llm.language_config import LanguageConfig
from unirl.llm.models.model import load_tokenizer
from unirl.llm.replay.stored_groups import LEASE_SECONDS, StoredGroups, consumer_of
from unirl.llm.trajectories.ledger import Ledger, StoredGroup
from unirl.llm.trajectories.store import TrajectoryStore

_LOOK_SECONDS = 0.5
"""Between two looks at a store that has nothing free."""


class Groups(Protocol):
    """Which group a ticket is."""

    def group(self, ticket: int) -> StoredGroup | None:
        """None: there is none now."""


class LeasedGroups:
    """Each group once, by the ledger: no other run gets it. consumer: see `consumer_of`."""

    def __init__(self, ledger: Ledger, consumer: str, run: str | None) -> None:
        self._ledger, self._consumer, self._run = ledger, consumer, run

    def group(self, ticket: int) -> StoredGroup | None:
        name = f"{self._consumer}{ticket}"
        return self._ledger.hold(name, run=self._run, seconds=LEASE_SECONDS)


class ReusedGroups:
    """All groups, each once before any comes again, in an order of the seed's, whatever the ledger
    says.
    """

    def __init__(self, ledger: Ledger, run: str | None, seed: int) -> None:
        self._ledger, self._seed, self._known = ledger, seed, ledger.tickets(run)
        self._epoch, self._order = -1, torch.empty(0)

    def group(self, ticket: int) -> StoredGroup | None:
        epoch, index = divmod(ticket, max(len(self._known), 1))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "replay", epoch))
            self._order = torch.randperm(len(self._known), generator=generator)
            self._epoch = epoch
        return self._ledger.group(*self._known[int(self._order[index])]) if self._known else None


class StoredReplay:
    """An actor. Owns the store. A group counts as new: how far its log-probabilities are from the
    policy's is in the losses. rewards: names, in the order of a slot's. num_tokens: of the model.
    """

    def __init__(
        self,
        store: TrajectoryStore,
        groups: Groups,
        weights: WeightStore,
        shape: GroupShape,
        *,
        rewards: tuple[str, ...],
        num_tokens: int,
        seconds: float,
    ) -> None:
        self._store, self._groups, self._weights, self._shape = store, groups, weights, shape
        self._rewards, self._num_tokens, self._seconds = rewards, num_tokens, seconds

    async def produce(self, slot: Slot) -> None:
        group = await self._wait_for(slot)
        version = self._weights.version
        slot.used = self._write(slot.data, group)
        drawn = slot.data["version"] >= 0
        slot.data["version"][drawn] = version
        slot.first_version = slot.last_version = version

    async def _wait_for(self, slot: Slot) -> StoredGroup:
        deadline = time.monotonic() + self._seconds
        while (group := self._groups.group(slot.ticket)) is None:
            if time.monotonic() > deadline:
                raise UniRLError(
                    "the store has no group left that this run may learn from",
                    f"none became free for queue.timeout_seconds = {self._seconds:g}",
                    "see whether another run reads it; its groups are free again when it has ended",
                )
            slot.progress()
            await asyncio.sleep(_LOOK_SECONDS)
        return group

    def _write(self, data: Mapping[str, Any], group: StoredGroup) -> int:
        records, prompt = group.records, group.prompt
        if len(records) != self._shape.group_size:
            raise _misfit(group, "episodes", len(records), self._shape.group_size)
        if set(records[0].scores) != set(self._rewards):
            raise _misfit(group, "rewards", sorted(records[0].scores), sorted(self._rewards))
        if len(prompt) > self._shape.max_prompt:
            prompt = ()  # each path then begins with its own
        episodes = [each.episode for each in records]
        largest = max(
            (token for one in episodes for turn in one.turns
             for token in (*turn.given, *turn.completion.tokens)), default=0,
        )  # fmt: skip
        if largest >= self._num_tokens:
            raise _misfit(group, "a token of another model", largest, self._num_tokens)
        scores = [[each.scores[name] for name in self._rewards] for each in records]
        for name in ("generate_seconds", "reward_seconds", "retries"):
            data[name].zero_()
        return write_episodes(data, prompt, episodes, scores, self._shape, counts_of(episodes))

    def restart(self, seed: int) -> None:
        """A sample depends on its ticket alone."""

    async def interrupt(self) -> None:
        """What it does ends soon by itself."""

    async def close(self) -> None:
        self._store.close()


def _misfit(group: StoredGroup, what: str, found: object, wanted: object) -> UniRLError:
    return UniRLError(
        f"the group of ticket {group.ticket} of run {group.run} has other {what} than this run",
        f"it has {found}, this run {wanted}",
        "keep groups of different settings in different stores",
    )


def make_replay(
    context: ActorContext,
    *,
    config: LanguageConfig,
    samples: str,
    shape: GroupShape,
    reuse: bool,
    folder: Path,
) -> StoredReplay:
    """The factory of a plan's actors. folder: of the run that learns."""
    assert config.store_config is not None
    found = StoredGroups.find(Path(samples).expanduser(), config.store_config)
    store = found.open()
    ledger = Ledger(store)
    groups: Groups = (
        ReusedGroups(ledger, found.run, config.run.seed)
        if reuse
        else LeasedGroups(ledger, consumer_of(folder), found.run)
    )
    return StoredReplay(
        store,
        groups,
        context.weights,
        shape,
        rewards=tuple(config.reward.weight_of),
        num_tokens=len(load_tokenizer(config.model)),
        seconds=config.queue.timeout_seconds,
    )
