"""The documentation is a program: every block of every page runs, in order, as its page says."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked, pages
from tests.pages import ROOT, Block, blocks
from unirl import cli

PAGES = ["README.md", *pages.PAGES]
RUN = [page for page in PAGES if any(b.language in ("sh", "python") for b in blocks(page))]
SHORTENED = [page for page in RUN if any(b.note.startswith("shortened") for b in blocks(page))]
LANGUAGES = {"python", "sh", "toml", "text"}
"""A block of another kind would be checked by nobody."""
NOT_RUN = {
    "draws frames for a minute": 1,
    "installs packages": 3,
    "loads a model of 135M weights": 3,
    "measures for minutes": 3,
    "needs CleanRL": 1,
    "needs RLlib": 1,
    "needs Sample Factory": 1,
    "needs Stable-Baselines3": 1,
    "needs TRL": 1,
    "needs a GPU": 3,
    "needs a login at the hub": 1,
    "needs a cluster": 2,
    "needs a daemon of containers": 1,
    "needs a run that trains meanwhile": 1,
    "needs verl": 1,
    "serves until it is stopped": 3,
    "trains for 44 minutes": 1,
    "trains for minutes": 1,
}
"""Why blocks are not run, and how many: a mark more is a change of this file."""
MAX_LINES = 40


def of(language: str) -> list[Block]:
    return [block for page in PAGES for block in blocks(page) if block.language == language]


def run_command(folder: Path, words: list[str]) -> int:
    """As a reader's shell in this folder."""
    os.chdir(folder)
    sys.argv = ["unirl", *words]
    return cli.main()


def run_script(folder: Path, name: str) -> None:
    """As `python name` in this folder."""
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    runpy.run_path(str(folder / name), run_name="__main__")


def run_interpreter(folder: Path, name: str, seconds: float) -> None:
    """The same in a new interpreter: actors in processes look for the file that was started."""
    # From the checkout or from an installed wheel, whichever this interpreter has.
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, name]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, f"{name}\n{done.stdout}\n{done.stderr}"


def run(folder: Path, words: list[str], where: str, seconds: float) -> None:
    """One command of a page; forked where torch is loaded."""
    output = folder / "output.txt"
    if words[0] == "unirl":
        process = forked.start(run_command, folder, words[1:], output=output)
    else:
        assert words[0] == "python" and len(words) == 2, f"{where}: nothing runs {words}"
        if "processes" in (folder / words[1]).read_text():
            return run_interpreter(folder, words[1], seconds)
        process = forked.start(run_script, folder, words[1], output=output)
    process.join(seconds)
    process.kill()
    said = "\n".join(output.read_text().splitlines()[-40:])
    assert process.exitcode == 0, f"{where}: {' '.join(words)}\n{said}"
    output.unlink()
    return None


def run_page(folder: Path, all_blocks: list[Block], seconds: float = 240) -> None:
    """Save files and run commands in order."""
    for block in all_blocks:
        where = f"{block.page}:{block.line}"
        if block.reason or block.language == "text":
            continue
        if block.language == "sh":
            for words in block.commands():
                run(folder, words, where, seconds)
            continue
        (folder / block.file_name).write_text(block.source)
        others = [one.text for one in all_blocks if one != block and not one.reason]
        if block.language == "python" and not is_used(block.file_name, "".join(others)):
            run(folder, ["python", block.file_name], where, seconds)


@pytest.mark.parametrize("page", RUN)
def test_every_block_of_a_page_runs_in_order(page: str, tmp_path: Path) -> None:
    run_page(tmp_path, blocks(page))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", SHORTENED)
def test_every_block_of_a_page_runs_at_full_length(page: str, tmp_path: Path) -> None:
    run_page(tmp_path, [block.at_full_length() for block in blocks(page)], 1800)


def is_used(name: str, text: str) -> bool:
    """Whether a command runs this file, a program imports it, or a setting names it."""
    stem = re.escape(Path(name).stem)
    uses = rf"python {stem}\.py|^(?:import|from) {stem}\b|import.module\W+{stem}\b|\b{stem}:\w"
    return re.search(uses, text, re.MULTILINE) is not None


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page: str) -> None:
    for block in blocks(page):
        where = f"{page}:{block.line}"
        assert block.language in LANGUAGES, f"{where}: {block.language!r}"
        assert not block.note or block.note.startswith(("shortened: ", "not run: ")), where


def test_the_blocks_that_are_not_run_are_counted_with_their_reasons() -> None:
    found: dict[str, int] = {}
    for block in (block for page in PAGES for block in blocks(page) if block.reason):
        found[block.reason] = found.get(block.reason, 0) + 1
    assert found == NOT_RUN


@pytest.mark.parametrize("block", of("python"), ids=lambda block: f"{block.page}:{block.file_name}")
def test_a_program_is_short(block: Block) -> None:
    assert len([line for line in block.text.splitlines() if line.strip()]) <= MAX_LINES


def test_the_tutorials_show_an_own_environment_actor_and_learner() -> None:
    text = "".join(b.text for b in of("python") if b.page.startswith("docs/tutorials/"))
    for shown in ("gymnasium.register", "make_plan", "unirl.run", "def produce", "def step"):
        assert shown in text
