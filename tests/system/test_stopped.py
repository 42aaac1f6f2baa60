"""A run that is stopped as a whole and continued, by Ctrl-Z or on a laptop that sleeps."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.system.test_console_gone import OnTerminal, on_terminal

__all__ = ["on_terminal"]


def test_nobody_is_judged_hung_for_a_time_in_which_all_were_stopped(
    on_terminal: Callable[..., OnTerminal],
) -> None:
    flags = ["--runner.kind", "processes", "--runner.hang-seconds", "1", "--no-console"]
    # An unroll of some tenths of a second: the actor is somewhere in it.
    run = on_terminal(*flags, "--actor.unroll-length", "500", "--run.checkpoint-steps", "1e9")
    run.wait_for_rows()
    for _ in range(3):
        os.killpg(run.pid, signal.SIGSTOP)
        time.sleep(1.6)
        os.killpg(run.pid, signal.SIGCONT)
        run.wait_for_rows(2)
    log = Path(run.run / "log.txt").read_text()
    assert "did not run for" in log and "killed" not in log and "died" not in log
