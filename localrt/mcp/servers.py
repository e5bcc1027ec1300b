"""Runs the MCP servers of a config in a thread with its own event loop.

Callers read ``statuses``; calls return futures. The thread imports the SDK, so that the import does
not delay the program's start. This module knows no model and no conversation.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING

from localrt.common.formatting import one_line
from localrt.mcp.config import ServerConfig, ServerStatus, Tool, ToolResult

if TYPE_CHECKING:
    from localrt.mcp.connection import Connection

_CLOSE_SECONDS = 8.0  # servers get two seconds to exit, then they are killed
_LOOK_SECONDS = 0.02


class ToolServers:
    """MCP servers; ``start`` starts all in parallel, ``close`` ends them."""

    def __init__(self, configs: Sequence[ServerConfig]) -> None:
        self.configs = tuple(configs)
        self._connections: dict[str, Connection] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._began = threading.Event()
        self._stop: asyncio.Event | None = None
        self._broken = ""
        self._thread = threading.Thread(target=self._run, name="localrt-tools", daemon=True)

    def start(self) -> None:
        """Start all servers without waiting for them."""
        if self.configs:
            self._thread.start()

    @property
    def statuses(self) -> tuple[ServerStatus, ...]:
        """The status of each server, in the config's order."""
        if self._broken:
            return tuple(ServerStatus(c.name, "failed", (), self._broken) for c in self.configs)
        if not self._began.is_set():
            return tuple(ServerStatus(config.name, "starting") for config in self.configs)
        return tuple(connection.status for connection in self._connections.values())

    def wait(self, cancelled: threading.Event) -> None:
        """Wait until all servers have started or failed, or ``cancelled`` is set."""
        while not cancelled.is_set() and any(s.state == "starting" for s in self.statuses):
            time.sleep(_LOOK_SECONDS)

    def start_again(self) -> None:
        """Start the failed servers again."""
        if self._loop is not None:
            for connection in self._connections.values():
                self._loop.call_soon_threadsafe(connection.start_again)

    def call(self, tool: Tool, arguments: Mapping[str, object], *, most: int) -> Future[ToolResult]:
        """Run a tool; its result is cut to ``most`` characters.

        A failed call is a result too, not an exception. Cancelling the future stops the call.
        """
        assert self._loop is not None, "a tool is known once its server has started"
        call = self._connections[tool.server].call(tool, arguments, most)
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def close(self) -> None:
        """End the servers and the thread; takes seconds if a server does not exit."""
        if self._thread.ident is None:
            return
        self._began.wait(_CLOSE_SECONDS)
        if self._loop is not None and self._stop is not None:
            with suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(_CLOSE_SECONDS)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        for name in ("mcp", "client", "httpx2"):  # their log lines would appear in the chat
            logging.getLogger(name).addHandler(logging.NullHandler())
            logging.getLogger(name).propagate = False
        try:
            asyncio.run(self._serve())
        except Exception as error:  # noqa: BLE001 - whatever it is, the statuses tell
            self._broken = f"cannot be used: {one_line(error)}"
        finally:
            self._began.set()

    async def _serve(self) -> None:
        from localrt.mcp.connection import Connection

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._connections = {config.name: Connection(config) for config in self.configs}
        tasks = [asyncio.create_task(each.run()) for each in self._connections.values()]
        self._began.set()
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
