"""Training throughput side by side: UniRL, the naive loop and Sample Factory, in turn, A B C A B C.

One env step is one decision of one environment that was learned from once. Every system gets the
whole machine while it runs, warm-up and start are not counted, nothing is saved or evaluated while
the clock runs. A ratio is taken round by round, so that a drift of the machine cancels.

    python benchmarks/throughput.py pong --rounds 3 --seconds 60
    python benchmarks/throughput.py cartpole --rounds 3 --seconds 30
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import measure

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RATE = "env_steps_per_second"
FAR = str(10**12)
Row = dict[str, Any]


@dataclass(frozen=True)
class Window:
    """What is counted of a training: `seconds`, from `warm_up_seconds` after the first update."""

    seconds: float
    warm_up_seconds: float

    @property
    def timeout_seconds(self) -> float:
        """When a command that should be done counts as stuck: start-up and shut-down take time."""
        return self.seconds + self.warm_up_seconds + 240.0


def unirl(env: str, config: Path, extra: list[str], window: Window) -> Row:
    """Train through the command line in a temporary folder; the rate is in metrics.jsonl."""
    with tempfile.TemporaryDirectory(prefix="unirl-throughput-") as folder:
        command = [sys.executable, "-m", "unirl", "train", "impala", f"@{config}"]
        command += ["--runs-dir", folder, "--name", "run", "--no-console"]
        command += ["--run.max-seconds", str(window.warm_up_seconds + window.seconds + 10)]
        command += ["--run.total-steps", FAR, "--run.log-seconds", "0.5"]
        command += ["--run.checkpoint-steps", FAR, "--run.eval-steps", "0"]
        command += ["--run.target-return", "none", *extra]
        result = measure.run(command, timeout_seconds=window.timeout_seconds, cwd=ROOT)
        path = Path(folder, "run", "metrics.jsonl")
        if result.returncode != 0 or not path.exists():
            raise SystemExit(
                f"{shlex.join(command)} exited with {result.returncode}:\n{result.stderr[-2000:]}"
            )
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    learned = [row for row in rows if row["step"] > 0]
    begin = learned[0]["seconds"] + window.warm_up_seconds
    counted = [row for row in learned if begin <= row["seconds"] <= begin + window.seconds + 1]
    if len(counted) < 2:
        raise SystemExit(
            f"UniRL logged {len(counted)} rows in {window.seconds} s; give --seconds more"
        )
    steps = counted[-1]["step"] - counted[0]["step"]
    seconds = counted[-1]["seconds"] - counted[0]["seconds"]
    # The end of the process is the end of the training, give or take the last checkpoint.
    end = result.wall_seconds - (rows[-1]["seconds"] - counted[-1]["seconds"])
    return {
        "system": "UniRL",
        "env": env,
        RATE: round(steps / seconds, 1),
        "peak_memory_mb": round(result.peak_memory_mb, 1),
        "cores_used": round(result.cores_used(end - seconds, end), 2),
        "seconds": round(seconds, 2),
        "steps": steps,
    }


def naive(env: str, dtype: str, window: Window) -> Row:
    """The lock-step loop beside this file."""
    command = [sys.executable, str(HERE / "naive_loop.py"), "--env", env, "--dtype", dtype]
    return _script(command, window)


def sample_factory(env: str, settings: dict[str, str], window: Window) -> Row:
    """Sample Factory in an environment of its own, which its script makes on first use."""
    script = HERE / "peers" / "sample_factory" / "run.py"
    command = [sys.executable, str(script), "--env", env]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    return _script(command, window)


def _script(command: list[str], window: Window) -> Row:
    command += ["--seconds", str(window.seconds), "--warm-up-seconds", str(window.warm_up_seconds)]
    result = measure.run([*command, "--json"], timeout_seconds=window.timeout_seconds)
    # All systems are weighed alike, from outside: what each says of its own memory is not used.
    return {**result.row, "peak_memory_mb": round(result.peak_memory_mb, 1)}


def systems(env: str, config: Path, extra: list[str]) -> dict[str, Callable[[Window], Row]]:
    """What is compared on this environment, by the name it bears in the table."""
    ours = partial(unirl, env, config, extra)
    if env == "pong":
        return {
            "UniRL": ours,
            "naive loop, bf16": partial(naive, env, "bf16"),
            "Sample Factory, EnvPool": partial(sample_factory, env, {}),
        }
    pooled = {"vector": "envpool", "num_envs": "256", "batch_size": "8192"}
    return {
        "UniRL": ours,
        "naive loop, fp32": partial(naive, env, "fp32"),
        "Sample Factory, Gymnasium": partial(sample_factory, env, {}),
        "Sample Factory, EnvPool": partial(sample_factory, env, pooled),
    }


def report(results: dict[str, list[Row]]) -> str:
    """The table of medians, and below it UniRL over each other system."""
    lines = []
    for name, rows in results.items():
        rates = [row[RATE] for row in rows]
        spread = f"{min(rates):,.0f} - {max(rates):,.0f}"
        memory, cores = (measure.median(rows, key) for key in ("peak_memory_mb", "cores_used"))
        lines.append(
            [name, f"{statistics.median(rates):,.0f}", spread, f"{memory:,.0f}", f"{cores:.2f}"]
        )
    columns = ["system", "env steps/s, median", "min - max", "peak memory, MB", "cores used"]
    text = measure.table(columns, lines)
    ours = results.get("UniRL")
    others = {name: rows for name, rows in results.items() if name != "UniRL"} if ours else {}
    for name, rows in others.items():
        each = measure.ratios(ours or [], rows, RATE)
        rounds = ", ".join(f"{ratio:.2f}" for ratio in each)
        text += f"\n{'' if name != next(iter(others)) else chr(10)}"
        text += f"- UniRL / {name}: **{statistics.median(each):.2f}** (rounds: {rounds})"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("env", choices=("pong", "cartpole"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warm-up-seconds", type=float, default=10.0)
    parser.add_argument("--config", type=Path, help="UniRL's config (default configs/ENV.toml)")
    parser.add_argument("--unirl", default="", help='more flags for UniRL: "--actor.num-envs 16"')
    parser.add_argument("--only", help="comma-separated beginnings of names: UniRL,naive")
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    flags = parser.parse_args()
    measure.exit_on_terminate()
    config = flags.config or ROOT / "configs" / f"{flags.env}.toml"
    wanted = tuple(flags.only.split(",")) if flags.only else ("",)
    compared = {
        name: start
        for name, start in systems(flags.env, config, shlex.split(flags.unirl)).items()
        if name.startswith(wanted)
    }
    window = Window(flags.seconds, flags.warm_up_seconds)
    results: dict[str, list[Row]] = {name: [] for name in compared}
    for round_index in range(flags.rounds):
        for name, start in compared.items():
            load = os.getloadavg()[0]
            row = start(window)
            results[name].append(row)
            print(f"round {round_index + 1}, load before {load:.1f}: {json.dumps(row)}", flush=True)
    text = report(results)
    print(f"\n{text}")
    if not flags.no_write:
        length = f"{flags.rounds} rounds of {flags.seconds:g} s each, in turn."
        measure.write_block(f"throughput-{flags.env}", f"{text}\n\n{length}")


if __name__ == "__main__":
    main()
