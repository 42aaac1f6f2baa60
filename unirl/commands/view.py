"""`unirl view`: runs and their trajectories in a browser."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unirl.commands.arguments import parse
from unirl.commands.listening import check_port, in_url, is_own, listen
from unirl.errors import UniRLError

if TYPE_CHECKING:
    from unirl.view.view import View


@dataclass(frozen=True)
class ViewOptions:
    """Flags of `unirl view`."""

    port: int = 8265
    """Of TCP; 0: any free one."""
    host: str = "127.0.0.1"
    """Address to listen on. Another one than this machine's own lets others look who know the
    token; what they see is not encrypted.
    """
    open: bool = False
    """Open it in a browser."""
    save: Path | None = None
    """Write one HTML file that shows these runs by itself, and end."""
    store_url: str = ""
    """env:NAME, the variable with the URL of the database that has the episodes of runs whose
    config.toml does not keep it.
    """

    def __post_init__(self) -> None:
        check_port(self.port, 8265)


def view(arguments: Sequence[str]) -> int:
    positional, options = parse(arguments, ViewOptions)
    from unirl.llm.trajectories.reading import check_url
    from unirl.view.folders import find_roots
    from unirl.view.view import View

    check_url(options.store_url)
    view = View(find_roots(positional), options.store_url)
    if not view.folders.runs():
        raise UniRLError(
            f"there is no run in {', '.join(positional) or 'runs'}",
            "a run folder has a config.toml or a metrics.jsonl",
            "train something: unirl train @cartpole",
        )
    if options.save is not None:
        return _save(view, options.save)
    return _serve(view, options)


def _save(view: View, path: Path) -> int:
    from unirl.view.page import saved_page

    page = saved_page(view, {})
    try:
        # Texts of users: nobody else reads them.
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(page)
    except OSError as error:
        raise UniRLError(
            f"{path} cannot be written",
            f"the system says: {error.strerror}",
            "name a file in a folder that is there",
        ) from error
    print(f"wrote {path}, {len(page) / 1e6:.1f} MB")
    return 0


def _serve(view: View, options: ViewOptions) -> int:
    from unirl.view.server import serve

    token = secrets.token_urlsafe(24)
    listening = listen("view", options.host, options.port)
    host, port = listening.getsockname()[:2]
    if not is_own(host):
        print(
            f"warning: everybody who reaches {options.host} and knows the token can look, and "
            "nothing is encrypted; from elsewhere rather: ssh -L "
            f"{port}:127.0.0.1:{port} HOST",
            file=sys.stderr,
        )
    named = socket.gethostname() if host in ("0.0.0.0", "::") else host
    url = f"http://{in_url(named)}:{port}/?token={token}"

    def ready() -> None:
        print(f"{len(view.folders.runs())} runs at {url}   (Ctrl-C ends)", flush=True)
        if options.open:
            import webbrowser

            webbrowser.open(url)

    with contextlib.suppress(KeyboardInterrupt):
        serve(view, listening, token, ready)
    return 0
