"""Answers that are written to conversations of the history, whoever reads along.

An answer belongs to its conversation and not to a request: it goes on while its page is reloaded,
every page that shows the conversation can follow it, and it ends early only if it is stopped. So
do the calls of tools in it, which run once the user has allowed them, and the answer after them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrt.chat_format.thinking import parted
from localrt.common.errors import ContextOverflowError, LocalrtError, StorageError
from localrt.common.formatting import as_line, printable
from localrt.common.settings import Settings
from localrt.engine.types import Chunk, ToolCall
from localrt.history import AnswerWriter, Conversation, History, Turn
from localrt.history.database import GoneError
from localrt.history.messages import (
    AnswerRecord,
    answer_counts,
    messages_for_model,
    summary_turns,
    ways_out,
)
from localrt.history.pictures import joined_content
from localrt.library import plan
from localrt.mcp import ROUNDS
from localrt.server.dialect import event
from localrt.server.errors import failure, in_words
from localrt.server.markdown import HtmlParts
from localrt.server.service import ModelRequest, Service, sent_key
from localrt.service.live import AsyncAnswer

if TYPE_CHECKING:  # they take a megabyte, and few servers' clients use tools of MCP servers
    from localrt.history.messages import CallTurn, Decision
    from localrt.mcp.toolbox import Toolbox
    from localrt.planning.forecast import PlannedContext

_FRAME_S = 0.05  # the least time between two events
_PATIENCE = 10  # and how many times as long as a text takes to become HTML
_LOOK_S = 0.1  # between looks at a call
_CLOSE_S = 5.0


class Answers:
    """The user's history and tools, opened when first needed, and what is being written to it."""

    def __init__(self, open_history: Callable[[], History], config_dir: Path | None) -> None:
        self.running: dict[int, ConversationAnswer | OpenCall] = {}  # by turn
        self._tasks = set[asyncio.Task[None]]()
        self._open, self._config_dir = open_history, config_dir

    @cached_property
    def history(self) -> History:
        """The history.

        Raises:
            StorageError: it cannot be opened.
        """
        return self._open()

    @cached_property
    def temporary(self) -> History:
        """Conversations that are in memory alone."""
        return History(":memory:")

    def history_of(self, conversation: str) -> History:
        """The history that a conversation is in, if it is in one."""
        with suppress(GoneError):
            self.temporary.open(conversation)
            return self.temporary
        return self.history

    @property
    def config_dir(self) -> Path:
        """The folder of the user's settings."""
        return self._config_dir or Settings.from_environment().config_dir

    @cached_property
    def toolbox(self) -> Toolbox:
        """The tools of the user's MCP servers, which start; for the event loop alone."""
        from localrt.mcp.toolbox import Toolbox

        return Toolbox.open(self.config_dir)

    def begin(
        self,
        request: ModelRequest,
        found: Conversation,
        writer: AnswerWriter,
        rounds: int = 0,
        *,
        continued: Turn | None = None,
        summed_up: Turn | None = None,
    ) -> None:
        """Let the requested model write an answer, after ``rounds`` of calls of tools; the answer
        ``continued`` from there, or a summary of what precedes the question ``summed_up``, which
        is asked again after it.
        """
        tools = request.fields.get("tools") and rounds < ROUNDS and summed_up is None
        toolbox, private = self.toolbox if tools else None, self.history_of(found.id).path is None
        one = ConversationAnswer(request, found, writer, toolbox, private, continued, summed_up)
        self.running[writer.turn] = one
        one.task.add_done_callback(lambda _: self.running.pop(writer.turn))
        self._tasks.add(task := asyncio.ensure_future(self._go_on(one, rounds)))
        task.add_done_callback(self._tasks.discard)

    async def _go_on(self, answer: ConversationAnswer, rounds: int) -> None:
        """Run the calls in an answer, and have the model answer again with their results."""
        found, service, stopped = answer.found, answer.request.service, False
        try:
            turns, question = await answer.task
            for turn in turns:
                self.running[turn.turn] = call = OpenCall(turn, found.id, stopped)
                await call.run(service, answer.ctx)
                del self.running[turn.turn]
                stopped = call.stopped
            if turns and not stopped and not service.draining:
                writer = await asyncio.to_thread(found.answer, after=turns[-1].turn)
                self.begin(answer.request, found, writer, rounds + 1)
            elif question is not None:
                self.begin(answer.request, found, question)
        except StorageError as error:
            service.note_once("history", f"an answer does not go on: {error}")

    def stop(self, conversation: str) -> None:
        """Stop the answers and calls in a conversation."""
        for one in self.running.values():
            if one.conversation == conversation:
                one.stop()

    async def close(self, service: Service) -> None:
        """Wait until all is saved, and close all; the service must have stopped."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)
        if "toolbox" in self.__dict__:
            await asyncio.to_thread(self.toolbox.close)
        for name in ("history", "temporary"):
            if name in self.__dict__:
                try:
                    await asyncio.to_thread(getattr(self, name).close)
                except StorageError as error:
                    service.note_once("history", str(error))


class OpenCall:
    """An open call of a tool. If it ``asks``, it waits for a ``decision`` that ends that."""

    def __init__(self, turn: CallTurn, conversation: str, stopped: bool) -> None:
        self.turn, self.conversation, self.stopped = turn, conversation, stopped
        self.asks = False
        self.decision: Decision = "once"

    def stop(self) -> None:
        """End it, also if it has not begun."""
        self.stopped = True

    def shown(self) -> dict[str, Any]:
        """Return what the user decides about, with control characters spelled out."""
        arguments = json.dumps(dict(self.turn.call.arguments), ensure_ascii=False, indent=2)
        shown = {"title": as_line(self.turn.call.title), "arguments": printable(arguments)}
        return {**shown, "asks": self.asks}

    async def run(self, service: Service, ctx: int) -> None:
        """Wait for the decision, and follow it; return when the call has ended and is saved."""
        self.asks, done = await asyncio.to_thread(self.turn.asks), False
        while not done:
            self.stopped |= service.stopping or (self.asks and service.draining)
            if self.stopped or not self.asks:
                try:
                    done = await asyncio.to_thread(self._advance, ctx)
                except StorageError as error:
                    service.note_once("history", f"a call is not saved yet: {error}")
            await asyncio.sleep(0 if done else _LOOK_S)

    def _advance(self, ctx: int) -> bool:
        if self.stopped:
            self.turn.stop()
        elif not self.turn.started:
            self.turn.decide(self.decision, ctx)
        return self.turn.has_ended()


class ConversationAnswer:
    """One answer while it is written, by ``task``, whose result are the calls in it, or the answer
    that begins after a summary.
    """

    def __init__(
        self,
        request: ModelRequest,
        found: Conversation,
        writer: AnswerWriter,
        toolbox: Toolbox | None,
        private: bool,
        continued: Turn | None,
        summed_up: Turn | None,
    ) -> None:
        self.request, self.found, self._writer, self._toolbox = request, found, writer, toolbox
        self._private, self._continued, self._summed_up = private, continued, summed_up
        self.conversation, self.ctx, self._error = found.id, 0, ""
        self._changed = asyncio.Event()
        self._chunk: Chunk | None = None
        self._record = AnswerRecord()
        self._pieces: list[str] = []
        self._answer: AsyncAnswer | None = None
        self._stopped = self._done = False
        self._working = asyncio.ensure_future(self._work())
        self.task = asyncio.ensure_future(self._run())

    def stop(self) -> None:
        """End the answer; its text so far stays."""
        self._stopped = True
        (self._answer or self._working).cancel()

    async def follow(self) -> AsyncIterator[bytes]:
        """Yield events with what is new as HTML, and all else, until the answer has ended."""
        parts = HtmlParts()
        while True:
            changed, done, began = self._changed, self._done, time.monotonic()
            told = await asyncio.to_thread(self._told, parts)
            took = time.monotonic() - began
            yield event({**told, "done": done})
            if done:
                return
            await changed.wait()
            await asyncio.sleep(max(_FRAME_S, _PATIENCE * took))

    async def _run(self) -> tuple[list[CallTurn], AnswerWriter | None]:
        state, info, calls = "done", dict[str, Any](), tuple[ToolCall, ...]()
        full = False
        try:
            await self._working
        except asyncio.CancelledError:
            state = "cancelled"
        except Exception as error:  # noqa: BLE001 - the page shows any error
            state, self._error = "failed", in_words(failure(error))
            info["error"], full = self._error, isinstance(error, ContextOverflowError)
        if (chunk := self._chunk) is not None:
            info |= self._record.info(self.request.model.name)
            full |= info["finish_reason"] == "length" and info["context"][0] >= self.ctx
        stopping = self._stopped or self.request.service.stopping
        if stopping or info.get("finish_reason") == "cancelled":
            state = info["finish_reason"] = "cancelled"
        elif chunk is not None and chunk.tool_calls:
            calls = chunk.tool_calls
            info["tool_calls"] = [call.to_dict() for call in calls]
        try:
            if full:
                info["ways"] = await asyncio.to_thread(self._ways)
            if self._summed_up is not None:
                info["summary"] = True
            await asyncio.to_thread(self._writer.finish, state, info=info)
            if self._summed_up is not None and state == "done":
                return [], await asyncio.to_thread(self._asked_again, self._summed_up)
            return await asyncio.to_thread(self._begun, calls), None
        finally:
            self._done = True
            self._notify()

    def _ways(self) -> list[tuple[str, str, int | None]]:
        """What the user can do about a full context, by name: without what makes room if nothing
        precedes the question.
        """
        turns = self.found.branch(self._writer.turn)
        alone = [turn.role for turn in turns if turn.id <= self._writer.turn].count("user") == 1
        contexts: Sequence[PlannedContext] = ()
        path = self.request.model.path
        if self.request.service.models.several and path is not None:
            with suppress(LocalrtError):
                contexts = plan(str(path)).contexts
        ways = ways_out(self.ctx, self.ctx, contexts)
        makes_room = ("oldest", "summary")
        return [
            (way.name, way.label, way.ctx) for way in ways if not (alone and way.name in makes_room)
        ]

    def _asked_again(self, question: Turn) -> AnswerWriter:
        """Ask the question after the summary."""
        parts = joined_content(
            question.content, question.pictures, lambda one: {"type": "image", "image": one}
        )
        asked = self.found.add("user", parts, after=self._writer.turn, info=question.info)
        return self.found.answer(after=asked.id)

    def _begun(self, calls: Sequence[ToolCall]) -> list[CallTurn]:
        if not calls:
            return []
        from localrt.history.messages import CallTurn

        assert self._toolbox is not None, "without it, no tools are offered"
        turns, kept, after = list[CallTurn](), self.found, self._writer.turn
        for call in calls:
            begin, finish = kept.answer, AnswerWriter.finish
            turns.append(CallTurn(self._toolbox, kept.id, call, begin, finish, after))
            after = turns[-1].turn
        return turns

    async def _work(self) -> None:
        request, service, writer = self.request, self.request.service, self._writer
        client, toolbox = sent_key(request.http.headers), self._toolbox
        while toolbox is not None and toolbox.starting and not service.draining:
            await asyncio.sleep(_LOOK_S)
        with service.admitted():
            async with request.using() as served:
                given = await asyncio.to_thread(self._given, bool(served.sees))
                self.ctx = served.model.info.ctx
                if toolbox is not None and (tools := toolbox.definitions()):
                    given["tools"] = tools
                if served.model.adapters:
                    given["adapter"] = request.model.adapter or "none"
                pictures = any(isinstance(one["content"], list) for one in given["prompt"])
                async with service.seeing if pictures else nullcontext():
                    self._answer = await served.live.asubmit(client=client, **given)
                async for chunk in self._answer:
                    await asyncio.to_thread(writer.write, chunk.text)
                    self._pieces.append(chunk.text)
                    self._chunk = chunk
                    self._record.add(chunk)
                    self._notify()
                    if chunk.error is not None:
                        raise chunk.error

    def _given(self, sees: bool) -> dict[str, Any]:
        """Return the prompt and the options of the conversation; reads the disk."""
        found, turn = self.found, self._writer.turn
        options = {name: value for name, value in found.options.items() if name != "adapter"}
        if self._private:
            options["private"] = True
        if (question := self._summed_up) is not None:
            turns = [each for each in found.branch(question.id) if each.id < question.id]
            prompt, _ = summary_turns(turns, found.system, sees=sees)
            return {"prompt": prompt, "overflow": "drop_oldest", "private": self._private}
        prompt = messages_for_model(
            found.branch(turn),
            found.system,
            before=turn,
            sees=sees,
            continued=None if self._continued is None else turn,
            model=self.request.model.name,
        )
        return {**options, "prompt": prompt}

    def _told(self, parts: HtmlParts) -> dict[str, Any]:
        before = "" if self._continued is None else self._continued.content
        thinking, text = parted("".join(self._pieces) or before)
        model, chunk = self.request.model.name, self._chunk
        counts = {} if chunk is None else answer_counts(chunk.metrics, model)
        new = parts.take(text, grows=True)
        return {"thinking": thinking, **new, "error": self._error, **counts}

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
