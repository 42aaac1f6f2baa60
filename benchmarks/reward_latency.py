"""Rewards that take their time: 40 % of the completions are judged within 30 ms, 10 % take longer
than 600 ms, as tools and judges do. A tiny model learns to reverse digits meanwhile, in each mode.

The latency of a completion is drawn from a lognormal distribution through these two points, by its
prompt, its text and how often that was judged before; it ends at 5 s, where a judge's own deadline
would be. Waiting takes no processor time. All modes learn from
equally many completions; `samples/s` counts what was learned, after the first update.

    python benchmarks/reward_latency.py
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import measure

FAST, SLOW = (0.4, 0.030), (0.9, 0.600)
"""Share of the completions, and the seconds within which they are judged."""
MOST_SECONDS = 5.0
MODES: dict[str, dict[str, Any]] = {
    "sync": {"mode": "sync"},
    "one-step-off": {"mode": "one-step-off"},
    "async, max_staleness 1": {"mode": "async", "queue.max_staleness": 1},
    "async, max_staleness 2": {"mode": "async", "queue.max_staleness": 2},
    "async, max_staleness 4": {"mode": "async", "queue.max_staleness": 4},
}
GROUP, BATCH = 8, 16


def latency(key: str) -> float:
    """Seconds that judging a completion takes: always the same for the same key."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    share = (int.from_bytes(digest, "big") + 0.5) / 2**64
    normal = statistics.NormalDist()
    (low, fast), (high, slow) = FAST, SLOW
    sigma = math.log(slow / fast) / (normal.inv_cdf(high) - normal.inv_cdf(low))
    mu = math.log(fast) - sigma * normal.inv_cdf(low)
    return min(MOST_SECONDS, math.exp(mu + sigma * normal.inv_cdf(share)))


class SlowReward:
    """The share of right characters, after a while."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    async def __call__(self, text: str, answer: str, prompt: str) -> float:
        key = f"{prompt}|{text}"
        # Who has learned the task says the same again and again: each time takes its own while.
        self._seen[key] += 1
        await asyncio.sleep(latency(f"{key}|{self._seen[key]}"))
        right = sum(a == b for a, b in zip(text, answer, strict=False))
        return right / max(len(text), len(answer))


slow_reward = SlowReward()


def train(arguments: argparse.Namespace) -> None:
    """One run, in this process; prints a JSON line."""
    import torch

    import unirl
    from unirl.llm.models.tiny import make_tiny

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny(Path(folder) / "model", width=64, layers=2)
        updates = arguments.updates
        plan = unirl.make_plan(
            "grpo",
            **{
                "model.path": str(model),
                "task.name": "reverse",
                "task.options": {"digits": "1"},
                "task.max_prompt": 16,
                "reward.weights": {"reward_latency:slow_reward": 1.0},
                "reward.concurrency": 100_000,  # who waits is no load
                "reward.timeout_seconds": 60.0,
                "rollout.group_size": GROUP,
                "queue.batch_size": BATCH,
                "sampling.max_tokens": 4,
                "algorithm.entropy_coef": 0.01,
                "learner.optimizer.lr": 2e-3,
                "runner.learner_threads": 1,
                "run.seed": arguments.seed,
                "run.total_steps": updates * BATCH * GROUP,
                "run.target_window": 8 * BATCH * GROUP,
                "run.log_seconds": 0.0,
                **MODES[arguments.mode],
            },
        )
        result = unirl.run(plan, Path(folder) / "run", console=False)
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").open()]
        samples = [json.loads(line) for line in samples_of(Path(folder) / "run")]
    first, last = rows[0], rows[-1]
    learned, seconds = last["step"] - first["step"], last["seconds"] - first["seconds"]
    discarded = sum(last.get(f"queue/discarded/{reason}", 0) for reason in plan.learner.reasons)
    versions = [version for row in samples for version in row["versions"]]
    ages = [row["update"] - 1 - version for row in samples for version in row["versions"]]
    tail = statistics.fmean(row["reward"] for row in rows[-8:])
    print(
        json.dumps(
            {
                "samples_per_s": learned / seconds,
                "seconds": result.seconds,
                "reward": tail,
                "max_age": max(ages),
                "discarded": discarded / (discarded + updates * BATCH),
                "has_versions": len(versions) >= len(samples),
                "busy": sum(row.get("time/learner/work", 0) for row in rows) / result.seconds,
            }
        )
    )


def samples_of(run_dir: Path) -> Iterator[str]:
    """Lines of samples.jsonl: all completions that were learned."""
    with (run_dir / "samples" / "samples.jsonl").open() as file:
        yield from file


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--modes", default=",".join(map(str, range(len(MODES)))))
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    parser.add_argument("--mode", choices=list(MODES), help="train in this mode only, here")
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    if flags.mode:
        train(flags)
        return
    measure.exit_on_terminate()
    here = str(Path(__file__).resolve().parent)
    path = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    rows, sync = [], 0.0
    for name in [list(MODES)[int(i)] for i in flags.modes.split(",")]:
        runs = []
        for seed in range(1, flags.seeds + 1):
            words = ["--mode", name, "--seed", str(seed), "--updates", str(flags.updates)]
            ran = measure.run(
                [sys.executable, str(Path(__file__).resolve()), *words],
                timeout_seconds=3600,
                environment={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
            runs.append(ran.row | {"cores": ran.cores_used(10.0)})
            print(name, seed, json.dumps(runs[-1]), flush=True)
            bound = MODES[name].get("queue.max_staleness", int(name == "one-step-off"))
            if runs[-1]["max_age"] > bound:
                raise RuntimeError(f"a token was {runs[-1]['max_age']} updates old: {name}")
        speed = measure.median(runs, "samples_per_s")
        sync = speed if name == "sync" else sync
        rows.append(
            [
                name,
                f"{speed:.1f}",
                f"{speed / sync:.2f}" if sync else "",
                f"{statistics.fmean(float(run['reward']) for run in runs):.3f}",
                max(int(run["max_age"]) for run in runs),
                f"{100 * statistics.fmean(float(run['discarded']) for run in runs):.1f} %",
                f"{measure.median(runs, 'cores'):.2f}",
            ]
        )
    columns = [
        "mode", "samples/s", "against sync", "final reward", "oldest token, updates",
        "groups discarded as too old", "cores busy",
    ]  # fmt: skip
    text = measure.table(columns, rows) + (
        f"\n\n{flags.updates} updates of {BATCH} groups of {GROUP} completions in each mode; "
        f"{flags.seeds} seed(s); final reward: mean of the last 8 updates. One-step-off takes "
        "groups in order; async takes whichever are finished first."
    )
    print(text)
    if not flags.no_write:
        measure.write_block("reward-latency", text)


if __name__ == "__main__":
    main()
