"""A resources server of NeMo Gym as a world: `nemo:http://HOST:PORT`.

POST /seed_session begins a session, which is a cookie; a call of the model is POST /{tool} with the
arguments as its body; an answer without a call ends the episode, and POST /verify judges all of it,
in the form of OpenAI's responses. What a tool refuses (a status of 4xx) is an answer for the model.
Tools come from the task's `responses_create_params`, else from the server's /openapi.json.

Source: github.com/NVIDIA-NeMo/Gym, nemo_gym/base_resources_server.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import aclosing
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
)
from unirl.llm.http import BadStatus, HttpClient, HttpFailed

_OWN_ROUTES = ("seed_session", "verify", "aggregate_metrics", "run", "health", "global_config_dict")
_MAX_BYTES = 2**26


class NemoWorld:
    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        self.name = f"nemo:{url}"
        require_options(self.name, options, ())
        self._url = url.rstrip("/")
        try:
            routes = Server(self.name, self._url).get("/openapi.json")
            self.tools = _tools(routes)
        except (NoRoute, AttributeError, KeyError, TypeError) as error:
            raise UniRLError(
                f'the world "{self.name}" does not say what it can do',
                f"/openapi.json: {type(error).__name__}: {error}",
                "name the url of a resources server, not of an agent or a model",
            ) from error

    def __call__(self) -> NemoClient:
        return NemoClient(self._url, self.tools)

    def tasks(self, split: Split) -> None:
        """They are JSONL files, of which the server knows nothing: task.name jsonl:FILE."""


class NemoClient:
    def __init__(self, url: str, tools: tuple[ToolSchema, ...]) -> None:
        self._client = HttpClient(url, {}, section="agent.world")
        self._tools = tools
        self._schemas: dict[str, Any] = {}
        self._cookies: dict[str, str] = {}
        self._about: dict[str, Any] = {}
        self._row: dict[str, Any] = {}
        self._output: list[dict[str, Any]] = []

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self._row = dict(task.get("info") or {})
        asked = self._row.get("responses_create_params")
        self._about = dict(asked) if isinstance(asked, Mapping) else {}
        self._about.setdefault("input", [dict(each) for each in task.get("messages") or ()])
        named = self._about.get("tools")
        tools = tuple(map(_chat_tool, named)) if isinstance(named, list) and named else self._tools
        self._schemas = {each["function"]["name"]: each["function"] for each in tools}
        self._output, self._cookies = [], {}
        rest = {key: value for key, value in self._row.items() if key != "agent_ref"}
        await self._ask("seed_session", {**rest, "responses_create_params": self._about})
        return Observation(tools=tools)

    async def step(self, action: Action) -> Observation:
        if isinstance(action, str):
            return await self._verified(action)
        schema = self._schemas.get(action.name)
        wrong = (
            f"there is no tool {action.name}; there are: {', '.join(self._schemas) or 'none'}"
            if schema is None
            else complaint(action.arguments, schema.get("parameters") or {})
        )
        text, is_invalid = f"Error: {wrong}.", bool(wrong)
        if not wrong:
            try:
                text = _text(await self._ask(action.name, action.arguments, parse=False))
            except _Refused as error:
                text, is_invalid = f"Error: {error}", True
        call = {"type": "function_call", "call_id": action.id, "name": action.name}
        call |= {"arguments": json.dumps(action.arguments), "id": action.id, "status": "completed"}
        self._output.append(call)
        self._output.append({"type": "function_call_output", "call_id": action.id, "output": text})
        return Observation(answered(action, text), is_invalid=is_invalid)

    async def close(self) -> None:
        """Sessions end with their server; each request has a connection of its own."""

    async def _verified(self, text: str) -> Observation:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        message = {"type": "message", "role": "assistant", "id": "msg", "status": "completed"}
        response = {
            "id": "resp",
            "created_at": 0.0,
            "model": "policy",
            "object": "response",
            "output": [*self._output, {**message, "content": content}],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self._about.get("tools") or [],
        }
        body = {**self._row, "responses_create_params": self._about, "response": response}
        answer = await self._ask("verify", body)
        reward = answer.get("reward") if isinstance(answer, Mapping) else None
        if not isinstance(reward, int | float):
            raise WorldFailed("/verify gives no reward", str(answer)[:200], "", "protocol")
        known = ("response", "responses_create_params")
        info = {key: value for key, value in answer.items() if key not in known}
        return Observation((), float(reward), terminated=True, info=info)

    async def _ask(self, route: str, body: Any, *, parse: bool = True) -> Any:
        """The answer of a route, with the session's cookies; JSON if parse, else bytes."""
        headers = {}
        if self._cookies:
            pairs = [f"{key}={value}" for key, value in self._cookies.items()]
            headers["Cookie"] = "; ".join(pairs)
        try:
            async with aclosing(
                await self._client.ask("POST", f"/{route}", body, headers)
            ) as answer:
                for line in answer.header_list("set-cookie"):
                    key, _, value = line.partition(";")[0].partition("=")
                    self._cookies[key.strip()] = value.strip()
                data = await answer.whole(_MAX_BYTES)
        except BadStatus as error:
            is_call = route not in ("seed_session", "verify")
            if is_call and 400 <= error.status < 500 and error.status != 429:
                raise _Refused(error.body) from error
            raise WorldFailed(f"/{route} failed", str(error), "", "status") from error
        except HttpFailed as error:
            raise WorldFailed(f"/{route} failed", str(error), "", "connection") from error
        if not parse:
            return data
        try:
            return json.loads(data) if data.strip() else None
        except ValueError as error:
            raise WorldFailed(
                f"/{route} answers no JSON", repr(data[:80]), "", "protocol"
            ) from error


class _Refused(Exception):
    """A tool refused its arguments."""


def _tools(routes: Mapping[str, Any]) -> tuple[ToolSchema, ...]:
    """Each POST route of the server that is no route of the protocol's own."""
    components = (routes.get("components") or {}).get("schemas") or {}
    found = []
    for path, methods in routes["paths"].items():
        name = path.strip("/")
        if "post" not in methods or name in _OWN_ROUTES or "/" in name or "{" in name:
            continue
        post = methods["post"]
        content = (post.get("requestBody") or {}).get("content") or {}
        schema = _resolved((content.get("application/json") or {}).get("schema") or {}, components)
        function = {
            "name": name,
            "description": post.get("description") or post.get("summary") or "",
            "parameters": {"type": "object", "properties": {}, **schema},
        }
        found.append({"type": "function", "function": function})
    return tuple(found)


def _resolved(schema: Any, components: Mapping[str, Any], depth: int = 0) -> Any:
    """With what it refers to put in its place, as far as a model can make use of it."""
    if depth > 8:
        return {}
    if isinstance(schema, list):
        return [_resolved(each, components, depth + 1) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    if isinstance(target := schema.get("$ref"), str):
        return _resolved(components.get(target.rpartition("/")[2], {}), components, depth + 1)
    return {key: _resolved(value, components, depth + 1) for key, value in schema.items()}


def _chat_tool(tool: Mapping[str, Any]) -> ToolSchema:
    """A tool of the responses API as the chat API has it."""
    if isinstance(tool.get("function"), Mapping):
        return tool
    function = {key: tool[key] for key in ("name", "description", "parameters") if key in tool}
    return {"type": "function", "function": function}


def _text(data: bytes) -> str:
    """A tool's answer: JSON that is one text without its quotes, all else as it came."""
    text = data.decode(errors="replace")
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text
