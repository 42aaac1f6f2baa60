"""Code blocks of the documentation's pages, and what their pages say about how a test runs them.

A comment before a block changes that, in the page's source and nowhere else:
`<!-- shortened: --run.total-steps 2000 -->` appends these words to what trains or measures in a
`sh` block; `<!-- shortened: 50_000 -> 5_000 -->` replaces text of a `python` or `toml` block; and
`<!-- not run: needs a GPU -->` leaves the block alone, for a reason that test_pages.py counts.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
LONG = ("train", "resume", "bench", "tune", "sweep")
"""Commands of `unirl` that may take long."""
BLOCK = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*) -->\n\n?)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    note: str = ""
    """What its comment says: how it is shortened, or why it is not run."""

    @property
    def reason(self) -> str:
        """Why it is not run; empty: it is."""
        return self.note.partition("not run: ")[2]

    def at_full_length(self) -> Block:
        """The same, as a reader runs it."""
        return replace(self, note=self.note if self.reason else "")

    @property
    def file_name(self) -> str:
        """A block that begins with a file's name (`# my_env.py`) is that file, for later ones."""
        named = re.match(r"# ([\w-]+\.(?:py|toml))\b", self.text)
        return named[1] if named else f"block_{self.line}.py"

    @property
    def source(self) -> str:
        """The text of a file, shortened as its comment says."""
        text = self.text
        shortened = self.note.partition("shortened: ")[2]
        for change in filter(None, shortened.split("; ")):
            before, arrow, after = change.partition(" -> ")
            assert arrow and before in text, f"{self.page}:{self.line}: {change} changes nothing"
            text = text.replace(before, after)
        return text

    def commands(self) -> list[list[str]]:
        """The words of each command of a `sh` block, shortened as its comment says."""
        extra = shlex.split(self.note.partition("shortened: ")[2])
        lines = self.text.replace("\\\n", " ").splitlines()
        commands = [words for line in lines if (words := shlex.split(line, comments=True))]
        return [[*words, *extra] if words[1] in LONG else words for words in commands]


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, found.start("text")),
            found["language"],
            found["text"],
            found["note"] or "",
        )
        for found in BLOCK.finditer(text)
    ]
