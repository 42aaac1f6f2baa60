"""A folder in which a run trains: a second run is refused, readers are not, and nothing is lost."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests import forked
from unirl import cli
from unirl.storage.checkpoint import load_checkpoint

TRAIN = ["train", "impala", "--env.id", "CartPole-v1", "--env.engine", "async", "--name", "x"]
TRAIN += ["--actor.num-envs", "2", "--policy.hidden", "[8]", "--runner.learner-threads", "1"]
TRAIN += ["--run.log-seconds", "0.2", "--run.checkpoint-steps", "200", "--no-console"]


def test_a_second_run_in_a_folder_is_refused_until_the_first_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    errors = tmp_path / "errors.txt"
    first = forked.start(
        cli.main, [*TRAIN, "--run.total-steps", "1e9"], output=tmp_path / "said.txt", errors=errors
    )
    try:
        deadline = time.monotonic() + 90
        while not Path("runs/x/checkpoints/latest/state.json").is_file():
            assert first.is_alive() and time.monotonic() < deadline, errors.read_text()
            time.sleep(0.05)
        for words in (
            ["resume", "runs/x", "--no-console"],
            ["train", "impala", "--name", "x"],
            [*TRAIN, "--overwrite", "--run.total-steps", "100"],
        ):
            assert cli.main(words) == 2
            lines = capsys.readouterr().err.splitlines()
            assert lines[0] == 'error: run folder "runs/x" is in use' and len(lines) == 3
            assert f"process {first.pid} on host {os.uname().nodename}" in lines[1]
        assert len(Path("runs/x/command.txt").read_text().splitlines()) == 1
        assert cli.main(["eval", "runs/x", "--episodes", "1"]) == 0
        assert first.is_alive()
        first.kill()
        first.join(60)
        step = load_checkpoint(Path("runs/x")).step
        total = str(step + 100)
        assert cli.main(["resume", "runs/x", "--run.total-steps", total, "--no-console"]) == 0
        assert load_checkpoint(Path("runs/x")).step >= step + 100
    finally:
        first.kill()
        first.join(60)
    assert errors.read_text() == ""
