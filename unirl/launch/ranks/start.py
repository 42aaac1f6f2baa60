"""The further ranks of a learner, started where the plan wants them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from unirl.launch.ranks.processes import RankProcesses
from unirl.launch.ranks.ranks import RankStarter, further_ranks
from unirl.runners.cluster.ray import RayCluster
from unirl.runners.plan import Plan
from unirl.storage.checkpoint import Checkpoint


@contextmanager
def started_ranks(
    plan: Plan, checkpoint: Checkpoint | None, log_dir: Path | None, cluster: RayCluster | None
) -> Iterator[Plan]:
    """The plan, with a learner of all its ranks; they end with this context."""
    if plan.learner.ranks == 1:
        yield plan
        return
    starter: RankStarter
    if cluster is not None and (plan.rank_resources.cpus or plan.rank_resources.gpus):
        from unirl.launch.ranks.ray import RankNodes

        starter = RankNodes(plan, cluster)
    else:
        starter = RankProcesses(plan, log_dir)
    with further_ranks(plan, checkpoint, starter) as together:
        yield together
