"""Which runs are found, and that nothing leads out of their folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.view.asking import Asker
from tests.view.page_runs import CARTPOLE, add_lines, begin, write_run
from unirl.errors import UniRLError
from unirl.view.folders import Folders, find_roots

CONFIG = CARTPOLE.format(seed=1, lr=0.1)


def names(*roots: Path) -> list[str]:
    return [run.name for run in Folders(roots).runs().values()]


def test_runs_are_found_in_folders_of_folders_and_by_themselves(tmp_path: Path) -> None:
    for name in ("a", "sweep/one", "sweep/two", "deep/er/run"):
        begin(tmp_path / name, CONFIG)
    (tmp_path / "empty").mkdir()
    (tmp_path / ".trash-x").mkdir()
    begin(tmp_path / ".trash-x/run", CONFIG)
    assert names(tmp_path) == ["a", "deep/er/run", "sweep/one", "sweep/two"]
    assert names(tmp_path / "a") == ["a"]
    assert names(tmp_path / "a", tmp_path / "sweep") == ["a", "sweep/one", "sweep/two"]


def test_policies_that_learn_against_each_other_are_parts_of_their_run(tmp_path: Path) -> None:
    write_run(tmp_path / "duel", CONFIG, 1)
    (tmp_path / "duel/policies/1").mkdir(parents=True)
    add_lines(tmp_path / "duel/policies/1/metrics.jsonl", [{"step": 7, "seconds": 1.0, "x": 3}])
    asker = Asker(tmp_path)
    whole, part = asker("/api/runs").value
    assert (whole["parts"], part["part_of"], part["step"]) == ([part["id"]], whole["id"], 7)
    # It has the settings and the events of its run, and a band of its own.
    assert part["recipe"] == "impala" and part["group"] != whole["group"]
    assert asker(f"/api/runs/{part['id']}/events").value[0]["event"] == "started"
    assert asker(f"/api/series?runs={part['id']}&names=x").value[part["id"]]["x"]["v"] == [3]


def test_a_run_that_is_new_is_found_and_one_that_is_gone_is_not_there(tmp_path: Path) -> None:
    begin(tmp_path / "old", CONFIG)
    folders = Folders([tmp_path])
    id = next(iter(folders.runs()))
    (tmp_path / "old").rename(tmp_path / "new")
    found = Folders([tmp_path])
    assert [run.name for run in found.runs().values()] == ["new"]
    with pytest.raises(UniRLError, match="no run with the id"):
        found.run(id)


@pytest.mark.parametrize(
    "name", [b"\xff\xfe", b"<script>alert(1)</script>", b"new\nline", b"\x1b[31mred", b"a..b"]
)
def test_hostile_names_are_shown_as_text(tmp_path: Path, name: bytes) -> None:
    folder = os.fsencode(tmp_path) + b"/" + name.replace(b"/", b"_")
    os.mkdir(folder)
    Path(os.fsdecode(folder), "config.toml").write_text(CONFIG)
    (shown,) = Asker(tmp_path)("/api/runs").value
    assert shown["name"].encode()  # whole characters
    assert Asker(tmp_path)(f"/api/runs/{shown['id']}").status == 200


def test_links_that_lead_out_are_not_followed(tmp_path: Path) -> None:
    begin(tmp_path / "elsewhere/secret", CONFIG)
    secret = tmp_path / "elsewhere/secret"
    add_lines(secret / "metrics.jsonl", [{"step": 1, "seconds": 1.0, "secret": 1.0}])
    (secret / "videos").mkdir()
    (secret / "videos/a.mp4").write_bytes(b"secret")
    runs = tmp_path / "runs"
    begin(runs / "run", CONFIG)
    (runs / "linked").symlink_to(secret)
    (runs / "run/metrics.jsonl").symlink_to(secret / "metrics.jsonl")
    (runs / "run/videos").symlink_to(secret / "videos")
    (runs / "run/samples").symlink_to(secret)
    (runs / "run/policies").symlink_to(tmp_path / "elsewhere")
    asker = Asker(runs)
    assert [each["name"] for each in asker("/api/runs").value] == ["run"]
    assert asker.of("run").value["videos"] == [] and asker.of("run").value["step"] is None
    assert asker.of("run", "/names").value == []
    assert asker.of("run", "/videos/a.mp4").status == 404


def test_a_pipe_in_place_of_a_file_holds_nothing_up(tmp_path: Path) -> None:
    begin(tmp_path / "run", CONFIG)
    for name in ("metrics.jsonl", "events.jsonl", ".lock"):
        os.mkfifo(tmp_path / "run" / name)
    asker = Asker(tmp_path)
    assert asker.of("run").value["state"] == "stale"
    assert asker.of("run", "/names").value == []


PARTS = st.text(st.sampled_from("./\\%2e\0~aé1'\"<&=?#:"), max_size=12)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Asker:
    """A run among secrets."""
    folder = tmp_path_factory.mktemp("fuzz")
    begin(folder / "runs/run", CONFIG)
    for name in ("config.toml", "app.js", "secret"):
        (folder / name).write_text("secret = 'secret'")
    return Asker(folder / "runs")


@settings(max_examples=25, deadline=None)
@given(PARTS, PARTS)
def test_no_id_or_name_reaches_a_file(guarded: Asker, one: str, two: str) -> None:
    id = guarded.id("run")
    for path in (
        f"/api/runs/{one}", f"/api/runs/{one}/videos/{two}", f"/assets/{one}{two}",
        f"/assets/../{one}", f"/api/runs/{id}/videos/../../../{one}secret",
        f"/api/runs/{id}/episodes/{one}", f"/api/runs/{id}/groups/{two}", f"/{one}/{two}",
    ):  # fmt: skip
        answered = guarded(path)
        assert b"'secret'" not in answered.body, path
        assert answered.status in (200, 303, 400, 404), (path, answered)


def test_roots_are_named_by_folder_or_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begin(Path("runs/one"), CONFIG)
    assert find_roots([]) == [(tmp_path / "runs").resolve()]
    assert find_roots(["one", "runs/one"]) == [(tmp_path / "runs/one").resolve()]
    with pytest.raises(UniRLError, match="no folder"):
        find_roots(["two"])
