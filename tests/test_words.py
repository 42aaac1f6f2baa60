"""Private words that have been replaced stay out."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
REPLACED = {
    "anew": "again",
    "bell": "event",
    "bells": "events",
    "buried": "reaped",
    "bury": "reap",
    "crew": "supervisor",
    "exchange": "worker handshake",
    "floors": "layers",
    "go on": "continue",
    "goes on": "continues",
    "gone on": "continued",
    "horizon": "training budget",
    "house": "project",
    "kindly": "with SIGTERM",
    "lane": "policy pipeline",
    "lanes": "policy pipelines",
    "law": "bound",
    "lifeline": "parent watch",
    "lies": "is in, is stored",
    "mend": "fix",
    "mended": "fixed",
    "mends": "fixes",
    "mourn": "on_exit",
    "noun": "subject",
    "nouns": "subjects",
    "push probability": "random-action bursts",
    "rings": "notifies",
    "rooms": "modules",
    "source: none": "no such line",
    "told": "given, passed",
    "under way": "in flight",
    "verdict": "kill_reason",
    "whoever": "the process that",
    "wing": "package",
    "wings": "packages",
}
"""Words, and what is said instead. Underscores and hyphens count as spaces."""
ALLOWED = {
    "CHANGELOG.md": set(REPLACED),
    "tests/test_words.py": set(REPLACED),
    # Names of PufferLib (bptt_horizon) and Isaac Lab (is_finite_horizon).
    "benchmarks/peers/pufferlib/run.py": {"horizon"},
    "envs/sim/adapters/isaaclab.py": {"horizon"},
    "tests/envs/sim/fake_isaaclab.py": {"horizon"},
    "tests/envs/sim/test_isaaclab.py": {"horizon"},
    # The table of renamed keys says what they were.
    "unirl/config/spelling.py": {"push probability"},
}
"""Files that may use some of them: to quote older versions, or a name of another system."""
PATTERN = re.compile(r"\b(" + "|".join(map(re.escape, REPLACED)) + r")\b", re.IGNORECASE)


def texts() -> list[str]:
    """Python, documents, settings and the Makefile, by their names in the repository."""
    # A checkout of another user (a container's, say) is read all the same.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if listed.returncode != 0:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    names = [name for name in listed.stdout.split("\0") if name.endswith((".py", ".md", ".toml"))]
    return sorted(name for name in [*names, "Makefile"] if (ROOT / name).is_file())


def as_words(text: str) -> str:
    return re.sub(r"[_-]", " ", text)


def test_replaced_words_are_neither_in_files_nor_in_their_names() -> None:
    found = []
    for name in texts():
        lines = [name, *(ROOT / name).read_text().splitlines()]
        for number, line in enumerate(lines):
            for word in {word.lower() for word in PATTERN.findall(as_words(line))}:
                if word not in ALLOWED.get(name, set()):
                    found.append(f"{name}:{number}: {word} -> {REPLACED[word]}: {line.strip()}")
    assert not found, "\n".join([f"{len(found)} lines", *found])
