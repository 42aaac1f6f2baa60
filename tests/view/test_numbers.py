"""metrics.jsonl as columns and as few points: what is read equals the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.view.asking import Asker
from tests.view.page_runs import CARTPOLE, add_lines, begin
from unirl.report.sinks import JsonlSink
from unirl.view.columns import Columns
from unirl.view.series import reduced

NAMES = ("x", "losses/y", "rare")


def slowly(path: Path, name: str) -> list[float | None]:
    """The column, by reading every whole line."""
    found = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            row = json.loads(line.decode("utf-8", "replace"))
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and all(is_number(row.get(key)) for key in ("step", "seconds")):
            found.append(row[name] if is_number(row.get(name)) else None)
    return found


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def same(column: Any, expected: list[float | None]) -> bool:
    return [None if math.isnan(value) else value for value in column.tolist()] == expected


LINES = st.one_of(
    st.builds(
        lambda step, values: json.dumps({"step": step, "seconds": step / 2, **values}).encode(),
        st.integers(0, 10**12),
        st.dictionaries(
            st.sampled_from(NAMES),
            st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-5, 5),
                      st.none(), st.text(max_size=3), st.booleans()),
        ),
    ),
    st.sampled_from(
        [b"", b"{", b"[1, 2]", b'{"step": 1}', b"\xff\xfe", b'{"step": 1, "seconds": NaN}',
         b'{"step": 3, "seconds": 1, "x": NaN}', b'{"step": "a", "seconds": 1}', b"null",
         b'{"step": 4, "seconds": 2, "z": "\xff", "x": 7}', b"[" * 3000]
    ),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.lists(LINES, max_size=6), st.sampled_from("awcn")), max_size=6))
def test_columns_equal_the_file_however_it_grows_and_is_cut(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[list[bytes], str]]
) -> None:
    folder = tmp_path_factory.mktemp("run")
    path = folder / "metrics.jsonl"
    path.write_bytes(b"")
    columns = Columns(folder)
    for number, (lines, how) in enumerate(changes):
        data = b"".join(line + b"\n" for line in lines)
        if how == "w":  # a resumed run replaces the file
            path.with_suffix(".new").write_bytes(data)
            path.with_suffix(".new").replace(path)
        elif how == "c":  # cut, and written again
            path.write_bytes(data)
        else:
            with path.open("ab") as file:
                file.write(data + (b'{"step": 5, "sec' if how == "n" else b""))
        asked = NAMES[: 1 + number % 3]  # columns are asked for one after the other
        found = columns.get(asked)
        for name in ("step", *asked):
            assert same(found[name], slowly(path, name)), name


def test_what_was_appended_is_read_and_nothing_before_it(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step in range(2000):
        sink.write(step, {"x": float(step)})
    columns = Columns(tmp_path)
    assert len(columns.get(["x"])["x"]) == 2000
    damaged = b"#" * 1000  # what was read is not looked at again
    with (tmp_path / "metrics.jsonl").open("r+b") as file:
        file.write(damaged)
    sink.write(2000, {"x": 7.0})
    found = columns.get(["x"])["x"]
    assert len(found) == 2001 and found[-1] == 7.0 and found[1] == 1.0


def test_a_name_that_no_row_has_is_left_out(tmp_path: Path) -> None:
    begin(tmp_path / "run", CARTPOLE.format(seed=1, lr=0.1))
    add_lines(tmp_path / "run/metrics.jsonl", [{"step": 1, "seconds": 1.0, "x": 2.0}])
    asker = Asker(tmp_path)
    id = asker.id("run")
    series = asker(f"/api/series?runs={id}&names=x,nothing").value
    assert series == {id: {"x": {"t": [1], "v": [2], "low": [2], "high": [2]}}}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan), st.just(math.inf)), max_size=60),
    st.integers(1, 70),
)
def test_few_points_keep_the_extremes_of_many(values: list[float], points: int) -> None:
    x, column = np.arange(len(values), dtype=np.float64), np.array(values, np.float64)
    found = reduced(x, column, points)
    assert len(found["t"]) == len(found["v"]) == min(points, len(values))
    known = [value for value in values if math.isfinite(value)]
    shown = [value for value in found["low"] + found["high"] if value is not None]
    assert (min(shown, default=None), max(shown, default=None)) == (
        min(known, default=None), max(known, default=None))  # fmt: skip
    begin = 0.0
    for end, mean, low, high in zip(
        *(found[key] for key in ("t", "v", "low", "high")), strict=True
    ):
        inside = [values[i] for i in range(int(begin), int(end) + 1) if math.isfinite(values[i])]
        assert (mean is None) == (not inside)
        if inside:
            assert mean == pytest.approx(sum(inside) / len(inside)) and low <= high
        begin = end + 1


def test_a_part_of_an_axis_is_shown_with_all_its_points(tmp_path: Path) -> None:
    begin(tmp_path / "run", CARTPOLE.format(seed=1, lr=0.1))
    rows = [{"step": 10 * i, "seconds": float(i), "x": float(i)} for i in range(1000)]
    add_lines(tmp_path / "run/metrics.jsonl", rows)
    asker = Asker(tmp_path)
    id = asker.id("run")
    part = asker(f"/api/series?runs={id}&names=x&x=seconds&from=10&to=19&points=100").value[id]["x"]
    assert part["t"] == [float(i) for i in range(10, 20)] == part["v"]
    assert len(asker(f"/api/series?runs={id}&names=x&points=10").value[id]["x"]["t"]) == 10


def test_ages_of_samples_are_a_histogram_over_time(tmp_path: Path) -> None:
    begin(tmp_path / "run", CARTPOLE.format(seed=1, lr=0.1))
    rows: list[dict[str, Any]] = [
        {"step": 1, "seconds": 1.0, "staleness/age/0": 3.0, "staleness/age/2": 1.0},
        {"step": 2, "seconds": 2.0, "staleness/age/0": 2.0},
        {"step": 3, "seconds": 3.0},
    ]
    add_lines(tmp_path / "run/metrics.jsonl", rows)
    found = Asker(tmp_path).of("run", "/staleness").value
    assert found == {"t": [1, 2, 3], "ages": [0, 2], "recorded": True,
                     "share": [[0.75, 0.25], [1, 0], [0, 0]]}  # fmt: skip


@pytest.mark.parametrize(
    "query",
    ["names=x", "runs=ID", "runs=ID&names=", "runs=ID&names=x&points=0", "runs=ID&names=x&points=x",
     "runs=ID&names=x&x=time", "runs=ID&names=x&from=nan", "runs=ID&names=x&points=1e9",
     "runs=" + ",".join(["ID"] + [f"a{i}" for i in range(100)]) + "&names=x"],
)  # fmt: skip
def test_questions_that_cannot_be_answered_are_explained(tmp_path: Path, query: str) -> None:
    begin(tmp_path / "run", CARTPOLE.format(seed=1, lr=0.1))
    asker = Asker(tmp_path)
    answered = asker("/api/series?" + query.replace("ID", asker.id("run")))
    assert answered.status in (400, 404) and all(answered.error)
