"""docs/python.md is a program: its blocks run as they stand, in order, each as a fresh script."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import forked
from tests.test_readme import file_name, run_block

PAGE = Path(__file__).resolve().parents[1] / "docs" / "python.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    for index, block in enumerate(BLOCKS):
        (folder / file_name(index, block)).write_text(block)
    return folder


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_a_block_runs_as_it_stands(index: int, folder: Path) -> None:
    name, output = file_name(index, BLOCKS[index]), folder / f"output_{index}.txt"
    process = forked.start(run_block, folder, name, output=output)
    process.join(240)
    process.kill()
    assert process.exitcode == 0, f"{BLOCKS[index]}\n{output.read_text()}"
