"""A peer and UniRL in turn, A B A B, on the same prompts: how fast language models learn.

Both run the same number of updates of the same size from the same model, one pass over each batch,
with the same loss and the same malloc setting, and each has all cores while it runs. Completion
tokens per second is end to end, from one update's end to a later one's: answers grow shorter as a
model learns, so equal updates are compared, not equal times. LANGUAGE_PAIRINGS says what runs
against what; side_by_side.py is the command:

    python benchmarks/side_by_side.py digits-trl --rounds 3 --model models/smollm2
    python benchmarks/side_by_side.py tiny-trl --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import measure
from side_by_side_malloc import MALLOC
from train_unirl import FAR, ROOT, Row

PEERS = Path(__file__).resolve().parent / "peers"
TARGET = 0.8
"""The reward that `seconds_to_target` waits for."""
NUM_BLOCKS = 8
"""Rows that a reward curve is printed in."""


@dataclass(frozen=True)
class LanguagePairing:
    """One comparison."""

    peer: str
    """Folder under peers/; its run.py holds the peer's settings."""
    env: str
    """What its run.py calls the task."""
    unirl: str
    """What follows `unirl train`; {model} is the model's folder."""
    steps: int
    """Updates of both."""
    completions: int
    """Completions of one update."""
    warm_up_steps: int = 2
    """Updates before rates are taken."""
    required: float | None = None
    """The ratio UniRL / peer of completion tokens/s that is asked for. None: only reported."""
    required_time: float | None = None
    """How often UniRL's time to the target is to fit into the peer's."""
    log_seconds: float = 0.0
    """Of UniRL's curve. 0: a point per update; more where updates are shorter than writing one."""
    settings: tuple[str, ...] = ()
    """KEY=VALUE that differ from the peer's preset."""


# TRL's default objective: with one update per batch, verl's differs from it in epsilon alone. Where
# TRL generates with transformers, it does not correct for its engine, nor does verl's.
SAME_LOSS = "--algorithm.preset verl:grpo --algorithm.epsilon 1e-4"
DIGITS = f"@configs/digits.toml --model.path {{model}} --model.dtype bfloat16 {SAME_LOSS}"
LANGUAGE_PAIRINGS = {
    "digits-trl": LanguagePairing("trl", "digits", DIGITS, 40, 64, required=1.6, required_time=2.0),
    "digits48-trl": LanguagePairing(
        "trl", "digits48", f"{DIGITS} --sampling.max-tokens 48", 10, 64, required=1.6
    ),
    "tiny-trl": LanguagePairing(
        "trl",
        "tiny",
        f"@configs/reverse.toml {SAME_LOSS} --algorithm.entropy-coef 0.01 "
        "--learner.optimizer.lr-schedule constant "
        "--reward.weights.characters 1 --reward.weights.exact 0 --sampling.max-tokens 6",
        300,
        256,
        warm_up_steps=10,
        required=1.3,
        log_seconds=0.5,
    ),
}


@dataclass(frozen=True)
class Point:
    """Where a training stood after an update; reward: the mean since the point before."""

    step: int
    seconds: float
    tokens: int
    reward: float


def train_peer(pairing: LanguagePairing, seed: int, model: str, venv: str) -> Row:
    """The peer's own script; the memory in its row is that of the peer's process tree alone."""
    command = [*_script(pairing, venv), "--env", pairing.env, "--json", "--model", model]
    command += ["--steps", str(pairing.steps), "--seed", str(seed)]
    for setting in pairing.settings:
        command += ["--set", setting]
    row = measure.run(command, timeout_seconds=_timeout(pairing)).row
    return _figures(pairing, row, [Point(*point) for point in row.pop("points")])


def train_ours(pairing: LanguagePairing, seed: int, model: str) -> Row:
    """UniRL through its command line, in a temporary folder; the points are in metrics.jsonl."""
    words = shlex.split(pairing.unirl.format(model=shlex.quote(model)))
    with tempfile.TemporaryDirectory(prefix="unirl-benchmark-") as folder:
        command = [sys.executable, "-m", "unirl", "train", *words]
        command += ["--runs-dir", folder, "--name", "run", "--no-console", "--run.seed", str(seed)]
        command += ["--run.total-steps", str(pairing.steps * pairing.completions)]
        command += ["--run.log-seconds", str(pairing.log_seconds), "--run.target-return", "none"]
        command += ["--run.checkpoint-steps", FAR, "--run.eval-steps", "0"]
        result = measure.run(
            command, timeout_seconds=_timeout(pairing), environment=MALLOC, cwd=ROOT
        )
        metrics = Path(folder, "run", "metrics.jsonl")
        if result.returncode != 0 or not metrics.exists():
            raise SystemExit(
                f"{shlex.join(command)} exited with {result.returncode}:\n{result.stderr[-2000:]}"
            )
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    points = [
        Point(
            int(row["charts/updates"]),
            row["time/seconds"],
            int(row["charts/tokens"]),
            row["reward"],
        )
        for row in rows
    ]
    row = {
        "system": "UniRL",
        "env": pairing.env,
        "seed": seed,
        "settings": f"`unirl train {shlex.join(words)}`",
        "peak_memory_mb": round(result.peak_memory_mb, 1),
    }
    return _figures(pairing, row, points)


