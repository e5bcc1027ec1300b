"""An MCP server of the official SDK for tests: over stdio, or with a port over streamable HTTP."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.types import ImageContent, TextContent

server = MCPServer("tests")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise ValueError(why)


@server.tool(name="read.file")
def read_file(path: str) -> str:
    """Read a file.

    More that nobody needs to see.
    """
    return f"{path} has {os.environ.get('SECRET', 'nothing')}" + "." * 1000


@server.tool()
def picture() -> list[TextContent | ImageContent]:
    """A picture."""
    image = ImageContent(type="image", data="AAAA", mime_type="image/png")
    return [TextContent(type="text", text="Look:"), image]


@server.tool()
async def sleep(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "woke up"


@server.tool()
def flood(characters: int, values: int = 0) -> dict[str, object]:
    """Give much."""
    return {"text": "x" * characters, "values": [[] for _ in range(values)]}


@server.tool()
def end() -> str:
    """End the server."""
    print("out of cheese", file=sys.stderr, flush=True)
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
