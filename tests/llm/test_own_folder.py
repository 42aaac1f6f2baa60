"""What a killed process leaves on the disk is removed by its successor, and nothing else is."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from tests import forked
from unirl.llm.engines.vllm.adapter import AdapterFolder
from unirl.llm.weights.own_folder import OwnFolder, remove_ownerless
from unirl.llm.weights.process import is_running, start_time
from unirl.llm.weights.transfer import FileSender


def write_and_die(folder: str, temporary: str) -> None:
    tempfile.tempdir = temporary
    FileSender(folder).write({"w": torch.zeros(3)}, torch.float32)
    os.kill(os.getpid(), signal.SIGKILL)


def left_behind(folder: str, temporary: Path) -> None:
    """By a sender that was killed."""
    process = forked.start(write_and_die, folder, str(temporary), forks=False)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("named", [False, True])
def test_weights_of_a_killed_process_go_when_the_next_one_starts(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors", reason="the file is one of safetensors")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = str(tmp_path) if named else ""
    left_behind(folder, tmp_path)
    (old,) = tmp_path.iterdir()
    assert list(old.iterdir())
    sender = FileSender(folder)
    sender.write({"w": torch.zeros(3)}, torch.float32)
    (new,) = tmp_path.iterdir()
    assert new != old
    sender.close()
    assert not list(tmp_path.iterdir())


def test_folders_of_the_living_and_of_others_stay(tmp_path: Path) -> None:
    mine = OwnFolder("weights", str(tmp_path)).path()
    pid, began = os.getpid(), start_time(os.getpid())
    dead = mine.name.replace(f"-{pid}-{began}-", f"-{pid}-{int(began) + 1}-")
    stays = [
        mine.name,
        dead.replace("weights", "other"),
        "unirl-weights-abc",
        dead.replace("unirl-weights-", "unirl-weights-0000"),  # of another machine or container
    ]
    for name in (dead, *stays[1:]):
        (tmp_path / name).mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    (tmp_path / f"{dead}0").symlink_to(elsewhere)
    remove_ownerless("weights", tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == {*stays, "elsewhere", f"{dead}0"}
    assert (elsewhere / "kept").exists()


def test_a_folder_is_made_when_it_is_first_needed_and_goes_with_its_owner(tmp_path: Path) -> None:
    parent = tmp_path / "not" / "there"
    adapters = AdapterFolder(8.0, str(parent))
    assert not parent.exists()
    own = OwnFolder("weights", str(parent))
    assert own.path() == own.path()
    (own.path() / "file").touch()
    own.remove()
    own.remove()
    adapters.close()
    assert not list(parent.iterdir())


def test_a_number_that_was_given_again_is_another_process() -> None:
    began = start_time(os.getpid())
    assert is_running(os.getpid(), began)
    assert not is_running(os.getpid(), str(int(began) - 1))
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not is_running(child.pid, start_time(child.pid))  # a zombie
    assert start_time(child.pid) == ""
