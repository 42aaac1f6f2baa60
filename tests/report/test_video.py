"""Videos: what was given is what plays, at its speed."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from unirl.errors import UniRLError
from unirl.report.video import Frame, write_video


def frames(number: int, height: int = 48, width: int = 64) -> Iterator[Frame]:
    """A white bar that moves over a red ground."""
    for i in range(number):
        frame = np.zeros((height, width, 3), np.uint8)
        frame[..., 0] = 200
        frame[:, i % width : i % width + 4] = 255
        yield frame


@pytest.mark.parametrize(("height", "width"), [(48, 64), (47, 63), (210, 160), (1, 1)])
def test_an_mp4_plays_every_frame_and_pads_odd_sides(
    tmp_path: Path, height: int, width: int
) -> None:
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "videos" / "episode.mp4"
    write_video(frames(12, height, width), path, fps=10)
    reader = ffmpeg.read_frames(str(path))
    info = next(reader)
    assert info["size"] == (width + width % 2, height + height % 2)
    assert info["fps"] == 10
    played = [np.frombuffer(frame, np.uint8) for frame in reader]
    assert len(played) == 12
    assert os.listdir(path.parent) == ["episode.mp4"]


def test_an_mp4_whose_encoder_was_killed_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")

    def frames_and_a_kill() -> Iterator[Frame]:
        yield from frames(12)
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
        for pid in map(int, children.split()):
            if "ffmpeg" in Path(f"/proc/{pid}/cmdline").read_text():
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(UniRLError, match="ffmpeg ended before"):
        write_video(frames_and_a_kill(), tmp_path / "episode.mp4", fps=10)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(("fps", "num_frames", "ms"), [(10, 12, 100), (50, 12, 20), (100, 6, 20)])
def test_a_gif_keeps_its_speed(tmp_path: Path, fps: int, num_frames: int, ms: int) -> None:
    image = pytest.importorskip("PIL.Image")
    write_video(frames(12, 47, 63), tmp_path / "episode.gif", fps=fps)
    with image.open(tmp_path / "episode.gif") as gif:
        assert gif.size == (63, 47)
        assert gif.n_frames == num_frames
        assert gif.info["duration"] == ms
        red, green, blue = gif.convert("RGB").getpixel((30, 20))
    assert abs(red - 200) < 8 and green < 8 and blue < 8


def test_a_video_of_one_still_frame_is_fine(tmp_path: Path) -> None:
    for suffix in ("gif", "mp4"):
        write_video(frames(1), tmp_path / f"still.{suffix}", fps=30)
        assert (tmp_path / f"still.{suffix}").stat().st_size > 0


@pytest.mark.parametrize("suffix", ["mp4", "gif"])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "no frames"),
        ([np.zeros((8, 8, 3), np.float32)], "frame 1 .* float32"),
        ([np.zeros((8, 8), np.uint8)], r"frame 1 has shape \(8, 8\)"),
        ([np.zeros((8, 8, 3), np.uint8), np.zeros((8, 9, 3), np.uint8)], r"frame 2 .*\(8, 8, 3\)"),
    ],
)
def test_frames_that_make_no_video_are_refused_and_the_old_one_stays(
    tmp_path: Path, suffix: str, bad: list[Frame], message: str
) -> None:
    path = tmp_path / f"episode.{suffix}"
    path.write_bytes(b"old")
    with pytest.raises(UniRLError, match=message) as caught:
        write_video(bad, path, fps=30)
    assert len(caught.value.parts) == 3
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == [path.name]


def test_an_unknown_suffix_and_no_speed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UniRLError, match=r"\.mp4 or \.gif.*'\.avi'.*episode\.mp4"):
        write_video(frames(1), tmp_path / "episode.avi", fps=30)
    with pytest.raises(UniRLError, match="fps > 0"):
        write_video(frames(1), tmp_path / "episode.gif", fps=0)


@pytest.mark.parametrize(("suffix", "module"), [("mp4", "imageio_ffmpeg"), ("gif", "PIL")])
def test_a_missing_package_names_the_extra_to_install(
    tmp_path: Path, suffix: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # imports of it now fail
    with pytest.raises(UniRLError, match=r"pip install 'unirl\[video\]'"):
        write_video(frames(1), tmp_path / f"episode.{suffix}", fps=30)
