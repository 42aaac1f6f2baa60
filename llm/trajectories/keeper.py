"""What a run's actors keep of their episodes: a store of trajectories, written behind the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unirl.core.sample import Slot
from unirl.errors import UniRLError
from unirl.llm.agents.episode import Episode
from unirl.llm.outcome import Score
from unirl.llm.rewards.rewards import combine
from unirl.llm.tasks.prompts import Prompt
from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.databases.bucket import Bucket
from unirl.llm.trajectories.databases.database import SECONDS
from unirl.llm.trajectories.databases.postgres import PostgresDatabase
from unirl.llm.trajectories.record import NO_TICKET, Record
from unirl.llm.trajectories.store import open_store
from unirl.llm.trajectories.writer import TrajectoryWriter

log = logging.getLogger(__name__)


class RunKeeper:
    """Made in the process of an actor. about: what is the same for all of its episodes, as fields
    of Record. waits: rather than to drop tokens and texts, `settled` waits for the store.
    """

    def __init__(
        self,
        config: StoreConfig,
        folder: Path,
        rewards: dict[str, float],
        about: dict[str, Any],
        *,
        waits: bool = False,
    ) -> None:
        self._waits, self._required = waits, config.required
        self._writer = TrajectoryWriter(open_store(config, folder), config)
        self._run, self._rewards, self._about = config.run_name(folder), rewards, about

    def keep(
        self,
        slot: Slot | None,
        prompt: Prompt,
        episodes: Sequence[Episode],
        scores: Sequence[Sequence[Score]],
    ) -> None:
        """What it cannot keep is counted. Raises UniRLError where the store is required."""
        try:
            self._keep(slot, prompt, episodes, scores)
        except Exception as error:  # whatever it is, it must not end the run
            if self._required and isinstance(error, UniRLError):
                raise
            self._writer.failed(len(episodes), error)

    def stats(self) -> Mapping[str, float]:
        return self._writer.stats()

    async def settled(self) -> None:
        """Until what was kept is in the store, where it waits; at most as long as a store may take
        to answer.
        """
        if self._waits:
            await asyncio.to_thread(self._writer.flush, SECONDS)

    def _keep(
        self,
        slot: Slot | None,
        prompt: Prompt,
        episodes: Sequence[Episode],
        scores: Sequence[Sequence[Score]],
    ) -> None:
        reward, valid = combine(scores, tuple(self._rewards.values()))
        records = [
            Record(
                episode,
                run=self._run,
                ticket=slot.ticket if slot is not None else NO_TICKET,
                place=place,
                group_size=len(episodes),
                prompt=prompt.tokens,
                task=prompt.task,
                task_id=str(prompt.index),
                split="train" if slot is not None else "held_out",
                scores=dict(zip(self._rewards, row, strict=True)),
                reward=float(reward[place]) if valid[place] else None,
                **self._about,
            )
            for place, (episode, row) in enumerate(zip(episodes, scores, strict=True))
        ]
        self._writer.keep(records)

    def close(self) -> None:
        self._writer.close()


def make_keeper(
    config: StoreConfig | None,
    folder: Path | None,
    rewards: dict[str, float],
    about: dict[str, Any],
    *,
    waits: bool = False,
) -> RunKeeper | None:
    """None where nothing is to be kept, and on a machine that does not have the run's folder."""
    if config is None or not config.enabled or folder is None:
        return None
    if not config.url and not folder.is_dir():
        log.warning(
            "episodes are not kept on this machine, which has no %s: store.url names a database "
            "that all machines reach",
            folder,
        )
        return None
    try:
        return RunKeeper(config, folder, rewards, about, waits=waits)
    except UniRLError as error:  # an actor that starts again must not end the run
        if config.required or waits:
            raise
        log.warning("Episodes are not kept: %s", error)
        return None


def check_store(config: StoreConfig | None) -> None:
    """Raises UniRLError where a database or a bucket of several runs cannot be reached."""
    if config is None or not config.enabled:
        return
    if config.database.startswith("postgres"):
        PostgresDatabase(config.database, create=False).close()
    if config.bodies_url:
        Bucket(config.bodies_url)
