"""A model's tool call as a turn of a conversation: allowed or refused, run, saved with its result.

The turn is saved before the call runs, so that a program that is killed loses only the result.
Nothing here waits for a call, or asks the user.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Literal

from localrt.common.files import parse_json
from localrt.engine.types import ToolCall
from localrt.history.database import AnswerWriter
from localrt.mcp.config import ToolResult
from localrt.mcp.toolbox import REFUSED, STOPPED, Toolbox

Decision = Literal["once", "always", "refuse"]


class CallTurn:
    """A call to be confirmed (``asks``) and run. ``result`` is set when it has ended.

    ``conversation`` is the id of its conversation, ``begin`` begins a turn there, with an ``info``
    and ``after`` another, and ``finish`` ends it. ``decide``, ``has_ended`` and ``stop`` raise what
    ``finish`` does.
    """

    def __init__(
        self,
        toolbox: Toolbox,
        conversation: str,
        call: ToolCall,
        begin: Callable[..., AnswerWriter],
        finish: Callable[..., None],
        after: int,
    ) -> None:
        self._toolbox, self._conversation, self._tool_call = toolbox, conversation, call
        self._running: Future[ToolResult] | None = None
        self.call = toolbox.read(call, conversation)
        self._info = {"tool_call_id": call.id, "arguments": call.arguments}
        self._info["title"] = self.call.title
        self.line = call_line(self._info)
        self._finish = finish
        self._writer = begin(after=after, role="tool", info=self._info)
        self.result: ToolResult | None = None

    @property
    def turn(self) -> int:
        return self._writer.turn

    @property
    def started(self) -> bool:
        return self._running is not None or self.result is not None

    def asks(self) -> bool:
        """Whether the user has to decide; an earlier decision may have allowed the tool since."""
        self.call = self._toolbox.read(self._tool_call, self._conversation)
        return self.call.asks

    def decide(self, decision: Decision, ctx: int) -> None:
        """Run it or refuse it; ``ctx`` is the model's context length in tokens."""
        if decision == "refuse":
            self._end(REFUSED)
            return
        if decision == "always" and self.call.tool is not None:
            self._toolbox.allow(self.call.tool, self._conversation)
        self._running = self._toolbox.run(self.call, ctx=ctx)

    def has_ended(self) -> bool:
        """Whether there is a result; a new one is saved."""
        running = self._running
        if self.result is None and running is not None and running.done():
            self._end(STOPPED if running.cancelled() else running.result())
        return self.result is not None

    def stop(self) -> None:
        if not self.has_ended():
            if self._running is not None:
                self._running.cancel()
            self._end(STOPPED)

    def _end(self, result: ToolResult) -> None:
        if not self._writer.text:
            self._writer.write(result.text)
        self._finish(self._writer, "done", info={**self._info, "ending": result.ending})
        self.result = result


def call_line(info: Mapping[str, object]) -> str:
    """A line such as ``files.read_file {"path": "a"}``, from a call turn's ``info``. If another
    program wrote that, items may be missing, and arguments may not be JSON.
    """
    arguments = str(info.get("arguments", ""))
    try:
        arguments = json.dumps(parse_json(arguments), ensure_ascii=False)
    except ValueError:
        arguments = " ".join(arguments.split())
    return f"{info.get('title') or info.get('name') or 'tool'} {arguments}".rstrip()
