"""`unirl serve`: a language model, or the newest checkpoint of a run, for clients of OpenAI's and
Anthropic's APIs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unirl.commands import run_folder
from unirl.commands.arguments import parse
from unirl.commands.listening import check_port, in_url, is_own, listen
from unirl.config.rules import check_at_least
from unirl.errors import UniRLError
from unirl.trained.language import language_config


@dataclass(frozen=True)
class ServeOptions:
    """Flags of `unirl serve`."""

    port: int = 8000
    """Of TCP; 0: any free one."""
    host: str = "127.0.0.1"
    """Address to listen on. Others than this machine's own need a key."""
    key_variable: str = ""
    """Name of the environment variable with the key that clients must send. "": none is asked."""
    max_tokens: int = 512
    """Tokens of an answer, where the client wants no less."""
    temperature: float = 1.0
    """Where the client says nothing of it."""
    tokens: bool = False
    """Be the engine of a run on other machines instead: token ids come and go, and new weights are
    taken. Always asks for a key, and makes one up where none is named. The run: --engine openai
    --engine.url URL --engine.api-key-variable NAME.
    """

    def __post_init__(self) -> None:
        check_port(self.port, 8000)
        check_at_least(1, "serve", self, "max_tokens")
        check_at_least(0, "serve", self, "temperature")


def serve(arguments: Sequence[str]) -> int:
    positional, options = parse(arguments, ServeOptions)
    if len(positional) != 1:
        raise UniRLError(
            f"unirl serve was given {' '.join(positional) or 'nothing'}",
            "it takes a model's folder, or a run",
            "unirl serve models/tiny",
        )
    if options.tokens:
        return _serve_tokens(positional[0], options)
    key = _key(options)
    from unirl.llm.endpoint.serving import Serving
    from unirl.llm.endpoint.serving import serve as run
    from unirl.llm.models.model import ModelConfig

    where = Path(positional[0]).expanduser()
    newest: Callable[[], tuple[int, Any] | None]
    more: dict[str, Any] = {}
    if positional[0] == "tiny" or (where / "config.json").is_file():
        model, newest = ModelConfig(path=positional[0]), _nothing_newer
    else:
        source = _Run(run_folder.find(positional[0]))
        model, newest = source.config.model, source.newest
        options_of_template = source.config.task.template_options
        more = {"agent": source.config.agent_config, "template_options": options_of_template}
    serving = Serving(options.host, options.port, key, options.max_tokens, options.temperature)

    def ready(endpoint: Any) -> None:
        print(f"serving {positional[0]}  OPENAI_BASE_URL={endpoint.root}/v1", flush=True)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run(model, serving, newest, ready, **more))
    return 0


def _serve_tokens(model: str, options: ServeOptions) -> int:
    key = _named_key(options)
    shown = "" if key else f"  export UNIRL_ENGINE_KEY={(key := secrets.token_urlsafe(24))}"
    from unirl.llm.engine import EngineConfig
    from unirl.llm.engines.hf.engine import HfEngine
    from unirl.llm.engines.hf.server import TokenServer
    from unirl.llm.models.model import ModelConfig

    listening = listen("serve", options.host, options.port)
    host, port = listening.getsockname()[:2]

    def ready() -> None:
        url = f"http://{in_url(host)}:{port}/v1"
        print(f"serving {model}  engine.url={url}{shown}", flush=True)

    async def run() -> None:
        engine = HfEngine(ModelConfig(path=model), EngineConfig())
        await TokenServer(engine, model, key).serve(listening, ready)

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())
    return 0


class _Run:
    """A run's newest checkpoint, as often as there is another one."""

    def __init__(self, where: Path) -> None:
        self._where = where
        self.config = language_config(run_folder.folder_of(where))
        self._seen: Path | None = None

    def newest(self) -> tuple[int, Any] | None:
        from unirl.llm.assembly import weights_of
        from unirl.storage.checkpoint import latest, load_checkpoint

        folder = run_folder.folder_of(self._where)
        path = latest(folder) if folder == self._where else self._where
        if path is None or path == self._seen:
            return None
        checkpoint = load_checkpoint(path)
        self._seen = path
        return checkpoint.step, weights_of(checkpoint.model, config=self.config)


def _named_key(options: ServeOptions) -> str:
    key = os.environ.get(options.key_variable, "") if options.key_variable else ""
    if options.key_variable and not key:
        raise UniRLError(
            f"the environment variable {options.key_variable} is not set",
            "key_variable names the one that holds the key of clients",
            f"export {options.key_variable}=...",
        )
    return key


def _key(options: ServeOptions) -> str:
    key = _named_key(options)
    if not is_own(options.host) and not key:
        raise UniRLError(
            f"unirl serve would be open to everybody on {options.host}",
            "an address that others can reach needs a key",
            "name its environment variable with --key-variable, or leave out --host",
        )
    return key


def _nothing_newer() -> tuple[int, Any] | None:
    """A folder is served as it is."""
    return None
