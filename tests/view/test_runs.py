"""What the list says of runs that train, ended, were killed, or cannot be read."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.view.asking import Asker
from tests.view.page_runs import CARTPOLE, add_lines, begin, write_run
from unirl.view.state import SILENT_SECONDS

CONFIG = CARTPOLE.format(seed=1, lr=0.1)
ROW = {"step": 10, "seconds": 5.0, "charts/episodic_return": 3.5, "perf/sps": 2.0}
NOBODY = 2**22 - 3  # no process of this machine has such a number


def run(folder: Path, *events: dict[str, Any]) -> Path:
    begin(folder / "run", CONFIG)
    add_lines(folder / "run/metrics.jsonl", [ROW])
    started = {"event": "started", "member": "run", "time": 100.0}
    add_lines(folder / "run/events.jsonl", [started, *({"member": "run", **e} for e in events)])
    return folder / "run"


def lock(folder: Path, pid: int, host: str = "", since: float | None = None) -> None:
    owner = {"host": host or socket.gethostname(), "pid": pid, "since": since or time.time()}
    (folder / ".lock").write_text(json.dumps(owner))


def state(folder: Path) -> str:
    found: str = Asker(folder).of("run").value["state"]
    return found


def test_a_run_trains_while_the_process_that_holds_its_lock_lives(tmp_path: Path) -> None:
    folder = run(tmp_path)
    lock(folder, os.getpid())
    assert state(tmp_path) == "training"
    lock(folder, NOBODY)
    assert state(tmp_path) == "stale"
    # Another process may have the number of one that was killed long ago.
    lock(folder, os.getpid(), since=1000.0)
    assert state(tmp_path) == "stale"


def test_a_run_of_another_machine_trains_while_it_writes(tmp_path: Path) -> None:
    folder = run(tmp_path)
    lock(folder, 1, host="elsewhere")
    assert state(tmp_path) == "training"
    before = time.time() - 2 * SILENT_SECONDS
    for name in ("metrics.jsonl", "events.jsonl"):
        os.utime(folder / name, (before, before))
    assert state(tmp_path) == "stale"


@pytest.mark.parametrize(
    "event, expected",
    [
        ({"event": "ended", "cause": "total_steps"}, "ended"),
        ({"event": "ended", "cause": "interrupted"}, "interrupted"),
        ({"event": "gave_up", "cause": "ActorFailed"}, "gave_up"),
        ({"event": "restarted"}, "stale"),
    ],
)
def test_how_a_run_ended_is_said_by_its_last_event(
    tmp_path: Path, event: dict[str, Any], expected: str
) -> None:
    run(tmp_path, event)
    assert state(tmp_path) == expected


def test_the_list_has_what_runs_are_chosen_by(tmp_path: Path) -> None:
    run(tmp_path, {"event": "ended", "cause": "total_steps"})
    write_run(tmp_path / "other", CARTPOLE.format(seed=2, lr=0.1), 2)
    one, two = sorted(Asker(tmp_path)("/api/runs").value, key=lambda row: -row["seed"])
    assert (two["step"], two["result"], two["rate"], two["env"]) == (10, 3.5, 2.0, "CartPole-v1")
    assert (two["recipe"], two["total_steps"], two["started"]) == ("impala", 200000, 100.0)
    assert one["group"] == two["group"]  # they differ in the seed alone
    assert one["limit"] == "learner" or one["limit"] == "actors"
    assert two["limit"] is None


def test_a_row_that_is_being_written_is_left_out_and_read_when_it_is_whole(tmp_path: Path) -> None:
    folder = run(tmp_path)
    asker = Asker(tmp_path)
    half, rest = json.dumps({**ROW, "step": 20})[:17], json.dumps({**ROW, "step": 20})[17:] + "\n"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(half)
        file.flush()
        assert asker.of("run").value["step"] == 10
        file.write(rest)
    assert asker.of("run").value["step"] == 20


@pytest.mark.parametrize(
    "config", ["", "recipe = ", "\0\xff", '[a]\n[a]\n', "recipe = 3\nrun = 4\nenv = [1]"]
)  # fmt: skip
def test_a_config_that_cannot_be_read_hides_nothing_else(tmp_path: Path, config: str) -> None:
    folder = run(tmp_path)
    (folder / "config.toml").write_text(config)
    asker = Asker(tmp_path)
    shown = asker.of("run").value
    assert shown["step"] == 10 and asker.of("run", "/names").value == sorted(set(ROW) - {"step", "seconds"})  # noqa: E501  # fmt: skip
    assert ("error" in shown) == (config != "recipe = 3\nrun = 4\nenv = [1]")


def test_settings_of_another_version_are_shown_like_others(tmp_path: Path) -> None:
    folder = run(tmp_path)
    (folder / "config.toml").write_text(CONFIG + "\n[warp_drive]\nfactor = 9\nname = '<b>'\n")
    shown = Asker(tmp_path).of("run").value
    assert shown["config"]["warp_drive.factor"] == 9
    assert shown["config"]["warp_drive.name"] == "<b>" and "error" not in shown


def test_files_of_a_run_may_hold_anything(tmp_path: Path) -> None:
    folder = run(tmp_path)
    odd: list[Any] = [[], {}, 3, "x", None, [1, {"a": []}], float("nan")]
    names = ("member", "pools", "queues", "pool", "size", "time", "step", "cause", "pid")
    rows = [
        {"event": kind, "member": "run", name: value}
        for kind in ("started", "resumed", "scaled", "died")
        for name in names
        for value in odd
    ]
    rows += [{"event": "started", "member": "run", "pools": [{"name": []}, 1], "queues": [[]]}]
    add_lines(folder / "events.jsonl", [*rows, *rows[::-1]])
    for place in ("eval", "eval/by_hand"):
        (folder / place).mkdir()
        for number, value in enumerate([*odd, {"step": "x"}, {"step": 1, "changes": [1]}]):
            (folder / place / f"step_{number}.json").write_text(json.dumps(value))
    (folder / "config.toml").write_text("env = 1\nreward = [1]\nmodel = 2.0\nrun = nan\n")
    asker = Asker(tmp_path)
    for path in ("", "/events", "/names", "/staleness", "/episodes"):
        assert asker.of("run", path).status == 200, path


def test_a_folder_without_anything_to_read_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/command.txt").write_text("unirl train x\n")
    shown = Asker(tmp_path).of("run").value
    assert shown["state"] == "unreadable" and len(shown["error"]) == 3


def test_events_have_the_seconds_and_the_step_at_which_they_happened(tmp_path: Path) -> None:
    begin(tmp_path / "run", CONFIG)
    rows = [{"step": 100 * i, "seconds": float(i)} for i in range(1, 11)]
    add_lines(tmp_path / "run/metrics.jsonl", rows)
    events = [
        {"time": 1000.0, "event": "started", "member": "run", "step": 0},
        {"time": 1004.5, "event": "died", "member": "actor 1", "cause": "\x1b[31m<b>"},
        # An hour later it continues from step 500: its rows count on from 5 seconds.
        {"time": 5000.0, "event": "resumed", "member": "run", "step": 500},
        {"time": 5003.0, "event": "scaled", "pool": "actor", "size": 3},
    ]
    add_lines(tmp_path / "run/events.jsonl", events)
    found = Asker(tmp_path).of("run", "/events").value
    assert [(each["seconds"], each["step"]) for each in found] == [
        (0, 0), (4.5, 450), (5, 500), (8, 800)]  # fmt: skip
    assert found[1]["cause"] == "\x1b[31m<b>"


def test_the_pipeline_has_its_members_and_what_limits_it(tmp_path: Path) -> None:
    write_run(tmp_path / "run", CONFIG, 1)
    pipeline = Asker(tmp_path).of("run").value["pipeline"]
    (pool,) = pipeline["pools"]
    assert (pool["name"], pool["members"], pool["wanted"], pool["most"]) == ("actor", 4, 6, 8)
    assert (pipeline["queue"]["slots"], pipeline["queue"]["max_staleness"]) == (12, 2)
    assert pipeline["queue"]["discarded"]["stale"] == 6
    assert pipeline["weights"]["version"] == 400
    assert 0 < pipeline["learner"]["wait"] < 1


def test_settings_side_by_side_say_which_differ(tmp_path: Path) -> None:
    write_run(tmp_path / "a", CARTPOLE.format(seed=1, lr=0.1), 1)
    write_run(tmp_path / "b", CARTPOLE.format(seed=2, lr=0.1), 1)
    asker = Asker(tmp_path)
    keys = asker(f"/api/compare?runs={asker.id('a')},{asker.id('b')}").value["keys"]
    assert {each["key"]: each["values"] for each in keys if each["differs"]} == {"run.seed": [1, 2]}


def test_videos_are_sent_in_parts(tmp_path: Path) -> None:
    folder = run(tmp_path)
    (folder / "videos").mkdir()
    (folder / "videos/step_10.mp4").write_bytes(bytes(range(100)))
    (folder / "videos/notes.txt").write_text("no video")
    asker = Asker(tmp_path)
    assert asker.of("run").value["videos"] == [{"name": "step_10.mp4", "bytes": 100}]
    assert asker.of("run", "/videos/step_10.mp4").body == bytes(range(100))
    assert asker.of("run", "/videos/notes.txt").status == 404
