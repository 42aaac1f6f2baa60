"""On a node of a cluster: the actor that starts one run's process there, and waits for its end."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from unirl.errors import UniRLError
from unirl.runners.cluster.actor import NodeNeeds
from unirl.runners.cluster.shipping import Parcel, arrive
from unirl.storage import disk
from unirl.sweep import runs
from unirl.sweep.trial import SeedRun, Trial

_STALE_SECONDS = 10.0
"""A network's file system may show a folder as it was a moment ago."""


@dataclass(frozen=True)
class Probe:
    """A file of random name in the sweep's folder: a node that sees it has the same folder."""

    path: Path

    def write(self) -> None:
        disk.replace_text(self.path, "nodes of the sweep look for it\n")

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def check(self, node: str, patience_seconds: float = _STALE_SECONDS) -> None:
        """UniRLError where this machine does not see it."""
        deadline = time.monotonic() + patience_seconds
        while not self.path.is_file():
            if time.monotonic() > deadline:
                raise UniRLError(
                    f'node {node} does not see the folder of the sweep, "{self.path.parent}"',
                    "all nodes must have it under the same path, and it is written there and here",
                    "name a folder of a disk that nodes share as --runs-dir, such as NFS",
                )
            time.sleep(0.1)


class TrialActor:
    """Of one session of one run. search_path, folder: where the sweep's process finds modules.
    parcel: what of them a machine may lack. needs: versions of that process.
    """

    def __init__(
        self,
        search_path: list[str],
        folder: str,
        parcel: Parcel | None,
        probe: Probe,
        needs: Mapping[str, str],
    ) -> None:
        self._probe, self._needs = probe, NodeNeeds(needs, 0, 0)
        self._process: runs.RunProcess | None = None
        self._is_stopped = False
        self._unpacked = arrive(search_path, folder, parcel)

    def run(
        self,
        sweep_dir: Path,
        trial: Trial,
        run: SeedRun,
        pause_steps: int | None,
        num_threads: int,
    ) -> str:
        """Train until the process ends. Why it failed; empty: it did not. UniRLError where this
        machine is not fit.
        """
        name = socket.gethostname()
        self._needs.check(name)
        self._probe.check(name)
        try:
            deadline = time.monotonic() + runs.LOCK_SECONDS
            runs.wait_until_free(sweep_dir / runs.run_name(trial, run), deadline)
        except UniRLError as error:
            return str(error)
        if self._is_stopped:
            return ""
        self._process = runs.start(sweep_dir, trial, run, pause_steps, num_threads)
        if self._is_stopped:
            self._process.stop()
        self._process.wait()
        if self._unpacked is not None:
            shutil.rmtree(self._unpacked, ignore_errors=True)
        end = self._process.poll()
        return end.failure if end is not None else ""

    def stop(self) -> None:
        """Ctrl-C, for its process."""
        self._is_stopped = True
        if self._process is not None:
            self._process.stop()
