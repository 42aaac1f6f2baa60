"""Only a browser that was given the token is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.view.asking import TOKEN, Asker, ask
from tests.view.page_runs import CARTPOLE, write_run


@pytest.fixture
def asker(tmp_path: Path) -> Asker:
    write_run(tmp_path / "one", CARTPOLE.format(seed=1, lr=0.1), 1)
    return Asker(tmp_path)


@pytest.mark.parametrize("path", ["/", "/assets/app.js", "/api/runs", "/api/live", "/nowhere"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {TOKEN}"},
        {"cookie": "unirl-view-8265=wrong"},
        {"cookie": f"unirl-view-9999={TOKEN}"},
        {"cookie": "\x00;;=é"},
    ],
)
def test_nothing_is_answered_without_the_token(
    asker: Asker, path: str, headers: dict[str, str]
) -> None:
    answered = ask(asker.app, path, headers)
    assert answered.status == 401
    assert "token" in answered.error[0]
    assert TOKEN not in str(answered)


def test_the_printed_address_sets_a_cookie_and_leads_away_from_the_token(asker: Asker) -> None:
    answered = ask(asker.app, f"/?token={TOKEN}")
    assert answered.status == 303 and answered.headers["location"] == "/"
    cookie = answered.headers["set-cookie"]
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    kept = {"cookie": cookie.partition(";")[0]}
    assert ask(asker.app, "/", kept).status == 200
    assert len(ask(asker.app, "/api/runs", kept).value) == 1


def test_a_token_elsewhere_than_in_the_printed_address_is_none(asker: Asker) -> None:
    assert ask(asker.app, f"/api/runs?token={TOKEN}").status == 401
    assert ask(asker.app, "/?token=").status == 401


def test_every_answer_keeps_other_sites_out(asker: Asker) -> None:
    for path in ("/", "/api/runs", "/api/runs/nothing", "/nowhere"):
        headers = asker(path).headers
        assert headers["content-security-policy"].startswith("default-src 'self';")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
