"""What a run needs to go on where it was: gathered from a loop into a checkpoint, and put back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from unirl.core.learner import LearnerState
from unirl.core.sample import Slot
from unirl.core.tree import Tree, leaves, tree_map
from unirl.errors import UniRLError
from unirl.runners.loop import TrainLoop
from unirl.runners.plan import Plan
from unirl.storage.checkpoint import JSON, Checkpoint, save_checkpoint


def save(loop: TrainLoop, run_dir: Path) -> Path:
    """Write a checkpoint of the learner, the acknowledged samples, random numbers and counters."""
    learner = loop.learner
    ready, unfinished, next_ticket, discarded = loop.queue.snapshot()
    loop.count_discards(discarded)
    state = learner.state_dict()
    for slot in ready:
        slot.wait_ready()
    require_finite(state.model, learner.version)
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
            "other_ranks": [
                {"next_ticket": other.next_ticket, "due": list[JSON](other.due)}
                for other in loop.other_cursors
            ],
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


def require_finite(model: Tree, version: int) -> None:
    """Raise UniRLError when a weight of the model is not a number any more."""
    for path, leaf in leaves(model):
        if leaf.is_floating_point() and not leaf.isfinite().all():
            raise diverged(f"{'/'.join(path)} holds NaN or infinity", version)


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
    ready, without_place = _restore_samples(loop, checkpoint)
    due = list(state.get("due", []))
    if loop.plan.reissue:
        due += without_place
    elif without_place:
        # Resumed with other sizes. Counted, not silent.
        loop.metrics.total("queue/discarded/resized", len(without_place))
    loop.queue.restore(ready, int(state["next_ticket"]), learner.version, due=due)


def of_rank(checkpoint: Checkpoint, rank: int) -> Checkpoint:
    """What a rank after the first goes on from: the samples in a checkpoint are the first's alone,
    and the tickets are its own where each rank has such.
    """
    others: Any = checkpoint.state.get("other_ranks", [])
    own = others[rank - 1] if others else {}
    return replace(checkpoint, samples=None, state={**checkpoint.state, "ready": [], **own})


def check_ranks(plan: Plan, checkpoint: Checkpoint, size: int) -> None:
    """Raise UniRLError unless as many processes go on as have written the checkpoint, where what a
    ticket names depends on their number.
    """
    others: Any = checkpoint.state.get("other_ranks", [])
    saved = 1 + len(others)
    if plan.reissue and saved != size:
        raise UniRLError(
            f"the checkpoint {checkpoint.path} is of a training in {_processes(saved)}",
            f"tickets are shared out among them: {_processes(size)} would repeat and skip some",
            "resume it without torchrun"
            if saved == 1
            else f"resume it with torchrun --nproc-per-node {saved}",
        )


def _processes(number: int) -> str:
    return f"{number} process{'es' * (number > 1)}"


def _restore_samples(loop: TrainLoop, checkpoint: Checkpoint) -> tuple[list[Slot], list[int]]:
    """Copy acknowledged samples into places; with the tickets of those that no longer fit."""
    samples: Any = checkpoint.samples or {}
    spec = loop.plan.spec
    restored: list[Slot] = []
    without_place: list[int] = []
    for i, note in enumerate(checkpoint.state["ready"]):
        data = samples[str(i)]
        saved = {"/".join(path): (tuple(leaf.shape), leaf.dtype) for path, leaf in leaves(data)}
        wanted = {name: (item.shape, item.dtype) for name, item in spec.fields.items()}
        if len(restored) == loop.queue.config.num_slots or saved != wanted:
            without_place.append(int(note["ticket"]))
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
    return restored, without_place


def check_fingerprint(plan: Plan, checkpoint: Checkpoint) -> None:
    """Raise UniRLError unless the checkpoint is of the same recipe, environment and policy."""
    saved = {"recipe": checkpoint.state.get("recipe"), **checkpoint.state.get("fingerprint", {})}
    wanted = {"recipe": plan.recipe, **plan.fingerprint}
    for key in {
        **wanted,
        **saved,
    }:  # in the recipe's order: the environment before what follows from it
        if saved.get(key) != wanted.get(key):
            name, has, wants = _difference(key, saved.get(key), wanted.get(key))
            raise UniRLError(
                f"the checkpoint {checkpoint.path} is of another {key.replace('_', ' ')}",
                f"it has {name} = {has!r}, this run has {wants!r}",
                "resume without changing it, or start a new run with `unirl train`",
            )


def _difference(name: str, saved: JSON, wanted: JSON) -> tuple[str, JSON, JSON]:
    """What differs, by its whole name: of tables their first value that does."""
    if not isinstance(saved, dict) or not isinstance(wanted, dict):
        return name, saved, wanted
    for key in {**wanted, **saved}:
        if saved.get(key) != wanted.get(key):
            return _difference(f"{name}.{key}", saved.get(key), wanted.get(key))
    return name, saved, wanted
