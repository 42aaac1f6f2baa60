"""The documentation speaks of what is there: metrics have their rows, links lead somewhere."""

from __future__ import annotations

import functools
import itertools
import json
import re
from pathlib import Path

import pytest

import unirl
from unirl import registry
from unirl.config import fields_help

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SPEAKING = [
    path
    for path in DOCUMENTS
    if path.parent.name != "decisions" and path.name not in ("CHANGELOG.md", "python.md")
]
"""Pages that speak of settings as they are; in python.md such words are of programs, which run."""
OWN_KEYS = (
    "mix.",
    "agent.options.",
    "env.kwargs.",
    "reward.weights.",
    "task.mix.",
    "population.vary.",
)
"""Tables whose keys are the user's own."""
COLUMNS = {"step", "seconds"}
"""What a row of metrics.jsonl says about itself: where in the run it was written."""


GENERATED = re.compile(
    r"docs/(reference/(config/\w+|configs|commands|python)|decisions/index)\.md$"
)
"""Pages that the site makes from the code (docs/hooks); its strict build checks links to them."""


def documented() -> list[str]:
    """Names in the first column of the tables, `{a,b}` written out; `<x>` is any one word."""
    names = []
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        row = re.match(r"\| `([^`]+)` \|", line)
        if row:
            parts = re.split(r"\{([^}]*)\}", row[1])
            # Every second part was in braces.
            choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
            names += ["".join(choice) for choice in itertools.product(*choices)]
    return names


def is_documented(name: str) -> bool:
    patterns = (re.sub(r"<[^>]+>", "[^/]+", re.escape(entry)) for entry in documented())
    return any(re.fullmatch(pattern, name) for pattern in patterns)


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Every name that a short run with evaluations writes."""
    run_dir = tmp_path_factory.mktemp("runs") / "metrics"
    overrides = {
        "env.id": "CartPole-v1",
        "run.total_steps": 8192,
        "run.log_seconds": 0.0,
        "run.eval_steps": 4096,
        "run.eval_episodes": 2,
    }
    unirl.run(unirl.make_plan("impala", **overrides), run_dir, console=False)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {name for row in rows for name in row}


def test_a_short_run_emits_every_group_of_metrics(emitted: set[str]) -> None:
    groups = {name.split("/")[0] for name in emitted - COLUMNS}
    assert {"charts", "losses", "staleness", "queue", "time", "perf", "eval"} <= groups


def test_every_metric_of_a_run_has_a_row_in_metrics_md(emitted: set[str]) -> None:
    unknown = sorted(name for name in emitted - COLUMNS if not is_documented(name))
    assert not unknown, f"docs/metrics.md has no row for {unknown}"


def test_a_name_that_is_not_documented_is_found() -> None:
    assert is_documented("queue/discarded/stale")
    assert is_documented("time/learner/wait")
    assert not is_documented("queue/discarded/stale/twice")
    assert not is_documented("losses/made_up")


def test_every_metric_is_documented_once() -> None:
    names = documented()
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            path = document.parent / target
            is_generated = GENERATED.search(path.resolve().as_posix()) is not None
            assert path.exists() or is_generated, f"{document}: {target}"


@functools.cache
def settings() -> set[str]:
    """Every key of every recipe, and every table."""
    items = (fields_help(registry.recipe(name).Config) for name in registry.RECIPES)
    keys = [item.key for each in items for item in each]
    tables = [key.split(".")[:i] for key in keys for i in range(1, key.count(".") + 1)]
    return {*keys, *map(".".join, tables)}


def named_settings(document: Path) -> set[str]:
    """What looks like a setting in a page's prose: `queue.window`, `--queue.window 2`."""
    text = document.read_text()
    if document.parent.name == "migration":  # a table's first column has the other's names
        text = re.sub(r"^\|[^|]*\|", "", text, flags=re.MULTILINE)
    names = re.findall(r"`(?:--)?([a-z]\w*(?:\.[\w-]+)+)[` =]", text)
    return {name.replace("-", "_") for name in names if not name.endswith((".json", ".db", ".pt"))}


@pytest.mark.parametrize("document", SPEAKING, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_setting_that_a_page_names_exists(document: Path) -> None:
    known = settings()
    tables = {key for key in known if "." not in key}
    named = {key for key in named_settings(document) if key.split(".")[0] in tables}
    unknown = [key for key in named - known if not key.startswith(OWN_KEYS)]
    assert not unknown


def test_decisions_are_numbered_without_a_gap_and_stay_short() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [int(path.name[:3]) for path in decisions] == list(range(1, len(decisions) + 1))
    for path in decisions:
        lines = path.read_text().splitlines()
        assert lines[0].startswith(f"# {path.name[:3]} ")
        assert len(lines) <= 20, f"{path} has {len(lines)} lines: a decision fits ten, or nearly"
