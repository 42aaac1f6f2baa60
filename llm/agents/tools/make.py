"""Tools by their names, as agent.tools has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unirl.errors import UniRLError
from unirl.imports import is_own
from unirl.llm.agents.tools.calculator import calculator
from unirl.llm.agents.tools.function import FunctionTool, own_tools
from unirl.llm.agents.tools.mcp import McpTools
from unirl.llm.agents.tools.search import make_corpus
from unirl.llm.agents.tools.tool import Tools, ToolSource


def make_tools(
    names: Sequence[str],
    options: Mapping[str, str],
    *,
    seconds: float,
    max_chars: int,
    sources: Mapping[str, ToolSource] | None = None,
) -> Tools:
    """sources: further tools by their names, that the run makes itself. Raises UniRLError for a
    name that is none, a schema that is invalid, and a server that does not answer.
    """
    made = [_source(name, options, sources or {}) for name in names]
    return Tools(made, seconds, max_chars)


def _source(name: str, options: Mapping[str, str], sources: Mapping[str, ToolSource]) -> ToolSource:
    if name in sources:
        return sources[name]
    if name == "calculator":
        return FunctionTool(calculator, name, is_quick=True)
    if name == "search":
        return FunctionTool(make_corpus(options).search, name)
    if name.startswith("mcp:"):
        return McpTools(name.removeprefix("mcp:"))
    if is_own(name):
        return own_tools(name)
    known = ", ".join(dict.fromkeys(("calculator", "search", *sources)))
    raise UniRLError(
        f'there is no tool "{name}"',
        f"there are {known}, mcp:COMMAND, mcp:URL, module:function and module:Class",
        "correct agent.tools",
    )
