"""Trackers get the numbers of metrics.jsonl, and a run never ends or waits because one does."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unirl
from unirl import cli
from unirl.report.sinks import read_metrics
from unirl.report.trackers import tracking
from unirl.report.trackers.follower import Handed
from unirl.report.trackers.tracking import Trackers, check_trackers

NAMES = ("wandb", "mlflow", "trackio", "clearml")
for package in NAMES:
    pytest.importorskip(package, reason=f"pip install 'unirl[{package}]'")

SMALL = ["--env.id", "CartPole-v1", "--actor.num-envs", "4", "--policy.hidden", "8"]
SMALL += ["--run.log-seconds", "0.3", "--run.seed", "5", "--no-console"]
Numbers = dict[tuple[str, int], float]


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder, which all trackers write into, by their own variables."""
    folder = tmp_path_factory.mktemp("trackers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.setenv("CLEARML_OFFLINE_MODE", "1")
        patch.setenv("CLEARML_CACHE_DIR", str(folder / "clearml"))
        yield folder


@pytest.fixture(scope="module")
def killed_and_resumed(offline: Path) -> tuple[Path, dict[str, str]]:
    """A run that all trackers followed, killed with them in the middle and resumed; and what each
    of them called it before.
    """
    words = ["train", "impala", "--runs-dir", str(offline), "--name", "a", *SMALL]
    words += ["--run.track", ",".join(NAMES), "--run.total-steps", "100000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "unirl", *words, "--run.checkpoint-steps", "2000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    run = offline / "a"
    deadline = time.monotonic() + 120
    while any(handed(run, name).step < 4000 for name in NAMES):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    ids = {name: str(handed(run, name).id) for name in NAMES}
    last = read_metrics(run)[-1]["step"]
    more = ["resume", str(run), "--run.total-steps", str(last + 4000), "--no-console"]
    assert cli.main(more) == 0
    return run, ids


def handed(run: Path, name: str) -> Handed:
    return Handed.read(Handed.path(run, name))


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_has_the_numbers_of_metrics_jsonl(
    name: str, killed_and_resumed: tuple[Path, dict[str, str]], offline: Path
) -> None:
    run, ids = killed_and_resumed
    read = {"wandb": of_wandb, "mlflow": of_mlflow, "trackio": of_trackio, "clearml": of_clearml}
    found, config = read[name](offline, ids[name])
    rows = read_metrics(run)
    wanted = {
        (key, row["step"]): value
        for row in rows
        for key, value in row.items()
        if key != "step" and value is not None
    }
    assert len(rows) > 10 and len(wanted) > 200
    wrong = {
        key: (found.get(key), value) for key, value in wanted.items() if found.get(key) != value
    }
    assert not wrong
    assert config["env.id"] == "CartPole-v1" and str(config["seed"]) == "5"
    assert handed(run, name).is_closed and handed(run, name).num_errors == 0


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_run_that_was_killed_continues_the_same_run_of_its_tracker(
    name: str, killed_and_resumed: tuple[Path, dict[str, str]]
) -> None:
    run, ids = killed_and_resumed
    assert handed(run, name).id == ids[name]


def of_wandb(folder: Path, run_id: str) -> tuple[Numbers, dict[str, Any]]:
    """Its offline files, of both parts, in the records of its own protocol."""
    from wandb.proto import wandb_internal_pb2

    found, config = Numbers(), dict[str, Any]()
    for path in sorted(folder.glob(f"a/wandb/offline-run-*/run-{run_id}.wandb")):
        for text in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(text)
            row = {
                item.nested_key[0] if item.nested_key else item.key: json.loads(item.value_json)
                for item in record.history.item
            }
            for name in row:
                if not name.startswith("_") and name != "step":
                    found[name, row["step"]] = row[name]
            for item in record.run.config.update:
                config[item.key] = json.loads(item.value_json)
    return found, {"env.id": config["env"]["id"], "seed": config["seed"]}


def log_records(data: bytes) -> Iterator[bytes]:
    """Records of LevelDB's log format, which wandb's files have behind a head of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if kind == 0:
            return
        part = data[at + 7 : at + 7 + length]
        record = part if kind in (1, 2) else record + part
        at += 7 + length
        if kind in (1, 4):
            yield record


def of_mlflow(folder: Path, run_id: str) -> tuple[Numbers, dict[str, Any]]:
    import mlflow

    client = mlflow.MlflowClient()
    data = client.get_run(run_id).data
    history = [one for name in data.metrics for one in client.get_metric_history(run_id, name)]
    history.sort(key=lambda one: one.timestamp)
    return {(one.key, one.step): one.value for one in history}, data.params


def of_trackio(folder: Path, run_id: str) -> tuple[Numbers, dict[str, Any]]:
    """In a process of its own: it looks for TRACKIO_DIR when it is imported."""
    script = f"""
import json
from trackio.sqlite_storage import SQLiteStorage
from trackio.api import Api
run = next(run for run in Api().runs("unirl") if run.name == {run_id!r})
print(json.dumps([SQLiteStorage.get_logs("unirl", {run_id!r}), run.config]))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    rows, config = json.loads(done.stdout.splitlines()[-1])
    found = {
        (name, row["step"]): value
        for row in rows
        for name, value in row.items()
        if name not in ("step", "timestamp")
    }
    return found, config


def of_clearml(folder: Path, run_id: str) -> tuple[Numbers, dict[str, Any]]:
    """Its sessions, as Task.import_offline_session reads them: one a part."""
    events, config = list[dict[str, Any]](), dict[str, Any]()
    for session in folder.glob("clearml/offline/*/"):
        for line in (session / "metrics.jsonl").read_text().splitlines():
            events += json.loads(line)
        sections = json.loads((session / "task.json").read_text())["hyperparams"]
        for section, values in sections.items():
            config |= {f"{section}/{name}": value["value"] for name, value in values.items()}
    events.sort(key=lambda event: event["timestamp"])
    found = {
        (one["metric"] if one["metric"] == one["variant"] else f"{one['metric']}/{one['variant']}",
         one["iter"]): one["value"]
        for one in events
    }  # fmt: skip
    return found, {"env.id": config["env/id"], "seed": config["run/seed"]}


@pytest.fixture
def hanging() -> Iterator[int]:
    """The port of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def hold() -> None:
            with pytest.raises(OSError):
                while True:
                    held.append(server.accept()[0])

        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for one in held:
            one.close()


def test_a_server_that_hangs_costs_a_warning_and_nothing_else(
    hanging: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{hanging}")
    monkeypatch.setattr(tracking, "END_SECONDS", 0.3)
    plan = unirl.make_plan(
        "impala",
        **{"env.id": "CartPole-v1", "actor.num_envs": 4, "policy.hidden": (8,)},
        **{"run.total_steps": 10**9, "run.max_seconds": 1.0, "run.log_seconds": 0.1},
        **{"run.track": ("mlflow",)},
    )
    assert unirl.run(plan, tmp_path / "run", console=False).reason == "max_seconds"
    warnings = [text for text in caplog.messages if "tracker mlflow" in text]
    assert len(warnings) == 1 and "has not taken everything within 0.3 s" in warnings[0]


class Loop:
    """Takes the counts of the trackers."""

    def __init__(self) -> None:
        self.num_errors = 0.0
        self.metrics = self

    def total(self, name: str, value: float) -> None:
        assert name == "faults/tracker_errors"
        self.num_errors += value


def test_a_server_that_refuses_is_counted_and_its_password_stays_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:s3cret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "seconds": 0.5, "a": 1.5}\n')
    monkeypatch.setattr(tracking, "END_SECONDS", 0.1)
    loop, one = Loop(), Trackers(["mlflow"], tmp_path, tmp_path, seed=1)
    wait_for(lambda: (one.at_end(loop), loop.num_errors > 1)[1])
    one.close()
    refused, ended = (text for text in caplog.messages if "tracker mlflow" in text)
    assert "MlflowException: API request to" in refused and "has not taken everything" in ended
    again = Trackers(["mlflow"], tmp_path, tmp_path, seed=1, resume_step=1)
    again.at_end(later := Loop())
    again.close()
    assert later.num_errors == 0, "what an earlier session had counted is not counted again"
    assert "s3cret" not in caplog.text


def test_a_tracker_that_dies_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop, one = Loop(), Trackers(["mlflow"], tmp_path, tmp_path, seed=1)
    os.kill(one.pids["mlflow"], signal.SIGKILL)
    wait_for(lambda: (one.at_end(loop), loop.num_errors == 1)[1])
    one.at_end(loop)
    one.close()
    assert loop.num_errors == 1
    assert [text for text in caplog.messages if "mlflow" in text] == [
        "tracker mlflow: its process ended with code -9 (logs/tracker-mlflow.txt); training does"
        " not wait, and what it lacks is sent later, or when the run is resumed",
        "tracker mlflow has not taken everything within 15 s of the run's end; the rest is sent"
        " when the run is resumed",
    ]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_where_nobody_is_logged_in_no_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "CLEARML_OFFLINE_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    for name, remedy in (("wandb", "wandb login"), ("clearml", "clearml-init")):
        words = ["train", "impala", "--runs-dir", str(tmp_path / "runs"), "--run.track", name]
        assert cli.main([*words, *SMALL]) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 3 and remedy in error
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "gopher://here")
    with pytest.raises(unirl.UniRLError, match="does not write to gopher:"):
        check_trackers(["mlflow"])
    assert not (tmp_path / "runs").exists()


def test_a_tracker_that_is_unknown_or_not_installed_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "impala", *SMALL, "--run.track", "wandbb"]) == 2
    error = capsys.readouterr().err
    assert "may be named once" in error and 'did you mean "wandb"' in error
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    with pytest.raises(unirl.UniRLError, match="pip install 'unirl\\[trackio\\]'"):
        check_trackers(["trackio"])
