"""Runs one MCP server through the official SDK: starts and restarts it, lists and calls its tools.

It runs in the event loop of ``servers.py``, and is imported only there, because it imports the SDK.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import math
import os
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from encodings import utf_8
from typing import Any, TextIO
from urllib.parse import urlsplit

import mcp
from anyio.streams.memory import MemoryObjectReceiveStream
from httpx2 import AsyncByteStream, AsyncClient, Response, StreamError, Timeout
from mcp import types
from mcp.client import Transport
from mcp.client._transport import TransportStreams
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from localrt import system
from localrt.common.errors import reason_of
from localrt.common.files import MOST_WORDS, json_words
from localrt.common.formatting import one_line
from localrt.common.network import network_problem
from localrt.common.processes import program_path
from localrt.common.version import __version__
from localrt.mcp.config import ServerConfig, ServerStatus, Tool, ToolResult

_MOST_PAGES = 20  # of the list of tools
_MOST_BYTES = 16 << 20  # of a message; results hold pictures too
_LINES = "localrt_mcp_lines"  # a codec: the SDK has no limit for lines, and decodes all of them
_reading: ContextVar[Callable[[str], None]] = ContextVar("reading")  # tells whose lines are refused
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
        self._refused = ""  # why what the server sent was not read
        self._patience = asyncio.timeout(None)  # with its start
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
            self._refused = ""
            try:
                async with AsyncExitStack() as stack:
                    async with asyncio.timeout(self._config.timeout) as self._patience:
                        client = await stack.enter_async_context(self._opened())
                        self._tools = await self._listed(client)
                    self._client = client
                    self._status = ServerStatus(self._config.name, "ready", self._tools)
                    self._settled.set()
                    await self._over.wait()
                    problem = self._refused or self._ended()
            except TimeoutError:
                problem = self._refused or f"did not start within {self._config.timeout:g} s"
            except Exception as error:  # noqa: BLE001 - a server's failure is told, whatever it is
                problem = self._explained(error)
            self._client = None
            self._status = ServerStatus(self._config.name, "failed", self._tools, problem)
            if not self._wanted.is_set():
                self._settled.set()
            await self._wanted.wait()
            self._wanted.clear()

    async def call(self, tool: Tool, arguments: Mapping[str, object], most: int) -> ToolResult:
        """Call a tool; return a result of at most ``most`` characters, for failures too."""
        name, timeout = self._config.name, self._config.timeout
        try:
            async with asyncio.timeout(timeout):
                await self._settled.wait()
                self.start_again()
                await self._settled.wait()
                if self._client is None:
                    return ToolResult(f"The server {name} {self.status.problem}.", "failed")
                if tool not in self._tools:  # what was allowed is not what would run
                    text = f"The server {name} has changed {tool.name}: see it, and call it again."
                    return ToolResult(text, "failed")
                found = await self._client.call_tool(tool.name, dict(arguments))
        except TimeoutError:
            return ToolResult(f"The server {name} did not answer within {timeout:g} s.", "failed")
        except Exception as error:  # noqa: BLE001 - the model is told, and may try otherwise
            closed = isinstance(error, mcp.MCPError) and error.code == types.CONNECTION_CLOSED
            if isinstance(error, mcp.MCPError) and not (closed or self._refused):
                return ToolResult(f"The server {name} says: {error.message}", "failed").cut(most)
            self._over.set()
            return ToolResult(f"The server {name} {self._explained(error)}.", "failed")
        return ToolResult(_text(found), "failed" if found.is_error else "done").cut(most)

    # -- parts -----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[mcp.Client]:
        config = self._config
        _reading.set(self._refuse)
        async with AsyncExitStack() as stack:
            if config.url:
                timeout = Timeout(config.timeout, connect=_CONNECT_SECONDS)
                headers = {**config.headers, "Accept-Encoding": "identity"}
                hooks = {"response": [self._limit]}
                http = AsyncClient(headers=headers, timeout=timeout, event_hooks=hooks)
                await stack.enter_async_context(http)
                transport = streamable_http_client(
                    config.url, http_client=http, max_sse_event_size=_MOST_BYTES
                )
            else:
                program = program_path(config.command, config.env.get("PATH"))
                if program is None:
                    raise FileNotFoundError("no program in PATH, nor an absolute path to one")
                args, env = list(config.args), dict(config.env)
                server = mcp.StdioServerParameters(
                    command=program, args=args, env=env, encoding=_LINES
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

    def _refuse(self, why: str) -> None:
        """End the server because of what it sent; the next call restarts it."""
        self._refused = why
        self._over.set()
        with suppress(RuntimeError):  # it has started
            self._patience.reschedule(0)

    async def _limit(self, response: Response) -> None:
        """Limit the body of a response, JSON or events."""
        if response.headers.get("content-encoding", "identity") != "identity":
            self._refuse("sends compressed answers, for which nobody asked")
            raise StreamError("it is compressed")
        events = response.headers.get("content-type", "").lower().startswith("text/event-stream")
        room = _Room(b"\n\n" if events else None, self._refuse)
        response.stream = _Body(response.stream, room)

    def _ended(self) -> str:
        """Return ``ended: LAST LINE OF STDERR``."""
        with self._reading:
            words = self._words if self._stderr is None else _last_line(self._stderr)
        return f"ended: {words}" if words else "ended"

    def _explained(self, error: BaseException) -> str:
        """Say why a server cannot be used; the text follows its name in a sentence."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if self._refused:
            return self._refused
        if isinstance(error, mcp.MCPError):
            if error.code == types.CONNECTION_CLOSED:
                return self._ended()
            return f"cannot be used: {one_line(error.message)}"
        if isinstance(error, OSError) and self._config.command:
            return f"cannot be started: {self._config.command}: {reason_of(error)}"
        url = self._config.url
        if not url:
            return f"cannot be used: {one_line(error) or type(error).__name__}"
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


