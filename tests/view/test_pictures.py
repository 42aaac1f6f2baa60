"""The pictures of the docs: runs of a few minutes, made for them, as the page shows them.

    UNIRL_VIEW_PICTURES=docs/images python -m pytest -m slow tests/view/test_pictures.py

Two seeds of CartPole, one that learns from samples of up to three updates ago and loses an actor,
and a language model that learns to ask a calculator.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.view.browser import ROOT, Visit, browser, findings, served
from unirl.llm.trajectories.config import StoreConfig
from unirl.llm.trajectories.filter import Filter
from unirl.llm.trajectories.reading import open_to_read

pytestmark = pytest.mark.slow
PICTURES = "UNIRL_VIEW_PICTURES"
"""Names, in the environment, the folder for the pictures: docs/images."""
MAX_BYTES = 250_000
FAULTY = (
    "@cartpole", "--name", "cartpole-async", "--runner.kind", "processes", "--actor.num-actors",
    "2", "--actor.num-envs", "64", "--queue.max-staleness", "3", "--queue.window", "4",
    "--run.eval-steps", "100000", "--run.target-return", "none", "--run.total-steps", "500000",
)  # fmt: skip


def start(runs: Path, *words: str, log_seconds: float = 0.1) -> subprocess.Popen[bytes]:
    words = (*words, "--runs-dir", str(runs), "--run.log-seconds", str(log_seconds))
    command = [sys.executable, "-m", "unirl", "train", *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("pictures") / "runs"
    for seed in ("1", "2"):
        training = start(runs, "@cartpole", "--run.seed", seed, "--name", f"cartpole-{seed}")
        assert training.wait(300) == 0
    training = start(runs, *FAULTY)
    while training.poll() is None and len(rows(runs / "cartpole-async/metrics.jsonl")) < 20:
        time.sleep(0.05)
    events = rows(runs / "cartpole-async/events.jsonl")
    os.kill(next(each["pid"] for each in events if each.get("member") == "actor 1"), signal.SIGKILL)
    assert training.wait(300) == 0
    assert start(runs, "@agent-calculator", log_seconds=1.0).wait(600) == 0
    return runs


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


def test_pictures_of_real_runs(runs: Path, chromium: Browser, tmp_path: Path) -> None:
    episode, ticket = interesting(runs / "agent-calculator")
    with served(runs) as address:
        visit = Visit(chromium.new_context(viewport={"width": 1280, "height": 800}), address)
        found = visit.context.request.get(f"{visit.origin}/api/runs").json()
        ids = {each["name"]: each["id"] for each in found}
        agent = f"#/runs/{ids['agent-calculator']}"
        cartpoles = ",".join(id for name, id in ids.items() if name.startswith("cartpole"))
        pages = {
            "runs": f"#/?runs={cartpoles}",
            "run": f"#/runs/{ids['cartpole-async']}",
            "episodes": f"{agent}/episodes",
            "episode": f"{agent}/episodes/{episode}",
            "group": f"{agent}/groups/{ticket}",
        }
        for name, where in pages.items():
            for scheme in ("light", "dark") if name == "run" else ("light",):
                page = visit.open(where)
                page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
                page.locator("[aria-busy=true]").first.wait_for(state="detached")
                page.wait_for_load_state("networkidle")
                suffix = "" if scheme == "light" else "-dark"
                path = Path(os.environ.get(PICTURES) or tmp_path) / f"view-{name}{suffix}.png"
                # Of a long table its beginning.
                is_whole = name != "episodes"
                page.screenshot(path=path, full_page=is_whole, animations="disabled")
                assert path.stat().st_size < MAX_BYTES
                assert findings(page) == []
        assert visit.strangers == [] and visit.complaints == []


def interesting(run: Path) -> tuple[int, int]:
    """An episode and its ticket: of those whose group is right in part, the one with most tokens
    that the learner has shown to be better or worse than others.
    """
    found: list[tuple[int, int, int]] = []
    with closing(open_to_read(StoreConfig(), run)) as store:
        for row in rows(run / "samples/samples.jsonl"):
            group = store.find(Filter(ticket=row["ticket"]))
            own = [each["id"] for each in group if each["place"] == row["place"]]
            if own and "each" in row and len({each["reward"] for each in group}) > 1:
                marked = sum(value not in (None, 0) for value in row["each"]["advantage"])
                found.append((marked, own[0], row["ticket"]))
    _, episode, ticket = max(found)
    return episode, ticket
