"""Videos of episodes: frames to an mp4 (H.264, plays everywhere) or a gif (needs no player)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from unirl.errors import UniRLError
from unirl.storage import disk

Frame: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

_GIF_MAX_FPS = 50
"""Viewers slow a gif down to 10 frames/s when a frame lasts less than 2/100 s."""


def write_video(frames: Iterable[Frame], path: Path, fps: float) -> None:
    """Write frames [H, W, 3] uint8 to `path`, an .mp4 or a .gif, one at a time; fps in frames/s.

    An mp4 needs even sides: a last row or column is repeated where one is odd. A gif above 50
    frames/s leaves frames out and keeps its speed. Raises UniRLError when there is no frame, when
    one has another shape or type, when the suffix is unknown or a package is missing; `path` is
    then as it was.
    """
    path = Path(path)
    writers: dict[str, Callable[[Iterator[Frame], Path, float], None]]
    writers = {".mp4": _write_mp4, ".gif": _write_gif}
    if path.suffix.lower() not in writers:
        raise UniRLError(
            f"a video cannot be written as {path.name}",
            f"the suffix must be .mp4 or .gif, and it is {path.suffix!r}",
            f"name it {path.stem}.mp4",
        )
    if not fps > 0:
        raise UniRLError(f"a video of {fps} frames/s", "fps > 0 must hold", "try 30")
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk.replacing(path) as aside:
        writers[path.suffix.lower()](_checked(frames), aside, fps)


def _checked(frames: Iterable[Frame]) -> Iterator[Frame]:
    shape = None
    for number, frame in enumerate(frames, 1):
        fits = frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3 and frame.size
        if not fits or (shape is not None and frame.shape != shape):
            raise UniRLError(
                f"frame {number} has shape {frame.shape} and type {frame.dtype}",
                f"frames are {shape or '[height, width, 3]'} of uint8",
                'make the environment with render_mode="rgb_array"',
            )
        shape = frame.shape
        yield frame
    if shape is None:
        raise UniRLError(
            "a video of no frames",
            "at least one frame is needed",
            'make the environment with render_mode="rgb_array"',
        )


def _write_mp4(frames: Iterator[Frame], path: Path, fps: float) -> None:
    try:
        from imageio_ffmpeg import write_frames
    except ImportError as error:
        raise _missing("imageio-ffmpeg", path) from error
    first = next(frames)
    height, width = first.shape[0] + first.shape[0] % 2, first.shape[1] + first.shape[1] % 2
    writer = write_frames(str(path), (width, height), fps=fps, macro_block_size=2)
    try:
        writer.send(None)
        for frame in chain([first], frames):
            pad = (0, height - frame.shape[0]), (0, width - frame.shape[1]), (0, 0)
            writer.send(np.ascontiguousarray(np.pad(frame, pad, mode="edge")))
    except OSError as error:
        raise UniRLError(
            f"ffmpeg could not write {path}",
            str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__,
            "free some space, or write a .gif instead",
        ) from error
    finally:
        writer.close()
    if not _is_finished(path):
        # The package does not say how its process ended.
        raise UniRLError(
            f"ffmpeg ended before {path.name} was finished",
            "an mp4 is finished by its index, which is missing",
            "look whether the process was killed; or write a .gif instead",
        )


def _is_finished(path: Path) -> bool:
    """Whether an mp4 has its index, which is written last."""
    if not path.exists():  # the process did not come so far
        return False
    with path.open("rb") as file:
        while len(head := file.read(8)) == 8:
            size, kind = struct.unpack(">I4s", head)
            if kind == b"moov":
                return True
            if size == 1:  # the size of a large part follows
                size = struct.unpack(">Q", file.read(8))[0] - 8
            if size < 8:
                return False
            file.seek(size - 8, 1)
    return False


def _write_gif(frames: Iterator[Frame], path: Path, fps: float) -> None:
    try:
        from PIL import Image
    except ImportError as error:
        raise _missing("pillow", path) from error
    stride = max(1, -int(-fps // _GIF_MAX_FPS))
    images = (Image.fromarray(frame) for i, frame in enumerate(frames) if i % stride == 0)
    first = next(images)
    duration = 1000 * stride / fps  # ms; the format rounds it to 1/100 s
    first.save(path, save_all=True, append_images=images, duration=duration, loop=0)


def _missing(package: str, path: Path) -> UniRLError:
    return UniRLError(
        f"an {path.suffix} video needs {package}",
        "the package is not installed",
        "pip install 'unirl[video]'",
    )
