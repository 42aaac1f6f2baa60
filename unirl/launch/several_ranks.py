"""What is different where torchrun started several processes that train one policy together."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from unirl.config import to_toml
from unirl.core.learner import Learner
from unirl.core.weights import Weights
from unirl.errors import UniRLError
from unirl.learners.parallel import Ranks
from unirl.runners.loop import Hook, TrainLoop
from unirl.runners.plan import Plan


def plan_for_ranks(plan: Plan, ranks: Ranks) -> Plan:
    """The plan whose learner learns together with others; UniRLError where it cannot."""
    if ranks.world_size == 1:
        return plan
    remedy = "start it once, without torchrun"
    if plan.learner.ranks > 1:
        raise UniRLError(
            f"learner.ranks is {plan.learner.ranks}, in {ranks.world_size} processes of torchrun",
            "either torchrun starts the processes that learn together, or the run itself",
            remedy,
        )
    if not plan.runner.is_inline or len(plan.learners) > 1:
        raise UniRLError(
            f"recipe {plan.recipe} runs {len(plan.learners)} learner(s) in the "
            f"{plan.runner.kind} runner, in {ranks.world_size} processes of torchrun",
            "processes that train together need runner.kind inline and one learner",
            "start it once, without torchrun, and set learner.ranks",
        )
    make: Callable[..., Learner] = plan.learner.make
    if "ranks" not in inspect.signature(make).parameters:
        raise UniRLError(
            f"recipe {plan.recipe} was started in {ranks.world_size} processes of torchrun",
            "its learner does not sum over processes: its factory takes no `ranks`",
            remedy,
        )
    return replace(plan, learners=(replace(plan.learner, make=partial(make, ranks=ranks)),))


def require_alike(loop: TrainLoop, ranks: Ranks) -> None:
    """Raise UniRLError unless all ranks begin with the same config, at the same weights."""
    if ranks.world_size == 1:
        return
    plan = loop.plan
    ranks.require_alike(
        config=to_toml(plan.config, recipe=plan.recipe) if plan.config is not None else plan.recipe,
        budget=repr(plan.run.budget),
        steps=f"{loop.learner.version} {loop.learner.num_steps}",
        weights=digest_of(loop.learner.weights()),
    )


def digest_of(weights: Weights) -> str:
    """What tells these weights from others."""
    digest = hashlib.blake2b()
    for _, value in sorted(weights.items()):
        digest.update(value.cpu().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def cursor_hooks(loop: TrainLoop, ranks: Ranks) -> list[Hook]:
    """First among the hooks of each rank; none where tickets may be lost. Called by all."""
    if ranks.world_size == 1 or not loop.learner_plan.reissue:
        return []
    hook = _CursorHook(ranks)
    hook.after_update(loop)  # a run that has nothing left to do is saved, too
    return [hook]


class _CursorHook:
    """Where the other ranks are in their tickets, exchanged at each update: a checkpoint may have
    to be written when they are gone.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def after_update(self, loop: TrainLoop) -> None:
        loop.other_cursors = self._ranks.share(loop.queue.snapshot().cursor)[1:]

    def at_end(self, loop: TrainLoop) -> None:
        """Nothing."""
