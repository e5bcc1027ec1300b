"""The tools of a chat: offers them to a model, and runs its calls.

Servers may use any names for tools, even the same ones; a model gets unique names of letters,
digits, ``_`` and ``-``. This module asks nobody: ``PendingCall.asks`` says that a call needs a
question.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from localrt.common.errors import OptionError
from localrt.common.files import parse_json
from localrt.common.formatting import as_line, one_line
from localrt.engine.types import ToolCall
from localrt.mcp.config import ServerStatus, Tool, ToolResult, read_servers
from localrt.mcp.servers import ToolServers

REFUSED = ToolResult("The user did not allow this call.", "refused")
STOPPED = ToolResult("The user stopped this call.", "stopped")

_LONGEST_NAME = 64
_MOST_CHARACTERS = 100_000  # in a result
_CHARACTERS_PER_TOKEN = 1.5  # so that a result takes at most about half of the context


@dataclass(frozen=True, slots=True)
class PendingCall:
    """A model's call of ``tool``. ``problem`` tells the model why the call cannot run, if so."""

    id: str
    name: str
    tool: Tool | None = None
    arguments: Mapping[str, object] = field(default_factory=dict)
    problem: str = ""
    asks: bool = False

    @property
    def title(self) -> str:
        """The tool's title (``files.read_file``), or the name that the model made up."""
        return self.name if self.tool is None else self.tool.title


class Toolbox:
    """The tools of ``servers``; ``notes`` are lines about configured servers left out."""

    def __init__(self, servers: ToolServers, notes: Sequence[str] = ()) -> None:
        self.servers = servers
        self._configs = {config.name: config for config in servers.configs}
        self._allowed: list[tuple[str, Tool]] = []  # by the user: conversation, tool as described
        self._first: dict[str, Tool] = {}  # by title: tools as they were first described
        self.without_tools: set[str] = set()  # models without tools, once the user was told
        self._news = list(notes)
        self._told: dict[str, str] = {}

    @classmethod
    def open(cls, folder: Path) -> Toolbox:
        """Create a toolbox for the servers in ``folder``'s config file, and start them."""
        configs, notes = read_servers(folder)
        toolbox = cls(ToolServers(configs), notes)
        toolbox.servers.start()
        return toolbox

    def close(self) -> None:
        """End the servers."""
        self.servers.close()

    def take_news(self) -> list[str]:
        """Return new lines about servers that cannot be used, each only once."""
        news, self._news = self._news, []
        for status in self.servers.statuses:
            before, self._told[status.name] = self._told.get(status.name, ""), status.problem
            if status.problem and status.problem != before:
                news.append(f"MCP server {status.name} {status.problem}")
        return news

    @property
    def starting(self) -> bool:
        """Whether a server is still starting."""
        return any(status.state == "starting" for status in self.servers.statuses)

    def wait(self, cancelled: threading.Event) -> None:
        """Wait until every server has started or failed, or ``cancelled`` is set."""
        self.servers.wait(cancelled)

    # -- what a model is offered -----------------------------------------------------------------

    @property
    def offered(self) -> dict[str, Tool]:
        """The tools that a model may call, by the names that it gets. Of two that a server calls
        the same, this is the first.
        """
        found: dict[str, Tool] = {}
        for tool in (tool for status in self.servers.statuses for tool in status.tools):
            if self._configs[tool.server].offers(tool.name):
                found.setdefault(tool.title, tool)
        self._first = found | self._first
        return model_names([*found.values()])

    def definitions(self) -> list[dict[str, object]]:
        """Return the offered tools in OpenAI's format."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": tool.description,
                    "parameters": dict(tool.schema),
                },
            }
            for name, tool in self.offered.items()
        ]

    # -- calls -----------------------------------------------------------------------------------

    def read(self, call: ToolCall, conversation: str) -> PendingCall:
        """Check a model's call in the conversation with this id; return it with its tool."""
        offered = self.offered
        tool = offered.get(call.name)
        if tool is None:
            there = f"There are: {', '.join(offered)}." if offered else "There are none."
            return PendingCall(call.id, call.name, problem=f"There is no such tool. {there}")
        try:
            arguments = parse_json(call.arguments or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            return PendingCall(
                call.id, call.name, tool, problem="The arguments must be a JSON object."
            )
        asks = self._permission(tool, conversation) == "asks"
        return PendingCall(call.id, call.name, tool, arguments, asks=asks)

    def allow(self, tool: Tool, conversation: str) -> None:
        """Let a tool run without a question in a conversation, until the app ends or the server
        describes it otherwise.
        """
        self._allowed.append((conversation, tool))

    def _permission(self, tool: Tool, conversation: str) -> str:
        """Settings name tools: that allows what such a tool was when the app began."""
        if self._configs[tool.server].allows(tool.name) and self._first[tool.title] == tool:
            return "allowed"
        here = (conversation, tool) in self._allowed
        return "allowed in this conversation" if here else "asks"

    def run(self, call: PendingCall, *, ctx: int = 0) -> Future[ToolResult]:
        """Run a call; the future never fails, and may be cancelled.

        ``ctx`` is the model's context in tokens, 0 if unknown; a result that would take more than
        about half of it is cut.
        """
        if call.tool is None or call.problem:
            told: Future[ToolResult] = Future()
            told.set_result(ToolResult(call.problem, "failed"))
            return told
        most = min(int(ctx * _CHARACTERS_PER_TOKEN) or _MOST_CHARACTERS, _MOST_CHARACTERS)
        return self.servers.call(call.tool, call.arguments, most=most)

    # -- /tools ----------------------------------------------------------------------------------

    def command(self, argument: str, conversation: str) -> str:
        """Run ``/tools``: list servers, their state and tools; ``retry`` restarts failed servers.

        Raises:
            OptionError: another argument.
        """
        if argument == "retry":
            self.servers.start_again()
            return "Starting the servers that failed; /tools lists them"
        if argument:
            raise OptionError(
                "/tools lists MCP servers and tools, /tools on and /tools off switch tools, "
                "/tools retry starts servers that failed"
            )
        if not self.servers.configs:
            return (
                "No tools: config.toml names MCP servers. A program needs [mcp.servers.NAME] with "
                'command = "PROGRAM" and args = ["ARGUMENT"], a web server url = "https://..."'
            )
        return "\n".join(
            line for status in self.servers.statuses for line in self._lines(status, conversation)
        )

    def _lines(self, status: ServerStatus, conversation: str) -> list[str]:
        config, offered = self._configs[status.name], [*self.offered.values()]
        lines = [f"{status.name}: {status.problem or status.state}"]
        for tool in status.tools:
            state = "denied" if not config.offers(tool.name) else "left out: its name is taken"
            state = self._permission(tool, conversation) if tool in offered else state
            about = one_line((tool.description.strip().splitlines() or [""])[0])
            name = as_line(tool.name[:_LONGEST_NAME])
            lines.append(f"  {name} ({state})" + (f": {about}" if about else ""))
        return lines


def model_names(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Map the names that a model gets to tools: a tool's own name, with its server's name in front
    if several servers have a tool of that name.
    """
    plain = Counter(_plain(tool.name) for tool in tools)
    names: dict[str, Tool] = {}
    for tool in tools:
        name = _plain(tool.name)
        if plain[name] > 1:
            name = _plain(f"{tool.server}_{tool.name}")
        number, free = 2, name
        while free in names:
            free, number = f"{name[: _LONGEST_NAME - 4]}_{number}", number + 1
        names[free] = tool
    return names


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:_LONGEST_NAME] or "_"
