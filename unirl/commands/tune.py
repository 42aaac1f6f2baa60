"""`unirl tune`: try shapes of a plan for seconds each, write the fastest as TOML."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from unirl import config as configs
from unirl.commands.arguments import choose
from unirl.commands.bench import check_seconds, disturbance, figure_cells, say
from unirl.errors import UniRLError
from unirl.storage import disk

if TYPE_CHECKING:
    from unirl.bench.shapes import Shape, Tried
    from unirl.bench.stages import Figures, StageName
    from unirl.runners.plan import Plan

    Measure: TypeAlias = Callable[[Plan, float], dict[StageName, Figures]]


@dataclass(frozen=True)
class TuneOptions:
    """Flags of `unirl tune` besides the recipe's own."""

    seconds: float = 10.0
    """How long each shape runs, after start and warm-up. More: smaller differences count."""
    out: Path | None = None
    """TOML file to write (an existing one is replaced). None: print it, with the table as comments.
    """
    free_batch: bool = False
    """Also try other numbers of samples per update, of up to 4 096 environments. Faster, but it
    changes how the run learns.
    """

    def __post_init__(self) -> None:
        check_seconds(self.seconds)


def tune(arguments: Sequence[str], measure: Measure | None = None) -> int:
    """Try shapes end to end, one knob after the other, and write the fastest.

    measure: figures of a plan from so many seconds; None: in a process tree of its own.
    """
    chosen, options = choose(arguments, TuneOptions, "tune")
    _check_out(options.out)
    from unirl.bench.shapes import Tried, knobs_of, search, start_of
    from unirl.bench.table import plain_lines, print_table
    from unirl.bench.trial import run_trial
    from unirl.host import usable_cores

    measure = measure or run_trial
    num_cores = usable_cores()
    start = start_of(chosen.config, num_cores)
    chosen.plan()  # an error of the config as it is needs no attempt

    def attempt(shape: Shape) -> Tried:
        changes = _flags(start, shape) or "as it is"
        say(f"{chosen.title}: {changes}, {options.seconds:g} s ...")
        try:
            plan = chosen.module.plan(configs.override(chosen.config, dict(shape)))
            return Tried(shape, measure(plan, options.seconds)["end_to_end"])
        except UniRLError as error:
            return Tried(shape, None, "; ".join(error.parts[:2]))

    vectorised = chosen.kind is not None and chosen.kind.stepping in ("vectorised", "simulator")
    knobs = knobs_of(chosen.config, num_cores, free_batch=options.free_batch, vectorised=vectorised)
    tried, best = search(start, knobs, attempt)
    columns, rows = _table(tried, best)
    comment = [
        *_outcome(tried[0], best, options),
        *disturbance(one.figures for one in tried if one.figures is not None),
    ]
    config = configs.override(chosen.config, dict(best.shape))
    # With a name the run folder is called so.
    name = {} if chosen.name is None else {"name": chosen.name}
    toml = configs.to_toml(config, recipe=chosen.recipe, **name)
    if options.out is None:
        print("\n".join(f"# {line}" for line in [*plain_lines(columns, rows), *comment]))
        print(toml, end="")
        return 0
    with disk.explained(options.out, "free some space, then call it again"):
        text = "".join(f"# {line}\n" for line in comment) + toml
        disk.replace_text(options.out, text)
    print_table(columns, rows, bold=tried.index(best))
    print("\n".join([*comment, f"wrote {options.out}"]))
    return 0


def _table(tried: Sequence[Tried], best: Tried) -> tuple[list[str], list[list[str]]]:
    keys = list(best.shape)
    columns = ["", *(key.partition(".")[2] for key in keys)]
    columns += ["env steps/s", "core-us/step", "cores", "peak MB", ""]
    rows = []
    for one in tried:
        marks = ["current"] * (one is tried[0]) + ["fastest"] * (one is best)
        cells = ["-"] * 4 if one.figures is None else figure_cells(one.figures)
        rows.append([", ".join(marks), *(str(one.shape[key]) for key in keys), *cells, one.reason])
    return columns, rows


def _outcome(first: Tried, best: Tried, options: TuneOptions) -> list[str]:
    """What was found, and what it means for learning, line by line."""
    found = "The current shape is the fastest, or within 3% of it: it stays."
    if best is not first:
        changed, ratio = _flags(first.shape, best.shape), best.rate / first.rate
        found = f"{ratio:.2f} times as fast as the current shape: {changed}."
    same = "Unroll length and max_staleness are as they were"
    if options.free_batch:
        return [found, f"{same}; samples per update may have changed (--free-batch)."]
    return [
        found,
        f"{same}, and so are the samples per update: learning is not changed,",
        "but for how old samples are within max_staleness.",
    ]


def _flags(start: Shape, shape: Shape) -> str:
    """What differs from the start, as flags."""
    changes = [key for key in shape if shape[key] != start[key]]
    return " ".join(f"{configs.flag_of(key)} {shape[key]}" for key in changes)


def _check_out(out: Path | None) -> None:
    """Raise UniRLError unless the file can be written: now, not after minutes of trying."""
    if out is None:
        return
    if out.is_dir() or not out.parent.is_dir():
        raise UniRLError(
            f'"{out}" cannot be written',
            "--out is a file in a folder that exists",
            f"try --out {out / 'tuned.toml' if out.is_dir() else out.name}",
        )
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise UniRLError(
            f'"{out}" cannot be written',
            "the system does not allow it",
            "choose another folder, or change its permissions",
        )
    if out.suffix != ".toml":
        raise UniRLError(
            f'"{out}" is no TOML file', "--out ends in .toml", f"try --out {out.name}.toml"
        )
