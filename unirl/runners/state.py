"""What a run needs to go on where it was: gathered from a loop into a checkpoint, and put back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from unirl.core.checkpoint import JSON, Checkpoint, save_checkpoint
from unirl.core.errors import UniRLError
from unirl.core.learner import LearnerState
from unirl.core.sample import Slot
from unirl.core.tree import leaves, tree_map
from unirl.runners.loop import TrainLoop
from unirl.runners.plan import Plan


def save(loop: TrainLoop, run_dir: Path) -> Path:
    """Write a checkpoint of the learner, the acknowledged samples, random numbers and counters."""
    learner = loop.learner
    ready, unfinished, next_ticket = loop.queue.snapshot()
    state = learner.state_dict()
    for slot in ready:
        slot.wait_ready()
    broken = [
        "/".join(path)
        for path, leaf in leaves(state.model)
        if leaf.is_floating_point() and not leaf.isfinite().all()
    ]
    if broken:
        raise diverged(f"{broken[0]} holds NaN or infinity", learner.version)
    return save_checkpoint(
        run_dir,
        learner.num_steps,
        model=state.model,
        optimizer={"learner": state.optimizer, "rng": {"torch": torch.get_rng_state()}},
        samples={str(i): slot.data for i, slot in enumerate(ready)} if ready else None,
        state={
            "recipe": loop.plan.recipe,
            "fingerprint": dict(loop.plan.fingerprint),
            "version": learner.version,
            "num_steps": learner.num_steps,
            "seconds": loop.seconds,
            "counters": dict(state.counters),
            "metrics": loop.metrics.state_dict(),
            "next_ticket": next_ticket,
            "due": list[JSON](unfinished if loop.plan.reissue else ()),
            "ready": [
                {
                    "ticket": slot.ticket,
                    "actor": slot.actor,
                    "first_version": slot.first_version,
                    "last_version": slot.last_version,
                }
                for slot in ready
            ],
        },
        keep=loop.plan.run.keep_checkpoints,
    )


def diverged(what: str, version: int) -> UniRLError:
    """The error that ends a training whose numbers are no longer numbers."""
    return UniRLError(
        f"training diverged by update {version}: {what}",
        "weights and losses must stay finite; such weights are never saved",
        "resume from the newest checkpoint with a smaller learner.optimizer.lr or max_grad_norm",
    )


def restore(loop: TrainLoop, checkpoint: Checkpoint) -> None:
    """Put a checkpoint back into a loop that has not started."""
    state = checkpoint.state
    check_fingerprint(loop.plan, checkpoint)
    optimizer: Any = checkpoint.optimizer
    learner = loop.learner
    learner.load_state_dict(LearnerState(checkpoint.model, optimizer["learner"], state["counters"]))
    learner.version, learner.num_steps = int(state["version"]), int(state["num_steps"])
    loop.metrics.load_state_dict(state["metrics"])
    loop.seconds_before = float(state["seconds"])
    torch.set_rng_state(optimizer["rng"]["torch"])
    ready, due = _restore_samples(loop, checkpoint), state.get("due", [])
    places = loop.queue.config.num_slots - len(ready)
    if len(due) > places:
        # Resumed with fewer places than tickets were under way.
        loop.metrics.total("queue/discarded/resized", len(due) - places)
    loop.queue.restore(ready, int(state["next_ticket"]), learner.version, due=due[:places])


def _restore_samples(loop: TrainLoop, checkpoint: Checkpoint) -> list[Slot]:
    """Copy acknowledged samples into places; what no longer fits the queue's law is counted as
    discarded.
    """
    samples: Any = checkpoint.samples or {}
    spec = loop.plan.spec
    restored: list[Slot] = []
    for i, note in enumerate(checkpoint.state["ready"]):
        data = samples[str(i)]
        saved = {"/".join(path): (tuple(leaf.shape), leaf.dtype) for path, leaf in leaves(data)}
        wanted = {name: (item.shape, item.dtype) for name, item in spec.fields.items()}
        if len(restored) == loop.queue.config.num_slots or saved != wanted:
            # The run was resumed with other sizes: the sample has no place any more. Counted, not
            # silent.
            loop.metrics.total("queue/discarded/resized", 1)
            continue
        place = loop.queue.place(len(restored))
        tree_map(lambda into, value: into.copy_(value), place, data)
        restored.append(
            Slot(
                len(restored),
                int(note["ticket"]),
                place,
                int(note["actor"]),
                int(note["first_version"]),
                int(note["last_version"]),
            )
        )
    return restored


def check_fingerprint(plan: Plan, checkpoint: Checkpoint) -> None:
    """Raise UniRLError unless the checkpoint is of the same recipe, environment and policy."""
    saved = {"recipe": checkpoint.state.get("recipe"), **checkpoint.state.get("fingerprint", {})}
    wanted = {"recipe": plan.recipe, **plan.fingerprint}
    for key in {
        **wanted,
        **saved,
    }:  # in the recipe's order: the environment before what follows from it
        if saved.get(key) != wanted.get(key):
            raise UniRLError(
                f"the checkpoint {checkpoint.path} is of another {key.replace('_', ' ')}",
                f"it has {key} = {saved.get(key)!r}, this run has {wanted.get(key)!r}",
                "resume without changing it, or start a new run with `unirl train`",
            )
