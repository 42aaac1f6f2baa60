"""Run a command as a process tree of its own, measure the whole tree, and keep the results file.

How a tree is measured: unirl/bench/usage.py. Linux and the standard library only: the environments
of peers have nothing of UniRL installed.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parents[1]
# The clone this file is in, whatever is installed; off the path again at once, as it has folders
# that other packages would be mistaken for.
sys.path.insert(0, str(ROOT))
from unirl.bench import usage  # noqa: E402
from unirl.host import usable_cores  # noqa: E402

sys.path.remove(str(ROOT))

Tree: TypeAlias = Mapping[int, usage.ProcessInfo]

GRACE_SECONDS = 3.0
RESULTS = Path(__file__).resolve().parent / "RESULTS.md"


@dataclass(frozen=True)
class Sample:
    """The tree at one moment: seconds since its start, its processes, PSS in MB (10^6 bytes)."""

    wall_seconds: float
    tree: Tree
    memory_mb: float

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the whole tree so far."""
        return usage.cpu_seconds(self.tree)


@dataclass
class Run:
    """What a command printed, how it ended and what it cost."""

    command: list[str]
    returncode: int = 0
    timed_out: bool = False
    stdout: str = ""
    stderr: str = ""
    wall_seconds: float = 0.0
    samples: list[Sample] = field(default_factory=list)

    @property
    def peak_memory_mb(self) -> float:
        """The largest PSS of the whole tree at any sample."""
        return max((sample.memory_mb for sample in self.samples), default=0.0)

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of the whole tree."""
        return max((sample.cpu_seconds for sample in self.samples), default=0.0)

    def cores_used(self, start_seconds: float = 0.0, end_seconds: float = float("inf")) -> float:
        """Mean number of busy cores between two moments of the run, in seconds since its start."""
        inside = [s for s in self.samples if start_seconds <= s.wall_seconds <= end_seconds]
        if len(inside) < 2:
            return 0.0
        first, last = inside[0], inside[-1]
        return (last.cpu_seconds - first.cpu_seconds) / (last.wall_seconds - first.wall_seconds)

    def cores_by_process(self, start_seconds: float, end_seconds: float) -> dict[str, float]:
        """The same by the name of the process."""
        inside = [s for s in self.samples if start_seconds <= s.wall_seconds <= end_seconds]
        if len(inside) < 2:
            return {}
        first, last = inside[0], inside[-1]
        seconds = last.wall_seconds - first.wall_seconds
        return {name: used / seconds for name, used in spent(first.tree, last.tree).items()}

    @property
    def row(self) -> dict[str, Any]:
        """The last JSON object on standard output; a RuntimeError shows what came instead."""
        for line in reversed(self.stdout.splitlines()):
            with contextlib.suppress(json.JSONDecodeError):
                value = json.loads(line)
                if isinstance(value, dict):
                    return value
        how = "timed out" if self.timed_out else f"exited with {self.returncode}"
        raise RuntimeError(
            f"{shlex.join(self.command)} {how} and printed no JSON line; the end of its output:\n"
            f"{(self.stdout + self.stderr)[-2000:]}"
        )


def spent(before: Tree, after: Tree) -> dict[str, float]:
    """CPU seconds between two moments by the name that a process bore last; their sum is the
    tree's.
    """
    found: dict[str, float] = {}

    def add(one: usage.ProcessInfo, sign: int) -> None:
        found[one.name] = found.get(one.name, 0.0) + sign * one.cpu_seconds

    for one in after.values():
        add(one, 1)
    for pid, one in before.items():
        # What had gone before is taken from the name that bears it now: of a process that is gone
        # it is the one that reaped it.
        bearer = pid
        while bearer in before and not _lives(bearer, before, after):
            bearer = before[bearer].parent
        name = after[bearer].name if bearer in after else one.name
        add(replace(one, name=name), -1)
    return found


def _lives(pid: int, before: Tree, after: Tree) -> bool:
    """Whether this process is there at both moments."""
    return pid in after and after[pid].start_ticks == before[pid].start_ticks


def core_us(cores: Mapping[str, float], steps_per_second: float) -> dict[str, float]:
    """Core-microseconds per env step by process, the dearest first; less than a hundredth of them
    all is left out.
    """
    each = {name: 1e6 * busy / steps_per_second for name, busy in cores.items()}
    dearest = sorted(each.items(), key=lambda one: -one[1])
    return {n: round(value, 1) for n, value in dearest if value >= 0.01 * sum(each.values())}


_QUICK_LOOK = 0.03
"""Seconds that adding up the memory of a process tree may take at every interval."""


def exit_on_terminate() -> None:
    """Make SIGTERM an ordinary exit, so that a terminated benchmark takes its commands with it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def run(
    command: Sequence[str],
    *,
    timeout_seconds: float,
    interval_seconds: float = 0.5,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Run:
    """Run `command` in a session of its own, sampling its tree; what is left of it is killed."""
    result = Run(list(command))
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        start = time.monotonic()
        process = subprocess.Popen(
            result.command,
            stdout=stdout,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            cwd=cwd,
            start_new_session=True,
        )
        seen: dict[int, usage.ProcessInfo] = {}
        try:
            while process.poll() is None:
                tree = usage.tree(process.pid)
                seen |= tree
                now = time.monotonic() - start
                if tree:
                    memory_mb = usage.memory_mb(tree)
                    result.samples.append(Sample(now, tree, memory_mb))
                if now > timeout_seconds:
                    result.timed_out = True
                    break
                # Adding up the pages of processes of several GB takes long: then 2 % of a core.
                looked = time.monotonic() - start - now
                pause = interval_seconds if looked < _QUICK_LOOK else 50 * looked
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(pause, interval_seconds))
        finally:
            result.wall_seconds = time.monotonic() - start
            _kill(process, seen)
        result.returncode = process.returncode
        result.stdout, result.stderr = (_text(stream) for stream in (stdout, stderr))
    return result


