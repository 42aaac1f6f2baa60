"""Truncation selection between updates (Jaderberg et al., arXiv 1711.09846, section 4.1.2).

Every so many steps of its own a learner compares itself with the others as they are. Where it is
among the worst it takes over weights, optimiser and statistics of one of the best, and settings
near its. It changes itself alone, and others are read under the lock of their loop: nobody waits
for a generation to be complete. In one process, where learners take turns, it repeats bit for bit.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import cast

import torch

from unirl.core.learner import LearnerState, TunableLearner
from unirl.core.seeding import derive_seed
from unirl.core.tree import tree_map
from unirl.population.config import PopulationConfig
from unirl.population.explore import explored
from unirl.run_events import event
from unirl.runners.loop import TrainLoop, next_multiple
from unirl.search_space import SearchSpace
from unirl.storage import disk

log = logging.getLogger(__name__)

NAME = "population.json"


class Peer:
    """One learner of a population, as the others see it."""

    def __init__(self, loop: TrainLoop, folder: Path, num_episodes: int) -> None:
        self.loop, self.folder, self._num_episodes = loop, folder, num_episodes
        self.name = loop.learner_plan.name
        self.learner = cast(TunableLearner, loop.learner)

    def score(self) -> float:
        """Its mean return; minus infinity until enough episodes are its own."""
        with self.loop.learning:
            returns = self.learner.recent_returns
        enough = len(returns) >= self._num_episodes
        return math.fsum(returns) / len(returns) if enough else -math.inf

    def is_sound(self) -> bool:
        """Whether its weights are numbers, by their sum: a device is waited for once."""
        with self.loop.learning:
            weights = self.loop.learner.weights().values()
            sums = [w.sum(dtype=torch.float64) for w in weights if w.is_floating_point()]
            return bool(torch.stack(sums).sum().isfinite())

    def settings(self, keys: Sequence[str]) -> dict[str, float]:
        return {key: self.learner.setting(key) for key in keys}

    def copy(self, keys: Sequence[str]) -> tuple[LearnerState, dict[str, float]]:
        """All that it is, in memory of its own."""
        with self.loop.learning:
            state = self.loop.learner.state_dict()
            model, optimizer = (
                tree_map(lambda leaf: leaf.clone(), tree) for tree in (state.model, state.optimizer)
            )
            return LearnerState(model, optimizer, dict(state.counters)), self.settings(keys)

    def become(self, state: LearnerState, settings: Mapping[str, float]) -> None:
        """Continue as another, with these settings."""
        loop, learner = self.loop, self.loop.learner
        with loop.learning:
            self.learner.adopt(state)
            self.learner.tune(settings)
            # Samples in flight are of other weights: to the queue they are one update older.
            learner.version += 1
        loop.weights.publish(learner.weights(), learner.version)


class PopulationHook:
    """Of one learner. seed: of the run."""

    def __init__(
        self,
        peers: Sequence[Peer],
        index: int,
        config: PopulationConfig,
        space: SearchSpace,
        seed: int,
    ) -> None:
        self._peers, self._index, self._own = peers, index, peers[index]
        self._config, self._space, self._seed = config, space, seed
        self._next = next_multiple(self._own.loop.learner.num_steps, config.every_steps)

    def after_update(self, loop: TrainLoop) -> None:
        for key, value in self._own.settings(list(self._space)).items():
            loop.metrics.last(f"population/{key}", value)
        steps = loop.learner.num_steps
        if not self._own.is_sound():
            # A step size was too large. The run is to continue, and to be saved, without it and
            # without losses that are no numbers.
            loop.metrics.flush()
            self._copy_one_of(loop, self._best(), -math.inf)
        elif steps >= self._next and loop.reason is None:
            self._next = next_multiple(steps, self._config.every_steps)
            self._compare(loop)

    def at_end(self, loop: TrainLoop) -> None:
        """The first learner, whose folder is the run's, says who was best."""
        if self._index == 0:
            write_standing(self._peers, list(self._space))

    def _compare(self, loop: TrainLoop) -> None:
        """Copy one of the best where this is one of the worst."""
        scores = [peer.score() for peer in self._peers]
        own = scores[self._index]
        worst = sorted(range(len(scores)), key=lambda index: (scores[index], index))
        if own > -math.inf and self._index in worst[: self._number]:
            better = [index for index in self._best() if scores[index] > own]
            self._copy_one_of(loop, better, own)

    @property
    def _number(self) -> int:
        """How many are the worst, and the best."""
        return max(1, int(self._config.quantile * len(self._peers)))

    def _best(self) -> list[int]:
        """Of the others, those whose weights are numbers."""
        scores = [
            (peer.score(), index)
            for index, peer in enumerate(self._peers)
            if index != self._index and peer.is_sound()
        ]
        return [index for _, index in sorted(scores)[-self._number :]]

    def _copy_one_of(self, loop: TrainLoop, others: Sequence[int], score: float) -> None:
        if not others:
            return
        version = loop.learner.version
        random = Random(derive_seed(self._seed, "population", self._index, version))
        other = self._peers[random.choice(others)]
        state, settings = other.copy(list(self._space))
        settings = explored(settings, self._space, self._config, random)
        self._own.become(state, settings)
        loop.metrics.total("population/copies", 1)
        about = event(
            "copied",
            learner=self._own.name,
            step=loop.learner.num_steps,
            settings=settings,
            score=_finite(score),
            score_of=_finite(other.score()),
            **{"from": other.name},
        )
        words = ", ".join(f"{key} {value:g}" for key, value in settings.items())
        log.info("%s continues from %s with %s", self._own.name, other.name, words, extra=about)


def _finite(score: float) -> float | None:
    return score if math.isfinite(score) else None


def write_standing(peers: Sequence[Peer], keys: Sequence[str]) -> None:
    """population.json of the run's folder: all learners, the best first."""
    scored = [(peer.score(), peer) for peer in peers]
    rows = [
        {
            "learner": peer.name,
            "folder": peer.folder.relative_to(peers[0].folder).as_posix(),
            "steps": peer.loop.learner.num_steps,
            "score": _finite(score),
            "settings": peer.settings(keys),
        }
        for score, peer in sorted(scored, key=lambda each: -each[0])
    ]
    disk.replace_text(peers[0].folder / NAME, json.dumps(rows, indent=1) + "\n")


def best_folder(run_dir: Path) -> Path | None:
    """The folder of the best learner of a population that has ended; None of another run."""
    try:
        rows = json.loads((run_dir / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return run_dir / str(rows[0]["folder"])
