"""The disk of the store is full while agents act: the run continues and counts, or it ends in three
parts; what was stored can be read, and there is more of it when there is room again.

A file system of its own needs root, and SQLite's `max_page_count` is of one connection, which a run
makes itself. So files may not grow beyond a limit (RLIMIT_FSIZE), which only the log of the store
does: each of its transactions writes whole pages, while metrics and checkpoints stay small.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="language models need the extra llm")

import unirl
from tests import forked
from tests.system.test_agent_ledger import BATCH, GROUP, SETTINGS
from unirl import cli
from unirl.llm.models.tiny import make_tiny
from unirl.llm.trajectories.config import FILE, StoreConfig
from unirl.llm.trajectories.store import open_store

LIMIT = 700_000
UPDATES = 40


def run_limited(folder: Path) -> int:
    """Runs with too little room, and the first of them once more with enough."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, most))
    config, ended = str(folder / "config.toml"), {}
    for name, flags in (("continues", []), ("ends", ["--store.required"])):
        errors = io.StringIO()
        words = ["train", "agent", f"@{config}", "--name", name, "--no-console", *flags]
        with contextlib.redirect_stderr(errors):
            ended[name] = (cli.main(words), errors.getvalue())
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    words = ["resume", "runs/continues", "--no-console", "--run.total-steps"]
    code = cli.main([*words, str(2 * UPDATES * BATCH * GROUP)])
    (folder / "ended.json").write_text(json.dumps({**ended, "resumed": (code, "")}))
    return 0


def test_a_full_disk_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = str(make_tiny(tmp_path / "tiny", width=32, layers=1))
    settings = {"model.path": model, "run.total_steps": UPDATES * BATCH * GROUP}
    plan = unirl.make_plan("agent", **{**SETTINGS, **settings})
    (tmp_path / "config.toml").write_text(unirl.config.to_toml(plan.config, recipe="agent"))
    output = tmp_path / "output.txt"
    process = forked.start(run_limited, tmp_path, output=output)
    process.join(120)
    assert process.exitcode == 0, output.read_text()
    ended = json.loads((tmp_path / "ended.json").read_text())
    code, errors = ended["ends"]
    lines = errors.splitlines()
    assert code == 2 and len(lines) == 3 and "store.required is true" in errors, ended
    assert ended["continues"][0] == ended["resumed"][0] == 0, ended
    run_dir = tmp_path / "runs" / "continues"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    lost = {row["charts/updates"]: row.get("store/failed", 0) for row in rows}
    assert 0 < lost[UPDATES] == lost[2 * UPDATES] < UPDATES * BATCH * GROUP
    with closing(open_store(StoreConfig(), run_dir, create=False)) as store:
        assert store.database.execute("PRAGMA integrity_check") == [("ok",)]
        found = store.find(limit=10**6)
        for row in found:
            store.get(int(row["id"]))
        marks = dict(store.database.execute("SELECT ticket, update_number FROM lease"))
    tickets = {row["ticket"] for row in found}
    assert min(tickets) == 0 and set(range((UPDATES + 1) * BATCH, 2 * UPDATES * BATCH)) <= tickets
    assert (run_dir / FILE).stat().st_size > 0
    # Marks of what the full disk did not take are written later, if the run was there to do so.
    assert all(marks[ticket] == 1 + ticket // BATCH for ticket in marks)
