"""`unirl bench SUITE`: run the benchmark scripts of a clone; source: none."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from unirl import config as configs
from unirl.core.errors import UniRLError


@dataclass(frozen=True)
class Suite:
    """Benchmarks that belong together."""

    summary: str
    """One line."""
    scripts: tuple[tuple[str, ...], ...]
    """Files of benchmarks/ with their arguments, run in this order."""


SUITES: Mapping[str, Suite] = MappingProxyType(
    {
        "queue": Suite("What moving one sample costs, beside a memcpy.", (("queue_speed.py",),)),
        "classic": Suite(
            "Training throughput on Pong, then on CartPole.",
            (("throughput.py", "pong"), ("throughput.py", "cartpole")),
        ),
    }
)
"""Suites by name."""


def bench(arguments: Sequence[str]) -> int:
    """Run a suite; further flags go to its scripts. Without a suite: list them."""
    if not arguments:
        width = max(len(name) for name in SUITES)
        for name, suite in SUITES.items():
            print(f"{name:<{width}}  {suite.summary}")
        return 0
    name, *flags = arguments
    if name not in SUITES:
        raise UniRLError(
            f'benchmark suite "{name}" is unknown',
            f"there are {', '.join(SUITES)}",
            configs.suggestion(name, SUITES) or "see what they measure: unirl bench",
        )
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    if not folder.is_dir():
        raise UniRLError(
            "benchmarks are not installed",
            f"they lie in benchmarks/ of a clone; there is no {folder}",
            "clone the repository and run unirl bench there",
        )
    for script, *words in SUITES[name].scripts:
        code = _run(folder / script, [*words, *flags], name)
        if code:
            return code
    return 0


def _run(script: Path, words: Sequence[str], suite: str) -> int:
    if not script.is_file():
        raise UniRLError(
            f'benchmark suite "{suite}" is not complete here',
            f"it runs {script.name}, and {script.parent} has no such file",
            "update the clone",
        )
    command = [sys.executable, str(script), *words]
    print(f"== {shlex.join(command[1:])}", flush=True)
    return subprocess.run(command, cwd=script.parent.parent).returncode