class _Room:
    """Limits each message of a server before the SDK parses it: its bytes, and the memory of its
    values, estimated as if texts were JSON too. ``end`` ends a message, unless there is only one.
    """

    def __init__(self, end: bytes | None, refuse: Callable[[str], None]) -> None:
        self._end, self._last, self._taken, self._refuse = end, b"", 0.0, refuse

    def takes(self, piece: bytes) -> bool:
        """Whether the messages of this piece are small enough so far."""
        data = self._last + piece.replace(b"\r", b"")
        self._last = data[-1:]
        for number, part in enumerate(data.split(self._end) if self._end else [data]):
            words = json_words(part.decode("latin-1"), math.inf)
            self._taken = self._taken if number == 0 else 0.0
            self._taken += len(part) + words * _MOST_BYTES / MOST_WORDS
            if self._taken > _MOST_BYTES:
                self._refuse(f"sent more than {_MOST_BYTES >> 20} MB, or too many values, at once")
                return False
        return True


class _Body(AsyncByteStream):
    def __init__(self, stream: Any, room: _Room) -> None:
        self._stream, self._room = stream, room

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._stream:
            if not self._room.takes(piece):
                raise StreamError("it is too large")
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Lines(utf_8.IncrementalDecoder):
    """UTF-8 in lines; after one that is too large the rest is left out."""

    def __init__(self, errors: str = "strict") -> None:
        super().__init__(errors)
        self._room, self._is_open = _Room(b"\n", _reading.get()), True

    def decode(self, data: Any, final: bool = False) -> str:
        self._is_open = self._is_open and self._room.takes(data)
        return super().decode(data, final) if self._is_open else ""


_CODEC = codecs.CodecInfo(utf_8.encode, utf_8.decode, incrementaldecoder=_Lines, name=_LINES)
codecs.register(lambda name: _CODEC if name == _LINES else None)


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
