"""All of a plan together: its own runner, in as many processes as it has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unirl.bench.stages import Figures
from unirl.bench.stopwatch import Stopwatch
from unirl.handshake.handshake import Handshake
from unirl.report.console import limiting_rate, waiting_share
from unirl.runners.loop import TrainLoop
from unirl.runners.make import Runner, make_runner
from unirl.runners.plan import Plan
from unirl.runners.processes import ProcessesRunner

_ENDLESS = 2**62


def measure_end_to_end(plan: Plan, seconds: float, log_dir: Path) -> Figures:
    """Figures of the plan over a window of `seconds` after a warm-up. Raises whatever ends it."""
    # It does not end by itself; what its learner binds of the run's length stays.
    plan = replace(plan, run=replace(plan.run, total_steps=_ENDLESS))
    runner = make_runner(plan, log_dir=log_dir)
    watch = _Watch(runner, seconds)
    runner.run([watch])
    return watch.figures


class _Watch:
    """A hook that stops the loop when the window is over, with all that can be said of it."""

    def __init__(self, runner: Runner, seconds: float) -> None:
        self._runner, self._stopwatch = runner, Stopwatch(seconds)
        self._handshake: Handshake | None = None
        if isinstance(runner, ProcessesRunner):
            found = runner.processes.pools[0].handshake
            self._handshake = found if isinstance(found, Handshake) else None
        self._first_totals: list[float] | None = None
        self._first_version = 0
        self.figures: Figures = {}

    def after_update(self, loop: TrainLoop) -> None:
        if self._stopwatch.tick(sum(each.learner.num_steps for each in self._runner.loops)):
            self._read(loop)
            loop.stop("measured")
        elif self._first_totals is None and self._stopwatch.has_begun:
            loop.metrics.flush()
            self._first_totals, self._first_version = self._worker_totals(), loop.learner.version

    def at_end(self, loop: TrainLoop) -> None:
        """Hook: nothing to do."""

    def _read(self, loop: TrainLoop) -> None:
        scalars, self.figures = loop.metrics.flush(), self._stopwatch.figures()
        seconds = self.figures["seconds"]
        self.figures |= {
            "updates_per_second": (loop.learner.version - self._first_version) / seconds,
            "staleness_mean": scalars["staleness/mean"],
            "staleness_max": scalars["staleness/max"],
            "learner_wait_share": waiting_share("learner", scalars),
            "actor_wait_share": waiting_share("actor", scalars),
            "limiting_rate": limiting_rate(scalars),
        }
        if self._handshake is None or self._first_totals is None:
            return
        layout = self._handshake.layout
        env_seconds, policy_seconds, forwards, rows = (
            after - before
            for after, before in zip(self._worker_totals(), self._first_totals, strict=True)
        )
        num_actors = layout.num_policies * layout.num_actors
        self.figures |= {
            "env_worker_busy_share": env_seconds / seconds / layout.num_workers,
            "policy_worker_busy_share": policy_seconds / seconds / num_actors,
            "rows_per_forward": rows / max(forwards, 1),
        }

    def _worker_totals(self) -> list[float]:
        """Seconds that environment workers stepped and policy workers computed; forward passes and
        their rows. Empty without such workers.
        """
        handshake = self._handshake
        if handshake is None:
            return []
        layout = handshake.layout
        groups = map(handshake.group_totals, range(layout.num_workers * layout.num_groups))
        actors = map(handshake.actor_totals, range(layout.num_policies * layout.num_actors))
        return [sum(seconds for seconds, _ in groups), *map(sum, zip(*actors, strict=True))]
