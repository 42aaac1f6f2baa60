"""Plain `unirl train RECIPE --env.id X` in turns with the best shape that `unirl tune` finds; and
whether it learns, with several seeds.

    python benchmarks/defaults.py cartpole acrobot
    python benchmarks/defaults.py --only speed           # all environments, about 3 minutes each
    python benchmarks/defaults.py pong --only learning --seeds 1 --max-seconds 3000
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import measure
from train_unirl import RATE, ROOT, Row, Window, train_unirl

BENCH = ("--env.import-module", "benchmarks.sleepy_env")
MINATAR = ("--env.import-module", "benchmarks.minatar_env")


@dataclass(frozen=True)
class Case:
    """A command without settings, and what it has to reach."""

    recipe: str
    env_id: str
    target: float
    """Mean return of the last 100 training episodes."""
    max_seconds: float
    """Of a training."""
    more: tuple[str, ...] = ()
    """What names the environment besides its id."""
    free_batch: bool = False
    """Environments are stepped together: tune may take 1 024 and more of them."""

    @property
    def command(self) -> str:
        return f"`{' '.join(self.words)}`"

    @property
    def words(self) -> list[str]:
        return [self.recipe, "--env.id", self.env_id, *self.more]


CASES = {
    "cartpole": Case("impala", "CartPole-v1", 475, 60, free_batch=True),
    "acrobot": Case("impala", "Acrobot-v1", -100, 120),
    "lunarlander": Case("impala", "LunarLander-v3", 200, 400),
    "halfcheetah": Case("impala", "HalfCheetah-v5", 1500, 400),
    "ppo-cartpole": Case("ppo", "CartPole-v1", 475, 60, free_batch=True),
    "ppo-halfcheetah": Case("ppo", "HalfCheetah-v5", 2000, 400),
    "pong": Case("impala", "ALE/Pong-v5", -15, 900),
    "ppo-pong": Case("ppo", "ALE/Pong-v5", -15, 1200),
    "minatar": Case("impala", "MinAtar/Breakout-v1", 5, 400, MINATAR),
    "waiting": Case("impala", "unirl-bench/SlowCartPole-v0", 400, 300, BENCH),
    "computing": Case(
        "impala", "unirl-bench/SlowCartPole-v0", 150, 400, (*BENCH, "--env.kwargs.computes", "true")
    ),
    "appo-waiting": Case("appo", "unirl-bench/SlowCartPole-v0", 400, 300, BENCH),
    "device": Case("ondevice", "torch/Cartpole", 450, 120, free_batch=True),
}


def tuned(case: Case, seconds: float, folder: Path) -> Path:
    """The fastest shape as a config file."""
    out = folder / "tuned.toml"
    words = ["tune", *case.words, "--seconds", str(seconds), "--out", str(out)]
    words += ["--free-batch"] * case.free_batch
    unirl(words, 1200)
    return out


def unirl(words: list[str], timeout_seconds: float) -> str:
    """Run one command line; its errors end this script."""
    command = [sys.executable, "-m", "unirl", *words]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_seconds, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr}")
    return done.stdout


def compare_speed(case: Case, flags: argparse.Namespace) -> list[list[object]]:
    """Plain and tuned in turns; the ratio of each pair is what counts."""
    with tempfile.TemporaryDirectory(prefix="unirl-defaults-") as folder:
        best = flags.tuned or tuned(case, flags.tune_seconds, Path(folder))
        window = Window(flags.seconds, warm_up_seconds=2.0, start_seconds=flags.start_seconds)
        plain: list[Row] = []
        fast: list[Row] = []
        for i in range(flags.rounds):
            # Each comes first in every other round: a machine that gets slower favours nobody.
            pair = [(plain, case.words), (fast, [case.recipe, f"@{best}"])]
            for rows, words in pair if i % 2 else reversed(pair):
                rows.append(train_unirl(case.env_id, words, window))
        changed = best.read_text().splitlines()[0].removeprefix("# ")
    pairs = measure.ratios(plain, fast, RATE)
    rates = (f"{measure.median(rows, RATE):,.0f}" for rows in (plain, fast))
    ratio = f"**{statistics.median(pairs):.2f}** ({', '.join(f'{one:.2f}' for one in pairs)})"
    return [[case.command, *rates, ratio, changed]]


def learn(case: Case, flags: argparse.Namespace) -> list[list[object]]:
    """A training to its target with each seed: how it ended, after how many steps and seconds."""
    seconds = flags.max_seconds or case.max_seconds
    return [_learn(case, seed, seconds) for seed in flags.seeds]


def _learn(case: Case, seed: int, seconds: float) -> list[object]:
    with tempfile.TemporaryDirectory(prefix="unirl-defaults-") as folder:
        words = ["train", *case.words, "--target", str(case.target), "--run.seed", str(seed)]
        words += ["--run.max-seconds", str(seconds), "--runs-dir", folder, "--name", "run"]
        unirl([*words, "--no-console", "--run.log-seconds", "0.5"], seconds + 300)
        rows = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    returns = [row for row in map(json.loads, rows) if "charts/episodic_return" in row]
    last = returns[-1]
    value = last["charts/episodic_return"]
    how = "reached" if value >= case.target else "**not reached**"
    numbers = f"{value:,.1f}", f"{last['step']:,}", f"{last['time/seconds']:.0f}"
    return [f"{case.command}, seed {seed}", f"{case.target:g}", how, *numbers]


PARTS: dict[str, tuple[list[str], Callable[[Case, argparse.Namespace], list[list[object]]]]] = {
    "speed": (
        ["plain command", "steps/s", "tuned", "plain / tuned (pairs)", "what tune found"],
        compare_speed,
    ),
    "learning": (
        ["plain command", "target", "", "last 100 episodes", "steps", "seconds"],
        learn,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--only", choices=PARTS, help="one part instead of both")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of the comparison of speed")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a run of a pair")
    parser.add_argument("--start-seconds", type=float, default=4.0, help="until its first update")
    parser.add_argument("--tuned", type=Path, help="a file of unirl tune, instead of tuning now")
    parser.add_argument("--tune-seconds", type=float, default=3.0, help="of a shape that is tried")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--max-seconds", type=float, help="of a training, on a busy machine, say")
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    flags = parser.parse_args()
    unknown = set(flags.cases) - set(CASES)
    if unknown:
        parser.error(f"{', '.join(unknown)}: there are {', '.join(CASES)}")
    measure.exit_on_terminate()
    for name in flags.cases:
        if name == "minatar" and importlib.util.find_spec("minatar") is None:
            print("minatar is left out: pip install minatar", flush=True)
            continue
        for part in [flags.only] if flags.only else PARTS:
            columns, measured = PARTS[part]
            rows = measured(CASES[name], flags)
            print(measure.table(columns, rows), flush=True)
            if not flags.no_write:
                measure.write_rows(f"defaults-{part}", columns, rows)


if __name__ == "__main__":
    main()
