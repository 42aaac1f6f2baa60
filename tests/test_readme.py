"""The README is a program: its Python blocks run as they stand, in order, and stay short."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
MAX_LINES = 30


def file_name(index: int, block: str) -> str:
    """A block that begins with a file's name (`# my_env.py`) is that file: later ones import it."""
    named = re.match(r"# (\w+\.py)\b", block)
    return named[1] if named else f"block_{index}.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One working folder with every block saved in it, as a reader would have it."""
    folder = tmp_path_factory.mktemp("readme")
    for index, block in enumerate(BLOCKS):
        (folder / file_name(index, block)).write_text(block)
    return folder


def test_the_readme_shows_a_custom_environment_actor_and_learner() -> None:
    assert len(BLOCKS) >= 3
    text = "\n".join(BLOCKS)
    assert "make_plan" in text and "unirl.run" in text


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_a_block_is_short(index: int) -> None:
    lines = [line for line in BLOCKS[index].splitlines() if line.strip()]
    assert len(lines) <= MAX_LINES


def run_block(folder: Path, name: str) -> None:
    """As `python name` in this folder."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    runpy.run_path(str(folder / name), run_name="__main__")


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_a_block_runs_as_it_stands(index: int, folder: Path) -> None:
    name, output = file_name(index, BLOCKS[index]), folder / f"output_{index}.txt"
    # Actors in processes look for the file that was started: that one is started as a reader does.
    if "processes" not in BLOCKS[index]:
        process = forked.start(run_block, folder, name, output=output)
        process.join(240)
        process.kill()
        assert process.exitcode == 0, f"{BLOCKS[index]}\n{output.read_text()}"
        return
    # From the checkout or from an installed wheel, whichever this interpreter has.
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{BLOCKS[index]}\n{done.stdout}\n{done.stderr}"
