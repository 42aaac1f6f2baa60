# mypy: ignore-errors
"""A server of package mcp: PYTHON mcp_sums.py [PORT]. Without a port it speaks over its streams."""

import sys

from mcp.server import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@server.tool()
def bad() -> str:
    """Fail."""
    raise ValueError("no way")


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
