"""The tool `search`: passages of a corpus by their words, ranked by BM25, in SQLite's FTS5.

The corpus is the task `people`'s, or that of option `corpus`: a file with a passage a line, or
JSONL with a field `text`. It is read once for a process, into memory.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

from unirl.errors import UniRLError
from unirl.llm.agents.tools.tool import ToolError
from unirl.llm.tasks.people import passages

_MOST_WORDS = 32


class Corpus:
    def __init__(self, texts: Iterator[str], num_results: int) -> None:
        # Only read from here on, and SQLite itself lets one thread in at a time.
        self._base = sqlite3.connect(":memory:", check_same_thread=False)
        self._num_results = num_results
        self._base.execute("CREATE VIRTUAL TABLE passage USING fts5(text)")
        self._base.executemany("INSERT INTO passage VALUES (?)", ((text,) for text in texts))
        self._base.commit()

    def search(self, query: str) -> str:
        """Find passages that have words of the query, the best first.

        Args:
            query: Some words, such as a name.
        """
        # Words alone, each in quotes: what the model writes is never a query of FTS5's language.
        words = re.findall(r"\w+", query)[:_MOST_WORDS]
        if not words:
            raise ToolError("the query has no words.")
        found = self._base.execute(
            "SELECT text FROM passage WHERE passage MATCH ? ORDER BY rank, rowid LIMIT ?",
            (" OR ".join(f'"{word}"' for word in words), self._num_results),
        )
        lines = [f"{i}. {text}" for i, (text,) in enumerate(found, 1)]
        return "\n".join(lines) or "Nothing was found."


def make_corpus(options: Mapping[str, str]) -> Corpus:
    """options: corpus (a file), results (how many passages; 3)."""
    number = options.get("results", "3")
    if not (number.isascii() and number.isdecimal() and 1 <= int(number) <= 100):
        raise UniRLError(
            f'agent.options.results is "{number}"',
            "search returns from 1 to 100 passages",
            "3 is the default",
        )
    path = options.get("corpus")
    texts = iter(passages()) if path is None else _read(Path(path))
    return Corpus(texts, int(number))


def _read(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UniRLError(
            f"the corpus {path} cannot be read", str(error), "correct agent.options.corpus"
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield line
            continue
        try:
            yield str(json.loads(line)["text"])
        except (ValueError, KeyError, TypeError) as error:
            raise UniRLError(
                f"line {number} of the corpus {path} is no passage",
                f'it must be JSON with a field "text": {error}',
                "correct the line",
            ) from error