def median(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    """The median of one column over several rounds."""
    return statistics.median(float(row[key]) for row in rows)


def ratios(
    above: Sequence[Mapping[str, Any]], below: Sequence[Mapping[str, Any]], key: str
) -> list[float]:
    """Round by round, one system over another: each pair ran side by side, under the same load."""
    return [float(a[key]) / float(b[key]) for a, b in zip(above, below, strict=True)]


def machine() -> str:
    """The processor, the cores this process may use, memory and software, in one line."""
    models = [
        line.split(":", 1)[1].strip()
        for line in usage.lines("/proc/cpuinfo")
        if line.startswith("model name")
    ]
    memory = usage.lines("/proc/meminfo")
    memory_kb = next((int(line.split()[1]) for line in memory if line.startswith("MemTotal")), 0)
    cores = usable_cores()
    model = models[0] if models else platform.machine()
    python = platform.python_version()
    return f"{model}, {cores} cores, {memory_kb / 2**20:.0f} GiB, Linux, Python {python}"


def write_block(name: str, body: str, *, results: Path = RESULTS) -> None:
    """Replace what stands between `<!-- name -->` and `<!-- /name -->`; append a missing pair.

    The date, the machine and the command line of this process are written under the body.
    """
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
    _replace(name, f"{body.strip()}\n\n{today}, {machine()}: `{command}`", results)


def write_rows(
    name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, results: Path = RESULTS
) -> None:
    """Replace rows of the table in a block, or append those whose first cell is not there yet; a
    last cell says when and where each was measured.
    """
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    measured = f"{today}, {machine().partition(', Linux')[0]}"
    found = _block(name, results.read_text() if results.exists() else "")[1].splitlines()
    fresh = table([*columns, "measured"], [[*row, measured] for row in rows]).splitlines()
    lines = {line.split(" | ")[0]: line for line in found[2:] + fresh[2:]}
    _replace(name, "\n".join([*fresh[:2], *lines.values()]), results)


def _block(name: str, text: str) -> tuple[str, str, str]:
    """What stands before, within and after a block; an empty one at the end where it is missing."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if start not in text or end not in text:
        return f"{text.rstrip()}\n\n".lstrip(), "", "\n"
    before, rest = text.split(start, 1)
    within, after = rest.split(end, 1)
    return before, within.strip(), after


def _replace(name: str, body: str, results: Path) -> None:
    before, _, after = _block(name, results.read_text() if results.exists() else "")
    aside = results.with_suffix(".tmp")
    aside.write_text(f"{before}<!-- {name} -->\n{body}\n<!-- /{name} -->{after}")
    aside.replace(results)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _kill(process: subprocess.Popen[bytes], seen: Mapping[int, usage.ProcessInfo]) -> None:
    # Helpers (torch's shared-memory manager, multiprocessing's resource tracker) unlink what the
    # others left once these are gone: they are given time, and killed only then.
    seen = {**seen, **usage.tree(process.pid)}
    if process.poll() is None:
        usage.kill({pid: one for pid, one in seen.items() if one.session == process.pid})
    process.wait()
    deadline = time.monotonic() + GRACE_SECONDS
    while usage.alive(seen) and time.monotonic() < deadline:
        time.sleep(0.05)
    usage.kill(seen)


def _text(stream: Any) -> str:
    stream.seek(0)
    return str(stream.read().decode(errors="replace"))
