"""A browser for the tests of the page, and the server that they look at."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# It is to ask nobody for anything by itself.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT = 20_000
"""Milliseconds, far beyond the usual."""


def find_browser() -> str:
    named = os.environ.get("UNIRL_CHROMIUM", "")
    found = named or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(
            "no browser: install Debian's package chromium (apt-get install chromium), "
            "or name one: UNIRL_CHROMIUM=/path/to/chrome"
        )
    return found


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    path = find_browser()
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield started
        finally:
            started.close()


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address, with its token, at which `unirl view` shows the runs in a folder."""
    command = [sys.executable, "-m", "unirl", "view", str(folder), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, f"unirl view said {line!r}"
        yield line[line.index("http://") :].split()[0]
    finally:
        process.terminate()
        process.wait(30)


class Visit:
    """A page of a browser; what it asks other machines for, and what it complains of, is kept."""

    def __init__(self, context: BrowserContext, address: str) -> None:
        parts = urlsplit(address)
        self.origin = f"{parts.scheme}://{parts.netloc}"
        self.context = context
        self.strangers: list[str] = []
        self.complaints: list[str] = []
        context.on("request", lambda request: self._note(request.url))
        self.page: Page = context.new_page()
        self.page.set_default_timeout(WAIT)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on(
            "console",
            lambda message: message.type == "error" and self.complaints.append(message.text),
        )
        self.page.goto(address)

    def _note(self, url: str) -> None:
        if not url.startswith((f"{self.origin}/", "data:", "blob:")):
            self.strangers.append(url)

    def open(self, place: str) -> Page:
        self.page.goto(f"{self.origin}/{place}")
        self.page.locator("h1").wait_for()
        return self.page


def findings(page: Page) -> list[str]:
    """What axe finds that keeps people out."""
    # One of many equal rows is as good as all, and takes a tenth of the time.
    found = Axe().run(page, {"exclude": [["tbody tr:nth-child(n+6)"]]}).response["violations"]
    return [
        f"{each['id']} ({each['impact']}): {node['html'][:200]}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]
