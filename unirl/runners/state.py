"""What a run needs to continue where it was: from a loop to a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from unirl.core.learner import Learner, LearnerState
from unirl.core.queue import Ticket
from unirl.core.sample import Slot
from unirl.core.tree import Tree, leaves, tree_map
from unirl.errors import UniRLError
from unirl.runners.loop import TrainLoop
from unirl.runners.plan import LearnerPlan, Plan
from unirl.storage.checkpoint import JSON, Checkpoint, save_checkpoint


def save(loop: TrainLoop, run_dir: Path) -> Path:
    """Write a checkpoint of the learner, the acknowledged samples, random numbers and counters."""
    learner = loop.learner
    if loop.ledger is not None:
        loop.ledger.flush()  # first: a checkpoint is never ahead of the ledger
    snapshot = loop.queue.snapshot()
    loop.count_discards(snapshot.discarded)
    state = learner.state_dict()
    ready = snapshot.ready
    for slot in ready:
        slot.wait_written()
    require_finite(state.model, learner.version)
    return save_checkpoint(
        run_dir,
        learner.num_steps,
        model=state.model,
        optimizer={"learner": state.optimizer, "rng": _random_states()},
        samples={str(i): slot.data for i, slot in enumerate(ready)} if ready else None,
        state={
            "recipe": loop.plan.recipe,
            "fingerprint": dict(loop.learner_plan.fingerprint),
            "version": learner.version,
            "num_steps": learner.num_steps,
            "seconds": loop.seconds,
            "counters": dict(state.counters),
            "metrics": loop.metrics.state_dict(),
            **_tickets(
                snapshot.next_ticket,
                snapshot.unfinished if loop.learner_plan.reissue else (),
                snapshot.issued,
            ),
            "num_unfinished": len(snapshot.unfinished),
            "other_ranks": [_tickets(*other) for other in loop.other_cursors],
            "ready": [
                {
                    "ticket": slot.ticket,
                    "pool": slot.pool,
                    "pool_ticket": slot.pool_ticket,
                    "used": slot.used,
                    "first_version": slot.first_version,
                    "last_version": slot.last_version,
                }
                for slot in ready
            ],
        },
        keep=loop.plan.run.keep_checkpoints,
    )


def _random_states() -> dict[str, torch.Tensor]:
    """Of torch's own generators: the host's, and the GPUs', where dropout of adapters draws."""
    has_gpus = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    num_gpus = torch.cuda.device_count() if has_gpus else 0
    gpus = {f"cuda:{i}": torch.cuda.get_rng_state(i) for i in range(num_gpus)}
    return {"torch": torch.get_rng_state(), **gpus}


def _restore_random(states: Mapping[str, torch.Tensor]) -> None:
    """A GPU that is not there draws nothing."""
    torch.set_rng_state(states["torch"])
    for i in range(torch.cuda.device_count()):
        if f"cuda:{i}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{i}"], i)


def _tickets(next_ticket: int, due: Sequence[Ticket], issued: Sequence[int]) -> dict[str, JSON]:
    """Where a queue is in its tickets."""
    return {
        "next_ticket": next_ticket,
        "due": [list[JSON](ticket) for ticket in due],
        "issued": list[JSON](issued),
    }


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
    check_fingerprint(loop.plan, loop.learner_plan, checkpoint)
    learner = loop.learner
    restore_learner(learner, checkpoint)
    loop.metrics.load_state_dict(state["metrics"])
    loop.seconds_before = float(state["seconds"])
    ready, without_slot = _restore_samples(loop, checkpoint)
    due = [_read_ticket(ticket) for ticket in state.get("due", [])]
    if loop.learner_plan.reissue:
        due += without_slot
    else:
        # Counted, not silent: what was being produced, and what other sizes have no slot for.
        for reason, number in (
            ("shutdown", int(state.get("num_unfinished", 0))),
            ("resized", len(without_slot)),
        ):
            if number:
                loop.metrics.total(f"queue/discarded/{reason}", number)
    loop.queue.restore(
        ready,
        int(state["next_ticket"]),
        learner.version,
        due=due,
        issued=state.get("issued"),
    )


def restore_learner(learner: Learner, checkpoint: Checkpoint) -> None:
    """The learner and torch's random numbers as they were."""
    state, optimizer = checkpoint.state, cast(Any, checkpoint.optimizer)
    learner.load_state_dict(LearnerState(checkpoint.model, optimizer["learner"], state["counters"]))
    learner.version, learner.num_steps = int(state["version"]), int(state["num_steps"])
    _restore_random(optimizer["rng"])


def _read_ticket(saved: Any) -> Ticket:
    """A ticket of a checkpoint; a number alone is of a run from before there were pools."""
    return Ticket(saved, 0, saved) if isinstance(saved, int) else Ticket(*saved)


def of_rank(checkpoint: Checkpoint, rank: int) -> Checkpoint:
    """What a rank after the first continues from: the samples in a checkpoint are the first's
    alone, and the tickets are its own where each rank has such.
    """
    others: Any = checkpoint.state.get("other_ranks", [])
    own = others[rank - 1] if others else {}
    return replace(checkpoint, samples=None, state={**checkpoint.state, "ready": [], **own})


def check_ranks(plan: LearnerPlan, checkpoint: Checkpoint, size: int) -> None:
    """Raise UniRLError unless as many processes continue as have written the checkpoint, where what
    a ticket names depends on their number.
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


def _restore_samples(loop: TrainLoop, checkpoint: Checkpoint) -> tuple[list[Slot], list[Ticket]]:
    """Copy acknowledged samples into slots; with the tickets of those that no longer fit."""
    samples: Any = checkpoint.samples or {}
    spec, slots = loop.learner_plan.spec, loop.queue.buffers()
    restored: list[Slot] = []
    without_slot: list[Ticket] = []
    for i, note in enumerate(checkpoint.state["ready"]):
        data, number = samples[str(i)], int(note["ticket"])
        ticket = Ticket(number, note.get("pool", 0), note.get("pool_ticket", number))
        saved = {"/".join(path): (tuple(leaf.shape), leaf.dtype) for path, leaf in leaves(data)}
        wanted = {name: (item.shape, item.dtype) for name, item in spec.fields.items()}
        if len(restored) == loop.queue.config.num_slots or saved != wanted:
            without_slot.append(ticket)
            continue
        buffer = slots.buffer(len(restored))
        tree_map(lambda into, value: into.copy_(value), buffer, data)
        restored.append(
            Slot(
                len(restored),
                ticket.number,
                buffer,
                pool=ticket.pool,
                pool_ticket=ticket.pool_ticket,
                first_version=int(note["first_version"]),
                last_version=int(note["last_version"]),
                used=note.get("used"),
            )
        )
    return restored, without_slot


def check_fingerprint(plan: Plan, learner: LearnerPlan, checkpoint: Checkpoint) -> None:
    """Raise UniRLError unless the checkpoint is of the same recipe, environment and policy."""
    saved = {"recipe": checkpoint.state.get("recipe"), **checkpoint.state.get("fingerprint", {})}
    wanted = {"recipe": plan.recipe, **learner.fingerprint}
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
