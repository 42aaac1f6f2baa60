"""What a person waits for at the page of `unirl view`, in a browser: first paint, and filters.

    python benchmarks/view.py --make FOLDER       # 200 runs of 100 000 rows, 100 000 episodes
    python benchmarks/view_page.py --folder FOLDER --write

Times are those of the browser: from the navigation until the list and the curves are there, and
from a letter that is typed until the frame that shows what was found.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import measure

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.view.browser import Visit, browser, served

PAINTED = """() => performance.getEntriesByName('first-contentful-paint')[0].startTime"""
# A frame after the one in which the words have changed, the new one is on the screen.
TYPED = """([input, status, text]) => new Promise((found, failed) => {
  setTimeout(() => failed(new Error(`nothing changed after ${text}`)), 10000);
  const [field, words] = [document.querySelector(input), document.querySelector(status)];
  const [before, begin] = [words.textContent, performance.now()];
  let wasBusy = false;
  new MutationObserver((_, observer) => {
    const isBusy = words.ariaBusy === 'true';
    wasBusy ||= isBusy;
    if (isBusy || (!wasBusy && words.textContent === before)) return;
    observer.disconnect();
    requestAnimationFrame(() => setTimeout(() => found(performance.now() - begin)));
  }).observe(document.querySelector('main'), { subtree: true, childList: true, characterData: true,
    attributes: true });
  field.value = text;
  const kind = field.tagName === 'SELECT' ? 'change' : 'input';
  field.dispatchEvent(new Event(kind, { bubbles: true }));
})"""


def look(folder: Path) -> list[tuple[str, str]]:
    with browser() as chromium, served(folder) as address:
        visit = Visit(chromium.new_context(viewport={"width": 1280, "height": 800}), address)
        page = visit.page
        page.locator(".plot canvas").wait_for()
        painted = page.evaluate(PAINTED)
        charts = page.evaluate("performance.now()")
        typed = [
            page.evaluate(TYPED, [".search input", ".count", text])
            for text in ("run-1", "run-12", "run-123", "", "nothing", "appo", "appo run-0", "199")
        ]
        first = visit.context.request.get(f"{visit.origin}/api/runs").json()[0]["id"]
        visit.open(f"#/runs/{first}")
        begin = page.evaluate("performance.now()")
        page.locator(".plot canvas").first.wait_for()
        run = page.evaluate("performance.now()") - begin
        visit.open(f"#/runs/{first}/episodes")
        page.locator("tbody tr").first.wait_for()
        filters = [
            page.evaluate(TYPED, [f".find {field}", ".count", text])
            for field, text in (
                ("select", "task3"), ("input[aria-label='reward to']", "0.5"), ("select", "task7"),
                ("input[type=search]", "21"), ("input[type=search]", ""), ("select", ""),
            )
        ]  # fmt: skip
        assert not visit.strangers and not visit.complaints, (visit.strangers, visit.complaints)
    return [
        ("first paint (<= 2 s)", f"{painted / 1000:.2f} s"),
        ("list of all runs and the newest ones' curves are there", f"{charts / 1000:.2f} s"),
        ("a run's page from a click to its first chart", f"{run / 1000:.2f} s"),
        (f"{len(typed)} filters of the list: median, slowest (<= 0.3 s)", seconds(typed)),
        (f"{len(filters)} filters of episodes: median, slowest (<= 0.3 s)", seconds(filters)),
    ]


def seconds(found: list[float]) -> str:
    return f"{statistics.median(found) / 1000:.3f} s, {max(found) / 1000:.3f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="written by view.py --make")
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    options = parser.parse_args()
    measure.exit_on_terminate()
    text = measure.table(("what", "measured"), look(options.folder))
    print(text)
    if options.write:
        measure.write_block("view-page", text)


if __name__ == "__main__":
    main()