def _figures(pairing: LanguagePairing, row: Row, points: list[Point]) -> Row:
    """The row with what was measured: rates between the first point after warm-up and the last."""
    if points[-1].step != pairing.steps:
        raise SystemExit(f"{row['system']} made {points[-1].step} of {pairing.steps} updates")
    first = next(point for point in points if point.step >= pairing.warm_up_steps)
    last = points[-1]
    seconds, steps = last.seconds - first.seconds, last.step - first.step
    if steps < 1:
        raise SystemExit(f"{pairing.steps} updates leave none after warm-up; give --steps more")
    reached = next((point.seconds for point in points if point.reward >= TARGET), None)
    return {
        **row,
        "tokens_per_second": round((last.tokens - first.tokens) / seconds, 1),
        "completions_per_second": round(steps * pairing.completions / seconds, 2),
        "seconds_per_step": round(seconds / steps, 3),
        "mean_tokens": round(last.tokens / last.step / pairing.completions, 2),
        "seconds_to_target": reached,
        "curve": curve(points, pairing.steps),
    }


def curve(points: Sequence[Point], num_steps: int) -> list[float]:
    """The mean reward of each of NUM_BLOCKS equal parts of the updates."""
    sums, counts = [0.0] * NUM_BLOCKS, [0] * NUM_BLOCKS
    before = 0
    for point in points:
        for step in range(before, point.step):
            block = min(step * NUM_BLOCKS // num_steps, NUM_BLOCKS - 1)
            sums[block] += point.reward
            counts[block] += 1
        before = point.step
    return [round(total / count, 4) for total, count in zip(sums, counts, strict=True) if count]


def _timeout(pairing: LanguagePairing) -> float:
    return 600.0 + 60.0 * pairing.steps


def _script(pairing: LanguagePairing, venv: str) -> list[str]:
    where = ["--venv", venv] if venv else []
    return [sys.executable, str(PEERS / pairing.peer / "run.py"), *where]


def compare(
    name: str, pairing: LanguagePairing, num_rounds: int, model: str, venv: str = ""
) -> str:
    """Run both in turn, round n with seed n, and describe the outcome in Markdown."""
    subprocess.run([*_script(pairing, venv), "--install"], check=True)
    ours: list[Row] = []
    theirs: list[Row] = []
    for seed in range(1, num_rounds + 1):
        for rows in (theirs, ours):
            load = os.getloadavg()[0]
            rows.append(
                train_peer(pairing, seed, model, venv)
                if rows is theirs
                else train_ours(pairing, seed, model)
            )
            print(
                f"{name}, round {seed}, load before {load:.1f}: {json.dumps(rows[-1])}", flush=True
            )
    return report(pairing, ours, theirs)


def report(pairing: LanguagePairing, ours: list[Row], theirs: list[Row]) -> str:
    """The table of medians, the ratios round by round, the reward curves, the settings of both."""
    lines = []
    for rows in (theirs, ours):
        rates = [row["tokens_per_second"] for row in rows]
        lines.append(
            [
                rows[0]["system"],
                f"{statistics.median(rates):,.0f}",
                f"{min(rates):,.0f} - {max(rates):,.0f}",
                f"{measure.median(rows, 'seconds_per_step'):.2f}",
                f"{measure.median(rows, 'mean_tokens'):.1f}",
                ", ".join(_time(row) for row in rows),
                f"{measure.median(rows, 'peak_memory_mb'):,.0f}",
            ]
        )
    columns = ["system", "completion tokens/s, median", "min - max", "s/update", "mean length"]
    columns += [f"seconds to reward {TARGET:g}", "peak memory, MB"]
    peer = theirs[0]["system"]
    text = measure.table(columns, lines)
    each = measure.ratios(ours, theirs, "tokens_per_second")
    text += "\n\n" + _ratio(f"UniRL / {peer}, completion tokens/s", each, pairing.required)
    each = measure.ratios(theirs, ours, "seconds_per_step")
    text += "\n" + _ratio(f"seconds per update of {peer} / UniRL", each, None)
    text += "\n" + _times(pairing, ours, theirs)
    memory = measure.ratios(theirs, ours, "peak_memory_mb")
    text += f"\n- memory of {peer} / UniRL: {statistics.median(memory):.2f}"
    text += f"\n\n{curves(pairing, ours, theirs)}\n"
    for rows in (theirs, ours):
        text += f"\n- {rows[0]['system']}: {rows[0]['settings']}"
    return text


def curves(pairing: LanguagePairing, ours: list[Row], theirs: list[Row]) -> str:
    """Mean reward by updates: of all rounds, and smallest to largest; then how far apart."""
    size = len(ours[0]["curve"])
    lines, gaps, spreads = [], [], []
    for i in range(size):
        cells: list[object] = [
            f"{i * pairing.steps // size + 1} - {(i + 1) * pairing.steps // size}"
        ]
        means = []
        for rows in (theirs, ours):
            values = [row["curve"][i] for row in rows]
            means.append(statistics.fmean(values))
            spreads.append(max(values) - min(values))
            cells += [f"{means[-1]:.3f}", f"{min(values):.3f} - {max(values):.3f}"]
        gaps.append(means[1] - means[0])
        lines.append(cells)
    peer = theirs[0]["system"]
    columns = ["reward in updates", peer, "min - max", "UniRL", "min - max"]
    text = measure.table(columns, lines)
    text += f"\n\n- largest gap between the systems' mean curves: {max(map(abs, gaps)):.3f}"
    if len(ours) > 1:
        text += f"; between two seeds of one system: {max(spreads):.3f}"
    return text + f"; mean of UniRL - {peer} over all updates: {statistics.fmean(gaps):+.3f}"


def _times(pairing: LanguagePairing, ours: list[Row], theirs: list[Row]) -> str:
    """How often our time to the target fits into theirs; who never got there has no ratio."""
    pairs = [(a["seconds_to_target"], b["seconds_to_target"]) for a, b in zip(ours, theirs)]  # noqa: B905
    known = [theirs / ours for ours, theirs in pairs if ours is not None and theirs is not None]
    if not known:
        return f"- time to reward {TARGET:g}: not reached by both within {pairing.steps} updates"
    text = _ratio(
        f"time to reward {TARGET:g} of {theirs[0]['system']} / UniRL", known, pairing.required_time
    )
    missing = len(pairs) - len(known)
    return text + (f"; in {missing} rounds not reached by both" if missing else "")


def _time(row: Row) -> str:
    return "never" if row["seconds_to_target"] is None else f"{row['seconds_to_target']:.0f}"


def _ratio(what: str, each: Sequence[float], required: float | None) -> str:
    ratio = statistics.median(each)
    text = f"- {what}: **{ratio:.2f}** (rounds: {', '.join(f'{value:.2f}' for value in each)})"
    if required is not None:
        reached = "reached" if ratio >= required else "NOT reached"
        text += f"; asked for: {required:g}, {reached}"
    return text


def changed(
    pairing: LanguagePairing, *, steps: int | None, unirl: str, settings: Sequence[str]
) -> LanguagePairing:
    """The pairing with more flags after its own; of a flag given twice the last one counts."""
    return replace(
        pairing,
        steps=steps or pairing.steps,
        unirl=f"{pairing.unirl} {unirl}".strip(),
        settings=(*pairing.settings, *settings),
    )


def run(name: str, flags: argparse.Namespace) -> None:
    """One pairing, printed and, by default, written to RESULTS.md."""
    pairing = changed(
        LANGUAGE_PAIRINGS[name], steps=flags.steps, unirl=flags.unirl, settings=flags.set
    )
    text = compare(name, pairing, flags.rounds, str(Path(flags.model).resolve()), flags.venv)
    print(f"\n{text}\n", flush=True)
    if not flags.no_write:
        length = f"{flags.rounds} rounds of {pairing.steps} updates each, in turn."
        measure.write_block(f"side-by-side-{name}", f"**{name}**\n\n{text}\n\n{length}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What only pairings of language models need."""
    parser.add_argument("--steps", type=int, help="language: updates, not the pairing's own number")
    parser.add_argument(
        "--model",
        default=os.environ.get("UNIRL_SMOLLM2", str(ROOT / "models" / "smollm2")),
        help="language: made by `unirl model smollm2`; default: $UNIRL_SMOLLM2, models/smollm2",
    )
    parser.add_argument("--venv", default="", help="language: the peer's environment, if elsewhere")
