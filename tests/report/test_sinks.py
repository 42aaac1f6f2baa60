"""Sinks: every row is readable at once, and a resumed run reads as one run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from unirl.errors import UniRLError
from unirl.report.sinks import JsonlSink, read_metrics
from unirl.report.trackers.tensorboard import TensorBoardSink


def test_a_row_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(100, {"losses/value": 0.5, "queue/ready": 2})
    (row,) = read_metrics(tmp_path)
    assert row.pop("seconds") >= 0
    assert row == {"step": 100, "losses/value": 0.5, "queue/ready": 2}
    sink.close()


def test_what_is_not_a_number_becomes_null(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    sink.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(text, parse_constant=pytest.fail)  # strict JSON, as other tools read it
    assert [row[name] for name in "abcd"] == [None, None, None, 1.0]


def test_a_resumed_run_continues_the_steps_and_the_clock(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": s, "seconds": s / 10, "x": s} for s in (100, 200, 300)]
    torn = '{"step": 400, "sec'
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + torn)
    sink = JsonlSink(path, resume_step=200)
    sink.write(250, {"x": 250})
    sink.close()
    read = read_metrics(tmp_path)
    assert [row["x"] for row in read] == [100, 200, 250]
    assert 20.0 <= read[-1]["seconds"] < 25.0
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_killed_before_its_first_row_can_be_resumed(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", resume_step=0)
    sink.write(1, {})
    sink.close()
    assert read_metrics(tmp_path)[0]["seconds"] < 5


def test_a_new_run_never_writes_into_the_metrics_of_another(tmp_path: Path) -> None:
    JsonlSink(tmp_path / "metrics.jsonl").close()
    with pytest.raises(UniRLError, match="unirl resume"):
        JsonlSink(tmp_path / "metrics.jsonl")


def test_a_torn_last_line_is_ignored_and_any_other_is_named(tmp_path: Path) -> None:
    good = '{"step": 1, "seconds": 0.1}\n'
    (tmp_path / "metrics.jsonl").write_text(good + '{"step": 2, "seconds": 0.2}')
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]
    (tmp_path / "metrics.jsonl").write_text(good + "what\n" + good)
    with pytest.raises(UniRLError, match="line 2"):
        read_metrics(tmp_path)
    with pytest.raises(UniRLError, match="not a run folder"):
        read_metrics(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("module", "sink", "name"),
    [
        ("unirl.report.sinks", "JsonlSink", "metrics.jsonl"),
        ("unirl.report.trackers.tensorboard", "TensorBoardSink", "tb"),
    ],
)
def test_a_full_disk_is_an_error_a_person_can_act_on(
    tmp_path: Path, module: str, sink: str, name: str
) -> None:
    script = f"""
import resource, signal
from pathlib import Path
from unirl.errors import UniRLError
from {module} import {sink}
sink = {sink}(Path({str(tmp_path)!r}) / "{name}")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
try:
    for step in range(100):
        sink.write(step, {{"x": 1.0}})
except UniRLError as error:
    print(step, *error.parts, sep="|")
sink.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    # Nothing else is said: no trace of a thread, none when Python ends.
    assert (done.returncode, done.stderr) == (0, "")
    step, what, _, remedy = done.stdout.split("|")
    assert int(step) > 5 and what.startswith("disk full: ") and "unirl resume" in remedy
    if sink == "JsonlSink":
        assert len(read_metrics(tmp_path)) >= int(step) - 1


def test_tensorboard_shows_a_resumed_run_without_the_abandoned_rows(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, steps in ((None, (100, 200, 300)), (200, (250, 350))):
        sink = TensorBoardSink(tmp_path, resume_step)
        for step in steps:
            sink.write(step, {"charts/episodic_return": float(step), "bad": math.nan})
        sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["charts/episodic_return"]
    read = [event.step for event in events.Scalars("charts/episodic_return")]
    assert read == [100, 200, 250, 350]
