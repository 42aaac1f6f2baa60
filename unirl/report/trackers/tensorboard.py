"""TensorBoard's event files, in tb/ of the run folder; source: https://www.tensorflow.org/tensorboard.

They are written by the run itself, as metrics.jsonl is: no server is behind them.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.errors import UniRLError
from unirl.report.records import record
from unirl.report.sinks import unwritable


class TensorBoardSink:
    """Event files for TensorBoard; rows after `resume_step` of an earlier part are hidden by it.

    A row is one event, flushed at once. The usual writer keeps a thread, whose errors nobody can
    catch, to save the few microseconds that this takes.
    """

    def __init__(self, folder: Path, resume_step: int | None = None) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
        except ImportError as error:
            raise UniRLError(
                f"TensorBoard's event files cannot be written: {error}",
                "the package tensorboard must be installed",
                "pip install tensorboard, or train without this log",
            ) from error
        # The generated classes are not typed.
        self._event: Any = event_pb2.Event
        self._summary: Any = summary_pb2.Summary
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / (
            f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}"
            f".{os.getpid()}.{time.monotonic_ns()}"
        )
        self._file = open(self._path, "xb")  # noqa: SIM115
        self._append(self._event(file_version="brain.Event:2"))
        if resume_step is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._append(self._event(step=resume_step + 1, session_log=start))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in scalars.items()
            if math.isfinite(value)
        ]
        self._append(self._event(step=step, summary=self._summary(value=values)))

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()

    def _append(self, event: Any) -> None:
        event.wall_time = time.time()
        try:
            self._file.write(record(event.SerializeToString()))
            self._file.flush()
        except OSError as error:
            self.close()  # what could not be written must not be tried again when Python ends
            raise unwritable(self._path, self._path.parent.parent, error) from error
