"""The glossary speaks of the code as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("unirl", "actors", "envs", "learners", "llm", "vtrace")


def terms() -> list[str]:
    """The first column of the glossary's table."""
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    return [row for row in rows[1:] if not row.startswith("-")]


@pytest.fixture(scope="module")
def code() -> str:
    """All source, in which "run outputs", `run_outputs` and `RunOutputs` are alike."""
    files = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    return "".join(re.sub(r"[\s_]", "", path.read_text().lower()) for path in files)


@pytest.mark.parametrize("term", terms())
def test_each_term_of_the_glossary_is_used_in_the_code(term: str, code: str) -> None:
    assert re.sub(r"\s", "", term) in code


def test_each_term_is_explained_once() -> None:
    assert sorted(set(terms())) == sorted(terms())
