"""`make gpu` on a machine without one, and its logic at sizes that a CPU manages."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests import forked

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"


def run_script(words: Sequence[str]) -> None:
    """As `python benchmarks/gpu.py` in the checkout."""
    os.chdir(ROOT)
    sys.argv = [str(SCRIPT), *words]
    sys.path.insert(0, str(SCRIPT.parent))
    runpy.run_path(str(SCRIPT), run_name="__main__")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., str]:
    """The script with these words; what it says."""

    def started(*words: str, code: int = 0) -> str:
        output = tmp_path / "said.txt"
        output.write_text("")
        path = {"PYTHONPATH": str(ROOT)}
        process = forked.start(run_script, words, environ=path, output=output, forks=False)
        process.join(200)
        process.kill()
        said = output.read_text()
        assert process.exitcode == code, said
        return said

    return started


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would begin")
def test_without_a_gpu_it_says_what_it_would_run_and_ends_well(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    said = run("--out", str(tmp_path / "out"))
    assert said.startswith(f"No GPU here (torch {torch.__version__}")
    limits = [int(words[1]) for words in map(str.split, said.splitlines()[2:])]
    assert len(limits) == 10 and sum(limits) <= 25 * 60
    for words in ("380 s  python -m pytest -m gpu", "210 s  python benchmarks/gpu_measure.py ant"):
        assert words in said
    assert "tests/system/test_gpu.py" in said
    assert not (tmp_path / "out").exists()


def test_an_unknown_part_is_refused(run: Callable[..., str]) -> None:
    assert "there is no part simm. There are tests, sim," in run("--parts", "simm", code=1)


def test_parts_run_once_and_write_the_block(tmp_path: Path, run: Callable[..., str]) -> None:
    out, file = tmp_path / "out", tmp_path / "RESULTS.md"
    file.write_text("# Before\n\n<!-- gpu -->\nNot run yet.\n<!-- /gpu -->\n\n# After\n")
    words = ["--cpu", "--bare", "--out", str(out), "--results", str(file)]
    # What does not fit into the time that is left is left for the next call.
    said = run(*words, "--parts", "sim,train", "--within", "80")
    assert "sim: torch/Cartpole, simulation alone (at most 60 s)" in said
    assert "train: left for the next time" in said
    assert sorted(path.name for path in out.iterdir()) == ["block.md", "log.txt", "results.json"]
    kept = json.loads((out / "results.json").read_text())
    assert kept["sim"]["state"] == "done"
    assert kept["sim"]["rows"][0][1].endswith("env steps/s simulated")
    text = file.read_text()
    assert text.startswith("# Before\n") and text.endswith("# After\n")
    assert "| sim | torch/Cartpole, simulation alone | torch/Cartpole, 64 environments: " in text
    assert "| train | torch/Cartpole, training | not run yet |" in text
    assert "tiny sizes, no GPU, torch " in text

    again = run(*words, "--parts", "sim")
    assert "sim: done already" in again
    assert json.loads((out / "results.json").read_text()) == kept


@pytest.mark.slow
def test_every_part_that_is_installed_runs_on_the_cpu(
    tmp_path: Path, run: Callable[..., str]
) -> None:
    out = tmp_path / "out"
    parts = "sim,train,ant,pong,halfcheetah,publish,grpo"
    run("--cpu", "--bare", "--out", str(out), "--parts", parts)
    kept = json.loads((out / "results.json").read_text())
    assert {name: one["state"] for name, one in kept.items()} == dict.fromkeys(kept, "done")


def test_the_environment_sees_torch_and_has_the_wheels_of_the_folder(tmp_path: Path) -> None:
    """Also where torch is in a virtual environment itself: there --system-site-packages alone sees
    nothing of it.
    """
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    about = "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as file:
        file.writestr("carried.py", "WORD = 'from a wheel'\n")
        file.writestr("carried-1.0.dist-info/METADATA", about)
        file.writestr("carried-1.0.dist-info/WHEEL", wheel)
        file.writestr("carried-1.0.dist-info/RECORD", "")
    (wheels / "broken-1.0-cp27-none-any.whl").write_bytes(b"")  # of another Python
    code = (
        "import sys; sys.path.insert(0, 'benchmarks'); from pathlib import Path; import gpu;"
        "python, refused = gpu.make_environment(Path(sys.argv[1]), Path(sys.argv[2]));"
        "print(python, *refused)"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "venv"), str(wheels)]
    for _ in range(2):  # the second time there is nothing left to do
        made = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=100)
        assert made.returncode == 0, made.stderr
        python, refused = made.stdout.split()[-2:]
        assert refused == "broken-1.0-cp27-none-any.whl"
    found = subprocess.run(
        [python, "-c", "import importlib.util as u, carried, unirl;"
         "print(carried.WORD, u.find_spec('torch').origin, unirl.__file__)"],
        cwd=tmp_path, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    own = f"{ROOT}/unirl/__init__.py"
    assert found.stdout.split() == ["from", "a", "wheel", torch.__file__, own], found.stderr
