"""What happens between updates: log, evaluate, checkpoint, stop."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from unirl.core.evaluator import EvalResult
from unirl.core.learner import EpisodicLearner, Learner
from unirl.core.queue import QueueStats
from unirl.errors import UniRLError
from unirl.runners import state
from unirl.runners.evaluation import EvalHook
from unirl.runners.loop import TrainLoop, next_multiple
from unirl.storage import disk
from unirl.storage.checkpoint import JSON

log = logging.getLogger(__name__)

_NOTE_SECONDS = 20.0
"""Between two samples that people are shown."""


class RowWriter(Protocol):
    """Where rows of scalars go."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """One row."""


class LogHook:
    """Every `log_seconds`, after each evaluation, and at the end: one row of all scalars to every
    sink.

    evaluate: the hook that evaluates. It stands before this one, so that a result is in the row of
    its own step.
    """

    def __init__(
        self, sinks: Sequence[RowWriter], log_seconds: float, evaluate: EvalHook | None = None
    ) -> None:
        self._sinks, self._log_seconds, self._evaluate = sinks, log_seconds, evaluate
        self._last_time = math.nan
        self._last_steps = self._last_version = 0
        self._last_stats: QueueStats
        self._last_result: EvalResult | None = None
        self._has_news = False
        self.scalars: dict[str, float] = {}
        """The newest row."""

    def after_update(self, loop: TrainLoop) -> None:
        now = time.monotonic()
        self._has_news = True
        if math.isnan(self._last_time):
            # Rates begin with the first update: what came before it was start-up.
            self._mark(loop, now)
        if now - self._last_time >= self._log_seconds or self._result is not self._last_result:
            self._write(loop, now)

    def at_end(self, loop: TrainLoop) -> None:
        if self._has_news:
            self._write(loop, time.monotonic())

    @property
    def _result(self) -> EvalResult | None:
        return self._evaluate.result if self._evaluate is not None else None

    def _write(self, loop: TrainLoop, now: float) -> None:
        learner, queue = loop.learner, loop.queue
        seconds = max(now - self._last_time, 1e-9)
        stats = queue.stats()
        loop.count_discards(stats.discarded, stats.late)
        loop.count_marks()
        scalars = loop.metrics.flush()
        # Here, where the numbers come to the host anyway, and not at every update.
        for name, value in scalars.items():
            if name.startswith("losses/") and not math.isfinite(value):
                raise state.diverged(f"{name} is {value}", learner.version)
        scalars["charts/updates"] = learner.version
        scalars["time/seconds"] = loop.seconds
        if learner.version > self._last_version:  # else no time has passed that could be counted
            num_steps = learner.num_steps - self._last_steps
            scalars["perf/sps"] = num_steps / seconds
            scalars["perf/updates_per_second"] = (learner.version - self._last_version) / seconds
            num_learned = stats.learned - self._last_stats.learned
            num_committed = stats.committed - self._last_stats.committed
            scalars["perf/produced_sps"] = num_steps / max(num_learned, 1) * num_committed / seconds
        scalars["queue/ready"] = stats.states["ready"]
        scalars["queue/running"] = stats.states["running"]
        if len(stats.pools) > 1:
            for pool, counts in zip(loop.pool_names, stats.pools, strict=True):
                scalars[f"queue/learned/{pool}"] = counts.learned
        for name, ages in zip(("in_flight", "in_queue"), queue.ages(learner.version), strict=True):
            if ages:
                scalars[f"staleness/{name}"] = sum(ages) / len(ages)
        for sink in self._sinks:
            sink.write(learner.num_steps, scalars)
        self.scalars, self._has_news, self._last_result = scalars, False, self._result
        self._mark(loop, now)

    def _mark(self, loop: TrainLoop, now: float) -> None:
        self._last_time, self._last_stats = now, loop.queue.stats()
        self._last_steps, self._last_version = loop.learner.num_steps, loop.learner.version


@runtime_checkable
class DividedLearner(Protocol):
    """A learner of which several processes may hold a shard each."""

    @property
    def is_divided(self) -> bool:
        """Whether they do: then all of them call `state_dict` where one does."""


def is_divided(learner: Learner) -> bool:
    """Whether other processes hold shards of its model."""
    return isinstance(learner, DividedLearner) and learner.is_divided


class CheckpointHook:
    """Every `every_steps` steps, and at the end: a checkpoint. `restart_actors` then restarts what
    no checkpoint can hold.

    leader: the hook of the plan's first learner, which others follow: learners do not count the
    same steps, and what is continued must be of one moment.
    run_dir: None where another process writes the checkpoints of this training. Where the learner
    is divided, that process gets this one's shard.
    """

    def __init__(
        self,
        run_dir: Path | None,
        every_steps: int,
        restart_actors: Callable[[], None],
        *,
        start_step: int = 0,
        leader: CheckpointHook | None = None,
    ) -> None:
        self._run_dir, self._every_steps, self._leader = run_dir, every_steps, leader
        self._restart_actors = restart_actors
        # Multiples of every_steps from the start: a resumed run saves where the whole one does.
        self._next = next_multiple(start_step, every_steps)
        self.path: Path | None = None
        """The newest checkpoint."""
        self._version = -1
        self.num_saved = self._num_followed = 0

    def after_update(self, loop: TrainLoop) -> None:
        steps = loop.learner.num_steps
        if self._is_due(steps) and loop.reason is None:
            self._save(loop)
            self.num_saved += 1
            self._next = next_multiple(steps, self._every_steps)
            self._restart_actors()

    def _is_due(self, steps: int) -> bool:
        if self._leader is None:
            return steps >= self._next
        is_due = self._leader.num_saved > self._num_followed
        self._num_followed = self._leader.num_saved
        return is_due

    def at_end(self, loop: TrainLoop) -> None:
        if is_divided(loop.learner) and loop.reason == "actor_failed":
            log.warning("no checkpoint: other processes hold shards of the model")
        elif self._version != loop.learner.version:
            self._save(loop)

    def _save(self, loop: TrainLoop) -> None:
        if self._run_dir is None:
            self._version = loop.learner.version
            if is_divided(loop.learner):
                loop.learner.state_dict()
            return
        started = time.monotonic()
        self.path = state.save(loop, self._run_dir)
        self._version = loop.learner.version
        loop.metrics.interval("time/checkpoint", time.monotonic() - started)
        log.info("checkpoint %s", self.path)


@runtime_checkable
class ExplainingLearner(Protocol):
    """A learner that can show what it learns from."""

    def take_samples(self) -> Sequence[Mapping[str, JSON]]:
        """Samples of the newest batch as rows, once."""

    def summary(self, row: Mapping[str, JSON]) -> str:
        """One of them in a line, for people."""


@runtime_checkable
class TokenLearner(Protocol):
    """A learner whose samples are made of tokens, which its rows name by their ids."""

    def vocabulary(self) -> Sequence[str]:
        """The text of each id."""


@runtime_checkable
class ArchivingLearner(Protocol):
    """A learner that writes all that it was given."""

    def keep_samples(self, folder: Path) -> None:
        """Write what came since the last call."""


class SamplesHook:
    """Every `log_seconds`: the newest batch of a learner that shows it, in samples/samples.jsonl;
    now and then one sample as a note. At every update: all of it, of a learner that keeps it.

    resume_step: rows of later updates are cut off, as the resumed run makes these updates again.
    """

    def __init__(self, run_dir: Path, log_seconds: float, resume_step: int | None = None) -> None:
        self._path, self._log_seconds = run_dir / "samples" / "samples.jsonl", log_seconds
        self._last_time = self._last_note = -math.inf
        if resume_step is not None and self._path.exists():
            _cut_samples(self._path, resume_step)

    def after_update(self, loop: TrainLoop) -> None:
        if isinstance(loop.learner, ArchivingLearner):
            loop.learner.keep_samples(self._path.parent)
        due = time.monotonic() - self._last_time >= self._log_seconds
        if due and isinstance(loop.learner, ExplainingLearner):
            self._write(loop.learner, loop.learner.num_steps)

    def at_end(self, loop: TrainLoop) -> None:
        if isinstance(loop.learner, ExplainingLearner):
            self._write(loop.learner, loop.learner.num_steps)

    def _write(self, learner: ExplainingLearner, step: int) -> None:
        rows = learner.take_samples()
        if not rows:
            return
        self._last_time = time.monotonic()
        if self._last_time - self._last_note >= _NOTE_SECONDS:
            self._last_note = self._last_time
            log.info("%s", learner.summary(rows[-1]))
        self._path.parent.mkdir(exist_ok=True)
        texts = self._path.with_name("vocabulary.json")
        if isinstance(learner, TokenLearner) and not texts.exists():
            disk.replace_text(texts, json.dumps(learner.vocabulary(), ensure_ascii=False))
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({"step": step, **row}) + "\n" for row in rows)


def _cut_samples(path: Path, step: int) -> None:
    """Drop rows of after `step`, and the half of one that a killed run left."""
    with path.open(encoding="utf-8", errors="replace") as file:
        # The last one may lack its end, and more rows will follow it.
        lines = [line.rstrip("\n") + "\n" for line in file if _step_of(line) <= step]
    disk.replace_text(path, "".join(lines))


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except ValueError:
        return math.inf  # half a row
    except (KeyError, TypeError):
        return -math.inf  # of an older version, which wrote no steps


class StopHook:
    """Ends the run when the training return reaches a target, or time is up."""

    def __init__(
        self, target_return: float | None, max_seconds: float | None, *, window: int
    ) -> None:
        self._target_return, self._max_seconds, self._window = target_return, max_seconds, window

    def after_update(self, loop: TrainLoop) -> None:
        if self._max_seconds is not None and loop.seconds >= self._max_seconds:
            loop.stop("max_seconds")
        if self._target_return is None:
            return
        if not isinstance(loop.learner, EpisodicLearner):
            raise UniRLError(
                f"run.target_return is {self._target_return:g}",
                f"{type(loop.learner).__name__} has no recent_returns to compare it with",
                "give it that property, or stop by run.total_steps",
            )
        recent = loop.learner.recent_returns
        if len(recent) >= self._window and sum(recent) / len(recent) >= self._target_return:
            loop.stop("target_return")

    def at_end(self, loop: TrainLoop) -> None:
        pass
