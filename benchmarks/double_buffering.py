"""What double-buffered sampling is worth where environments wait, and what a slow one costs others.

Environments whose step sleeps 5 ms and computes nothing: 64 of them in 2 workers, and a policy
whose forward pass takes as long as stepping one of the groups of double buffering (16 of them).

    python benchmarks/double_buffering.py
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import measure

import unirl
from unirl.actors.inference import PolicyWorker
from unirl.actors.sampler import SamplerConfig
from unirl.core.actor import ActorContext
from unirl.envs.make import spaces
from unirl.handshake.handshake import Handshake
from unirl.policy import Policy
from unirl.recipes.appo import Config
from unirl.runners.processes import ProcessesRunner

STEP_SECONDS, NUM_ENVS, NUM_WORKERS = 0.005, 64, 2
FORWARD_SECONDS = STEP_SECONDS * NUM_ENVS / NUM_WORKERS / 2


class SlowPolicyWorker(PolicyWorker):
    """Sleeps until a forward pass has taken FORWARD_SECONDS, however many rows it has."""

    def _act(self, groups: Sequence[Any]) -> None:
        started = time.monotonic()
        super()._act(groups)
        time.sleep(max(0.0, FORWARD_SECONDS - (time.monotonic() - started)))


def make_slow_policy_worker(context: ActorContext, *, config: Config) -> PolicyWorker:
    """The factory of a plan."""
    assert isinstance(context.handshake, Handshake)
    policy = Policy(*spaces(config.env), config.policy, seed=0).eval()
    return SlowPolicyWorker(context, policy, context.handshake, config.sampler)


def sample(
    *, seconds: float, slow_forward: bool = True, slow_factor: float = 1.0, **sampler: Any
) -> dict[str, Any]:
    """Rates of one setting: group steps per second of every group, share of time spent stepping."""
    shape = SamplerConfig(num_workers=NUM_WORKERS, unroll_length=8, **sampler)
    plan = unirl.make_plan(
        "appo",
        **{
            "env.id": "unirl-bench/Sleepy-v0",
            "env.engine": "sync",
            "env.import_module": "sleepy_env",
            "env.kwargs": {"step_seconds": STEP_SECONDS, "slow_factor": slow_factor},
            "sampler.num_workers": NUM_WORKERS,
            "sampler.num_groups": shape.num_groups,
            "sampler.num_envs": shape.num_envs,
            "sampler.unroll_length": shape.unroll_length,
            "sampler.batch_wait_ms": shape.batch_wait_ms,
            "sampler.group_threads": shape.group_threads,
            "queue.batch_size": 1,
            "queue.max_staleness": 3 * shape.total_groups,
            "learner.minibatches": 1,
            "learner.epochs": 1,
            "run.total_steps": 10**9,
        },
    )
    if slow_forward:
        plan = plan.with_pool(make_actor=partial(make_slow_policy_worker, config=plan.config))
    runner = ProcessesRunner(plan)
    found: dict[str, Any] = {}

    def watch() -> None:
        handshake = runner.processes.pools[0].handshake
        assert isinstance(handshake, Handshake)
        groups = range(shape.total_groups)
        while not all(handshake.group_totals(group)[1] > 5 for group in groups):
            time.sleep(0.1)
        before, started = [handshake.group_totals(group) for group in groups], time.monotonic()
        time.sleep(seconds)
        after, wall = (
            [handshake.group_totals(group) for group in groups],
            time.monotonic() - started,
        )
        work = [a[0] - b[0] for a, b in zip(after, before, strict=True)]
        steps = [a[1] - b[1] for a, b in zip(after, before, strict=True)]
        found["steps_per_second"] = sum(steps) * shape.num_envs / wall
        found["group_rates"] = [count / wall for count in steps]
        found["busy"] = sum(work) / wall / NUM_WORKERS
        runner.loop.stop("measured")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    runner.run([])
    thread.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    flags = parser.parse_args()
    run = partial(sample, seconds=flags.seconds)
    single = run(num_groups=1, num_envs=32)
    double = run(num_groups=2, num_envs=16, batch_wait_ms=100.0)
    ratio = double["steps_per_second"] / single["steps_per_second"]
    rows = [
        ["1 group of 32", f"{single['steps_per_second']:.0f}", f"{single['busy']:.0%}", ""],
        [
            "2 groups of 16",
            f"{double['steps_per_second']:.0f}",
            f"{double['busy']:.0%}",
            f"{ratio:.2f}",
        ],
    ]
    text = measure.table(["each worker", "env steps/s", "time spent stepping", "ratio"], rows)
    shape = {"num_groups": 2, "num_envs": 16, "group_threads": True, "slow_forward": False}
    even, uneven = run(**shape), run(**shape, slow_factor=10.0)
    kept = [a / b for a, b in zip(uneven["group_rates"], even["group_rates"], strict=True)]
    names = ["that of the slow environment", "other group of its worker", *["another worker"] * 2]
    text += "\n\nOne environment 10 times slower than the other 63 (sampler.group_threads):\n\n"
    text += measure.table(
        ["group", "share of its rate kept"],
        [[name, f"{share:.0%}"] for name, share in zip(names, kept, strict=True)],
    )
    print(text)
    if not flags.no_write:
        measure.write_block("double-buffering", text)


if __name__ == "__main__":
    main()
