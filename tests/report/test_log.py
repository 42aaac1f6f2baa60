"""Sentences: all in log.txt, those that matter on the console, and no trace from a full disk."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from unirl.report.log import log_to_file, notes_on


class Notes:
    """A console that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def update(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None: ...


def test_a_checkpoint_and_a_dead_actor_are_one_note_each(tmp_path: Path) -> None:
    console = Notes()
    with log_to_file(tmp_path / "log.txt"), notes_on(console):
        logging.getLogger("unirl.launch").info("plan:\n  much of it")
        logging.getLogger("unirl.runners.hooks").info("checkpoint %s", "step_1")
        try:
            raise ValueError("a bad step\nand its details")
        except ValueError:
            logging.getLogger("unirl.runners.inline").exception("actor 3 failed")
    logging.getLogger("unirl").warning("when it is over")
    assert console.notes == ["checkpoint step_1", "actor 3 failed: ValueError: a bad step"]
    text = (tmp_path / "log.txt").read_text()
    assert "much of it" in text and "Traceback" in text and "it is over" not in text


def test_a_log_that_may_not_grow_costs_sentences_and_nothing_else(tmp_path: Path) -> None:
    script = f"""
import logging, resource, signal
from pathlib import Path
from unirl.report.log import log_to_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
with log_to_file(Path({str(tmp_path)!r}) / "log.txt"):
    for number in range(100):
        logging.getLogger("unirl").info("sentence %d", number)
print("continues")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "continues\n", "")
    assert "sentence 3" in (tmp_path / "log.txt").read_text()
