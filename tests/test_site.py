"""The documentation's site: built strictly, without a request, and nothing in it asks for one."""

from __future__ import annotations

import logging
import re
import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest

pytest.importorskip("mkdocs", reason="the site is built with the extra docs")

import unirl
from tests import forked
from unirl import cli, registry
from unirl.config import fields_help

ROOT = Path(__file__).resolve().parents[1]
FETCHED = re.compile(
    r"""<(?:script|img|iframe|source|video)[^>]*\ssrc=["']?(?:https?:)?//[^>]*>"""
    r"""|<link(?=[^>]*rel=["']?(?:stylesheet|preload|preconnect|icon|dns-prefetch|modulepreload))"""
    r"""[^>]*href=["']?(?:https?:)?//[^>]*>|url\(["']?(?:https?:)?//|@import\s+["'](?:https?:)?//""",
    re.IGNORECASE,
)
"""What a browser fetches by itself; a link that a reader follows is not."""


def build(site: Path) -> None:
    """As `make docs`, in a process that reaches no network."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    def refused(*arguments: Any) -> NoReturn:
        raise AssertionError(f"the build connects to {arguments[1:]}")

    socket.socket.connect = refused  # type: ignore[method-assign,assignment]
    logging.basicConfig(level=logging.WARNING)
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(site), strict=True))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    process = forked.start(build, folder / "site", output=folder / "output.txt")
    process.join(200)
    process.kill()
    assert process.exitcode == 0, (folder / "output.txt").read_text()
    return folder / "site"


def page(site: Path, name: str) -> str:
    return (site / name).read_text(encoding="utf-8")


def test_the_site_builds_strictly_and_every_page_is_there(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    for name in pages:
        built = "index" if name.stem == "README" else name.stem
        assert (site / name).with_name(f"{built}.html").is_file(), name


def test_nothing_in_the_site_is_fetched_from_elsewhere(site: Path) -> None:
    for path in [*site.rglob("*.html"), *site.rglob("*.css")]:
        found = FETCHED.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.relative_to(site)}: {found and found[0]}"
    script = '<script src="https://unpkg.com/x"></script>'
    assert FETCHED.search(script) and not FETCHED.search('<a href="https://ray.io">Ray</a>')


def test_the_search_needs_no_server(site: Path) -> None:
    assert (site / "search" / "search_index.js").is_file()
    assert (site / "assets" / "iframe-worker.js").is_file()
    assert "assets/iframe-worker.js" in page(site, "index.html")


@pytest.mark.parametrize("recipe", registry.RECIPES)
def test_every_key_of_a_recipe_has_its_place(recipe: str, site: Path) -> None:
    text = page(site, f"reference/config/{recipe}.html")
    for item in fields_help(registry.recipe(recipe).Config):
        assert f'id="{item.key}"' in text, item.key


def test_every_command_and_every_exported_name_is_described(site: Path) -> None:
    commands = page(site, "reference/commands.html")
    assert all(f'id="unirl-{name}"' in commands for name in cli.COMMANDS)
    python = page(site, "reference/python.html")
    for name in ("make_plan", "run", "Plan", "Slot", "Batch", "LearnerPlan", "UniRLError"):
        assert f'id="{getattr(unirl, name).__module__}.{name}"' in python, name


def test_figures_come_from_the_results(site: Path) -> None:
    text = page(site, "reference/policies.html")
    assert "<strong>acrobot</strong>, mean over seeds" in text
    assert "benchmarks/curves/acrobot.png" in text
    assert (site / "benchmarks" / "curves" / "acrobot.png").is_file()
