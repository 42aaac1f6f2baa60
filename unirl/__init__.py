"""UniRL: one engine for reinforcement learning of every kind.

plan = unirl.make_plan("impala", **{"env.id": "CartPole-v1"})
result = unirl.run(plan, "runs/cartpole")
"""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from unirl.actors.trained_policy import TrainedPolicy as TrainedPolicy
    from unirl.core.actor import Actor as Actor
    from unirl.core.actor import ActorContext as ActorContext
    from unirl.core.actor import AsyncActor as AsyncActor
    from unirl.core.learner import Learner as Learner
    from unirl.core.learner import LearnerContext as LearnerContext
    from unirl.core.learner import LearnerState as LearnerState
    from unirl.core.pool import Pool as Pool
    from unirl.core.pool import Resources as Resources
    from unirl.core.queue import QueueConfig as QueueConfig
    from unirl.core.sample import Batch as Batch
    from unirl.core.sample import Field as Field
    from unirl.core.sample import SampleSpec as SampleSpec
    from unirl.core.sample import Slot as Slot
    from unirl.core.sample import collate as collate
    from unirl.errors import DiscardSlot as DiscardSlot
    from unirl.errors import ReissueSlot as ReissueSlot
    from unirl.errors import UniRLError as UniRLError
    from unirl.launch import RunResult as RunResult
    from unirl.launch import run as run
    from unirl.launch.callbacks import Callback as Callback
    from unirl.launch.callbacks import Training as Training
    from unirl.metrics.metrics import Metrics as Metrics
    from unirl.runners.config import RunConfig as RunConfig
    from unirl.runners.config import RunnerConfig as RunnerConfig
    from unirl.runners.plan import LearnerPlan as LearnerPlan
    from unirl.runners.plan import Plan as Plan
    from unirl.trained.trained_run import TrainedRun as TrainedRun
    from unirl.trained.trained_run import load as load

_HOMES = {
    "actors.trained_policy": ("TrainedPolicy",),
    "core.actor": ("Actor", "ActorContext", "AsyncActor"),
    "core.learner": ("Learner", "LearnerContext", "LearnerState"),
    "metrics.metrics": ("Metrics",),
    "core.pool": ("Pool", "Resources"),
    "core.queue": ("QueueConfig",),
    "core.sample": ("Batch", "Field", "SampleSpec", "Slot", "collate"),
    "errors": ("DiscardSlot", "ReissueSlot", "UniRLError"),
    "launch": ("RunResult", "run"),
    "launch.callbacks": ("Callback", "Training"),
    "runners.config": ("RunConfig", "RunnerConfig"),
    "runners.plan": ("LearnerPlan", "Plan"),
    "trained.trained_run": ("TrainedRun", "load"),
}


def make_plan(recipe: str, *, by_kind: bool = False, **overrides: Any) -> Plan:
    """The plan of a recipe. Overrides are config keys with dots: **{"env.id": "ALE/Pong-v5",
    "queue.max_staleness": 2}.

    by_kind: what is left out depends on the environment and the machine, as with `unirl train`;
    else it is what the config's classes say. Raises UniRLError for an unknown recipe, key,
    environment or a value that breaks a rule.
    """
    from unirl import config, registry

    module = registry.recipe(recipe)
    plain = config.override(module.Config(), overrides)
    if not by_kind:
        plan: Plan = module.plan(plain)
        return plan
    from unirl.recipes.defaults import settle

    settled = settle(module, plain, config.nest(module.Config, overrides))
    plan = module.plan(settled.config)
    return replace(plan, notes=(*settled.lines, *plan.notes))


def __getattr__(name: str) -> Any:
    # Lazily: `unirl --help` must not wait for torch.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"unirl.{home}"), name)
    raise AttributeError(f"module 'unirl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *(name for names in _HOMES.values() for name in names)])
