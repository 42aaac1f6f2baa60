"""Pages of the site that are files of the repository outside docs/, and links that lead out of it.

A page may link to any file of the repository, so that links work where the repository is browsed,
too. On the site a link to a page becomes one to that page, and one to source code becomes its
name. `<!-- results: NAME -->` stands for the block of that name in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "benchmarks/RESULTS.md"
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", RESULTS, "benchmarks/peers/README.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
BLOCK = re.compile(r"<!-- results: ([\w-]+) -->")


def on_files(files: Any, config: Any) -> Any:
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for picture in sorted((ROOT / "benchmarks" / "curves").glob("*.png")):
        name = picture.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(picture)))
    files.append(File.generated(config, "decisions/index.md", content=decisions()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    name = page.file.src_uri
    markdown = BLOCK.sub(lambda found: results(found[1], name), markdown)
    home = PurePosixPath(name) if name in PAGES else PurePosixPath("docs", name)

    def on_the_site(found: re.Match[str]) -> str:
        picture, text, target, anchor = found[1], found[2], found[3], found[4] or ""
        if "://" in target or target.startswith("mailto:"):
            return found[0]
        path = os.path.normpath(home.parent / target)
        path = path.removeprefix("docs/")
        if path.startswith("decisions") and not Path(path).suffix:
            path = "decisions/index.md"
        if files.get_file_from_path(path) is None and (ROOT / path).exists():
            return text  # source code: named, not shown
        return f"{picture}[{text}]({os.path.relpath(path, Path(name).parent)}{anchor})"

    return LINK.sub(on_the_site, markdown)


def results(name: str, page: str) -> str:
    """A block of RESULTS.md, with its pictures as seen from another page."""
    text = (ROOT / RESULTS).read_text(encoding="utf-8")
    block = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", text, re.DOTALL)
    if block is None:
        raise PluginError(f"{page}: {RESULTS} has no block {name}")
    up = os.path.relpath("benchmarks", Path("docs", page).parent)
    return re.sub(r"\]\((curves/)", rf"]({up}/\1", block[1])


def decisions() -> str:
    """A list of all decisions by their titles."""
    lines = ["# Decisions", "", "Choices that had a real alternative, about ten lines each.", ""]
    for path in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines)
