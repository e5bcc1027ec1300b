"""Answers that are written to conversations of the history, whoever reads along.

An answer belongs to its conversation and not to a request: it goes on while its page is reloaded,
every page that shows the conversation can follow it, and it ends early only if it is stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from localrt.chat_format.thinking import parted
from localrt.common.errors import StorageError
from localrt.engine.types import Chunk
from localrt.history import AnswerWriter, Conversation, History
from localrt.history.messages import messages_for_model
from localrt.server.dialect import event
from localrt.server.errors import failure, in_words
from localrt.server.page import to_html
from localrt.server.service import ModelRequest, sent_key
from localrt.service.live import AsyncAnswer

_FRAME_S = 0.05  # the least time between two events
_PATIENCE = 10  # and how many times as long as a text takes to become HTML
_RETRY_S = 2.0  # while the disk is full
_CLOSE_S = 5.0


class Answers:
    """The user's history, opened when it is first needed, and the answers being written to it."""

    def __init__(self, open_history: Callable[[], History]) -> None:
        self.running: dict[int, Answer] = {}  # by turn
        self._open = open_history

    @cached_property
    def history(self) -> History:
        """The history.

        Raises:
            StorageError: it cannot be opened.
        """
        return self._open()

    def begin(self, request: ModelRequest, found: Conversation, writer: AnswerWriter) -> None:
        """Let the requested model write the answer."""
        self.running[writer.turn] = one = Answer(request, found, writer)
        one.task.add_done_callback(lambda _: self.running.pop(writer.turn))

    def stop(self, conversation: str) -> None:
        """Stop the answers in a conversation."""
        for one in self.running.values():
            if one.conversation == conversation:
                one.stop()

    async def close(self) -> None:
        """Wait until answers are saved, and close the file; the service must have stopped."""
        if tasks := [one.task for one in self.running.values()]:
            await asyncio.wait(tasks, timeout=_CLOSE_S)
        if "history" in self.__dict__:
            self.history.close()


class Answer:
    """One answer while it is written, by ``task``."""

    def __init__(self, request: ModelRequest, found: Conversation, writer: AnswerWriter) -> None:
        self._request, self._found, self._writer = request, found, writer
        self.conversation = found.id
        self._changed = asyncio.Event()
        self._chunk: Chunk | None = None
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
        """Yield events with all that is written and its HTML, until the answer has ended."""
        while True:
            changed, done, began = self._changed, self._done, time.monotonic()
            told = await asyncio.to_thread(self._told)
            took = time.monotonic() - began
            yield event({**told, "done": done})
            if done:
                return
            await changed.wait()
            await asyncio.sleep(max(_FRAME_S, _PATIENCE * took))

    async def _run(self) -> None:
        state, info = "done", dict[str, Any]()
        try:
            await self._working
        except asyncio.CancelledError:
            state = "cancelled"
        except Exception as error:  # noqa: BLE001 - the page shows any error
            state, info["error"] = "failed", in_words(failure(error))
        if (chunk := self._chunk) is not None:
            info |= {**self._counts(chunk), "finish_reason": chunk.finish_reason}
            info["context"] = [info["context"], self._request.model.name]
        stopping = self._stopped or self._request.service.stopping
        if stopping or info.get("finish_reason") == "cancelled":
            state = info["finish_reason"] = "cancelled"
        try:
            await self._save(state, info)
        finally:
            self._done = True
            self._notify()

    async def _work(self) -> None:
        request, service, writer = self._request, self._request.service, self._writer
        client = sent_key(request.http.headers)
        with service.admitted():
            async with request.using() as served:
                given = await asyncio.to_thread(self._given, bool(served.sees))
                if served.model.adapters:
                    given["adapter"] = request.model.adapter or "none"
                pictures = any(isinstance(one["content"], list) for one in given["prompt"])
                async with service.seeing if pictures else nullcontext():
                    self._answer = await served.live.asubmit(client=client, **given)
                async for chunk in self._answer:
                    await asyncio.to_thread(writer.write, chunk.text)
                    self._pieces.append(chunk.text)
                    self._chunk = chunk
                    self._notify()
                    if chunk.error is not None:
                        raise chunk.error

    def _given(self, sees: bool) -> dict[str, Any]:
        """Return the prompt and the options of the conversation; reads the disk."""
        found, turn = self._found, self._writer.turn
        options = {name: value for name, value in found.options.items() if name != "adapter"}
        prompt = messages_for_model(found.branch(turn), found.system, before=turn, sees=sees)
        return {**options, "prompt": prompt}

    def _told(self) -> dict[str, Any]:
        thinking, text = parted("".join(self._pieces))
        counts = {} if self._chunk is None else self._counts(self._chunk)
        return {"thinking": thinking, "html": to_html(text), **counts}

    def _counts(self, chunk: Chunk) -> dict[str, Any]:
        counts = chunk.metrics
        used = counts.prompt_tokens + counts.completion_tokens
        return {"tokens": counts.completion_tokens, "tok_s": counts.decode_tok_s, "context": used}

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _save(self, state: str, info: dict[str, Any]) -> None:
        while True:
            try:
                return await asyncio.to_thread(self._writer.finish, state, info=info)
            except StorageError as error:
                self._request.service.note_once("history", f"an answer is not saved yet: {error}")
            await asyncio.sleep(_RETRY_S)
