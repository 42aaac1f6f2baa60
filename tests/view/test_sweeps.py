"""Sweeps in the view: what their file says, in order, and files that say nothing."""

from __future__ import annotations

import json
from pathlib import Path

from tests.view.asking import Asker
from tests.view.page_runs import CARTPOLE, begin
from unirl.sweep.record import Record
from unirl.sweep.trial import SeedRun, Trial


def write_sweep(folder: Path) -> None:
    """Four trials of two seeds: one at the last rung, one stopped, one that trains, one failed."""
    lrs, statuses = (0.1, 0.01, 0.001, 1.0), ("finished", "stopped", "running", "failed")
    values = ([[5.0, 90.0], [7.0, 110.0]], [[40.0], [44.0]], [[], [1.0]], [[1e9], [1e9]])
    trials = []
    for number, (lr, status, own) in enumerate(zip(lrs, statuses, values, strict=True)):
        runs = [SeedRun(seed, each, 1000 * len(each)) for seed, each in enumerate(own, 1)]
        settings = {"learner.optimizer.lr": lr, "actor.kind": "<b>"}
        trials.append(Trial(number, settings, runs, status=status, reason="died" * (lr == 1.0)))  # type: ignore[arg-type]
        for run in runs:
            begin(folder / f"trial-{number:03d}-seed-{run.seed}", CARTPOLE.format(seed=1, lr=lr))
    asked = {"objective": {"metric": "charts/episodic_return", "mode": "max"}, "settings": {}}
    Record(asked, trials, 12.5).save(folder)


def test_trials_are_rows_the_best_first(tmp_path: Path) -> None:
    write_sweep(tmp_path / "lr")
    asker = Asker(tmp_path)
    (row,) = asker("/api/sweeps").value
    assert (row["name"], row["trials"], row["best"], row["seconds"]) == ("lr", 4, 100.0, 12.5)
    assert row["metric"] == "charts/episodic_return" and row["statuses"]["failed"] == 1
    found = asker(f"/api/sweeps/{row['id']}").value
    assert found["settings"] == ["learner.optimizer.lr", "actor.kind"]
    assert [each["trial"] for each in found["trials"]] == [0, 1, 2, 3]
    best, stopped, training, failed = found["trials"]
    assert (best["mean"], best["rung"], best["steps"]) == (100.0, 2, 4000)
    assert abs(best["std"] - 200**0.5) < 1e-9
    assert (stopped["mean"], training["mean"], training["rung"]) == (42.0, None, 0)
    assert (failed["status"], failed["reason"]) == ("failed", "died")
    ids = {each["name"]: each["id"] for each in asker("/api/runs").value}
    assert [run["id"] for run in best["runs"]] == [ids[f"lr/trial-000-seed-{i}"] for i in (1, 2)]
    assert [run["seed"] for run in best["runs"]] == ["1", "2"]
    assert asker("/api/sweeps/none").status == 404
    # The folder of a sweep itself may be what is looked at.
    assert len(Asker(tmp_path / "lr")("/api/sweeps").value) == 1


def test_a_saved_page_has_the_sweeps_of_its_runs(tmp_path: Path) -> None:
    write_sweep(tmp_path / "lr")
    begin(tmp_path / "other", CARTPOLE.format(seed=1, lr=0.1))
    asker = Asker(tmp_path)
    (row,) = asker("/api/sweeps").value
    where = f"/api/sweeps/{row['id']}"
    assert where in asker("/api/page").body.decode()
    assert where not in asker(f"/api/page?runs={asker.id('other')}").body.decode()


def test_files_of_other_versions_and_damaged_ones_are_explained(tmp_path: Path) -> None:
    for name, text in (
        ("damaged", '{"trials": ['),
        ("list", "[]"),
        ("other", json.dumps({"format": 9, "trials": [{"number": 0}, 3, {}], "asked": None})),
        ("empty", "{}"),
    ):
        begin(tmp_path / name / "trial-000-seed-1", CARTPOLE.format(seed=1, lr=0.1))
        (tmp_path / name / "sweep.json").write_text(text)
    asker = Asker(tmp_path)
    rows = {row["name"]: row for row in asker("/api/sweeps").value}
    for name in ("damaged", "list"):
        assert "cannot be read" in rows[name]["error"][0] and len(rows[name]["error"]) == 3
        assert asker(f"/api/sweeps/{rows[name]['id']}").status == 400
    assert (rows["other"]["trials"], rows["empty"]["trials"]) == (2, 0)
    found = asker(f"/api/sweeps/{rows['other']['id']}").value
    assert found["metric"] is None and len(found["trials"]) == 2
    assert [len(each["runs"]) for each in found["trials"]] == [0, 1]
