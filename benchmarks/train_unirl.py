"""UniRL's row of a comparison: a training through the command line, weighed from outside.

One env step is one decision of one environment that was learned from. Start and warm-up are not
counted, nothing is saved or evaluated while the clock runs.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure

ROOT = Path(__file__).resolve().parent.parent
RATE = "env_steps_per_second"
FAR = str(10**12)
Row = dict[str, Any]


@dataclass(frozen=True)
class Window:
    """What is counted of a training: `seconds`, from `warm_up_seconds` after the first update."""

    seconds: float
    warm_up_seconds: float
    start_seconds: float = 10.0
    """How long the first update may take."""

    @property
    def timeout_seconds(self) -> float:
        """When a command that should be done counts as stuck: start-up and shut-down take time."""
        return self.seconds + self.warm_up_seconds + 240.0


def train_unirl(env: str, arguments: list[str], window: Window) -> Row:
    """What follows `unirl train`, run in a temporary folder; the rate is in metrics.jsonl."""
    with tempfile.TemporaryDirectory(prefix="unirl-benchmark-") as folder:
        command = [sys.executable, "-m", "unirl", "train", *arguments]
        command += ["--runs-dir", folder, "--name", "run", "--no-console"]
        whole = window.start_seconds + window.warm_up_seconds + window.seconds
        command += ["--run.max-seconds", str(whole)]
        command += ["--run.total-steps", FAR, "--run.log-seconds", "0.5"]
        command += ["--run.checkpoint-steps", FAR, "--run.eval-steps", "0"]
        command += ["--run.target-return", "none", "--run.anneal-over", "steps"]
        result = measure.run(command, timeout_seconds=window.timeout_seconds, cwd=ROOT)
        run_dir = Path(folder, "run")
        if result.returncode != 0 or not (run_dir / "metrics.jsonl").exists():
            raise SystemExit(
                f"{shlex.join(command)} exited with {result.returncode}:\n{result.stderr[-2000:]}"
            )
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        passes = tomllib.loads((run_dir / "config.toml").read_text())["learner"]["epochs"]
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
        "passes": passes,
        RATE: round(steps / seconds, 1),
        "cores_used": round(result.cores_used(end - seconds, end), 2),
        "core_us_per_env_step": measure.core_us(
            result.cores_by_process(end - seconds, end), steps / seconds
        ),
        "seconds": round(seconds, 2),
        "steps": steps,
        "settings": f"`unirl train {shlex.join(arguments)}`",
        "peak_memory_mb": round(result.peak_memory_mb, 1),
    }
