"""What a model is offered, which calls ask, and what /tools says."""

from __future__ import annotations

import pytest

from localrt.common.errors import OptionError
from localrt.engine.types import ToolCall
from localrt.mcp.config import ServerConfig, ServerStatus, Tool
from localrt.mcp.servers import ToolServers
from localrt.mcp.toolbox import Toolbox

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}


class FakeServers(ToolServers):
    """Servers that the test sets."""

    state: tuple[ServerStatus, ...] = ()

    @property
    def statuses(self) -> tuple[ServerStatus, ...]:
        return self.state


@pytest.fixture
def servers() -> FakeServers:
    found = FakeServers(
        [
            ServerConfig(name="files", command="x", allow=("read*",), deny=("write",)),
            ServerConfig(name="web", url="http://x"),
        ]
    )
    found.state = (
        ServerStatus(
            "files",
            "ready",
            tuple(Tool("files", name, f"{name}s.\n\nMore.", SCHEMA) for name in ("read", "write")),
        ),
        ServerStatus("web", "ready", tuple(Tool("web", n, "", SCHEMA) for n in ("read", "get.it"))),
    )
    return found


def test_offered(
    servers: FakeServers,
) -> None:
    toolbox = Toolbox(servers)
    assert {name: tool.title for name, tool in toolbox.offered.items()} == {
        "files_read": "files.read",
        "web_read": "web.read",
        "get_it": "web.get.it",
    }
    assert toolbox.definitions()[0] == {
        "type": "function",
        "function": {
            "name": "files_read",
            "description": "reads.\n\nMore.",
            "parameters": SCHEMA,
        },
    }


def test_allowed(servers: FakeServers) -> None:
    toolbox = Toolbox(servers)
    assert not toolbox.read(ToolCall("1", "files_read", '{"path": "a"}'), "here").asks
    get = ToolCall("2", "get_it", "")
    assert toolbox.read(get, "here").asks
    toolbox.allow(toolbox.offered["get_it"], "here")
    assert not toolbox.read(get, "here").asks
    assert toolbox.read(get, "elsewhere").asks


def test_bad_calls(servers: FakeServers) -> None:
    toolbox = Toolbox(servers)
    denied = toolbox.read(ToolCall("1", "write", "{}"), "here")
    assert denied.problem == ("There is no such tool. There are: files_read, web_read, get_it.")
    for arguments in ("[1]", "{", "[" * 100_000):
        call = toolbox.read(ToolCall("1", "get_it", arguments), "here")
        assert call.problem == "The arguments must be a JSON object."
        assert not call.asks
        assert toolbox.run(call).result().ending == "failed"


def test_command(servers: FakeServers) -> None:
    toolbox = Toolbox(servers)
    toolbox.allow(toolbox.offered["get_it"], "here")
    assert toolbox.command("", "here").splitlines() == [
        "files: ready",
        "  read (allowed): reads.",
        "  write (denied): writes.",
        "web: ready",
        "  read (asks)",
        "  get.it (allowed in this conversation)",
    ]
    assert "[mcp.servers.NAME]" in Toolbox(ToolServers(())).command("", "")
    with pytest.raises(OptionError):
        toolbox.command("what", "here")


def test_news(servers: FakeServers) -> None:
    toolbox = Toolbox(servers, ["a note"])
    assert toolbox.take_news() == ["a note"]
    ready = servers.state
    servers.state = (ServerStatus("files", "failed", (), "ended: boo"),)
    assert toolbox.take_news() == ["MCP server files ended: boo"]
    assert toolbox.take_news() == []
    servers.state = ready
    assert toolbox.take_news() == []
    servers.state = (ServerStatus("files", "failed", (), "ended: boo"),)
    assert toolbox.take_news() == ["MCP server files ended: boo"]
