"""Trains shipped configs with several seeds, evaluates each run, puts curves into RESULTS.md.

    python benchmarks/learning_curves.py acrobot lunarlander halfcheetah --seeds 3
    python benchmarks/learning_curves.py pong --seeds 1 --episodes 20

Runs are in runs/curves-<config>-<seed> and are kept; --reuse evaluates what is there already.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import measure

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def unirl(*arguments: str) -> str:
    """Run one command line and return what it printed; its errors end this script."""
    command = [sys.executable, "-m", "unirl", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr}")
    return done.stdout


def train_and_evaluate(config: str, seed: int, episodes: int, reuse: bool) -> dict[str, Any]:
    """One run: its last row of metrics and its evaluation."""
    name = f"curves-{config}-{seed}"
    run_dir = ROOT / "runs" / name
    if not (reuse and run_dir.exists()):
        unirl("train", f"@{config}", "--name", name, "--run.seed", str(seed), "--overwrite")
    evaluation = json.loads(
        unirl("eval", str(run_dir), "--episodes", str(episodes), "--seed", "1000", "--json")
    )
    last = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    return {"run_dir": run_dir, "seed": seed, "evaluation": evaluation, "last": last}


def report(config: str, results: list[dict[str, Any]], episodes: int) -> str:
    """The table of one config, and its curve."""
    rows = []
    for result in results:
        last, evaluation = result["last"], result["evaluation"]
        rows.append(
            [
                result["seed"],
                f"{evaluation['return_mean']:,.1f} +- {evaluation['return_std']:,.1f}",
                f"{last['step']:,}",
                f"{last['time/seconds'] / 60:.1f}",
            ]
        )
    picture = HERE / "curves" / f"{config}.png"
    picture.parent.mkdir(exist_ok=True)
    unirl("plot", *(str(result["run_dir"]) for result in results), "-o", str(picture))
    mean = statistics.fmean(result["evaluation"]["return_mean"] for result in results)
    columns = ["seed", f"return of {episodes} episodes", "env steps", "minutes"]
    return (
        f"**{config}**, mean over seeds {mean:,.1f}\n\n{measure.table(columns, rows)}\n\n"
        f"![{config}](curves/{config}.png)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("configs", nargs="+", help="names of shipped configs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--reuse", action="store_true", help="do not train what was trained")
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    flags = parser.parse_args()
    for config in flags.configs:
        results = [
            train_and_evaluate(config, seed, flags.episodes, flags.reuse)
            for seed in range(1, flags.seeds + 1)
        ]
        text = report(config, results, flags.episodes)
        print(text, flush=True)
        if not flags.no_write:
            measure.write_block(f"learning-{config}", text)


if __name__ == "__main__":
    main()
