"""A server of OpenEnv as a world: `openenv:ws://HOST:PORT`.

A session is a WebSocket at /ws, one for each episode; reset, step and state are JSON messages.
/schema says what an action is: where it is one text, the model's answer is the action, else it
calls `act`; where the server has MCP tools, the model calls those. Option: `act` = text | tool.
Spoken with `websockets`, as the package of the project needs 42 others; the same for openenv-core
0.3 and openenv 0.10, which has tasks as well.

Source: github.com/huggingface/OpenEnv, core/env_server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unirl.errors import UniRLError
from unirl.llm.agents.tools.schema import complaint
from unirl.llm.agents.worlds.server import NoRoute, Server, require_options
from unirl.llm.agents.worlds.world import (
    Action,
    Observation,
    Split,
    ToolSchema,
    WorldFailed,
    answered,
    in_text,
)
from unirl.llm.packages import needs
from unirl.llm.tasks.task import Example, Examples

CAPACITY_SECONDS = 40.0
"""How long a reset waits for a server that has no free session."""
_MAX_BYTES = 2**26
_PAUSES = (0.05, 0.2, 0.5, 1.0)
_POLICY = ("VALIDATION_ERROR", "INVALID_JSON")
"""Codes of errors that an action may cause; all others are the server's own."""
_SPLITS: Mapping[Split, tuple[str, ...]] = {
    "train": ("train",),
    "held_out": ("test", "validation", "eval"),
}


@dataclass(frozen=True)
class _Actions:
    """What the server takes as an action."""

    text_field: str = ""
    """The field that the model's text becomes; "": it must call."""
    tools: tuple[ToolSchema, ...] = ()
    are_mcp: bool = False
    """The tools are the server's MCP tools; else there is one, `act`, with the action's fields."""


class OpenEnvWorld:
    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self.name = f"openenv:{url}"
        require_options(self.name, options, ("act",))
        base = url.rstrip("/").removesuffix("/ws")
        self._server = Server(self.name, re.sub(r"^ws", "http", base))
        self._ws = re.sub(r"^http", "ws", base) + "/ws"
        with needs("websockets", f"the world {self.name} cannot be reached"):
            import websockets  # noqa: F401
        self._actions = self._look(options.get("act", ""))

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        return self._actions.tools

    def __call__(self) -> OpenEnvClient:
        return OpenEnvClient(self._ws, self._actions)

    def tasks(self, split: Split) -> Examples | None:
        """The specs of tasks that the server lists; each is info, and its text the question."""
        try:
            (env, *_) = self._server.get("/list_environments")
            names = [each["name"] for each in self._server.get(f"/{env}/splits")]
        except NoRoute:
            return None
        found = next((name for name in _SPLITS[split] if name in names), None)
        if found is None:
            return [] if split == "held_out" else None
        specs = self._server.post(f"/{env}/tasks", {"split": found})["tasks"]
        return [_example(spec, found, i) for i, spec in enumerate(specs)]

    def _look(self, act: str) -> _Actions:
        schema = self._server.get("/schema").get("action") or {}
        properties = {
            key: value
            for key, value in (schema.get("properties") or {}).items()
            if key != "metadata"
        }
        if not properties or "tool_name" in properties:
            return _Actions(tools=self._mcp_tools(), are_mcp=True)
        required = schema.get("required") or list(properties)
        plain = {key for key in required if properties.get(key, {}).get("type") == "string"}
        if len(plain) == len(required) == 1 and act != "tool":
            return _Actions(text_field=plain.pop())
        if act == "text":
            raise UniRLError(
                f"the world {self.name} cannot read text",
                f"its actions have the fields {', '.join(properties)}, not one of text",
                "leave out agent.options.act",
            )
        parameters = {key: schema[key] for key in ("$defs",) if key in schema}
        parameters |= {"type": "object", "properties": properties, "required": list(required)}
        about = schema.get("description") or "Take an action."
        function = {"name": "act", "description": about, "parameters": parameters}
        return _Actions(tools=({"type": "function", "function": function},))

    def _mcp_tools(self) -> tuple[ToolSchema, ...]:
        request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
        answer = self._server.post("/mcp", request)
        try:
            return tuple(
                {
                    "type": "function",
                    "function": {
                        "name": each["name"],
                        "description": each.get("description") or "",
                        "parameters": each.get("inputSchema") or each.get("input_schema") or {},
                    },
                }
                for each in answer["result"]["tools"]
            )
        except (KeyError, TypeError) as error:
            raise UniRLError(
                f"the world {self.name} has neither actions nor tools",
                f"/schema names no field, and tools/list answers {json.dumps(answer)[:120]}",
                "look at the server",
            ) from error


