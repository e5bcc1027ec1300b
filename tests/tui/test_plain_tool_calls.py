"""The plain chat runs a model's calls of tools, those of a real server among them."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from localrt.client.model import connect
from localrt.mcp.config import Tool, ToolResult
from localrt.mcp.toolbox import Toolbox
from localrt.tui.conversation.generation import NO_TOOLS
from tests.fake_endpoint import DONE, HEAD, Asked, delta, saying, whole
from tests.tui.test_plain import chat
from tests.tui.fakes import FakeLoader, FakeModel
from tests.tui.tool_fakes import FakeServers, call, toolbox

SERVER = Path(__file__).parent.parent / "mcp" / "server.py"


def told(model: FakeModel) -> list[str]:
    return [m["content"] for m in model.seen[-1].messages if m["role"] == "tool"]


def test_calls(model: FakeModel, chat: Callable[..., str]) -> None:
    tools, servers = toolbox()
    model.calls = [[call("read_file", path="a"), call("delete", path="a")], [call("list")]]
    text = chat("What is in a?", "perhaps", "y", "n", "/show", toolbox=tools)
    assert text.partition("continue it.\n")[2].startswith(
        'Call: files.read_file {"path": "a"}\n'
        "Run it? [y]es, [a]lways in this conversation, [n]o: "
        "Run it? [y]es, [a]lways in this conversation, [n]o: Result: milk\n"
        'Call: files.delete {"path": "a"}\n'
        "Run it? [y]es, [a]lways in this conversation, [n]o: "
        "Result (refused): The user did not allow this call.\n"
        "Call: files.list {}\n"
        "Result: a\nb\n"
        "Hello there.\n"
        "You: What is in a?\n"
        'Call: files.read_file {"path": "a"}\nResult: milk\n'
    )
    assert servers.called == [("read_file", {"path": "a"}), ("list", {})]
    assert told(model) == ["milk", "The user did not allow this call.", "a\nb"]


def test_always_and_end_of_input(model: FakeModel, chat: Callable[..., str]) -> None:
    tools, servers = toolbox()
    model.calls = [[call("read_file", path="a")], [call("read_file", path="b")], [call("delete")]]
    text = chat("Go", "a", toolbox=tools)
    assert text.count("Run it?") == 2
    assert [name for name, _ in servers.called] == ["read_file", "read_file"]
    assert told(model)[-1] == "The user did not allow this call."


class Interrupting(Future[ToolResult]):
    """Ctrl+C is pressed when somebody looks whether it is done."""

    pressed = False

    def done(self) -> bool:
        if not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)
        return super().done()


@pytest.mark.skipif(os.name == "nt", reason="signals")
def test_ctrl_c_stops_call(model: FakeModel, chat: Callable[..., str]) -> None:
    class Servers(FakeServers):
        def call(self, tool: Tool, arguments: Mapping[str, Any], *, most: int) -> Interrupting:
            return Interrupting()

    model.calls = [[call("list")]]
    text = chat("Go", toolbox=Toolbox(Servers()))
    assert "Result (stopped): The user stopped this call.\nHello there.\n" in text


def test_model_without_tools(model: FakeModel, chat: Callable[..., str]) -> None:
    model.takes_tools = False
    assert chat("One", "Two", toolbox=toolbox()[0]).count(NO_TOOLS) == 1


def test_tools_of_a_real_server(model: FakeModel, chat: Callable[..., str], tmp_path: Path) -> None:
    pytest.importorskip("mcp")
    config = f"command = '{sys.executable}'\nargs = ['{SERVER}']\nallow = ['add']\n"
    (tmp_path / "config.toml").write_text(f"[mcp.servers.tests]\n{config}")
    tools = Toolbox.open(tmp_path)
    try:
        model.calls = [[call("add", a=2, b=3), call("fail", why="rain")], [call("end")]]
        text = chat("Go", "y", "y", toolbox=tools)
    finally:
        tools.close()
    assert 'Call: tests.add {"a": 2, "b": 3}\nResult: 5\n' in text
    assert told(model)[1] == "Error executing tool fail"
    assert len(told(model)) == 3, text
    assert "out of cheese" in told(model)[2]
    assert text.count("Run it?") == 2


def test_remote_model_calls_tools(chat: Callable[..., str]) -> None:
    function = {"name": "list", "arguments": "{}"}
    calls = [{"index": 0, "id": "c1", "type": "function", "function": function}]

    def reply(asked: Asked, connection: socket.socket) -> bytes:
        if asked.body["messages"][-1]["role"] == "user":
            return HEAD + delta(tool_calls=calls) + delta("tool_calls") + DONE
        return HEAD + delta(content="Two files.") + delta("stop") + DONE

    tools, _ = toolbox()
    with saying(reply) as server:
        text = chat("Go", toolbox=tools, load=lambda progress: connect(server.url))
        first, second = (asked.body for asked in server.asked if asked.body)
    assert "Call: files.list {}\nResult: a\nb\nTwo files.\n" in text
    assert [tool["function"]["name"] for tool in first["tools"]] == ["read_file", "list", "delete"]
    result = {"role": "tool", "tool_call_id": "c1", "content": "a\nb"}
    assert second["messages"][-1] == result


def test_server_refuses_tools(chat: Callable[..., str]) -> None:
    def reply(asked: Asked, connection: socket.socket) -> bytes:
        if "tools" in asked.body:
            return whole(400, {"error": {"message": "m does not support tools"}})
        return HEAD + delta(content="Hello.") + delta("stop") + DONE

    tools, _ = toolbox()
    with saying(reply) as server:
        text = chat("One", "Two", toolbox=tools, load=lambda progress: connect(server.url))
        assert ["tools" in asked.body for asked in server.asked if asked.body] == [
            True,
            False,
            False,
        ]
    assert text.count("Hello.\n") == 2
    assert text.count(NO_TOOLS) == 1
