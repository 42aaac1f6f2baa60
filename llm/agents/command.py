"""An agent that is a program: it has an interpreter of its own, and speaks to the endpoint as it
would to any server of OpenAI's or Anthropic's API.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from unirl.errors import UniRLError
from unirl.llm.agents.agent import AgentTask, EpisodeFailed
from unirl.llm.agents.session import Session
from unirl.llm.outcome import Ending
from unirl.llm.tasks.task import Task

_MOST_OUTPUT = 64 * 1024
"""Bytes of what a program prints that are read; the rest is thrown away."""
_SHOWN = 500
_LOOK_SECONDS = 0.1
_MOST_VARIABLE = 100_000
"""Bytes of a variable of the environment: the kernel takes 128 KiB, its name included."""


class Door(Protocol):
    """Where programs find their session: unirl.llm.endpoint."""

    def start(self) -> None: ...

    def open(self, session: Session) -> str: ...

    def url(self, secret: str) -> str: ...

    def forget(self, secret: str) -> None: ...

    def close(self) -> None: ...


class CommandAgent:
    """One process for each episode, in a group of its own that ends with the episode."""

    schemas: tuple[dict[str, Any], ...] = ()

    def __init__(self, command: str, door: Door) -> None:
        self._argv, self._door, self._is_open = shlex.split(command), door, False
        if not self._argv or shutil.which(self._argv[0]) is None:
            raise UniRLError(
                f'agent.command "{command}" cannot be started',
                f"there is no program {self._argv[0] if self._argv else 'named'}",
                "name a program that is on the PATH, or write its whole path",
            )

    def task(self) -> Task | None:
        return None

    async def run(self, task: AgentTask, session: Session) -> Ending:
        if not self._is_open:
            self._door.start()
            self._is_open = True
        secret = self._door.open(session)
        try:
            return await self._run(task, secret)
        finally:
            self._door.forget(secret)

    async def _run(self, task: AgentTask, secret: str) -> Ending:
        url = self._door.url(secret)
        known = {
            "name": task.name, "messages": [dict(each) for each in task.messages],
            "info": dict(task.info), "index": task.index, "seed": task.seed,
        }  # fmt: skip
        variables = {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": secret,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": secret,
            # It asks a public site for prices otherwise, for seconds.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        with _passed(json.dumps(known, default=str)) as task_variable:
            await self._to_its_end({**variables, **task_variable})
        return "stop"

    async def _to_its_end(self, variables: Mapping[str, str]) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **variables},
                start_new_session=True,
            )
        except OSError as error:
            raise EpisodeFailed(
                f"the agent {self._argv[0]} could not be started",
                str(error),
                "the episode is tried again",
            ) from error
        # A program that it has left behind may hold the pipe open: its own end counts.
        reading = asyncio.ensure_future(_last_of(process.stdout))
        try:
            while process.returncode is None and not reading.done():
                await asyncio.wait({reading}, timeout=_LOOK_SECONDS)
            code = await process.wait()
            await asyncio.wait({reading}, timeout=1.0)
            tail = reading.result() if reading.done() else b""
        finally:
            reading.cancel()
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        if code:
            text = tail.decode(errors="replace").strip()[-_SHOWN:]
            raise AgentCrashed(f"{self._argv[0]} ended with code {code}: {text}")

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            await asyncio.to_thread(self._door.close)


class AgentCrashed(Exception):
    """The agent's own program failed."""


@contextlib.contextmanager
def _passed(task: str) -> Iterator[dict[str, str]]:
    """The variable in which a program finds its task, or finds where it is."""
    if len(task.encode()) <= _MOST_VARIABLE:
        yield {"UNIRL_TASK": task}
        return
    with tempfile.NamedTemporaryFile("w", prefix="unirl-task-", suffix=".json") as file:
        file.write(task)
        file.flush()
        yield {"UNIRL_TASK_FILE": file.name}


async def _last_of(stream: asyncio.StreamReader | None) -> bytes:
    assert stream is not None
    tail = b""
    while chunk := await stream.read(8192):
        tail = (tail + chunk)[-_MOST_OUTPUT:]
    return tail
