"""Runs one MCP server through the official SDK: starts and restarts it, lists and calls its tools.

It runs in the event loop of ``servers.py``, and is imported only there, because it imports the SDK.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import TextIO
from urllib.parse import urlsplit

import mcp
from anyio.streams.memory import MemoryObjectReceiveStream
from httpx2 import AsyncClient, Timeout
from mcp import types
from mcp.client import Transport
from mcp.client._transport import TransportStreams
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from localrt import system
from localrt.common.errors import reason_of
from localrt.common.formatting import one_line
from localrt.common.network import network_problem
from localrt.common.processes import program_path
from localrt.common.version import __version__
from localrt.mcp.config import ServerConfig, ServerStatus, Tool, ToolResult

_MOST_PAGES = 100  # of the list of tools
_LAST_WORDS = 4096  # bytes of a server's stderr that may say why it ended
_CONNECT_SECONDS = 10.0
_INFO = types.Implementation(name="localrt", version=__version__)


class Connection:
    """A connection that ``run`` keeps open. The next call restarts a server that ended."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._status = ServerStatus(config.name, "starting")
        self._tools: tuple[Tool, ...] = ()  # kept after the server ended, as a call restarts it
        self._client: mcp.Client | None = None
        self._incoming: object = None  # the transport's stream of messages
        self._reading = threading.Lock()  # any thread reads stderr, which is not closed meanwhile
        self._stderr: TextIO | None = None
        self._words = ""
        self._settled = asyncio.Event()  # set once the server runs or has failed
        self._over = asyncio.Event()
        self._wanted = asyncio.Event()

    @property
    def status(self) -> ServerStatus:
        """The server's state now; may be read from any thread."""
        if self._status.state == "ready" and self._is_closed:
            return ServerStatus(self._config.name, "failed", self._tools, self._ended())
        return self._status

    def start_again(self) -> None:
        """Restart the server if it has failed; call this in the event loop."""
        if self.status.state == "failed":
            self._settled.clear()
            self._over.set()
            self._wanted.set()

    async def run(self) -> None:
        """Keep the server running until cancelled."""
        while True:
            self._status = ServerStatus(self._config.name, "starting")
            self._over.clear()
            try:
                async with AsyncExitStack() as stack:
                    async with asyncio.timeout(self._config.timeout):
                        client = await stack.enter_async_context(self._opened())
                        self._tools = await self._listed(client)
                    self._client = client
                    self._status = ServerStatus(self._config.name, "ready", self._tools)
                    self._settled.set()
                    await self._over.wait()
                    problem = self._ended()
            except TimeoutError:
                problem = f"did not start within {self._config.timeout:g} s"
            except Exception as error:  # noqa: BLE001 - a server's failure is told, whatever it is
                problem = self._explained(error)
            self._client = None
            self._status = ServerStatus(self._config.name, "failed", self._tools, problem)
            if not self._wanted.is_set():
                self._settled.set()
            await self._wanted.wait()
            self._wanted.clear()

    async def call(self, tool: str, arguments: Mapping[str, object], most: int) -> ToolResult:
        """Call a tool; return a result of at most ``most`` characters, for failures too."""
        name, timeout = self._config.name, self._config.timeout
        try:
            async with asyncio.timeout(timeout):
                await self._settled.wait()
                self.start_again()
                await self._settled.wait()
                if self._client is None:
                    return ToolResult(f"The server {name} {self.status.problem}.", "failed")
                found = await self._client.call_tool(tool, dict(arguments))
        except TimeoutError:
            return ToolResult(f"The server {name} did not answer within {timeout:g} s.", "failed")
        except Exception as error:  # noqa: BLE001 - the model is told, and may try otherwise
            if isinstance(error, mcp.MCPError) and error.code != types.CONNECTION_CLOSED:
                return ToolResult(f"The server {name} says: {error.message}", "failed").cut(most)
            self._over.set()
            return ToolResult(f"The server {name} {self._explained(error)}.", "failed")
        return ToolResult(_text(found), "failed" if found.is_error else "done").cut(most)

    # -- parts -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[mcp.Client]:
        config = self._config
        async with AsyncExitStack() as stack:
            if config.url:
                timeout = Timeout(config.timeout, connect=_CONNECT_SECONDS)
                http = AsyncClient(headers=dict(config.headers), timeout=timeout)
                await stack.enter_async_context(http)
                transport = streamable_http_client(config.url, http_client=http)
            else:
                program = program_path(config.command, config.env.get("PATH"))
                if program is None:
                    raise FileNotFoundError("no program in PATH, nor an absolute path to one")
                server = mcp.StdioServerParameters(
                    command=program, args=list(config.args), env=dict(config.env)
                )
                transport = stdio_client(server, stack.enter_context(self._kept_words()))
            client = mcp.Client(self._watched(transport), client_info=_INFO)
            yield await stack.enter_async_context(client)

    @contextmanager
    def _kept_words(self) -> Iterator[TextIO]:
        """Open a file for a program's stderr; its last line may say why the program ended."""
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as self._stderr:
            try:
                yield self._stderr
            finally:
                with self._reading:
                    self._words, self._stderr = _last_line(self._stderr), None

    @asynccontextmanager
    async def _watched(self, transport: Transport) -> AsyncIterator[TransportStreams]:
        """Open ``transport``, and keep its incoming stream to notice when its server ends."""
        async with transport as (incoming, outgoing):
            self._incoming = incoming
            yield incoming, outgoing

    @property
    def _is_closed(self) -> bool:
        """Whether a local program has ended; a remote server shows it only at the next call."""
        stream = self._incoming
        return isinstance(stream, MemoryObjectReceiveStream) and (
            stream.statistics().open_send_streams == 0
        )

    def _ended(self) -> str:
        """Return ``ended: LAST LINE OF STDERR``."""
        with self._reading:
            words = self._words if self._stderr is None else _last_line(self._stderr)
        return f"ended: {words}" if words else "ended"

    def _explained(self, error: BaseException) -> str:
        """Say why a server cannot be used; the text follows its name in a sentence."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, mcp.MCPError):
            if error.code == types.CONNECTION_CLOSED:
                return self._ended()
            return f"cannot be used: {one_line(error.message)}"
        if isinstance(error, OSError) and self._config.command:
            return f"cannot be started: {self._config.command}: {reason_of(error)}"
        url = self._config.url
        place = urlsplit(url)
        shown = f"{place.scheme}://{place.netloc.rpartition('@')[2]}{place.path}"
        problem = network_problem(error, place.hostname or "")
        reason = (problem or one_line(error) or type(error).__name__).replace(url, shown)
        return f"cannot be reached at {shown}: {reason}"  # a query may hold a key

    async def _listed(self, client: mcp.Client) -> tuple[Tool, ...]:
        found: list[Tool] = []
        cursor: str | None = None
        for _ in range(_MOST_PAGES):
            page = await client.list_tools(cursor=cursor)
            found += [
                Tool(self._config.name, tool.name, tool.description or "", tool.input_schema)
                for tool in page.tools
            ]
            if (cursor := page.next_cursor) is None:
                break
        return tuple(found)


def _last_line(file: TextIO) -> str:
    """Return the last line of a file that another process writes."""
    number = file.fileno()
    size = os.fstat(number).st_size
    last = bytearray(_LAST_WORDS)
    count = system.read_at(number, memoryview(last), max(0, size - _LAST_WORDS))
    text = last[:count].decode(errors="replace")
    return next((one_line(line) for line in reversed(text.splitlines()) if line.strip()), "")


def _text(found: types.CallToolResult) -> str:
    """Return a tool's result as text; models here read nothing else."""
    parts = [_part(block) for block in found.content]
    if not parts and found.structured_content is not None:
        parts = [json.dumps(found.structured_content, ensure_ascii=False)]
    return "\n".join(parts) or "(nothing)"


def _part(block: types.ContentBlock) -> str:
    match block:
        case types.TextContent():
            return block.text
        case types.EmbeddedResource(resource=types.TextResourceContents(text=text)):
            return text
        case types.ResourceLink():
            return f"[{block.name}: {block.uri}]"
        case _:
            return f"[{block.type}: left out, only text can be read]"
