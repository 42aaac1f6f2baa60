"""Weights & Biases; source: https://docs.wandb.ai. With WANDB_MODE=offline its files stay in
the run folder, for `wandb sync`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from unirl.errors import UniRLError
from unirl.report.trackers.tracker import TrackedRun, Tracker

_OFFLINE = ("offline", "disabled", "dryrun")


def make() -> Tracker:
    return Wandb()


class Wandb:
    """A run of wandb. Rows are drawn over `step`: its own count of rows cannot be set back."""

    settle_seconds = 60.0

    def __init__(self) -> None:
        self._run: Any = None

    def check(self) -> None:
        if os.environ.get("WANDB_MODE") in _OFFLINE:
            return
        import wandb

        settings = wandb.setup().settings
        if settings.mode in _OFFLINE:  # a file of settings says so
            return
        # Neither asks a person nor the server.
        if not wandb.login(verify=False, timeout=0, prompt=False):
            raise UniRLError(
                f"run.track names wandb, and nobody is logged in at {settings.base_url}",
                "it reads WANDB_API_KEY, or the netrc file that wandb login writes",
                "wandb login, or WANDB_MODE=offline to keep its files in the run folder",
            )

    def open(self, run: TrackedRun) -> str:
        import wandb

        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,  # they would be of this process, which does not train
            x_disable_meta=True,
        )
        self._run = wandb.init(
            project=run.project or os.environ.get("WANDB_PROJECT") or "unirl",
            id=run.id or secrets.token_hex(8),
            name=run.name,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(run.folder),
            config={**run.config, "seed": run.seed},
            settings=settings,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, step: int, seconds: float, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, "step": step, "seconds": seconds})

    def close(self) -> None:
        self._run.finish()
