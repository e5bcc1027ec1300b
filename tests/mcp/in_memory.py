"""An MCP server in this process, which answers with what it is given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
from mcp.client import stdio

from localrt.mcp import connection
from localrt.mcp.config import ServerConfig
from localrt.mcp.toolbox import model_names
from tests.mutations import is_line

_ABOUT = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}}
_LINK = {"type": "resource_link", "name": "a", "uri": "file:///a"}
_TOOL = {"name": "add", "description": "Add.", "inputSchema": {"type": "object"}}
ANSWERS = json.dumps(
    [
        {"result": {**_ABOUT, "serverInfo": {"name": "a", "version": "1"}}},
        {"result": {"tools": [_TOOL, {**_TOOL, "name": "a.b"}]}},
        {"result": {"content": [{"type": "text", "text": "3"}, _LINK], "isError": False}},
        {"error": {"code": -1, "message": "no"}},
    ]
)
"""The start, the tools, and two calls."""


@asynccontextmanager
async def _transport(lines: Sequence[Any]) -> AsyncIterator[Any]:
    give, incoming = anyio.create_memory_object_stream[Any](99)
    outgoing, asked = anyio.create_memory_object_stream[Any](99)

    async def answer() -> None:
        left = list(lines)
        async for message in asked:
            if (number := getattr(message.message, "id", None)) is None:
                continue
            if not left:
                break
            line = left.pop(0)
            if isinstance(line, dict):
                line = json.dumps({"jsonrpc": "2.0", "id": number, **line})
            with suppress(anyio.BrokenResourceError):
                await give.send(stdio._parse_line(str(line)))
        give.close()

    task = asyncio.create_task(answer())
    try:
        yield incoming, outgoing
    finally:
        task.cancel()
        for stream in (give, incoming, outgoing, asked):
            stream.close()


async def _talked(lines: Sequence[Any]) -> list[str]:
    one = connection.Connection(ServerConfig(name="one", command="none", timeout=0.02))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stdio.logger, "disabled", True)
        patch.setattr(connection, "stdio_client", lambda *_: _transport(lines))
        task = asyncio.create_task(one.run())
        await one._settled.wait()
        status = one.status
        assert is_line(status.problem)
        told = [status.problem or status.state]
        for name, tool in list(model_names(status.tools).items())[:2]:
            result = await one.call(tool.name, {}, 999)
            assert len(result.text) < 2000
            told.append(f"{name}: {result.text}")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return told


def answered(data: bytes) -> list[str]:
    """What is told of a server whose answers are the values of this list, or else these lines."""
    try:
        lines = json.loads(data)
    except (ValueError, RecursionError):
        lines = data.decode("utf-8", "replace").split("\n")
    return asyncio.run(_talked(lines if isinstance(lines, list) else [lines]))
