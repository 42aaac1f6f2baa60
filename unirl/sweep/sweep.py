"""A sweep in its folder: starts runs, judges them, decides who continues, until nothing is due."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.errors import UniRLError
from unirl.storage import disk
from unirl.sweep import runs
from unirl.sweep.asynchronous import promote
from unirl.sweep.config import SweepConfig
from unirl.sweep.halving import decide
from unirl.sweep.launcher import End, Launcher, Training
from unirl.sweep.methods import Propose
from unirl.sweep.objective import measure, unknown_objective
from unirl.sweep.record import Record
from unirl.sweep.trial import SeedRun, Trial

_POLL_SECONDS = 0.1


def say_at_once(text: str) -> None:
    """On standard output, also where that is a file."""
    print(text, flush=True)


@dataclass(frozen=True)
class Task:
    """What a sweep is to do."""

    config: SweepConfig
    num_trials: int
    rungs: tuple[int, ...]
    """Steps at which trials are compared; the last is the end of a run."""
    propose: Propose
    """Settings of the next trial."""
    resolve: Callable[[dict[str, Any]], str]
    """The whole config of these settings as TOML; UniRLError where they are not allowed."""
    say: Callable[[str], None] = say_at_once


class Sweep:
    """Runs a task in a folder whose lock its caller holds."""

    def __init__(self, task: Task, folder: Path, record: Record, launcher: Launcher) -> None:
        self._task, self._folder, self._record = task, folder, record
        self._launcher = launcher
        self._running: list[Training] = []
        self._why_stopped = ""
        self._seconds_before, self._started = record.seconds, time.monotonic()

    def propose_all(self) -> None:
        """Make the trials that depend on no result. Raises UniRLError where one is not allowed."""
        if self._task.config.method != "optuna":
            while len(self._record.trials) < self._task.num_trials:
                self._add_trial()
        self._save()

    def run(self) -> str:
        """Until nothing is left to do. Returns why it stopped before that, or nothing."""
        with self._stopped_by_signals():
            try:
                self._take_stock()
                while self._step():
                    time.sleep(_POLL_SECONDS)
            finally:
                self._end_all()
                self._save()
        return self._why_stopped

    def _step(self) -> bool:
        """Look at what trains, and start what is due; False when there is nothing of either."""
        finished = [(each, end) for each in self._running if (end := each.poll()) is not None]
        for each, end in finished:
            self._running.remove(each)
            self._account(each, end)
        if self._decide() or finished:
            self._save()
        limit = self._task.config.max_seconds
        if limit is not None and self._seconds >= limit and not self._why_stopped:
            self._stop(f"max_seconds {limit:g}")
        while not self._why_stopped and self._launcher.has_room(self._running):
            found = self._next()
            if found is None:
                break
            self._start(*found)
        return bool(self._running) or (not self._why_stopped and self._is_unfinished())

    def _is_unfinished(self) -> bool:
        trials = self._record.trials
        return len(trials) < self._task.num_trials or any(t.status == "running" for t in trials)

    @property
    def _seconds(self) -> float:
        return self._seconds_before + time.monotonic() - self._started

    def _next(self) -> tuple[Trial, SeedRun] | None:
        """The run that is due and does not train: of the oldest trial first, but of the highest
        rung where rungs do not wait.
        """
        busy = [each.run for each in self._running]
        due = [
            (trial, run)
            for trial in self._record.trials
            for run in trial.due()
            if not any(run is other for other in busy)
        ]
        halving = self._task.config.halving
        if halving.asynchronous:
            due.sort(key=lambda each: -each[0].rung)
            if not (due and due[0][0].rung) and self._promote():
                return self._next()
        if due:
            return due[0]
        if len(self._record.trials) == self._task.num_trials:
            return None
        try:
            trial = self._add_trial()
        except UniRLError as error:  # a combination that no corner of the space has
            self._save()
            self._task.say(f"{self._record.trials[-1].name} failed: {error.what}")
            return self._next()
        self._save()
        return trial, trial.runs[0]

    def _promote(self) -> bool:
        task = self._task
        halving, objective = task.config.halving, task.config.objective
        found = promote(self._record.trials, len(task.rungs), halving, objective)
        if found is not None:
            self._save()
        return found is not None

    def _add_trial(self) -> Trial:
        number, trials = len(self._record.trials), self._record.trials
        settings = self._task.propose(number, trials)
        trial = Trial(number, settings, [SeedRun(seed) for seed in self._task.config.seeds])
        try:
            text = self._task.resolve(settings)
        except UniRLError as error:
            trial.fail(trial.runs[0], str(error))
            trials.append(trial)
            raise
        path = runs.config_path(self._folder, trial)
        path.parent.mkdir(exist_ok=True)
        disk.replace_text(path, text)
        trials.append(trial)
        return trial

    def _start(self, trial: Trial, run: SeedRun) -> None:
        is_last = trial.rung == len(self._task.rungs) - 1
        pause = None if is_last else self._task.rungs[trial.rung]
        self._running.append(self._launcher.start(trial, run, pause))

    def _account(self, done: Training, end: End) -> None:
        trial, run = done.trial, done.run
        name = runs.run_name(trial, run)
        if end.is_lost and not self._why_stopped:
            run.lost += 1
            self._task.say(f"{name} was lost: {end.failure}")
            if run.lost <= self._task.config.max_lost:
                return  # it is due, and continues from its checkpoint
        if end.failure:
            if not self._why_stopped:  # a second Ctrl-C ended it at once
                trial.fail(run, end.failure)
                self._task.say(f"{name} failed: {run.reason}")
            return
        self._judge(trial, run)

    def _judge(self, trial: Trial, run: SeedRun) -> None:
        """Note how far a run has come that does not train, and its objective there."""
        name = runs.run_name(trial, run)
        folder, rungs = self._folder / name, self._task.rungs
        found = runs.ended(folder)
        if found is None:
            return
        run.steps = found.steps
        is_over = found.cause not in runs.RESUMABLE
        reached = len(rungs) if is_over else sum(found.steps >= rung for rung in rungs[:-1])
        if reached <= len(run.values):
            return
        value = measure(folder, self._task.config.objective)
        if value is None:
            if not any(r.values for t in self._record.trials for r in t.runs):
                self._save()
                raise unknown_objective(folder, self._task.config.objective)
            trial.fail(run, f"no row of metrics.jsonl has {self._task.config.objective.metric}")
            self._task.say(f"{name} failed: {run.reason}")
            return
        # A run that has come to its end, at its target say, is worth the same at later rungs.
        run.values += [value] * (reached - len(run.values))
        self._task.say(f"{name}: {value:g} at {found.steps:,} steps ({found.cause})")

    def _decide(self) -> bool:
        task = self._task
        trials, config = self._record.trials, task.config
        return decide(trials, task.num_trials, len(task.rungs), config.halving, config.objective)

    def _take_stock(self) -> None:
        """See what runs of an earlier session have come to since it was killed."""
        deadline = time.monotonic() + runs.LOCK_SECONDS
        for trial in self._record.trials:
            for run in trial.due():
                runs.wait_until_free(self._folder / runs.run_name(trial, run), deadline)
                self._judge(trial, run)

    def _stop(self, why: str) -> None:
        self._why_stopped = why
        for each in self._running:
            each.stop()

    @contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        """The first Ctrl-C, SIGTERM or SIGHUP ends all runs in good order, a second one at once."""

        def stop(number: int, frame: object) -> None:
            self._stop("interrupted")

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {
            number: signal.signal(number, stop)
            for number in numbers
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_all(self) -> None:
        """Nothing trains when the sweep has ended, however it did."""
        for each in self._running:
            each.stop()
        for each in self._running:
            each.wait()

    def _save(self) -> None:
        self._record.seconds = self._seconds
        self._record.save(self._folder)
