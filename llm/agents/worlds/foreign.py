"""Environments of packages that need an interpreter of their own: `skyrl:NAME`, `verifiers:NAME`.

Each client has a process, run by the interpreter that option `python` names; it runs
`bridge_script.py`, which imports the package and answers JSON lines. Processes are used again for
the next episode, as importing such a package takes seconds; one that failed is ended. Options
besides `python` are keywords of the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unirl.errors import UniRLError
from unirl.llm.agents.worlds.server import ask_now
from unirl.llm.agents.worlds.world import Action, Observation, Split, WorldFailed, answered
from unirl.llm.tasks.task import Example, Examples

_SCRIPT = Path(__file__).with_name("bridge_script.py")
_MAX_LINE = 2**26
_START_SECONDS = 120.0
"""Importing such a package takes many seconds on a busy machine."""
_PACKAGES = {"skyrl": "skyrl-gym", "verifiers": "verifiers"}


class ForeignWorld:
    def __init__(self, kind: str, name: str, options: Mapping[str, str]) -> None:
        self.name = f"{kind}:{name}"
        self.tools = ()
        self._kind = kind
        python = options.get("python", "python3")
        found = shutil.which(python)
        if found is None:
            raise UniRLError(
                f'the world "{self.name}" has no interpreter',
                f'agent.options.python is "{python}", which is no program',
                f"python -m venv worlds && worlds/bin/pip install {_PACKAGES[kind]}, then set "
                "agent.options.python to worlds/bin/python",
            )
        keywords = {key: _value(text) for key, text in options.items() if key != "python"}
        self._argv = (found, str(_SCRIPT), kind, name, json.dumps(keywords))
        self._idle: dict[asyncio.AbstractEventLoop, list[_Bridge]] = {}
        self._all_tasks: dict[Split, Examples | None] = {}
        try:
            self._all_tasks = ask_now(self._first_look())
        except (WorldFailed, OSError, TimeoutError) as error:
            why = error.parts[1] if isinstance(error, WorldFailed) else str(error)
            raise UniRLError(
                f'the world "{self.name}" cannot be made',
                why or f"it took longer than {_START_SECONDS:g} s to start",
                f"{found} must have {_PACKAGES[kind]}; set agent.options.python",
            ) from error

    def __call__(self) -> ForeignClient:
        return ForeignClient(self)

    def tasks(self, split: Split) -> Examples | None:
        return self._all_tasks.get(split)

    async def take(self) -> _Bridge:
        idle = self._idle.setdefault(asyncio.get_running_loop(), [])
        while idle:
            bridge = idle.pop()
            if bridge.is_alive:
                return bridge
        bridge = _Bridge(self._argv)
        await bridge.start()
        return bridge

    def give_back(self, bridge: _Bridge) -> None:
        self._idle.setdefault(asyncio.get_running_loop(), []).append(bridge)

    async def _first_look(self) -> dict[Split, Examples | None]:
        async with asyncio.timeout(_START_SECONDS):
            bridge = _Bridge(self._argv)
            try:
                await bridge.start()
                if self._kind != "verifiers":
                    return {}
                found: dict[Split, Examples | None] = {}
                for split in ("train", "held_out"):
                    answer = await bridge.ask({"do": "tasks", "split": split})
                    found[split] = [_example(row) for row in answer["tasks"]]
                return found
            finally:
                await bridge.close()


class ForeignClient:
    def __init__(self, world: ForeignWorld) -> None:
        self._world = world
        self._bridge: _Bridge | None = None
        self._is_idle = False

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        if self._bridge is None:
            self._bridge = await self._world.take()
        sent = {key: task.get(key) for key in ("messages", "answer", "info")}
        answer = await self._ask({"do": "reset", "task": sent, "seed": seed})
        return Observation(_messages(answer), info=_info(answer))

    async def step(self, action: Action) -> Observation:
        if not isinstance(action, str):
            text = f"Error: there is no tool {action.name}; this world reads text."
            return Observation(answered(action, text), is_invalid=True)
        answer = await self._ask({"do": "step", "text": action})
        reward = answer.get("reward")
        if not isinstance(reward, int | float | None):
            raise WorldFailed("no reward came", str(reward)[:80], "", "protocol")
        return Observation(
            _messages(answer),
            None if reward is None else float(reward),
            bool(answer.get("done")),
            info=_info(answer),
        )

    async def close(self) -> None:
        bridge, self._bridge = self._bridge, None
        if bridge is None:
            return
        if self._is_idle and bridge.is_alive:
            self._world.give_back(bridge)
        else:
            await bridge.close()

    async def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._bridge is not None
        # Only between requests is a process fit for another episode.
        self._is_idle = False
        answer = await self._bridge.ask(request)
        self._is_idle = True
        return answer


class _Bridge:
    """One process."""

    def __init__(self, argv: tuple[str, ...]) -> None:
        self._argv = argv
        self._process: asyncio.subprocess.Process | None = None

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_MAX_LINE,
            start_new_session=True,
        )
        try:
            await self._answer()
        except BaseException:
            await self.close()
            raise

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._process is None or self._process.stdin is None:
            raise WorldFailed("there is no process", "it was ended", "", "closed")
        self._process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
        await self._process.stdin.drain()
        return await self._answer()

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _answer(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise WorldFailed("its process has ended", "it wrote no answer", "", "died")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise WorldFailed("no JSON came", repr(line[:80]), "", "protocol") from error
        if not isinstance(answer, dict):
            raise WorldFailed("no answer came", repr(line[:80]), "", "protocol")
        if "error" in answer:
            where = answer.get("where") or "its code"
            raise WorldFailed(f"{where} raised", str(answer["error"])[:400], "", "code")
        return answer


def _messages(answer: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    found = answer.get("messages") or ()
    if not all(isinstance(each, dict) and "role" in each for each in found):
        raise WorldFailed("no messages came", str(found)[:80], "", "protocol")
    return tuple(found)


def _info(answer: Mapping[str, Any]) -> dict[str, Any]:
    info = answer.get("info")
    return info if isinstance(info, dict) else {}


def _example(row: Mapping[str, Any]) -> Example:
    prompt = row.get("prompt")
    messages = tuple(prompt) if isinstance(prompt, list) else ()
    if isinstance(prompt, str):
        messages = ({"role": "user", "content": prompt},)
    answer = row.get("answer")
    return Example("" if answer is None else str(answer), messages, info={"verifiers": dict(row)})


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
