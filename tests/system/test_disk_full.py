"""A full disk ends a training with three sentences, whichever file it was that did not fit."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from unirl import cli
from unirl.storage.checkpoint import load_checkpoint

ROOT = Path(cli.__file__).resolve().parent.parent
TRAIN = ["train", "impala", "--env.id", "CartPole-v1", "--actor.num-envs", "8", "--name", "x"]
TRAIN += ["--run.total-steps", "1e9", "--run.log-seconds", "0", "--runner.learner-threads", "1"]

# One process for all cases: each command gets a limit, and its exit code and errors are collected.
LIMITED = """
import contextlib, io, json, resource, signal, sys
from unirl.cli import main
if __name__ == "__main__":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    done = []
    for limit, output, words in json.loads(sys.argv[1]):
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        errors = io.StringIO()
        with open(output, "w") as out, contextlib.redirect_stdout(out):
            with contextlib.redirect_stderr(errors):
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))
                code = main(words)
                resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        done.append((code, errors.getvalue()))
    print(json.dumps(done))
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250
    )


def assert_explained(code: int, errors: str) -> str:
    """Exit code 2 and three parts, and nothing else; returns what was said."""
    lines = errors.splitlines()
    assert code == 2, errors
    assert len(lines) == 3 and lines[0].startswith("error: disk full: "), errors
    assert "free some space" in lines[2]
    return lines[0]


def test_whatever_cannot_be_written_ends_the_training_in_three_parts(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    saves = ["--run.checkpoint-steps", "200", "--run.log-seconds", "60"]
    cases = [
        (100, os.devnull, [], "command.txt"),
        (1_000, os.devnull, [], "config.toml"),
        (6_000, os.devnull, [], "metrics.jsonl"),
        (20_000, os.devnull, saves, "checkpoint"),
        (10**9, "/dev/full", [], "output"),
    ]
    commands = [
        (limit, output, [*TRAIN, *flags, "--name", f"case-{number}"])
        for number, (limit, output, flags, _) in enumerate(cases)
    ]
    script = tmp_path / "limited.py"
    script.write_text(LIMITED)
    done = run(tmp_path, sys.executable, str(script), json.dumps(commands))
    # Nothing was said besides, by a thread or when Python ended.
    assert (done.returncode, done.stderr) == (0, "")
    for (_, _, _, part), (code, errors) in zip(cases, json.loads(done.stdout), strict=True):
        said = assert_explained(code, errors)
        assert part in said or part == "output", said


CLONE_NEWNS, CLONE_NEWUSER, MS_REC, MS_PRIVATE = 0x20000, 0x10000000, 0x4000, 0x40000


def train_on_small_disk(words: list[str]) -> int:
    """A command in a user namespace where the folder `small` is a disk of its own, as `unshare -rm`
    makes it; what the run left there is copied out for the test to read.
    """
    system, user, group = ctypes.CDLL(None), os.getuid(), os.getgid()
    assert system.unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"0 {user} 1"),
        ("gid_map", f"0 {group} 1"),
    ):
        Path(f"/proc/self/{name}").write_text(text)
    assert system.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
    assert system.mount(b"none", b"small", b"tmpfs", 0, b"size=400k") == 0
    code = cli.main(words)
    shutil.copytree("small/x", "kept", symlinks=True)
    return code


@pytest.mark.parametrize("runner", ["inline", "processes"])
def test_a_full_file_system_ends_the_training_and_resume_continues_with_more_space(
    tmp_path: Path, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = ["mount", "-t", "tmpfs", "none", str(tmp_path)]
    if shutil.which("unshare") is None or run(tmp_path, "unshare", "-rm", *mount).returncode:
        pytest.skip("a file system of its own needs unshare with user namespaces")
    monkeypatch.chdir(tmp_path)
    Path("small").mkdir()
    flags = ["--runs-dir", "small", "--run.checkpoint-steps", "500", "--runner.kind", runner]
    errors = tmp_path / "errors.txt"
    process = forked.start(
        train_on_small_disk, [*TRAIN, *flags], output=Path(os.devnull), errors=errors, forks=False
    )
    process.join(250)
    process.kill()
    assert process.exitcode is not None
    assert_explained(process.exitcode, errors.read_text())
    step = load_checkpoint(tmp_path / "kept").step
    assert step > 0
    words = ["resume", "kept", "--run.total-steps", str(step + 500), "--no-console"]
    assert cli.main(words) == 0
    assert load_checkpoint(tmp_path / "kept").step >= step + 500


def test_a_listing_into_a_full_disk_is_explained_too(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    command = [sys.executable, "-m", "unirl", "list", "configs"]
    done = run(tmp_path, "sh", "-c", '"$@" > /dev/full', "sh", *command)
    assert_explained(done.returncode, done.stderr)
