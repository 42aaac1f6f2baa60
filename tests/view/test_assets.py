"""The built page in the repository is that of its sources."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

VIEW = Path(__file__).resolve().parents[2] / "unirl" / "view"
ASSETS, SOURCES = VIEW / "assets", VIEW / "app"


def digest_of_sources() -> str:
    """As build.mjs computes it."""
    files = {
        path.relative_to(SOURCES).as_posix(): path
        for path in SOURCES.rglob("*")
        if path.is_file()
        and not any(
            part == "node_modules" or part.startswith(".")
            for part in path.relative_to(SOURCES).parts
        )
    }
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(name.encode() + b"\0" + files[name].read_bytes() + b"\0")
    return digest.hexdigest()


def test_the_page_was_built_from_the_sources_that_are_there() -> None:
    built = (ASSETS / "sources.sha256").read_text().strip()
    assert built == digest_of_sources(), "cd unirl/view/app && npm ci && npm run build"


def test_the_page_names_no_other_machine() -> None:
    # Names of XML's vocabularies are no addresses.
    vocabularies = {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML",
                    "http://www.w3.org/1999/xhtml", "http://www.w3.org/1999/xlink"}  # fmt: skip
    for name in ("app.js", "app.css", "index.html"):
        found = set(re.findall(r"https?://[\w./-]+", (ASSETS / name).read_text()))
        assert found <= vocabularies, name


def test_licences_of_what_is_bundled_come_with_it() -> None:
    licences = (ASSETS / "LICENSES.txt").read_text()
    for package in ("preact", "uplot"):
        assert re.search(rf"^{package} [\d.]+ \(MIT\)$", licences, re.MULTILINE), package
    assert licences.count("Permission is hereby granted") == 2


def test_no_text_is_inserted_as_markup() -> None:
    for path in (SOURCES / "src").rglob("*.ts*"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", path.read_text()
        ), path