class OpenEnvClient:
    """One session."""

    def __init__(self, url: str, actions: _Actions) -> None:
        self._url, self._actions = url, actions
        self._socket: Any = None

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        data: dict[str, Any] = {"seed": seed % 2**31}
        chosen = (task.get("info") or {}).get("openenv")
        if isinstance(chosen, Mapping):
            data |= {key: chosen[key] for key in ("split", "index") if key in chosen}
        end = time.monotonic() + CAPACITY_SECONDS
        pauses = iter(_PAUSES)
        while True:
            if self._socket is None:
                self._socket = await _connected(self._url)
            answer = await self._ask({"type": "reset", "data": data})
            if answer.get("code") != "CAPACITY_REACHED" or time.monotonic() > end:
                break
            await self.close()
            await asyncio.sleep(next(pauses, _PAUSES[-1]))
        if "code" in answer:
            raise _failed(answer)
        return _observation(answer, "")

    async def step(self, action: Action) -> Observation:
        fields = self._fields(action)
        if isinstance(fields, str):
            return Observation(answered(action, f"Error: {fields}."), is_invalid=True)
        answer = await self._ask({"type": "step", "data": fields})
        if answer.get("code") in _POLICY:
            text = f"Error: this is no action: {_reasons(answer)}"
            return Observation(answered(action, text), is_invalid=True)
        if "code" in answer:
            raise _failed(answer)
        return _observation(answer, action)

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            with contextlib.suppress(Exception):
                await socket.send('{"type": "close"}')
            with contextlib.suppress(Exception):
                await socket.close()

    def _fields(self, action: Action) -> dict[str, Any] | str:
        """The action's fields; a text says why there are none."""
        if isinstance(action, str):
            if self._actions.text_field:
                return {self._actions.text_field: action}
            return "an action is a call, and there is none"
        schema = {each["function"]["name"]: each["function"] for each in self._actions.tools}
        if action.name not in schema:
            return f"there is no tool {action.name}; there are: {', '.join(schema) or 'none'}"
        wrong = complaint(action.arguments, schema[action.name]["parameters"])
        if wrong or not self._actions.are_mcp:
            return wrong or dict(action.arguments)
        return {"type": "call_tool", "tool_name": action.name, "arguments": action.arguments}

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The data of an answer; of an error its code and message."""
        import websockets

        if self._socket is None:
            raise WorldFailed("there is no session", "it was closed", "", "closed")
        try:
            # A full server says so and closes, without being asked: its word is read in any case.
            with contextlib.suppress(websockets.ConnectionClosed):
                await self._socket.send(json.dumps(message))
            text = await self._socket.recv()
        except websockets.ConnectionClosed as error:
            raise WorldFailed("the server hung up", str(error), "", "connection") from error
        try:
            answer = json.loads(text)
            kind, data = answer["type"], answer["data"]
            if kind == "error":
                return {**data, "code": str(data.get("code"))}
            if kind != "observation" or not isinstance(data, dict):
                raise ValueError(f"an observation was asked for, {kind} came")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WorldFailed(
                f"the server answers {str(text)[:80]!r}", str(error), "", "protocol"
            ) from error
        return {key: value for key, value in data.items() if key != "code"}


async def _connected(url: str) -> Any:
    import websockets

    try:
        return await websockets.connect(
            url, compression=None, proxy=None, max_size=_MAX_BYTES, open_timeout=10
        )
    except websockets.InvalidHandshake as error:
        raise WorldFailed(f"{url} is no WebSocket", str(error), "", "protocol") from error


def _observation(answer: Mapping[str, Any], action: Action) -> Observation:
    fields, reward = answer.get("observation"), answer.get("reward")
    if not isinstance(fields, Mapping) or not isinstance(reward, int | float | None):
        raise WorldFailed("no observation came", json.dumps(answer)[:200], "", "protocol")
    about = answer.get("metadata") or fields.get("metadata") or {}
    shown = {key: value for key, value in fields.items() if key != "metadata"}
    return Observation(
        answered(action, in_text(shown)),
        None if reward is None else float(reward),
        bool(answer.get("done")),
        info=dict(about) if isinstance(about, Mapping) else {},
    )


def _failed(answer: Mapping[str, Any]) -> WorldFailed:
    code = str(answer["code"])
    return WorldFailed(f"the server says {code}", str(answer.get("message"))[:400], "", code)


def _reasons(answer: Mapping[str, Any]) -> str:
    errors = answer.get("errors")
    if not isinstance(errors, list):
        return str(answer.get("message"))
    parts = [
        f"{'.'.join(map(str, each.get('loc', ())))}: {each.get('msg')}"
        for each in errors
        if isinstance(each, Mapping)
    ]
    return "; ".join(parts)


def _example(spec: Any, split: str, index: int) -> Example:
    info = {"openenv": {"split": split, "index": index}, "task": spec}
    fields = spec if isinstance(spec, Mapping) else {"question": spec}
    keys = ("prompt", "question", "instruction")
    text = next((fields[key] for key in keys if isinstance(fields.get(key), str)), None)
    messages = ({"role": "user", "content": text},) if text is not None else ()
    return Example(answer=str(fields.get("answer", "")), messages=messages, info=info)
