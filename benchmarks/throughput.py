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
from collections.abc import Callable
from functools import partial
from pathlib import Path

import measure
from train_unirl import RATE, ROOT, Row, Window, train_unirl

from unirl.policy.precision import has_bfloat16

HERE = Path(__file__).resolve().parent


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
    # All systems are measured alike, from outside: what each reports of its memory is not used.
    return {**result.row, "peak_memory_mb": round(result.peak_memory_mb, 1)}


def systems(env: str, config: Path, extra: list[str]) -> dict[str, Callable[[Window], Row]]:
    """What is compared on this environment, by the name it bears in the table."""
    # One pass over the data for everyone, whatever the config needs to learn well.
    once = ["--learner.epochs", "1", "--learner.minibatches", "1", "--learner.policy-clip", "none"]
    if env == "pong":
        # The network of the others; the config's own is cheaper. What helps to learn is left out.
        once += ["--policy.torso", "nature", "--policy.feature-size", "512"]
        once += ["--no-policy.normalize-images", "--env.random-burst-probability", "0"]
        once += ["--no-env.last-action", "--env.frame-size", "84", "--policy.image-stride", "4"]
        once += ["--actor.unroll-length", "20", "--queue.max-staleness", "3"]
    ours = partial(train_unirl, env, ["impala", f"@{config}", *once, *extra])
    if env == "pong":
        dtype = "bf16" if has_bfloat16("cpu") else "fp32"
        return {
            "UniRL": ours,
            f"naive loop, {dtype}": partial(naive, env, dtype),
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
