"""What a killed run leaves among the temporary files goes with the next one, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from unirl.supervision.temp_folders import claim, claim_torchrun, disclaim, sweep

CLAIMS = """
import sys, time
from pathlib import Path
from unirl.supervision.temp_folders import claim, claim_torchrun
claim(Path(sys.argv[1]))
claim_torchrun({"TORCHELASTIC_ERROR_FILE": f"{sys.argv[2]}/run/attempt_0/0/error.json"})
print("claimed", flush=True)
time.sleep(60)
"""


def test_folders_of_the_dead_go_and_those_of_the_living_and_of_nobody_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = ["pymp-dead", "torchelastic_dead", "pymp-living", "pymp-nobodys", "other", "pymp-kept"]
    dead, torchrun, living, _, other, kept = folders = [tmp_path / name for name in names]
    for folder in folders:
        folder.mkdir()
    claim(living)
    claim(other, pid=2**22 + 1)
    # Its torchrun is this process, which lives.
    owner = subprocess.Popen(
        [sys.executable, "-c", CLAIMS, str(dead), str(torchrun)], stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"claimed\n"
    claim(kept, pid=2**22 + 1)
    disclaim(kept)
    sweep()
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 60.0
    while dead.exists() and time.monotonic() < deadline:
        sweep()
    assert {path.name for path in tmp_path.iterdir()} == set(names) - {"pymp-dead"}


def test_a_process_that_torchrun_did_not_start_claims_nothing() -> None:
    claim_torchrun({})
