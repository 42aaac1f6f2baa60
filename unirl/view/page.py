"""One HTML file that shows some runs by itself: the page with its script, its style, and what the
server would have answered.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.errors import UniRLError
from unirl.view.answers import as_error, as_json
from unirl.view.details import VIDEOS
from unirl.view.questions import bounded, words

if TYPE_CHECKING:
    from unirl.view.view import View

ASSETS = Path(__file__).parent / "assets"
MAX_RUNS, NUM_POINTS, NUM_EPISODES, MAX_EPISODES = 50, 300, 50, 500
_STYLE = '<link rel="stylesheet" href="/assets/app.css">'
_SCRIPT = '<script src="/assets/app.js" defer></script>'
_PLACE = "<!--saved-->"
_POLICY = (
    '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; media-src data:\">"
)
"""A saved page can ask nobody for anything."""
_FILE_BYTES = 30_000_000
"""Of videos and exports in a page; of what does not fit the page says what it is."""


def saved_page(view: View, query: Mapping[str, str]) -> str:
    """runs: their ids, all by default. episodes: ID:EPISODE, by default the newest of each run."""
    ids = words(query, "runs") or [str(row["id"]) for row in view.runs()]
    bounded(ids, "runs", MAX_RUNS)
    chosen: dict[str, list[str]] | None = None
    if query.get("episodes"):
        chosen = {id: [] for id in ids}
        for word in bounded(words(query, "episodes"), "episodes", MAX_EPISODES):
            id, _, episode = word.partition(":")
            chosen.setdefault(id, []).append(episode)
    files = Files()
    answers = _answers(view, ids, chosen, files)
    block = {"saved": time.time(), "answers": answers, "files": files.urls}
    # Nothing in it ends the element that holds it.
    text = as_json(block).replace("<", "\\u003c")
    page = _asset("index.html")
    for mark in (_STYLE, _SCRIPT, _PLACE, "<head>", "</body>"):
        if page.count(mark) != 1:
            raise UniRLError(
                "the page cannot be saved", f"index.html has {mark} once", "install UniRL again"
            )
    for mark, put in (
        (_SCRIPT, ""),
        ("</body>", f"<script>{_asset('app.js')}</script></body>"),
        (_STYLE, f"<style>{_asset('app.css')}</style>"),
        (_PLACE, f'<script type="application/json" id="saved">{text}</script>'),
        ("<head>", f"<head>{_POLICY}"),
    ):
        before, after = page.split(mark, 1)
        page = f"{before}{put}{after}"
    return page


class Files:
    """What a page links to, by the path that the server has it under: as data: URLs, as long as
    there is room.
    """

    def __init__(self) -> None:
        self.urls: dict[str, str] = {}
        self._room = _FILE_BYTES

    def put(self, path: str, kind: str, size: int, read: Callable[[], bytes]) -> None:
        if size <= self._room:
            self._room -= size
            self.urls[path] = f"data:{kind};base64,{base64.b64encode(read()).decode()}"


def _answers(
    view: View, ids: list[str], chosen: Mapping[str, list[str]] | None, files: Files
) -> dict[str, Any]:
    """By the path that the page would have asked."""
    rows = {row["id"]: row for row in view.runs()}
    together = ",".join(ids)
    found: dict[str, Any] = {
        "/api/runs": [rows[id] for id in ids if id in rows],
        "/api/compare": view.compare({"runs": together}),
    }
    found |= _sweeps(view, ids)
    series: dict[str, dict[str, Any]] = {"step": {}, "seconds": {}}
    for id in ids:
        base = f"/api/runs/{id}"
        names = view.names(id)
        found |= {base: view.run(id), f"{base}/names": names, f"{base}/events": view.events(id),
                  f"{base}/staleness": view.staleness(id)}  # fmt: skip
        for axis, of_axis in series.items():
            of_axis[id] = {}
            names = [*view.names(id), "seconds" if axis == "step" else "step"]
            for begin in range(0, len(names), 100):
                some = ",".join(names[begin : begin + 100])
                query = {"runs": id, "names": some, "x": axis, "points": str(NUM_POINTS)}
                of_axis[id] |= view.series(query)[id]
        found |= _episodes(view, id, None if chosen is None else chosen.get(id, []), files)
        for film in reversed(found[base]["videos"]):  # the newest first
            path = view.video(id, film["name"])
            kind = VIDEOS[path.suffix.lower()]
            files.put(f"{base}/videos/{film['name']}", kind, film["bytes"], path.read_bytes)
    return {**found, **{f"/api/series?x={axis}": each for axis, each in series.items()}}


def _sweeps(view: View, ids: list[str]) -> dict[str, Any]:
    """Those of which the page has runs."""
    rows, found = [], dict[str, Any]()
    for row in view.sweeps.all():
        if "error" in row:
            continue
        one = view.sweeps.one(row["id"])
        if any(run["id"] in ids for trial in one["trials"] for run in trial["runs"]):
            rows.append(row)
            found[f"/api/sweeps/{row['id']}"] = one
    return {"/api/sweeps": rows, **found}


def _episodes(view: View, id: str, chosen: list[str] | None, files: Files) -> dict[str, Any]:
    base, episodes = f"/api/runs/{id}", view.episodes(id)
    try:
        listed = view.find_episodes(id, {"limit": str(NUM_EPISODES)})
    except UniRLError as reason:  # a store that cannot be reached
        return {f"{base}/episodes": as_error(reason.parts)}
    names = [str(row["id"]) for row in listed["rows"]] if chosen is None else chosen
    opened = {name: episodes.open(name) for name in names}
    for name, one in opened.items():
        if one.get("source") == "store":
            text = episodes.export(name, "atif").text.encode()
            where = f"{base}/episodes/{name}/export?format=atif"
            files.put(where, "application/json", len(text), io.BytesIO(text).read)
    lines = ("turns", "outline", "rewards", "source")
    rows = [
        {**{key: value for key, value in one.items() if key not in lines},
         "turns": one.get("num_turns", len(one["turns"]))}
        for one in opened.values()
    ]  # fmt: skip
    tickets = {row["ticket"] for row in rows if isinstance(row.get("ticket"), int)}
    found = {f"{base}/episodes": {**listed, "rows": rows, "total": len(rows), "next": None}}
    found |= {f"{base}/episodes/{name}": one for name, one in opened.items()}
    for ticket in tickets:
        if ticket >= 0:
            found[f"{base}/groups/{ticket}"] = episodes.group(str(ticket))
    return found


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
