"""Plots: the curves are those of the runs, and seeds of one configuration are one curve."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from unirl.errors import UniRLError
from unirl.report.plots import group_curves, mean_and_band, plot_runs, smooth


def make_run(folder: Path, seed: int = 1, lr: float = 1e-3, num_rows: int = 100) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(
        f'recipe = "impala"\n[run]\nseed = {seed}\n[learner]\nlr = {lr}\n'
    )
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(num_rows):
        row = {"step": 1000 * i, "seconds": 0.5 * i, "losses/value": 1.0}
        if i > 2:  # no episode has ended before
            row["charts/episodic_return"] = 500 * (1 - np.exp(-i / 30)) + 30 * rng.normal()
        rows.append(row)
    rows.append({"step": 1000 * num_rows, "seconds": 99.0, "charts/episodic_return": None})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_runs_become_a_picture(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    runs = [make_run(tmp_path / f"runs/s{i}", seed=i) for i in range(3)]
    runs.append(make_run(tmp_path / "runs/other", lr=3e-4))
    assert plot_runs(runs, tmp_path / "out" / "curve.png") == tmp_path / "out" / "curve.png"
    with image.open(tmp_path / "out" / "curve.png") as picture:
        assert picture.format == "PNG" and picture.width > 2 * picture.height
        colors = {color for _, color in picture.convert("RGB").getcolors(1 << 24)}
    assert {(31, 119, 180), (255, 127, 14)} <= colors  # two groups, two lines
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["curve.png"]


def test_a_curve_holds_the_rows_in_which_episodes_ended(tmp_path: Path) -> None:
    ((curve,),) = group_curves([make_run(tmp_path / "pong")])
    assert curve.label == "pong"
    assert curve.steps[0] == 3000 and curve.steps[-1] == 99_000 and len(curve.returns) == 97
    assert curve.seconds[0] == 1.5 and np.isfinite(curve.returns).all()


def test_runs_that_differ_in_the_seed_alone_are_one_group(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"a-{seed}", seed) for seed in (1, 2)]
    runs.insert(1, make_run(tmp_path / "b", lr=3e-4))
    groups = group_curves(runs)
    assert [[curve.label for curve in group] for group in groups] == [["a-1", "a-2"], ["b"]]


def test_a_band_spans_the_seeds_where_all_were_measured(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"a-{seed}", seed, num_rows=50 * seed) for seed in (1, 2)]
    (curves,) = group_curves(runs)
    grid, mean, low, high = mean_and_band(curves, "steps")
    assert grid[0] == 3000 and grid[-1] == 49_000
    assert (low <= mean).all() and (mean <= high).all() and (low < high).any()


def test_runs_of_one_name_are_distinguished_by_their_parents(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / parent / "pong", lr=lr) for parent, lr in (("x", 1.0), ("y", 2.0))]
    assert [curve.label for (curve,) in group_curves(runs)] == ["x/pong", "y/pong"]


def test_smoothing_never_looks_ahead() -> None:
    values = np.array([0.0, 0.0, 3.0, 6.0])
    assert smooth(values, 3).tolist() == [0.0, 0.0, 1.0, 3.0]
    assert smooth(values, 1).tolist() == values.tolist()


def test_what_cannot_be_plotted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    young = make_run(tmp_path / "young", num_rows=2)
    with pytest.raises(UniRLError, match="young has no returns"):
        plot_runs([young], tmp_path / "curve.png")
    with pytest.raises(UniRLError, match="not a run folder"):
        plot_runs([tmp_path / "nowhere"], tmp_path / "curve.png")
    with pytest.raises(UniRLError, match="no run to plot"):
        plot_runs([], tmp_path / "curve.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # imports of it now fail
    with pytest.raises(UniRLError, match=r"pip install 'unirl\[plot\]'"):
        plot_runs([young], tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()
