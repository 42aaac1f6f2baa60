"""UniRL: one engine for reinforcement learning of every kind.

plan = unirl.make_plan("impala", **{"env.id": "CartPole-v1"})
result = unirl.run(plan, "runs/cartpole")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from unirl.launch import RunResult as RunResult
    from unirl.launch import run as run
    from unirl.runners.plan import Plan


def make_plan(recipe: str, **overrides: Any) -> Plan:
    """The plan of a recipe. Overrides are config keys with dots: **{"env.id": "ALE/Pong-v5",
    "queue.max_staleness": 2}.

    Raises UniRLError for an unknown recipe, key, environment or a value that breaks a rule.
    """
    from unirl import config, registry

    module = registry.recipe(recipe)
    plan: Plan = module.plan(config.override(module.Config(), overrides))
    return plan


def __getattr__(name: str) -> Any:
    # Lazily: `unirl --help` must not wait for torch.
    if name in ("run", "RunResult"):
        from unirl import launch as module

        return getattr(module, name)
    raise AttributeError(f"module 'unirl' has no attribute {name!r}")
