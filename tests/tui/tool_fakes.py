"""A server of tools that the test answers for."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from localrt.engine.types import ToolCall
from localrt.mcp.config import ServerConfig, ServerStatus, Tool, ToolResult
from localrt.mcp.servers import ToolServers
from localrt.mcp.toolbox import Toolbox

__all__ = ["FakeServers", "call", "toolbox"]

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
NAMES = ("read_file", "list", "delete")


class FakeServers(ToolServers):
    """One server ``files``, whose ``list`` runs without a question. ``results`` are by tool; one
    that is None stays away until the call is stopped.
    """

    def __init__(self) -> None:
        super().__init__([ServerConfig(name="files", command="x", allow=("list",))])
        self.tools = tuple(Tool("files", name, "", SCHEMA) for name in NAMES)
        self.results: dict[str, ToolResult | None] = {
            "read_file": ToolResult("milk"),
            "list": ToolResult("a\nb"),
            "delete": ToolResult("There is no such file.", "failed"),
        }
        self.called: list[tuple[str, dict[str, Any]]] = []
        self.running: list[Future[ToolResult]] = []
        self.ready = True

    @property
    def statuses(self) -> tuple[ServerStatus, ...]:
        if not self.ready:
            return (ServerStatus("files", "starting"),)
        return (ServerStatus("files", "ready", self.tools),)

    def call(self, tool: Tool, arguments: Mapping[str, Any], *, most: int) -> Future[ToolResult]:
        self.called.append((tool.name, dict(arguments)))
        future: Future[ToolResult] = Future()
        result = self.results[tool.name]
        if result is not None:
            future.set_result(result)
        self.running.append(future)
        return future


def toolbox() -> tuple[Toolbox, FakeServers]:
    servers = FakeServers()
    return Toolbox(servers), servers


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(uuid.uuid4().hex[:9], name, json.dumps(arguments))
