"""Unmodified agents over the endpoint and engine hf: does each request extend a stored path, and is
each drawn token trained exactly once?

    sh benchmarks/agents/make_venvs.sh FOLDER
    python -m benchmarks.agent_clients FOLDER [NAME ...]

The first answer of each episode is a call of a tool, written by hand as a model from scratch knows
none; all others are drawn.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.llm.agents.hosted import TOKENIZER, Hosted, hosted
from unirl.llm.agents.episode import ROOT
from unirl.llm.engine import Completion, Request

SCRIPTS = Path(__file__).resolve().parent / "agents"
ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 30}}\n</tool_call>'
BASH = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo hello"}}\n</tool_call>'
CODE = "Thought: add.\n<code>\nprint(add(a=12, b=30))\n</code>"


class Client(NamedTuple):
    venv: str
    script: str
    argument: str = ""
    first: str = ADD
    may_fail: bool = False
    """An agent of a model that says nonsense may give up; its requests count all the same."""


CLIENTS = {
    "openai": Client("sdk", "openai_chat.py"),
    "agents-chat": Client("sdk", "agents_sdk.py", "chat"),
    "agents-responses": Client("sdk", "agents_sdk.py", "responses"),
    "anthropic": Client("sdk", "anthropic_messages.py"),
    "langgraph": Client("langgraph", "langgraph_react.py", "whole"),
    "langgraph-stream": Client("langgraph", "langgraph_react.py", "stream"),
    "smolagents-tool": Client("smolagents", "smolagents_steps.py", "tool", ADD, True),
    "smolagents-code": Client("smolagents", "smolagents_steps.py", "code", CODE, True),
    "mini-swe-agent": Client("mini", "mini_swe.py", "", BASH, True),
}


class Result(NamedTuple):
    requests: int
    origins: dict[str, int]
    proven: int
    """Requests whose prompt is a stored path, token for token, and what was given behind it."""
    drawn: int
    """Tokens of turns that are learned from."""
    trained: int
    """Of these, tokens of turns of which each is trained exactly once."""
    foreign: int
    """Tokens that are trained and nobody drew."""
    error: str


def run(host: Hosted, venvs: Path, name: str, timeout: float = 150.0) -> Result:
    client = CLIENTS[name]
    asked: list[Request] = []

    async def draw(request: Request) -> Completion:
        asked.append(request)
        if len(asked) > 1:
            return await host.draw(request)
        tokens = (*TOKENIZER.encode(client.first), TOKENIZER.eos_token_id)
        return Completion(tokens, (-1.0,) * len(tokens), (0,) * len(tokens), "stop")

    session, key = host.open(draw)
    command = [str(venvs / client.venv / "bin/python"), str(SCRIPTS / client.script)]
    done = subprocess.run(
        [*command, *filter(None, [client.argument])],
        env={
            "PATH": os.environ["PATH"],
            "HOME": os.environ.get("HOME", "/tmp"),
            "OPENAI_BASE_URL": host.endpoint.url(key),
            "OPENAI_API_KEY": key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_SILENT_STARTUP": "1",
        },
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    host.endpoint.forget(key)
    episode = session.episode
    proven = 0
    for turn, request in zip(episode.turns, asked, strict=True):
        path = episode.tokens(turn.parent) if turn.parent != ROOT else ()
        is_counted = turn.parent != ROOT or turn.origin in ("prompt", "rewritten", "forked")
        proven += request.prompt[: len(path)] == path and is_counted
    marks: Counter[int] = Counter()
    foreign = 0
    for segment in episode.segments():
        learned = [i for i, is_trained in enumerate(segment.mask) if is_trained]
        marks.update(segment.turn[i] for i in learned)
        # Of an engine without weights of a run all versions are alike; what is given has logp 0.
        foreign += sum(segment.logp[i] == 0 for i in learned)
    sizes = {i: len(turn.completion.tokens) for i, turn in enumerate(episode.turns)}
    trained = sum(size for i, size in sizes.items() if marks[i] == size)
    owed = sum(len(turn.completion.tokens) for turn in episode.turns if turn.trained)
    is_fine = done.returncode == 0 or (client.may_fail and asked)
    failed = "" if is_fine else done.stderr[-2000:]
    return Result(len(asked), dict(session.counts), proven, owed, trained, foreign, failed)


def main() -> None:
    venvs, names = Path(sys.argv[1]), sys.argv[2:] or list(CLIENTS)
    columns = (
        "client", "requests", "proven", "continue a path", "roots", "drawn", "trained once",
        "trained, not drawn",
    )  # fmt: skip
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    with hosted(max_tokens=24) as host:
        for name in names:
            found = run(host, venvs, name)
            roots = sum(found.origins.get(each, 0) for each in ("prompt", "rewritten"))
            others = found.requests - roots
            print(
                f"| {name} | {found.requests} | {found.proven} | {others} | {roots} | "
                f"{found.drawn} | {found.trained} | {found.foreign} |"
            )
            if found.error:
                print(found.error)


if __name__ == "__main__":
    main()
