"""MLflow; source: https://mlflow.org/docs/latest. It sends to MLFLOW_TRACKING_URI, or without
that to a file mlflow.db in the working directory.
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.errors import UniRLError
from unirl.report.trackers.tracker import TrackedRun, Tracker

_MOST_PARAMS, _MOST_METRICS, _LONGEST_PARAM = 100, 1000, 6000
"""What MLflow's servers take in one request, and of one parameter."""
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def make() -> Tracker:
    return Mlflow()


class Mlflow:
    """A run of MLflow, through its client: the package's own idea of an active run is not used."""

    settle_seconds = 0.0

    def __init__(self) -> None:
        self._client: Any = None
        self._id = ""

    def check(self) -> None:
        usual = "file:" if Path("mlruns").is_dir() else "sqlite:"
        address = os.environ.get("MLFLOW_TRACKING_URI") or usual
        scheme = address.partition(":")[0].partition("+")[0]
        if scheme in _DATABASES and not (_has("sqlalchemy") and _has("alembic")):
            raise UniRLError(
                f"run.track names mlflow, which is to write to a database ({scheme})",
                "it does so with packages sqlalchemy and alembic, and one of them is missing",
                "pip install 'unirl[mlflow]', or set MLFLOW_TRACKING_URI to a server",
            )
        if scheme in (*_DATABASES, "http", "https"):
            return  # what is more is known when it is reached
        import mlflow

        try:
            mlflow.MlflowClient()
        except mlflow.MlflowException as error:
            raise UniRLError(
                f"run.track names mlflow, which does not write to {scheme}: addresses",
                str(error).splitlines()[0],
                "set MLFLOW_TRACKING_URI to a server, or to sqlite:///PATH",
            ) from error

    def open(self, run: TrackedRun) -> str:
        import mlflow

        self._client = mlflow.MlflowClient()
        if run.id is not None:
            self._id = run.id
            self._client.update_run(self._id, status="RUNNING")
            return self._id
        name = run.project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "unirl"
        experiment = self._client.get_experiment_by_name(name)
        where = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._id = self._client.create_run(where, run_name=run.name).info.run_id
        self._log_params({**run.flat_config(), "seed": run.seed})
        return self._id

    def log(self, step: int, seconds: float, scalars: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        row = {**scalars, "seconds": seconds}
        metrics = [Metric(name, value, now, step) for name, value in row.items()]
        for begin in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _MOST_METRICS])

    def close(self) -> None:
        self._client.set_terminated(self._id)

    def _log_params(self, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in values.items()]
        for begin in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[begin : begin + _MOST_PARAMS])


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
