"""What a command does until the first update is made: seconds by part, of two commits in turns.

    python benchmarks/startup.py --against 41f6c10 --rounds 5
    python benchmarks/startup.py --cases cartpole resume --imports     # which packages are imported

Each command runs by itself, as startup_stamps.py notes when it comes how far. Parts of a commit:

interpreter   until Python runs the first line
command       the command line itself is imported
recipe        the recipe is imported, and torch with it
defaults      config files and flags are read, what nobody set is chosen
plan          the plan is made
start         run folder, learner, queue, outputs and processes, until the loop waits for a batch
batch         until the first batch is there
update        until it is learned from
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import measure

ROOT = Path(__file__).resolve().parents[1]
STAMPS = Path(__file__).resolve().with_name("startup_stamps.py")
PARTS = ("interpreter", "command", "recipe", "defaults", "plan", "started", "batch", "update")
LIMIT_SECONDS = 120.0
CASES = {
    "cartpole": "train @cartpole",
    "plain": "train impala --env.id CartPole-v1",
    "halfcheetah": "train @halfcheetah",
    "pong": "train ppo --env.id ALE/Pong-v5",
    "grpo": "train grpo @reverse",
    "sim": "train @sim-cartpole",
    "resume": "resume",
}
"""`resume` continues what `cartpole` has left in the same round."""
BASES = {"import torch": "import torch"}
ANSWERS = ("--help", "list recipes")
"""What answers without training."""
Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--against", metavar="REV", help="another commit, in turns with this one")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--imports", action="store_true", help="list imports by package, and end")
    parser.add_argument("--save", type=Path, help="keep what was measured, add to what is there")
    parser.add_argument("--report", action="store_true", help="measure nothing, show what is saved")
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    flags = parser.parse_args()
    measure.exit_on_terminate()
    found: dict[str, list[Row]] = json.loads(flags.save.read_text()) if _has(flags.save) else {}
    if not flags.report:
        with checkout(flags.against) as other:
            trees = {"now": ROOT, **({"before": other} if other is not None else {})}
            if flags.imports:
                print("\n\n".join(imports(tree, CASES[flags.cases[0]]) for tree in trees.values()))
                return
            for number in range(flags.rounds):
                # Each comes first in every other round.
                order = {name: trees[name] for name in sorted(trees, reverse=bool(number % 2))}
                for key, row in one_round(order, flags.cases):
                    found.setdefault(key, []).append(row)
                    if flags.save is not None:  # at once: a limit of time may end this
                        flags.save.write_text(json.dumps(found))
    text = report(found)
    print(text)
    if not flags.no_write:
        measure.write_block("startup", text)


def _has(path: Path | None) -> bool:
    return path is not None and path.exists()


@contextmanager
def checkout(revision: str | None) -> Iterator[Path | None]:
    """Another commit's tree for the time of the measurement."""
    if revision is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="unirl-startup-") as folder:
        tree = Path(folder, "tree")
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", tree, revision], check=True)
        try:
            # Not a part of the first start alone.
            subprocess.run(
                [sys.executable, "-m", "compileall", "-q", "-x", "/(tests|peers)/", tree],
                check=False,
            )
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=True)


