"""Videos of a run are served in parts, as what they are, and only from its folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.view.asking import TOKEN, Answered, Asker, ask
from tests.view.page_runs import CARTPOLE, begin


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    begin(tmp_path / "runs/run", CARTPOLE.format(seed=1, lr=0.1))
    videos = tmp_path / "runs/run/videos"
    videos.mkdir()
    return videos


def part(asker: Asker, name: str, bounds: str) -> Answered:
    headers = {"authorization": f"Bearer {TOKEN}", "range": f"bytes={bounds}"}
    return ask(asker.app, f"/api/runs/{asker.id('run')}/videos/{name}", headers)


def test_a_player_gets_the_part_that_it_asks_for(folder: Path) -> None:
    (folder / "step 1.mp4").write_bytes(bytes(range(256)))
    asker = Asker(folder.parents[1])
    found = part(asker, "step 1.mp4", "100-109")
    assert (found.status, found.body) == (206, bytes(range(100, 110)))
    assert found.headers["content-range"] == "bytes 100-109/256"
    assert part(asker, "step 1.mp4", "-6").body == bytes(range(250, 256))
    assert part(asker, "step 1.mp4", "500-").status == 416
    whole = asker.of("run", "/videos/step 1.mp4")
    assert whole.body == bytes(range(256)) and whole.headers["accept-ranges"] == "bytes"


def test_each_kind_is_named_and_no_other_file_is_a_video(folder: Path) -> None:
    kinds = {"a.mp4": "video/mp4", "b.GIF": "image/gif", "c.webm": "video/webm"}
    for name in (*kinds, "d.html", ".e.mp4"):
        (folder / name).write_bytes(b"12")
    asker = Asker(folder.parents[1])
    listed = asker.of("run").value["videos"]
    assert listed == [{"name": name, "bytes": 2} for name in sorted(kinds)]
    for name, kind in kinds.items():
        assert asker.of("run", f"/videos/{name}").headers["content-type"] == kind
    assert asker.of("run", "/videos/d.html").status == 404


def test_links_out_of_the_folder_and_pipes_are_no_videos(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (folder / "out.mp4").symlink_to(tmp_path / "secret.mp4")
    (folder / "gone.mp4").symlink_to(tmp_path / "nothing.mp4")
    os.mkfifo(folder / "pipe.mp4")
    (folder / "inside.mp4").write_bytes(b"film")
    (folder / "newest.mp4").symlink_to(folder / "inside.mp4")
    asker = Asker(folder.parents[1])
    assert [video["name"] for video in asker.of("run").value["videos"]] == [
        "inside.mp4",
        "newest.mp4",
    ]
    for name in ("out.mp4", "gone.mp4", "pipe.mp4"):
        assert asker.of("run", f"/videos/{name}").status == 404
    assert asker.of("run", "/videos/newest.mp4").body == b"film"
