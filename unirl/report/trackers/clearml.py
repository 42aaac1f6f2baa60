"""ClearML; source: https://clear.ml/docs. Offline with CLEARML_OFFLINE_MODE=1: files for
`Task.import_offline_session`, a session each time the run is started or resumed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from unirl.errors import UniRLError
from unirl.report.trackers.tracker import TrackedRun, Tracker

_KEYS = ("CLEARML_API_ACCESS_KEY", "CLEARML_AUTH_TOKEN")


def make() -> Tracker:
    return Clearml()


class Clearml:
    """A task of ClearML. What precedes the first / of a metric's name is its plot."""

    settle_seconds = 60.0

    def __init__(self) -> None:
        self._task: Any = None
        self._logger: Any = None

    def check(self) -> None:
        if any(map(os.environ.get, _KEYS)) or os.environ.get("CLEARML_OFFLINE_MODE") == "1":
            return
        from clearml import Task
        from clearml.config import config_obj

        if not Task.is_offline() and not config_obj.get("api.credentials.access_key", None):
            raise UniRLError(
                "run.track names clearml, and it is not configured on this machine",
                "it reads CLEARML_API_ACCESS_KEY and others, or the file that clearml-init writes",
                "clearml-init, or CLEARML_OFFLINE_MODE=1 to keep its session in files",
            )

    def open(self, run: TrackedRun) -> str:
        from clearml import Task
        from clearml.utilities.process.mp import BackgroundMonitor

        Task._report_subprocess_enabled = False  # a fork of this process, which is one by itself
        self._task = Task.init(
            project_name=run.project or os.environ.get("CLEARML_PROJECT") or "unirl",
            task_name=run.name,
            reuse_last_task_id=False,
            continue_last_task=run.id if run.id is not None and not Task.is_offline() else False,
            # This program is not the one that trains.
            auto_connect_arg_parser=False,
            auto_connect_frameworks={"detect_repository": False},
            auto_connect_streams=False,
            auto_resource_monitoring=False,
        )
        # With all of that left out, clearml 2.1 makes what sends rows only after it has started
        # those that are to send: rows would wait for the end.
        assert self._task._reporter is not None
        BackgroundMonitor.start_all(task=self._task)
        self._task.set_initial_iteration(0)  # our steps continue by themselves
        self._task.set_parameters({**run.flat_config("/"), "seed": run.seed})
        self._logger = self._task.get_logger()
        return str(self._task.id)

    def log(self, step: int, seconds: float, scalars: Mapping[str, float]) -> None:
        for name, value in {**scalars, "seconds": seconds}.items():
            title, _, series = name.partition("/")
            self._logger.report_scalar(title, series or title, value, step)

    def close(self) -> None:
        self._task.close()
