"""The page of `unirl view` in a real browser: what people do there, and what it must never do."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.view.browser import WAIT, Visit, browser, findings, served
from tests.view.page_runs import BEGAN, HOSTILE, add_lines, begin, row, write_runs
from tests.view.test_sweeps import write_sweep
from unirl import cli

FILM = "step 2 000.mp4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("view") / "runs"
    write_runs(folder)
    record_episode(folder.parent, folder / "cartpole-1" / "videos" / FILM)
    return folder


def record_episode(folder: Path, path: Path) -> None:
    """A video as users make it."""
    words = ["--run.total-steps", "2000", "--runner.kind", "inline", "--runs-dir", str(folder)]
    assert cli.main(["train", "@cartpole", "--name", "recorded", *words]) == 0
    assert cli.main(["play", str(folder / "recorded"), "--video", str(path)]) == 0


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def address(chromium: Browser, folder: Path) -> Iterator[str]:
    with served(folder) as address:
        yield address


@pytest.fixture(scope="module")
def shared(chromium: Browser, address: str) -> Iterator[Visit]:
    """One visit for all tests; at its end: no other machine was asked, and nothing failed."""
    context = chromium.new_context(viewport={"width": 1280, "height": 800}, accept_downloads=True)
    visit = Visit(context, address)
    yield visit
    context.close()
    assert visit.strangers == []
    assert visit.complaints == []


@pytest.fixture(scope="module")
def ids(shared: Visit) -> dict[str, str]:
    """Ids of the runs by their names."""
    found = shared.context.request.get(f"{shared.origin}/api/runs").json()
    return {each["name"]: each["id"] for each in found}


def episode_of(shared: Visit, ids: dict[str, str], task: str) -> str:
    where = f"{shared.origin}/api/runs/{ids['agent']}/episodes?task={task}"
    return str(shared.context.request.get(where).json()["rows"][0]["id"])


def test_runs_are_found_by_typing_and_their_curves_are_drawn(shared: Visit) -> None:
    page = shared.open("#/?runs=none")
    expect(page.get_by_role("status").filter(has_text="5 runs")).to_be_visible()
    page.get_by_role("searchbox", name="Filter runs").fill("cartpole slow")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_role("searchbox", name="Filter runs").fill("impala")
    page.get_by_role("checkbox", name="Show all of these").check()
    # Three seeds are one line with a band, the other config is a line of its own.
    expect(page.locator(".legend li")).to_have_count(2)
    expect(page.locator(".legend")).to_contain_text("mean of 3 seeds")
    expect(page.locator(".plot canvas")).to_be_visible()
    page.get_by_role("button", name="Result").click()
    assert page.locator("tbody .name").last.text_content() == "cartpole-slow"


def test_a_run_shows_its_pipeline_and_what_happened(shared: Visit, ids: dict[str, str]) -> None:
    page = shared.open(f"#/runs/{ids['cartpole-1']}")
    pipeline = page.get_by_role("img", name=re.compile("limited by: actors"))
    expect(pipeline).to_contain_text("of 12 slots")
    expect(pipeline).to_contain_text("limits the run")
    expect(page.get_by_role("img", name=re.compile("Shares of samples by age"))).to_be_visible()
    events = page.get_by_role("region", name="Faults, restarts, scaling")
    expect(events).to_contain_text("killed by SIGKILL")
    expect(page.get_by_role("region", name="Samples discarded")).to_contain_text("actor_died")
    page.get_by_role("link", name="Metrics").click()
    page.get_by_role("searchbox", name="Find metrics").fill("loss ent")
    expect(page.locator(".small.chart")).to_have_count(1)
    page.get_by_role("radio", name="seconds").check()
    expect(page.get_by_role("img", name="losses/entropy by seconds")).to_be_visible()


def test_configs_are_side_by_side_with_their_differences(
    shared: Visit, ids: dict[str, str]
) -> None:
    page = shared.open(f"#/compare?runs={ids['cartpole-1']},{ids['cartpole-slow']}")
    expect(page.locator("tr.differs")).to_have_count(1)
    expect(page.locator("tr.differs")).to_contain_text("learner.optimizer.lr")
    page.get_by_role("checkbox").check()
    expect(page.locator("tbody")).to_contain_text("CartPole-v1")


def test_an_episode_is_found_stepped_through_and_exported(
    shared: Visit, ids: dict[str, str]
) -> None:
    page = shared.open(f"#/runs/{ids['agent']}/episodes")
    page.get_by_label("Task").select_option("products")
    page.get_by_role("spinbutton", name="Reward from").fill("1")
    expect(page.get_by_role("status").filter(has_text="24 episodes")).to_be_visible()
    page.locator("tbody a").first.click()
    turn = page.get_by_role("heading", name=re.compile(r"Turn \d of 3"))
    expect(turn).to_have_text("Turn 1 of 3")
    page.get_by_role("button", name="Next").click()
    expect(turn).to_have_text("Turn 2 of 3")
    page.locator("h1").focus()
    page.keyboard.press("ArrowRight")
    expect(turn).to_have_text("Turn 3 of 3")
    page.keyboard.press("Home")
    expect(turn).to_have_text("Turn 1 of 3")
    # What is learned from it is seen first: all of a right answer is to become likelier.
    assert page.locator(".t.drawn.d8").count() == page.locator(".t.drawn").count() > 0
    page.get_by_label("Colour by").select_option("logp")
    assert page.locator(".t.drawn.d8").count() == 0 < page.locator(".t.drawn.s1").count()
    page.locator(".tokens").focus()
    page.keyboard.press("End")
    for words in ("log-probability -", "difference", "advantage 1", "version 1"):
        expect(page.locator(".readout")).to_contain_text(words)
    formats = {"ATIF": "schema_version", "verifiers": "traces", "OTLP": "resourceSpans"}
    for name, key in formats.items():
        with page.expect_download() as download:
            page.get_by_role("link", name=name).click()
        assert key in json.loads(Path(download.value.path()).read_text())


def test_forks_and_groups_are_seen(shared: Visit, ids: dict[str, str]) -> None:
    page = shared.open(f"#/runs/{ids['agent']}/episodes/{episode_of(shared, ids, 'forks')}")
    expect(page.locator(".fork")).to_have_count(2)
    page = shared.open(f"#/runs/{ids['agent']}/groups/3")
    expect(page.locator(".group article")).to_have_count(4)
    expect(page.locator("main")).to_contain_text("mean reward 0.5")


PLAYED = """async () => {
  const video = document.querySelector("video");
  await video.play();
  await new Promise((done) => video.addEventListener("timeupdate", () => video.currentTime > 0 && done()));
  video.pause();
  video.currentTime = 0.8 * video.duration;
  await new Promise((done) => (video.onseeked = done));
  return [video.readyState >= 2, video.videoWidth, video.currentTime / video.duration];
}"""  # noqa: E501


def test_a_recorded_episode_is_played_and_sought(shared: Visit, ids: dict[str, str]) -> None:
    answered = list[int]()
    shared.page.on("response", lambda it: "/videos/" in it.url and answered.append(it.status))
    page = shared.open(f"#/runs/{ids['cartpole-1']}")
    page.get_by_role("link", name="Videos").click()
    expect(page.get_by_role("figure")).to_contain_text(FILM)
    assert page.evaluate(PLAYED) == [True, 600, pytest.approx(0.8, abs=0.1)]
    assert set(answered) == {206}


def test_hostile_text_is_text(shared: Visit, ids: dict[str, str]) -> None:
    page = shared.open(f"#/runs/{ids['agent']}/episodes/{episode_of(shared, ids, 'hostile')}")
    main = page.locator("main")
    expect(main).to_contain_text("<img src=x onerror=")
    expect(main).to_contain_text(r"\x1b[31mred")
    assert "\u202e" not in (main.text_content() or "")
    assert page.locator("main img, main script").count() == 0
    assert page.title().startswith("Episode")
    # A long line is broken, not a reason to scroll the page sideways.
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def test_a_saved_file_opens_alone(
    chromium: Browser, shared: Visit, ids: dict[str, str], tmp_path: Path
) -> None:
    page = shared.open(f"#/?runs={ids['cartpole-1']},{ids['agent']}")
    with page.expect_download() as download:
        page.get_by_role("link", name="Save as one HTML file").click()
    saved = tmp_path / "saved.html"
    download.value.save_as(saved)
    context = chromium.new_context(offline=True)
    alone = Visit(context, saved.as_uri())
    alone.strangers.clear()  # the file itself
    expect(alone.page.locator("tbody tr")).to_have_count(2)
    expect(alone.page.locator(".plot canvas")).to_be_visible()
    alone.page.get_by_role("link", name="cartpole-1").click()
    expect(alone.page.get_by_role("img", name=re.compile("limited by: actors"))).to_be_visible()
    alone.page.get_by_role("link", name="Videos").click()
    assert alone.page.evaluate(PLAYED)[:2] == [True, 600]
    alone.page.get_by_role("link", name="Runs").click()
    alone.page.get_by_role("link", name="agent").click()
    alone.page.get_by_role("link", name="Episodes").click()
    alone.page.get_by_label("Task").select_option("hostile")
    alone.page.locator("tbody a").first.click()
    expect(alone.page.locator("main")).to_contain_text(HOSTILE[:40])
    with alone.page.expect_download() as download:
        alone.page.get_by_role("link", name="ATIF").click()
    assert "schema_version" in json.loads(Path(download.value.path()).read_text())
    expect(alone.page.get_by_role("link", name="OTLP")).to_have_count(0)
    context.close()
    assert alone.strangers == []
    assert alone.complaints == []


PAGES = {
    "runs": "#/?runs={cartpole-1},{cartpole-2},{cartpole-3},{cartpole-slow}",
    "run": "#/runs/{cartpole-1}",
    "metrics": "#/runs/{cartpole-1}/metrics?find=losses",
    "videos": "#/runs/{cartpole-1}/videos",
    "events": "#/runs/{cartpole-1}/events",
    "config": "#/runs/{cartpole-1}/config?with={cartpole-slow}",
    "compare": "#/compare?runs={cartpole-1},{cartpole-slow}",
    "episodes": "#/runs/{agent}/episodes",
    "episode": "#/runs/{agent}/episodes/2",
    "group": "#/runs/{agent}/groups/3",
}


@pytest.mark.parametrize("name", PAGES)
def test_everybody_can_use_it(name: str, shared: Visit, ids: dict[str, str]) -> None:
    """No finding of axe is serious, in light and in dark."""
    where = PAGES[name]
    for run, id in ids.items():
        where = where.replace(f"{{{run}}}", id)
    page = shared.open(where)
    page.locator("[aria-busy=true]").first.wait_for(state="detached")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        assert findings(page) == []
    page.emulate_media(color_scheme="light")


def test_a_phone_shows_it_without_scrolling_sideways(
    chromium: Browser, address: str, ids: dict[str, str]
) -> None:
    context = chromium.new_context(viewport={"width": 390, "height": 800}, has_touch=True)
    visit = Visit(context, address)
    for place in ("#/", f"#/runs/{ids['cartpole-1']}", f"#/runs/{ids['agent']}/episodes/2"):
        page = visit.open(place)
        page.locator("[aria-busy=true]").first.wait_for(state="detached")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, place
    context.close()


def test_what_is_not_there_is_explained(shared: Visit, ids: dict[str, str]) -> None:
    page = shared.open(f"#/runs/{ids['agent']}/episodes/123456")
    expect(page.get_by_role("alert")).to_be_visible(timeout=WAIT)
    shared.complaints.clear()  # the browser logs the 404


def test_rows_and_runs_appear_as_they_are_written(shared: Visit, folder: Path) -> None:
    page = shared.open("#/")
    expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
    live = folder / "while-looked-at"
    begin(live, (folder / "cartpole-1" / "config.toml").read_text().replace("= 1\n", "= 77\n"))
    draw = random.Random(0)
    add_lines(live / "metrics.jsonl", [row(1, draw)])
    started = {"time": BEGAN, "event": "started", "member": "run"}
    add_lines(live / "events.jsonl", [started])
    page.get_by_role("link", name="while-looked-at").click()
    steps = page.locator(".facts div", has_text="Steps").locator("dd").first
    expect(steps).to_have_text("2 000")
    for i in range(2, 5):
        add_lines(live / "metrics.jsonl", [row(i, draw)])
    expect(steps).to_have_text("8 000")
    add_lines(live / "events.jsonl", [{**started, "event": "died", "member": "actor 3"}])
    expect(page.locator("table.events")).to_contain_text("actor 3")


def test_a_sweep_is_a_table_of_its_trials(shared: Visit, folder: Path) -> None:
    write_sweep(folder / "lr")
    page = shared.open("#/sweeps")
    page.get_by_role("link", name="lr", exact=True).click()
    table = page.get_by_role("region", name="Trials", exact=True)
    expect(table.locator("tbody tr")).to_have_count(4, timeout=WAIT)
    expect(table.locator("tbody tr").first).to_contain_text("100 ± 14")
    expect(table).to_contain_text("<b>")  # as text
    page.get_by_role("button", name="learner.optimizer.lr").click()
    expect(table.locator("tbody tr").first).to_contain_text("failed")  # 1.0 is the largest
    assert page.get_by_role("img", name="by learner.optimizer.lr").locator("circle").count() == 2
    page.locator("[aria-busy=true]").first.wait_for(state="detached")
    assert findings(page) == []
    table.get_by_role("link", name="0", exact=True).click()
    expect(page.locator("h1")).to_contain_text("trial-000-seed-1")
