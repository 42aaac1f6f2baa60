"""The stages of a plan, each on its own: one actor and the learner take turns in this process, with
nothing beside them, and timers tell where the time goes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from unirl.actors.device import DeviceActor
from unirl.bench.host_reads import host_reads
from unirl.bench.stages import Figures, StageName, rates
from unirl.bench.stopwatch import Stopwatch
from unirl.core.actor import Actor, ActorContext, is_async, require_one_by_one
from unirl.core.learner import LearnerContext
from unirl.core.seeding import derive_seed
from unirl.errors import DiscardSlot, UniRLError
from unirl.metrics.timers import TimedActor, Timers
from unirl.runners.async_actors import EventLoop, fill_round
from unirl.runners.plan import Plan
from unirl.transports.local import LocalTransport

_NUM_COUNTED = 4
"""Iterations in which host reads are counted."""


def measure_apart(plan: Plan, seconds: float) -> dict[StageName, Figures]:
    """Figures of all stages but end_to_end, from a window of `seconds` after a warm-up."""
    if len(plan.learners) > 1 or len(plan.pools) > 1:
        raise UniRLError(
            "several policies or environments take part",
            "one actor and one learner alone are not what runs",
            "see how the plan does end to end",
        )
    turns, stopwatch = _Turns(plan), Stopwatch(seconds)
    try:
        while not stopwatch.tick(turns.learner.num_steps):
            turns.take_one(is_warm=stopwatch.has_begun)
        figures = turns.figures(stopwatch)
        if isinstance(turns.actor, DeviceActor):
            simulated = figures.get("stepping") or figures["acting"]
            simulated["physics_steps_per_env_step"] = turns.actor.sim.physics_steps
            # After what is timed: counting takes time.
            with host_reads(turns.actor.sim.device) as lines:
                for _ in range(_NUM_COUNTED):
                    turns.take_one(is_warm=True)
            simulated["host_reads_per_iteration"] = len(lines) / _NUM_COUNTED
            simulated["host_reads_at"] = sorted(set(lines))
        return figures
    finally:
        turns.close()


class _Turns:
    """One actor fills a batch of slots, the learner learns from it, the weights are published."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._events, transport = plan, EventLoop(), LocalTransport(takes_turns=True)
        spec, queue = plan.learner.spec, replace(plan.learner.queue, max_staleness=0)
        self._queue = transport.queue(spec, queue, reasons=plan.learner.reasons)
        self._client = self._queue.join()
        self._on_cuda = torch.device(spec.device).type == "cuda"
        self.learner = plan.learner.make(LearnerContext(plan.learner_seed(0)))
        self._weights = transport.weights(self.learner.weights())
        self._weights.publish(self.learner.weights(), self.learner.version)
        seed = derive_seed(plan.run.seed, "actor", 0, "version", 0)
        context = ActorContext(0, seed, self._weights)
        self.actor = require_one_by_one(plan.pools[0].make_actor(context))
        self._timers, self._actor_timers, self._is_warm = Timers(), Timers(), False
        self._is_split = isinstance(self.actor, TimedActor) and not self._on_cuda
        if isinstance(self.actor, TimedActor) and self._is_split:
            self._actor_timers = self.actor.timers
        self._timers.counts_cpu = self._actor_timers.counts_cpu = True

    def take_one(self, *, is_warm: bool) -> None:
        """Act, learn, publish. is_warm: what came before the first such turn does not count."""
        if is_warm and not self._is_warm:
            self._is_warm = True
            self._timers.reset()
            self._actor_timers.reset()
        queue, learner, threads = self._queue, self.learner, torch.get_num_threads()
        self._timers.start()
        if not self._plan.runner.is_inline:
            torch.set_num_threads(self._plan.runner.actor_threads)
        while queue.next_pool() is not None:
            self._fill()
        torch.set_num_threads(threads)
        self._lap("acting")
        batch = queue.take(learner.version, 0.0)
        learner.step(batch)
        self._lap("learning")
        self._weights.publish(learner.weights(), learner.version)
        queue.release(batch)
        self._lap("weights")

    def figures(self, stopwatch: Stopwatch) -> dict[StageName, Figures]:
        own, actor = self._timers, self._actor_timers
        laps: dict[StageName, list[tuple[Timers, str]]]
        if self._is_split:
            laps = {"stepping": [(actor, "env")], "inference": [(actor, "inference")]}
        else:
            laps = {"acting": [(own, "acting")]}
        laps |= {"weights": [(own, "weights"), (actor, "weights")], "learning": [(own, "learning")]}
        window = stopwatch.window
        assert window is not None
        children_cpu_seconds = max(0.0, window.cpu_seconds - window.own_cpu_seconds)
        others = stopwatch.figures()["cores_used_by_others"]
        figures: dict[StageName, Figures] = {}
        for stage, timed in laps.items():
            seconds = sum(timers.seconds(name) for timers, name in timed)
            cpu_seconds = sum(timers.cpu_seconds(name) for timers, name in timed)
            if stage in ("stepping", "acting"):  # only environments and engines have processes
                cpu_seconds += children_cpu_seconds
            figures[stage] = rates(window.num_steps, seconds, cpu_seconds)
            figures[stage]["cores_used_by_others"] = others
        return figures

    def close(self) -> None:
        self._queue.close()
        if is_async(self.actor):
            self._events.run(self.actor.close())
        else:
            self.actor.close()
        self._events.close()

    def _fill(self) -> None:
        client, seconds = self._client, self._plan.learner.queue.timeout_seconds
        if is_async(self.actor):
            slots = list(iter(client.try_acquire, None))
            self._events.run(
                fill_round(self.actor, client, self._queue, slots, enough=None, timeout=seconds)
            )
            return
        slot = client.acquire(0.0)
        try:
            cast(Actor, self.actor).produce(slot)
        except DiscardSlot as discard:
            client.discard(slot, discard.reason)
        else:
            client.commit(slot)

    def _lap(self, name: str) -> None:
        if self._on_cuda:  # what was launched belongs to this lap
            torch.cuda.synchronize(self._plan.learner.spec.device)
        self._timers.lap(name)
