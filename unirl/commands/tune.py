"""`unirl tune`: try shapes of a plan for seconds each, write the fastest as TOML; source: none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl import config as configs
from unirl.commands.bench import Chosen, check_seconds, choose, disturbance, figure_cells, say
from unirl.errors import UniRLError
from unirl.storage import disk

if TYPE_CHECKING:
    from unirl.bench.shapes import Shape, Tried
    from unirl.bench.stages import Figures


@dataclass(frozen=True)
class TuneOptions:
    """Flags of `unirl tune` besides the recipe's own."""

    seconds: float = 10.0
    """How long each shape runs, after start and warm-up. More: smaller differences count."""
    out: Path | None = None
    """TOML file to write (an existing one is replaced). None: print it, with the table as comments.
    """
    free_batch: bool = False
    """Also try other numbers of samples per update. Faster, but it changes how the run learns."""

    def __post_init__(self) -> None:
        check_seconds(self.seconds)


def tune(arguments: Sequence[str]) -> int:
    """Try shapes end to end, one knob after the other, and write the fastest."""
    chosen, options = choose(arguments, TuneOptions, "tune")
    _check_out(options.out)
    from unirl.bench.shapes import knobs_of, search, start_of
    from unirl.host import usable_cores

    num_cores = usable_cores()
    start = start_of(chosen.config, num_cores)
    chosen.plan()  # what is wrong with the config as it is has its own words
    knobs = knobs_of(chosen.config, num_cores, free_batch=options.free_batch)
    attempts = _Attempts(chosen, start, options.seconds)
    tried, best = search(start, knobs, attempts.attempt)
    comment = [*_outcome(start, tried[0], best, options), *attempts.disturbance()]
    toml = configs.to_toml(attempts.config(best.shape), recipe=chosen.recipe, **_name_of(chosen))
    columns, rows = attempts.table(tried, best)
    if options.out is None:
        from unirl.bench.table import plain_lines

        print("\n".join(f"# {line}" for line in [*plain_lines(columns, rows), *comment]))
        print(toml, end="")
        return 0
    from unirl.bench.table import print_table

    with disk.explained(options.out, "free some space, then call it again"):
        text = "".join(f"# {line}\n" for line in comment) + toml
        disk.replace_text(options.out, text)
    print_table(columns, rows, bold=tried.index(best))
    print("\n".join(comment))
    print(f"wrote {options.out}")
    return 0


class _Attempts:
    """Runs shapes of one config and remembers their figures."""

    def __init__(self, chosen: Chosen, start: Shape, seconds: float) -> None:
        self._chosen, self._start, self._seconds = chosen, start, seconds
        self._figures: list[Figures | None] = []

    def config(self, shape: Shape) -> Any:
        """The config in this shape."""
        return configs.override(self._chosen.config, dict(shape))

    def attempt(self, shape: Shape) -> Tried:
        """Run a shape end to end; what cannot be run is said, not raised."""
        from unirl.bench.errors import StageCrashed
        from unirl.bench.shapes import Tried
        from unirl.bench.trial import Trial

        changes = _words({key: value for key, value in shape.items() if self._start[key] != value})
        say(f"{self._chosen.title}: {changes or 'as it is'}, {self._seconds:g} s ...")
        try:
            plan = self._chosen.module.plan(self.config(shape))
            figures = Trial("end_to_end", plan, self._seconds).run()
        except UniRLError as error:
            self._figures.append(None)
            return Tried(shape, None, "; ".join(error.parts[:2]))
        except StageCrashed as error:
            self._figures.append(None)
            return Tried(shape, None, str(error))
        self._figures.append(figures)
        return Tried(shape, figures["env_steps_per_second"])

    def disturbance(self) -> list[str]:
        """A sentence on what other processes used meanwhile, if it was much."""
        return disturbance(figures for figures in self._figures if figures is not None)

    def table(self, tried: Sequence[Tried], best: Tried) -> tuple[list[str], list[list[str]]]:
        """Columns and rows of what was tried, in order."""
        keys = list(self._start)
        columns = ["", *(key.partition(".")[2] for key in keys)]
        columns += ["env steps/s", "core-us/step", "cores", "peak MB", ""]
        rows = []
        for one, figures in zip(tried, self._figures, strict=True):
            marks = [
                word
                for word, is_so in (("current", one.shape == self._start), ("fastest", one is best))
                if is_so
            ]
            cells = figure_cells(figures) if figures is not None else ["-"] * 4
            values = [str(one.shape[key]) for key in keys]
            rows.append([", ".join(marks), *values, *cells, one.reason])
        return columns, rows


def _outcome(start: Shape, first: Tried, best: Tried, options: TuneOptions) -> list[str]:
    """What was found, and what it means for learning, line by line."""
    assert first.rate is not None and best.rate is not None
    if best is first:
        found = "The current shape is the fastest, or within 3% of it: it stays."
    else:
        changed = {key: value for key, value in best.shape.items() if start[key] != value}
        found = (
            f"{best.rate / first.rate:.2f} times as fast as the current shape: {_words(changed)}."
        )
    same = "Unroll length and max_staleness are as they were"
    if options.free_batch:
        return [found, f"{same}; samples per update may have changed (--free-batch)."]
    return [
        found,
        f"{same}, and so are the samples per update: learning is not changed,",
        "but for how old samples are within max_staleness.",
    ]


def _words(shape: Shape) -> str:
    return " ".join(f"{configs.flag_of(key)} {value}" for key, value in shape.items())


def _name_of(chosen: Chosen) -> dict[str, str]:
    """The run's name, if the config had one: its run folder is called so."""
    return {"name": chosen.title} if chosen.title != chosen.recipe else {}


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
            "choose another place, or mend its permissions",
        )
    if out.suffix != ".toml":
        raise UniRLError(
            f'"{out}" is no TOML file', "--out ends in .toml", f"try --out {out.name}.toml"
        )
