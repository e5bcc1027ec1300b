"""A model's calls of tools while they are asked about and run, and the turns that keep them.

A call's turn begins before the call runs, so that an app that is killed loses no more than its
result. Knows the toolbox and the open conversation, no widget.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from localrt.common.errors import LocalrtError
from localrt.mcp.config import ToolResult
from localrt.mcp.toolbox import REFUSED, STOPPED, Toolbox
from localrt.tui.conversation.open_conversation import OpenConversation

if TYPE_CHECKING:
    from localrt import ChatSession, Chunk, ToolCall, Turn

Decision = Literal["once", "always", "refuse"]

NO_TOOLS = "This model cannot be given tools: it answers without those of the MCP servers"
ROUNDS_OVER = "So many calls for one message are enough: the model has to answer now"


def stream_answer(
    chat: ChatSession,
    text: str | None,
    tools: Sequence[Mapping[str, Any]],
    *,
    last: bool = False,
    **arguments: Any,
) -> Iterator[Chunk]:
    """The answer's chunks. ``last``: the model may call no more of the ``tools``.

    Where a server turns out to refuse tools, it is asked once more without them.
    """
    if not tools:
        yield from chat.stream(text, **arguments)
        return
    began = False
    if last:
        arguments["tool_choice"] = "none"
    try:
        for chunk in chat.stream(text, tools=tools, **arguments):
            began = True
            yield chunk
    except LocalrtError:
        if began or chat.takes_tools:
            raise
        arguments.pop("tool_choice", None)
        yield from chat.stream(text, **arguments)


def lacks_tools(toolbox: Toolbox, chat: ChatSession) -> bool:
    """Whether there are MCP servers and the model cannot be given their tools."""
    return bool(toolbox.servers.configs) and not chat.takes_tools


def begin_calls(
    toolbox: Toolbox, conversation: OpenConversation, calls: Sequence[ToolCall], after: int
) -> list[CallTurn]:
    """The turns of an answer's calls, in order behind turn ``after``."""
    begun: list[CallTurn] = []
    for call in calls:
        begun.append(CallTurn(toolbox, conversation, call, after))
        after = begun[-1].turn
    return begun


class CallTurn:
    """A call to be asked about (``asks``) and run. ``result`` is there when it has ended."""

    def __init__(
        self, toolbox: Toolbox, conversation: OpenConversation, asked: ToolCall, after: int
    ) -> None:
        self._toolbox, self._conversation, self._asked = toolbox, conversation, asked
        self._running: Future[ToolResult] | None = None
        self.call = toolbox.read(asked, conversation.id)
        self._info = {
            "tool_call_id": asked.id,
            "title": self.call.title,
            "arguments": asked.arguments,
        }
        self._writer = conversation.answer(after=after, role="tool", info=self._info)
        self.result: ToolResult | None = None

    @property
    def turn(self) -> int:
        """Its number in the history."""
        return self._writer.turn

    @property
    def kept(self) -> KeptCall:
        """The call as it is kept."""
        return KeptCall.of(self._info)

    def asks(self) -> bool:
        """Whether the user has to decide; read anew, since an earlier answer may allow it."""
        self.call = self._toolbox.read(self._asked, self._conversation.id)
        return self.call.asks

    def always(self) -> None:
        """Let its tool run without a question in this conversation."""
        if self.call.tool is not None:
            self._toolbox.allow(self.call.tool, self._conversation.id)

    def run(self, ctx: int) -> None:
        """Begin to run; ``ctx`` is how many tokens the model's context holds."""
        self._running = self._toolbox.run(self.call, ctx=ctx)

    def has_ended(self) -> bool:
        """Whether there is a result; keeps one that has come."""
        running = self._running
        if self.result is None and running is not None and running.done():
            self._end(running.result())
        return self.result is not None

    def refuse(self) -> None:
        """The user does not allow it."""
        self._end(REFUSED)

    def stop(self) -> None:
        """The user does not wait for it any longer."""
        if not self.has_ended():
            if self._running is not None:
                self._running.cancel()
            self._end(STOPPED)

    def _end(self, result: ToolResult) -> None:
        self.result = result
        self._writer.write(result.text)
        self._conversation.finish(self._writer, "done", {**self._info, "ending": result.ending})


@dataclass(frozen=True, slots=True)
class KeptCall:
    """A call as its turn keeps it. ``arguments`` is JSON on one line, or what the model wrote."""

    title: str
    arguments: str
    ending: str = ""

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> KeptCall:
        """From a turn's ``info``; a conversation of another program may say less."""
        arguments = str(info.get("arguments", ""))
        try:
            arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
        except ValueError:
            arguments = " ".join(arguments.split())
        title = str(info.get("title") or info.get("name") or "tool")
        return cls(title, arguments, str(info.get("ending", "")))

    @classmethod
    def of_turn(cls, turn: Turn) -> KeptCall:
        """Of a turn of a tool."""
        return cls.of(turn.info)

    @property
    def line(self) -> str:
        """``files.read_file {"path": "a"}``."""
        return f"{self.title} {self.arguments}".rstrip()