def one_round(trees: Mapping[str, Path], cases: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Each case once with each tree, one after the other, and what no start can be quicker than."""
    with tempfile.TemporaryDirectory(prefix="unirl-startup-") as folder:
        for key in (*BASES, *ANSWERS, *cases):
            for name, tree in trees.items():
                runs = Path(folder, name)
                runs.mkdir(exist_ok=True)
                if key in BASES:
                    row = timed(tree, [sys.executable, "-c", BASES[key]])
                elif key in ANSWERS:
                    row = timed(tree, [sys.executable, "-m", "unirl", *key.split()])
                else:
                    row = started(tree, words_of(key, runs), runs / f"{key}.txt")
                yield f"{name} {key}", row


def words_of(case: str, runs: Path) -> list[str]:
    """The command of a case, whose run ends after one update."""
    words = CASES[case].split()
    if case != "resume":
        return [*words, "--runs-dir", str(runs), "--name", case, "--run.total-steps", "1"]
    num_steps = int((runs / "cartpole/checkpoints/latest").resolve().name.split("_")[1])
    return [*words, str(runs / "cartpole"), "--run.total-steps", str(num_steps + 1)]


def environment(tree: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), **more}


def timed(tree: Path, command: Sequence[str]) -> Row:
    """Seconds until a command has ended."""
    begin = time.monotonic()
    subprocess.run(command, cwd=tree, env=environment(tree), check=True, capture_output=True)
    return {"total": time.monotonic() - begin}


def started(tree: Path, words: Sequence[str], stamps: Path) -> Row:
    """Seconds of each part of a training that ends after its first update."""
    command = [sys.executable, str(STAMPS), *words]
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment(tree, UNIRL_STAMPS=str(stamps)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        said = os.read(process.stdout.fileno(), 1 << 16)
        first_line = time.monotonic() - begin
        said += process.communicate(timeout=LIMIT_SECONDS)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode or not stamps.exists():
        raise SystemExit(f"{shlex.join(command)} in {tree}:\n{said.decode()[-2000:]}")
    reached = {
        name: (float(seconds), float(more))
        for name, seconds, more in map(str.split, stamps.read_text().splitlines())
    }
    row, before = {"first line": first_line}, begin
    for name in PARTS:
        row[name], before = reached[name][0] - before, reached[name][0]
    row["making"], row["num_made"] = reached["made"]
    end, row["cpu"] = reached["update"]
    return {**row, "total": end - begin}


def imports(tree: Path, words: str) -> str:
    """Milliseconds of imports by package, in the process of a training's learner."""
    with tempfile.TemporaryDirectory(prefix="unirl-startup-") as folder:
        command = [sys.executable, "-X", "importtime", "-m", "unirl", *words.split()]
        command += ["--runs-dir", folder, "--name", "run", "--run.total-steps", "1"]
        done = subprocess.run(
            command, cwd=tree, env=environment(tree), check=True, capture_output=True, text=True
        )
    spent: Counter[str] = Counter()
    for own, name in re.findall(r"^import time: +(\d+) \| +\d+ \| +(\S+)$", done.stderr, re.M):
        spent[name.partition(".")[0]] += int(own)
    rows = [[name, f"{micros / 1e3:,.0f}"] for name, micros in spent.most_common(20)]
    rows.append(["all", f"{spent.total() / 1e3:,.0f}"])
    return f"{tree}\n" + measure.table(["package", "ms"], rows)


def report(found: dict[str, list[Row]]) -> str:
    """The tables: seconds before and now; then by part."""
    both = any(key.startswith("before ") for key in found)
    names = ("before", "now") if both else ("now",)

    def medians(key: str, part: str) -> list[float]:
        return [statistics.median(row[part] for row in found[f"{name} {key}"]) for name in names]

    def cells(values: Sequence[float], form: str = ".2f") -> list[str]:
        ratio = [f"{values[0] / values[-1]:.2f}" if values[-1] else "-"] if both else []
        return [*(f"{value:{form}}" for value in values), *ratio]

    keys = [
        key for key in (*BASES, *ANSWERS, *CASES) if all(f"{name} {key}" in found for name in names)
    ]
    tail = ["ratio"] if both else []
    rows = []
    for key in keys:
        name = f"`unirl {CASES.get(key, key)}`" if key not in BASES else key
        spread = [row["total"] for row in found[f"now {key}"]]
        rows.append([name, *cells(medians(key, "total")), f"{min(spread):.2f} - {max(spread):.2f}"])
    text = measure.table(["seconds", *names, *tail, "now, min - max"], rows)
    parts = ("first line", *PARTS, "cpu", "making", "num_made")
    rows = []
    for key in keys:
        if key in CASES:
            for name in names:
                column = [
                    statistics.median(row[part] for row in found[f"{name} {key}"]) for part in parts
                ]
                *seconds, number = column
                rows.append([key, name, *(f"{value:.2f}" for value in seconds), f"{number:.0f}"])
    titles = ["start" if p == "started" else p for p in parts[:-3]]
    titles += ["CPU", "envs made in", "number"]
    number = [len(found[f"{name} {key}"]) for key in keys for name in names]
    rounds = f"Medians of {min(number)} to {max(number)} rounds."
    return f"{text}\n\n{measure.table(['', '', *titles], rows)}\n\n{rounds}"


if __name__ == "__main__":
    main()
