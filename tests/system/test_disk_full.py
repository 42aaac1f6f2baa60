"""A full disk ends a training with three sentences, whichever file it was that did not fit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import unirl
from unirl.core.checkpoint import load_checkpoint

ROOT = Path(unirl.__file__).resolve().parent.parent
TRAIN = ["train", "impala", "--env.id", "CartPole-v1", "--actor.num-envs", "8", "--name", "x"]
TRAIN += ["--run.total-steps", "1e9", "--run.log-seconds", "0", "--runner.learner-threads", "1"]

LIMITED = """
import os, resource, signal, sys
size = int(sys.argv.pop(1))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
from unirl.cli import main
if __name__ == "__main__":
    sys.exit(main())
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def assert_explained(done: subprocess.CompletedProcess[str]) -> str:
    """Exit code 2 and three parts, and nothing else; returns what was said."""
    lines = done.stderr.splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 3 and lines[0].startswith("error: disk full: "), done.stderr
    assert "free some space" in lines[2]
    return lines[0]


@pytest.mark.parametrize(
    ("limit", "file", "flags"),
    [
        (100, "command.txt", []),
        (1_000, "config.toml", []),
        (6_000, "metrics.jsonl", []),
        (20_000, "checkpoint", ["--run.checkpoint-steps", "200", "--run.log-seconds", "60"]),
    ],
)
def test_a_file_that_may_not_grow_ends_the_training_in_three_parts(
    tmp_path: Path, limit: int, file: str, flags: list[str]
) -> None:
    script = tmp_path / "limited.py"
    script.write_text(LIMITED)
    words = [str(limit), *TRAIN, *flags, "--no-console"]
    assert file in assert_explained(run(tmp_path, sys.executable, str(script), *words))


@pytest.mark.parametrize("runner", ["inline", "processes"])
def test_a_full_file_system_ends_the_training_and_resume_goes_on_with_more_space(
    tmp_path: Path, runner: str
) -> None:
    if shutil.which("unshare") is None or run(tmp_path, "unshare", "-rm", "true").returncode:
        pytest.skip("a file system of its own needs unshare with user namespaces")
    (tmp_path / "small").mkdir()
    script = tmp_path / "train.sh"
    # The mount lives as long as this shell; what lies in it is copied out for the test to read.
    script.write_text(
        "mount -t tmpfs -o size=400k none small || exit 77\n"
        '"$@"\n'
        "code=$?\n"
        "cp -a small/x kept\n"
        "exit $code\n"
    )
    flags = ["--runs-dir", "small", "--run.checkpoint-steps", "500", "--runner.kind", runner]
    train = [sys.executable, "-m", "unirl", *TRAIN, *flags]
    done = run(tmp_path, "unshare", "-rm", "sh", str(script), *train)
    if done.returncode == 77:
        pytest.skip("mounting a tmpfs is not permitted")
    assert_explained(done)
    step = load_checkpoint(tmp_path / "kept").step
    assert step > 0
    words = ["resume", "kept", "--run.total-steps", str(step + 500), "--no-console"]
    done = run(tmp_path, sys.executable, "-m", "unirl", *words)
    assert done.returncode == 0, done.stderr
    assert load_checkpoint(tmp_path / "kept").step >= step + 500


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_an_output_that_takes_no_more_is_explained_too(tmp_path: Path) -> None:
    for words in (["list", "configs"], [*TRAIN, "--run.total-steps", "200"]):
        command = [sys.executable, "-m", "unirl", *words]
        done = run(tmp_path, "sh", "-c", '"$@" > /dev/full', "sh", *command)
        assert_explained(done)
