"""The stages of a plan, each measured in this process and its children: sampling, inference and
learning alone, and all of it end to end. On a device simulation takes the place of sampling, and
simulation with the policy that of inference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from unirl.bench import repeat
from unirl.bench.forward import inference_plan
from unirl.bench.host_reads import host_reads
from unirl.bench.parts import policies_in
from unirl.bench.replay import sampling_plan
from unirl.bench.simulate import acting_plan, is_simulated, noting_plan, simulation_plan
from unirl.bench.stopwatch import Stopwatch
from unirl.core.learner import LearnerContext
from unirl.envs.device import SimSpec
from unirl.report.console import limiting_rate, waiting_share
from unirl.runners.inline import InlineRunner
from unirl.runners.loop import TrainLoop
from unirl.runners.plan import Plan
from unirl.runners.process_settings import keep_freed_memory
from unirl.runners.processes import ProcessesRunner

StageName: TypeAlias = Literal[
    "sampling", "inference", "simulation", "simulation_with_policy", "learning", "end_to_end"
]
STAGES: tuple[StageName, ...] = ("sampling", "inference", "learning", "end_to_end")
SIM_STAGES: tuple[StageName, ...] = (
    "simulation",
    "simulation_with_policy",
    "learning",
    "end_to_end",
)
Figures: TypeAlias = dict[str, Any]
Runner: TypeAlias = InlineRunner | ProcessesRunner
_FAR = 2**62
_NUM_COUNTED = 4
"""Iterations in which host reads are counted, after those that are timed: counting takes time."""


def stages_of(plan: Plan) -> tuple[StageName, ...]:
    """The stages that this plan consists of, in order."""
    return SIM_STAGES if is_simulated(plan) else STAGES


def measure(
    stage: StageName,
    plan: Plan,
    seconds: float,
    log_dir: Path,
    on_begin: Callable[[], None],
    rows_per_forward: float | None = None,
) -> Figures:
    """Figures of one stage over `seconds`, warm-up excluded; this process is the learner's.

    rows_per_forward: for inference, what was measured end to end. Raises Unmeasurable, and whatever
    ends the plan.
    """
    keep_freed_memory()
    inline = plan.runner.kind == "inline"
    torch.set_num_threads(plan.runner.learner_threads or (torch.get_num_threads() if inline else 1))
    stopwatch = Stopwatch(seconds, min(3.0, max(0.5, seconds / 4)), on_begin)
    if is_simulated(plan):
        return _simulate(stage, plan, stopwatch, log_dir)
    if stage == "end_to_end":
        return _run(_endless(plan), stopwatch, log_dir)
    if stage == "learning":
        return _learn(plan, stopwatch, log_dir)
    # Here, where it can be said why not: an actor's own failure would end the whole plan.
    policies_in(plan.make_learner(LearnerContext(0)))
    alone = sampling_plan(plan) if stage == "sampling" else inference_plan(plan, rows_per_forward)
    figures = _run(_endless(alone), stopwatch, log_dir)
    return {name: figures[name] for name in stopwatch.figures()}


def _simulate(stage: StageName, plan: Plan, stopwatch: Stopwatch, log_dir: Path) -> Figures:
    """As `measure`, for a simulator on a device: with its physics steps, and end to end with the
    number of times per iteration that the host reads from the device.
    """
    if stage == "learning":
        return _learn(plan, stopwatch, log_dir)
    found: list[SimSpec] = []
    noted = _endless(noting_plan(plan, found))
    if stage == "end_to_end":
        figures = _run(noted, stopwatch, log_dir, found)
    else:
        policies_in(plan.make_learner(LearnerContext(0)))
        alone = simulation_plan(noted) if stage == "simulation" else acting_plan(noted)
        _run(alone, stopwatch, log_dir)
        figures = {**stopwatch.figures()}
    rate = figures["env_steps_per_second"] * found[0].physics_steps
    return {**figures, "physics_steps_per_second": rate}


def _run(
    plan: Plan, stopwatch: Stopwatch, log_dir: Path, simulated: Sequence[SimSpec] | None = None
) -> Figures:
    """Figures of a plan that trains. simulated: host reads are counted on the device of its first
    entry, which is there once the run has begun.
    """
    runner = _make_runner(plan, log_dir)
    with ExitStack() as counting:
        watch = _Watch(runner, stopwatch, simulated, counting)
        runner.run([watch])
    return {**stopwatch.figures(), **watch.figures}


def _learn(plan: Plan, stopwatch: Stopwatch, log_dir: Path) -> Figures:
    runner = _make_runner(_endless(repeat.collecting_plan(plan)), log_dir)
    stop = repeat.StopWhenAllHaveLearned(runner.loops)
    if isinstance(runner, ProcessesRunner):
        runner.run(*([stop] for _ in runner.loops))
    else:
        runner.run([stop])
    learners = [loop.learner for loop in runner.loops]
    while not stopwatch.tick(sum(learner.num_steps for learner in learners)):
        for learner in learners:
            assert isinstance(learner, repeat.KeepingLearner)
            learner.repeat()
    return stopwatch.figures()


def _make_runner(plan: Plan, log_dir: Path) -> Runner:
    if plan.runner.kind == "inline":
        return InlineRunner(plan)
    return ProcessesRunner(plan, log_dir=log_dir)


def _endless(plan: Plan) -> Plan:
    """The plan that does not end by itself; what its learner binds of the run's length stays."""
    return replace(
        plan,
        run=replace(plan.run, total_steps=_FAR),
        other_policies=tuple(map(_endless, plan.other_policies)),
    )


