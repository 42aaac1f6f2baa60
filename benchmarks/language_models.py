"""Trains language models in every mode with several seeds, and puts the table into RESULTS.md.

    python benchmarks/language_models.py reverse --seeds 3
    python benchmarks/language_models.py digits --seeds 3 --model models/smollm2 --engine vllm

reverse: a tiny Llama from scratch, modes sync, colocated, one-step-off and async. digits:
SmolLM2-135M-Instruct, sync and async. agent-calculator and agent-products: the same two models with
a tool that they must call. Runs are in runs/language-<task>-<mode>-<seed>; --reuse evaluates what
is there already. Held-out prompts are asked at temperature 1 and with the likeliest token, before
and after. An answer is right when its reward is 1.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import measure

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


class Trial(NamedTuple):
    """What is trained: a config's name leads here."""

    modes: tuple[str, ...]
    prompts: int
    """Held out, that are asked."""
    metric: str
    level: float
    """Of the metric, to be reached."""


TRIALS = {
    "reverse": Trial(
        ("sync", "colocated", "one-step-off", "async"), 200, "rewards/exact/mean", 0.9
    ),
    "digits": Trial(("sync", "async"), 400, "charts/episodic_return", 0.85),
    "agent-calculator": Trial(("one-step-off",), 200, "rewards/exact/mean", 0.9),
    "agent-products": Trial(("sync",), 200, "rewards/exact/mean", 0.7),
}
# Freed memory stays with the process: the kernel need not clear it again for every update.
MALLOC = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "MALLOC_TOP_PAD_": str(2**28),
}


def unirl(*arguments: str) -> str:
    """Run one command line and return what it printed; its errors end this script."""
    command = [sys.executable, "-m", "unirl", *arguments]
    environment = os.environ | MALLOC
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr}")
    return done.stdout


def right(run_dir: Path, episodes: int, *, greedy: bool) -> tuple[float, float]:
    """Share of right answers to held-out prompts, and half its 95 % interval."""
    words = ["--deterministic"] if greedy else []
    printed = unirl(
        "eval", str(run_dir), "--episodes", str(episodes), "--seed", "1000", "--json", *words
    )
    returns = json.loads(Path(json.loads(printed)["file"]).read_text())["returns"]
    share = statistics.fmean(float(value) == 1.0 for value in returns)
    return share, 1.96 * math.sqrt(share * (1 - share) / len(returns))


def crossing(rows: list[dict[str, Any]], name: str, level: float) -> float | None:
    """Seconds of training until a metric first reached a level."""
    return next((row["seconds"] for row in rows if row.get(name, -1.0) >= level), None)


def before(task: str, words: list[str]) -> str:
    """Held-out answers of the model as it is: after one batch with next to no step size."""
    name = f"language-{task}-before"
    nothing = ["--run.total-steps", "1", "--learner.optimizer.lr", "1e-12"]
    flags = ["--mode", "sync", "--name", name, *words, *nothing]
    unirl("train", f"@{task}", "--overwrite", "--no-console", *flags)
    run_dir = ROOT / "runs" / name
    sampled = right(run_dir, TRIALS[task].prompts, greedy=False)
    greedy = right(run_dir, TRIALS[task].prompts // 4, greedy=True)
    return (
        f"Held out before training: {sampled[0]:.2f} +- {sampled[1]:.2f} at T = 1, "
        f"{greedy[0]:.2f} +- {greedy[1]:.2f} greedy."
    )


def measured(task: str, mode: str, seed: int, words: list[str], reuse: bool) -> list[object]:
    """One row of the table."""
    name = f"language-{task}-{mode}-{seed}"
    run_dir = ROOT / "runs" / name
    flags = ["--mode", mode, "--run.seed", str(seed), "--name", name, *words]
    if not (reuse and run_dir.exists()):
        unirl("train", f"@{task}", "--overwrite", "--no-console", *flags)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    metric, last = TRIALS[task].metric, rows[-1]
    seconds = crossing(rows, metric, TRIALS[task].level)
    sampled = right(run_dir, TRIALS[task].prompts, greedy=False)
    greedy = right(run_dir, TRIALS[task].prompts // 4, greedy=True)
    print(name, seconds, last["seconds"], sampled, greedy, flush=True)
    return [
        mode,
        seed,
        f"{rows[0].get(metric, math.nan):.2f} -> {last[metric]:.2f}",
        f"{seconds:.0f}" if seconds is not None else "not reached",
        f"{last['seconds']:.0f}",
        f"{sampled[0]:.2f} +- {sampled[1]:.2f}",
        f"{greedy[0]:.2f} +- {greedy[1]:.2f}",
        f"{max(row.get('staleness/token_max', 0) for row in rows):.0f}",
        *([f"{last['agent/well_formed_calls']:.2f}"] if "agent/turns" in last else []),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=list(TRIALS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--modes", nargs="*", help="only these")
    parser.add_argument("--model", help="folder of the model; the config's by default")
    parser.add_argument("--engine", default="hf", choices=["hf", "vllm"])
    parser.add_argument("--max-seconds", type=float, help="of training, per run")
    parser.add_argument("--reuse", action="store_true", help="do not train what was trained")
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    flags = parser.parse_args()
    words = ["--engine", flags.engine]
    words += ["--model", flags.model] if flags.model else []
    words += ["--run.max-seconds", str(flags.max_seconds)] if flags.max_seconds else []
    trial = TRIALS[flags.task]
    modes = flags.modes or trial.modes
    begun = before(flags.task, words)
    print(begun, flush=True)
    rows = [
        measured(flags.task, mode, seed, words, flags.reuse)
        for mode in modes
        for seed in range(1, flags.seeds + 1)
    ]
    first = modes[0]
    picture = HERE / "curves" / f"language-{flags.task}.png"
    runs = [f"runs/language-{flags.task}-{first}-{seed}" for seed in range(1, flags.seeds + 1)]
    unirl("plot", *runs, "-o", str(picture))
    is_exact = trial.metric == "rewards/exact/mean"
    what = "exact match in training" if is_exact else "reward in training"
    columns = ["mode", "seed", what, f"seconds to {trial.level}", "seconds of training"]
    columns += ["held out, T = 1", "held out, greedy", "oldest token"]
    columns += ["well-formed calls"] if flags.task.startswith("agent") else []
    body = (
        f"**{flags.task}**, engine {flags.engine}\n\n{measure.table(columns, rows)}\n\n{begun}\n\n"
        f"![{flags.task}](curves/{picture.name})"
    )
    print(body)
    if not flags.no_write:
        measure.write_block(f"language-{flags.task}", body)


if __name__ == "__main__":
    main()
