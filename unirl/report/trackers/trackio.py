"""Trackio; source: https://github.com/gradio-app/trackio. It writes to TRACKIO_DIR of this
machine, or to the Space of TRACKIO_SPACE_ID, or to the server of TRACKIO_SERVER_URL.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from unirl.errors import UniRLError
from unirl.report.trackers.tracker import TrackedRun, Tracker


def make() -> Tracker:
    return Trackio()


class Trackio:
    """A run of Trackio, which knows runs by their names: ours end in a few random letters."""

    settle_seconds = 5.0

    def __init__(self) -> None:
        self._run: Any = None

    def check(self) -> None:
        if not os.environ.get("TRACKIO_SPACE_ID"):
            return
        import trackio

        if trackio.huggingface_hub.get_token() is None:
            raise UniRLError(
                "run.track names trackio, and nobody is logged in to the Hugging Face hub",
                "TRACKIO_SPACE_ID is set, and a Space takes numbers of those who may write to it",
                "hf auth login, or unset TRACKIO_SPACE_ID to keep the numbers on this machine",
            )

    def open(self, run: TrackedRun) -> str:
        import trackio

        name = run.id or f"{run.name}-{secrets.token_hex(3)}"
        self._run = trackio.init(
            project=run.project or os.environ.get("TRACKIO_PROJECT") or "unirl",
            name=name,
            config={**run.flat_config(), "seed": run.seed},
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # they would be of this process, which does not train
            auto_log_cpu=False,
        )
        return name

    def log(self, step: int, seconds: float, scalars: Mapping[str, float]) -> None:
        self._run.log({**scalars, "seconds": seconds}, step=step)

    def close(self) -> None:
        self._run.finish()
