"""Curves of one or several runs: return against environment steps and against seconds."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from unirl.errors import UniRLError
from unirl.report.sinks import read_metrics
from unirl.storage import disk

Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"

_RETURN = "charts/episodic_return"
_PANELS = (("steps", "environment steps"), ("seconds", "seconds"))


@dataclass
class Curve:
    """The training return of one run; all arrays [N]."""

    label: str
    steps: Array
    seconds: Array
    returns: Array


def plot_runs(run_dirs: Sequence[Path], out_path: Path) -> Path:
    """Draw the runs into a PNG, one line each: smoothed, with what was measured faintly behind it.

    Runs whose config.toml differs in the seed alone are drawn as their mean with a band from the
    lowest to the highest. Returns `out_path`. Raises UniRLError when a run has no returns yet or
    matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError as error:
        raise UniRLError(
            "a plot needs matplotlib",
            "the package is not installed",
            "pip install 'unirl[plot]'",
        ) from error
    if not run_dirs:
        raise UniRLError("no run to plot", "at least one is needed", "unirl plot runs/NAME")
    groups = group_curves([Path(run_dir) for run_dir in run_dirs])
    figure = Figure(figsize=(10, 4), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    for index, (axis, label) in enumerate(_PANELS):
        panel = figure.add_subplot(1, 2, index + 1)
        for color, curves in enumerate(groups):
            _draw(panel, curves, axis, f"C{color % 10}")
        panel.set_xlabel(label)
        panel.set_xlim(left=0)
        panel.margins(x=0)
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
        if axis == "steps":
            panel.xaxis.set_major_formatter(EngFormatter(sep=""))
            panel.set_ylabel("return")
            panel.legend(frameon=False, loc="best", fontsize="small")
    out_path = Path(out_path)
    out_path.parent.mkdir(parents=True, exist_ok=True)
    with disk.replacing(out_path) as aside:
        canvas.print_figure(str(aside), format="png")
    return out_path


def group_curves(run_dirs: Sequence[Path]) -> list[list[Curve]]:
    """The runs' curves in the order given; those that differ in the seed alone are together."""
    groups: dict[str, list[Curve]] = {}
    for run_dir, label in zip(run_dirs, labels(run_dirs), strict=True):
        groups.setdefault(_group(run_dir), []).append(_read_curve(run_dir, label))
    return list(groups.values())


def smooth(values: Array, width: int) -> Array:
    """Mean of each value and up to `width` - 1 before it, [N] -> [N]: it never looks ahead."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    begin = np.maximum(0, end - width)
    mean: Array = (total[end] - total[begin]) / (end - begin)
    return mean


def mean_and_band(curves: Sequence[Curve], axis: str) -> tuple[Array, Array, Array, Array]:
    """Where all curves were measured: positions, mean, lowest and highest smoothed return, [M]."""
    positions = [getattr(curve, axis) for curve in curves]
    begin, end = max(x[0] for x in positions), min(x[-1] for x in positions)
    grid: Array = np.linspace(begin, max(begin, end), 200)
    returns = zip(positions, map(_smoothed, curves), strict=True)
    stacked = np.stack([np.interp(grid, x, smoothed) for x, smoothed in returns])
    return grid, stacked.mean(0), stacked.min(0), stacked.max(0)


def _draw(panel: Any, curves: Sequence[Curve], axis: str, color: str) -> None:
    if len(curves) == 1:
        (curve,) = curves
        x = getattr(curve, axis)
        panel.plot(x, curve.returns, color=color, alpha=0.25, linewidth=0.8)
        panel.plot(x, _smoothed(curve), color=color, linewidth=1.6, label=curve.label)
        return
    grid, mean, low, high = mean_and_band(curves, axis)
    letters = zip(*(curve.label for curve in curves), strict=False)
    label = "".join(some[0] for some in takewhile(lambda some: len(set(some)) == 1, letters))
    panel.fill_between(grid, low, high, color=color, alpha=0.2, linewidth=0)
    label = f"{label.rstrip('-_. ') or curves[0].label} ({len(curves)} seeds)"
    panel.plot(grid, mean, color=color, linewidth=1.6, label=label)


def _smoothed(curve: Curve) -> Array:
    return smooth(curve.returns, max(1, len(curve.returns) // 25))


def _read_curve(run_dir: Path, label: str) -> Curve:
    rows = [row for row in read_metrics(run_dir) if row.get(_RETURN) is not None]
    if not rows:
        raise UniRLError(
            f"{run_dir} has no returns to plot",
            f"{_RETURN} must be in its metrics.jsonl; no episode has ended yet",
            "train on, or leave this run out",
        )
    columns = (np.array([row[name] for row in rows]) for name in ("step", "seconds", _RETURN))
    steps, seconds, returns = (column.astype(np.float64) for column in columns)
    return Curve(label, steps, seconds, returns)


def labels(run_dirs: Sequence[Path]) -> list[str]:
    """Folder names; where two are alike, with as many parents as tell them apart."""
    paths = [run_dir.resolve().parts for run_dir in run_dirs]
    found = []
    for path in paths:
        depth = 1
        others = [other for other in paths if other != path]
        while depth < len(path) and any(other[-depth:] == path[-depth:] for other in others):
            depth += 1
        found.append("/".join(path[-depth:]))
    return found


def _group(run_dir: Path) -> str:
    """What runs of several seeds have in common; without a readable config, the run itself."""
    try:
        config = tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return str(run_dir.resolve())
    return group_key(config)


def group_key(config: Mapping[str, Any]) -> str:
    """What the configs of runs have in common that differ in the seed alone."""
    return json.dumps(_without_seed(config), sort_keys=True, default=str)


def _without_seed(value: Any) -> Any:
    if isinstance(value, dict):
        names = ("seed", "name", "run_dir")
        return {key: _without_seed(child) for key, child in value.items() if key not in names}
    # nan is not equal to itself, but its text is.
    return str(value) if isinstance(value, float) and math.isnan(value) else value