class _Watch:
    """A hook that ends the loop when the stopwatch does, with all that the loop can tell.

    simulated: whose device host reads are counted on before it ends. counting: closes the count.
    """

    def __init__(
        self,
        runner: Runner,
        stopwatch: Stopwatch,
        simulated: Sequence[SimSpec] | None,
        counting: ExitStack,
    ) -> None:
        self._runner, self._stopwatch = runner, stopwatch
        self._simulated, self._counting = simulated, counting
        self._places: list[str] = []
        self._last_version: int | None = None
        self._exchange = runner.actors.exchange if isinstance(runner, ProcessesRunner) else None
        self._before: tuple[float, float, int, int] | None = None
        self._version = 0
        self.figures: Figures = {}

    def after_update(self, loop: TrainLoop) -> None:
        """See Hook."""
        if self._last_version is not None:
            self._count_reads(loop)
            return
        stopwatch, begun = self._stopwatch, self._stopwatch.start is not None
        done = stopwatch.tick(sum(each.learner.num_steps for each in self._runner.loops))
        if stopwatch.start is not None and not begun:
            loop.metrics.flush()
            self._before, self._version = self._totals(), loop.learner.version
        if not done or self.figures:
            return
        self._note(loop)
        if self._simulated is None:
            loop.stop("measured")
            return
        self._last_version = loop.learner.version + _NUM_COUNTED
        self._places = self._counting.enter_context(host_reads(self._simulated[0].device))

    def at_end(self, loop: TrainLoop) -> None:
        """See Hook."""

    def _note(self, loop: TrainLoop) -> None:
        scalars, seconds = loop.metrics.flush(), self._stopwatch.figures()["seconds"]
        self.figures = {
            "updates_per_second": (loop.learner.version - self._version) / seconds,
            "staleness_mean": scalars["staleness/mean"],
            "staleness_max": scalars["staleness/max"],
            "learner_wait_share": waiting_share("learner", scalars),
            "actor_wait_share": waiting_share("actor", scalars),
            "limiting_rate": limiting_rate(scalars),
        }
        self.figures |= self._shares(seconds)

    def _count_reads(self, loop: TrainLoop) -> None:
        if loop.learner.version == self._last_version:
            self._counting.close()
            self.figures["host_reads_per_iteration"] = len(self._places) / _NUM_COUNTED
            self.figures["host_reads_at"] = sorted(set(self._places))
            loop.stop("measured")

    def _shares(self, seconds: float) -> Figures:
        """How busy environment workers and policy workers were, where there are such."""
        now = self._totals()
        if self._exchange is None or now is None or self._before is None:
            return {}
        env_seconds, policy_seconds, forwards, rows = (
            after - before for after, before in zip(now, self._before, strict=True)
        )
        layout = self._exchange.layout
        num_actors = layout.num_policies * layout.num_actors
        return {
            "env_worker_busy_share": env_seconds / seconds / layout.num_workers,
            "policy_worker_busy_share": policy_seconds / seconds / num_actors,
            "rows_per_forward": rows / max(forwards, 1),
        }

    def _totals(self) -> tuple[float, float, int, int] | None:
        """Seconds that environments were stepped and policies computed; forward passes, rows."""
        exchange = self._exchange
        if exchange is None:
            return None
        layout = exchange.layout
        groups = map(exchange.group_totals, range(layout.num_workers * layout.num_groups))
        actors = list(map(exchange.actor_totals, range(layout.num_policies * layout.num_actors)))
        return (
            sum(seconds for seconds, _ in groups),
            sum(seconds for seconds, _, _ in actors),
            sum(forwards for _, forwards, _ in actors),
            sum(rows for _, _, rows in actors),
        )
