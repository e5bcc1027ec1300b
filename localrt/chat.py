"""A conversation: messages and options, answered by a local model or one behind a server.

``ChatHost`` is what it needs of a model; ``ChatModel`` is what both kinds have.
"""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from localrt.chat_format.histories import text_of
from localrt.common.closing import Closing
from localrt.common.errors import LocalrtError, OptionError, StorageError
from localrt.common.files import parse_json, read_text, several, user_path, write_text
from localrt.common.forks import Answering
from localrt.common.progress import ProgressCallback
from localrt.engine.options import GenerateOptions, SendOptions, schema_of
from localrt.engine.types import Answer, Chunk, Message, ToolCall, Tools
from localrt.mcp import ROUNDS
from localrt.service.arguments import (
    check_messages,
    check_path,
    check_text,
    check_tools,
    in_thread,
    joined,
)
from localrt.service.functions import run

if TYPE_CHECKING:  # they bring models and the planner, which a command starts without
    from localrt.engine.saved_caches import Tier
    from localrt.planning.recommend import Outlook
    from localrt.service.status import ModelInfo, Status

__all__ = ["ChatCache", "ChatHost", "ChatModel", "ChatSession", "Message"]

_VERSION = 1
_ROLES = ("system", "user", "assistant", "tool")
_ASKING = ("user", "tool")


class ChatCache(Protocol):
    """A model's side of one conversation: it answers, and keeps a cache for the next turn."""

    @property
    def tokens(self) -> int:
        """The number of tokens that need not be computed again."""

    @property
    def kv_nbytes(self) -> int:
        """The bytes that those tokens take in this process."""

    def answer(
        self,
        messages: Sequence[Message],
        options: Mapping[str, object],
        *,
        tools: Sequence[Mapping[str, object]] | None,
        cancel: threading.Event,
        on_progress: ProgressCallback | None,
    ) -> Generator[Chunk, None, None]:
        """Generate the next turn of ``messages``; ``options`` are those explicitly set."""

    def save_while(self, exists: Callable[[], bool]) -> None:
        """Save the KV cache on the disk only while ``exists()``."""

    def park(self, to: Tier) -> int:
        """Save the KV cache and free it; return the bytes saved, 0 if it stays."""

    def close(self) -> None:
        """Free the KV cache once a running answer has ended."""


class ChatHost(Protocol):
    """What a conversation needs of a model, local or behind a server."""

    info: ModelInfo

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def ctx(self) -> int:
        """The tokens that its context holds; 0: unknown."""

    @property
    def takes_tools(self) -> bool:
        """Whether it accepts tools, as far as is known."""

    def count(self, text: str) -> int:
        """Count the tokens of a text, or estimate them."""

    def check(self, options: Mapping[str, object]) -> None:
        """Raise ``OptionError`` if a conversation cannot have these options."""

    def open_chat(self) -> ChatCache:
        """Start a new conversation."""


class ChatModel(Protocol):
    """A model to chat with: the common part of ``Model`` and a model behind a server.

    What a server does not tell is None, or 0 in ``info``.
    """

    name: str
    defaults: dict[str, Any]
    info: ModelInfo

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names for the option ``adapter``; none if a server does not list them."""

    def chat(
        self,
        system: str | None = None,
        *,
        tools: Tools | None = None,
        embedder: Callable[[], Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> ChatSession:
        """Start a conversation that keeps its history."""

    def load_chat(self, path: str | Path) -> ChatSession:
        """Load a conversation saved with ``ChatSession.save``."""

    def count(self, prompt: str | Sequence[Message]) -> int:
        """Count the tokens of a text or a conversation, or estimate them."""

    def status(self, *, lanes: bool | None = None) -> Status | None:
        """Return what the model is doing now."""

    def advise(self) -> Outlook | None:
        """Return what limits its speed, and what would help."""

    def unload(self) -> None:
        """Close, and give all memory back to the system."""

    def close(self) -> None:
        """End its answers, and free its memory."""


class ChatSession:
    """Created by ``Model.chat``. One generation at a time; ``cancel`` works from any thread."""

    def __init__(
        self,
        host: ChatHost,
        *,
        system: str | None = None,
        tools: Tools | None = None,
        embedder: Callable[[], Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> None:
        if system is not None:
            check_text("system", system)
        if tools is not None:
            check_tools(tools)
        self._host = host
        self._cache = host.open_chat()
        self._cancel = threading.Event()
        self._busy = threading.Lock()
        self.messages: list[Message] = []
        self.file_notes: list[str] = []  # lines for the user about the last ``files``
        self.embedder = embedder  # opens a model to search ``files`` with: ``localrt.embedder``
        self.tools = tools
        self._stopped: Message | None = None  # the last answer if it did not end, and its tokens
        self._ids: list[int] = []
        self.options: dict[str, Any] = {}
        self.set(**options)
        self.system = system

    def __repr__(self) -> str:
        """Name the model, and the conversation's length."""
        return f"<localrt.ChatSession with {self._host.name!r}: {len(self.messages)} messages>"

    __reduce__ = Closing.__reduce__

    # -- state -----------------------------------------------------------------------------------

    @property
    def system(self) -> str | None:
        """The system prompt; setting it keeps the other turns."""
        if self.messages and self.messages[0]["role"] == "system":
            return str(self.messages[0]["content"])
        return None

    @system.setter
    def system(self, text: str | None) -> None:
        if self.system is not None:
            del self.messages[0]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    @property
    def tokens_used(self) -> int:
        """The number of tokens in the KV cache."""
        return self._cache.tokens

    @property
    def capacity(self) -> int:
        """The number of tokens that the context holds."""
        return self._host.ctx

    @property
    def takes_tools(self) -> bool:
        """Whether the model accepts tools; for a server, whether it has not refused them."""
        return self._host.takes_tools

    def set(self, **options: Unpack[GenerateOptions]) -> None:
        """Change defaults of this conversation (``temperature=0.2``); None takes one back.

        Raises:
            OptionError: unknown name or impossible value; nothing changes then.
        """
        changed = {**self.options, **options}
        self._host.check(changed)
        self.options = {name: value for name, value in changed.items() if value is not None}

    def clear(self) -> None:
        """Forget the turns; system prompt and options stay."""
        system = self.system
        self.messages = []
        self.system = system

    # -- generation ------------------------------------------------------------------------------

    def add_tool_result(self, call: ToolCall | str, result: Any) -> None:
        """Add the result of a call: text, or any value that JSON can represent.

        ``call`` is one of the answer's ``tool_calls``, or its id. Once all have their results,
        ``stream()`` without a text goes on.

        Raises:
            OptionError: no call with that id waits for a result.
        """
        call_id = call.id if isinstance(call, ToolCall) else call
        if call_id not in self._waiting_calls():
            raise OptionError(f"no call {call_id!r:.80} waits for a result")
        content = result if isinstance(result, str) else _json(result)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def _waiting_calls(self) -> frozenset[str]:
        """Return the ids of calls without results at the end of the conversation."""
        answered: list[str] = []
        for message in reversed(self.messages):
            if message["role"] == "tool":
                answered.append(message.get("tool_call_id", ""))
                continue
            calls = frozenset(call.get("id", "") for call in message.get("tool_calls") or ())
            return calls.difference(answered)
        return frozenset()

    def stream(
        self,
        text: str | None = None,
        *,
        images: Sequence[Any] = (),
        files: str | Path | Sequence[str | Path] = (),
        tools: Tools | None = None,
        on_progress: ProgressCallback | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Chunk]:
        """Send a user turn and stream the answer; without a text, answer the messages so far.

        ``images`` are pictures for the turn: paths, bytes or PIL images. ``files`` are documents,
        text files and folders to read. Of those that do not fit the context it is the pieces that
        go best with the text; ``file_notes`` then says so.

        ``on_progress`` is called with ``Progress`` while files are read and the prompt is computed.
        Until this returns it may raise an error of its own to cancel.

        ``tools`` are functions, Python's or in OpenAI's form, by default the chat's own. Where the
        answer calls some, the last chunk's ``finish_reason`` is ``"tool_calls"``.

        When the stream ends, is cancelled or is closed early, the turn and the text so far join
        the history; when it fails before any text, the history is as it was.
        """
        if text is None and self._waiting_calls():
            raise OptionError("calls wait for their results: give them with add_tool_result")
        if text is None and (not self.messages or self.messages[-1]["role"] not in _ASKING):
            raise OptionError("there is nothing to answer: give a text")
        if text is not None and not isinstance(text, str):
            raise OptionError(f"a message must be a string, is {text!r:.80}")
        if text is not None and not text:
            raise OptionError("the message is empty: write something to answer")
        if (images or files) and text is None:
            raise OptionError("pictures and files need a text: say what to do with them")
        if files and text is not None:
            text, pages = self._with_files(text, several(files), on_progress)
            images = [*several(images), *pages]
        content: str | list[dict[str, Any]] | None = text
        if images and text is not None:
            from localrt.chat_format.pictures import with_pictures  # brings numpy

            content = with_pictures(text, images)
        return self._begin(content, options, tools, on_progress)

    def continue_answer(
        self,
        *,
        tools: Tools | None = None,
        on_progress: ProgressCallback | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[Chunk]:
        """Continue the last answer, which was stopped or cut by ``max_tokens``.

        The stream begins with the text so far and replaces it. The model goes on from its own last
        token, in its thinking or within a call too; an answer of elsewhere goes on from its text.

        Raises:
            OptionError: the last message is no answer, or its calls wait for results.
        """
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or last.get("tool_calls"):
            raise OptionError("there is no answer to continue")
        ids = self._ids if last is self._stopped else []
        begun: Message = {"token_ids": ids, **last, "prefix": True}
        return self._begin(None, options, tools, on_progress, begun)

    def _begin(
        self,
        content: str | list[dict[str, Any]] | None,
        options: Mapping[str, Any],
        tools: Tools | None,
        on_progress: ProgressCallback | None,
        begun: Message | None = None,
    ) -> Iterator[Chunk]:
        chosen = {name: value for name, value in options.items() if value is not None}
        chosen = {**self.options, **chosen}
        self._host.check({**options, **chosen})
        if self._busy.locked():
            raise _already_answering()
        self._cancel = cancel = threading.Event()
        tools = check_tools(tools or self.tools or ())
        answer = self._answer(content, chosen, tools or None, cancel, on_progress, begun)
        return Answering(answer)

    def _with_files(
        self, text: str, files: Sequence[str | Path], progress: ProgressCallback | None
    ) -> tuple[str, list[bytes]]:
        """Return the text below its files, and pictures of their pages."""
        from localrt.documents.index import fitted
        from localrt.documents.reading import read_document

        host = self._host
        read = [read_document(each, pictures=host.info.sees, progress=progress) for each in files]
        how: dict[str, Any] = {"progress": progress, "embedder": self.embedder}
        shown = fitted(read, text, free=self._free, count=host.count, **how)
        self.file_notes = list(dict.fromkeys(each.note for each in (*read, *shown) if each.note))
        pictures = [page.picture for each in shown for page in each.pictures]
        return "\n".join([*(each.text for each in shown), text]), pictures

    def _free(self) -> int:
        """The tokens of the context that messages leave; 0: unknown."""
        used = sum(self._host.count(text_of(message)) for message in self.messages)
        return max(self.capacity - used, 2) if self.capacity else 0

    def _answer(
        self,
        content: str | list[dict[str, object]] | None,
        options: Mapping[str, object],
        tools: Sequence[Mapping[str, object]] | None,
        cancel: threading.Event,
        on_progress: ProgressCallback | None,
        begun: Message | None,
    ) -> Iterator[Chunk]:
        if not self._busy.acquire(blocking=False):
            raise _already_answering()
        turn: list[Message] = [] if content is None else [{"role": "user", "content": content}]
        said: Message = {"role": "assistant", "content": ""}
        before, keep = self.messages, False
        if begun is not None:
            before, turn = before[:-1], [begun]
        ids, ended = list[int](), False
        try:
            answer = self._cache.answer(
                [*before, *turn],
                options,
                tools=tools,
                cancel=cancel,
                on_progress=on_progress,
            )
            with closing(answer) as chunks:
                for chunk in chunks:
                    said["content"] += chunk.text
                    ids += *chunk.info.get("begun", ()), *chunk.token_ids
                    ended = chunk.finish_reason in ("stop", "tool_calls")
                    if chunk.tool_calls:
                        said["tool_calls"] = [call.to_dict() for call in chunk.tool_calls]
                    yield chunk
            keep = True
        except GeneratorExit:
            keep = True
            raise
        finally:
            if said["content"] or (keep and begun is None):
                self.messages += [*turn, said] if begun is None else []
                self.messages[-1] = said
                self._stopped, self._ids = None if ended else said, ids
            self._busy.release()

    def send(
        self, text: str | None = None, *, run_tools: bool = False, **options: Unpack[SendOptions]
    ) -> Answer:
        """Like ``stream``, but return the whole answer.

        With ``run_tools`` the functions of ``tools`` that it calls are run, and the model goes on
        with their results until it calls none, at most 20 times; what a function raises ends it. A
        ``tool_choice`` is for the first answer alone.
        """
        answer = self._joined(self.stream(text, **options), options)
        for _ in range(ROUNDS if run_tools else 0):
            if not (results := run(answer, options.get("tools") or self.tools)):
                break
            self.messages += results
            options |= {"images": (), "files": (), "tool_choice": "auto"}
            answer = self._joined(self.stream(**options), options)
        return answer

    def astream(
        self, text: str | None = None, **options: Unpack[SendOptions]
    ) -> AsyncIterator[Chunk]:
        """Like ``stream``, for asyncio."""
        return in_thread(lambda: self.stream(text, **options), self.cancel)

    async def asend(
        self, text: str | None = None, *, run_tools: bool = False, **options: Unpack[SendOptions]
    ) -> Answer:
        """Like ``send``, for asyncio; tools may be coroutine functions, others run in threads."""
        import asyncio  # imported late: it takes six megabytes

        loop = asyncio.get_running_loop()
        answer = self._joined([each async for each in self.astream(text, **options)], options)
        for _ in range(ROUNDS if run_tools else 0):
            tools = options.get("tools") or self.tools
            if not (results := await asyncio.to_thread(run, answer, tools, loop)):
                break
            self.messages += results
            options |= {"images": (), "files": (), "tool_choice": "auto"}
            answer = self._joined([each async for each in self.astream(**options)], options)
        return answer

    def _joined(
        self, chunks: Iterator[Chunk] | Sequence[Chunk], options: Mapping[str, Any]
    ) -> Answer:
        return joined(chunks, options.get("json_schema") or self.options.get("json_schema"))

    def cancel(self) -> None:
        """Stop the running generation, if any; its text is kept."""
        self._cancel.set()

    @property
    def kv_nbytes(self) -> int:
        """The bytes that the KV cache takes in memory."""
        return self._cache.kv_nbytes

    def save_while(self, exists: Callable[[], bool]) -> None:
        """Save the KV cache on the disk only while ``exists()`` is true, in whatever thread.

        It is asked before and after saving: another process may delete the conversation.
        """
        self._cache.save_while(exists)

    def park(self, to: Tier = "disk") -> int:
        """Save the KV cache and free it; the next turn restores it.

        ``to`` is ``"disk"``, or ``"ram"``, which frees GPU memory only. Returns the bytes
        saved. 0: the cache stays where it is, since it is too small to be worth it, or the engine
        cannot.

        Raises:
            LocalrtError: the chat is answering.
            StorageError: the disk is full or fails; the cache stays.
        """
        if not self._busy.acquire(blocking=False):
            raise _already_answering()
        try:
            return self._cache.park(to)
        finally:
            self._busy.release()

    def close(self) -> None:
        """Free the KV cache; the messages stay, and the next turn computes them again."""
        self.cancel()
        with self._busy:
            self._cache.close()

    # -- files -----------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write messages and options as JSON, readable only by this user.

        Raises:
            StorageError: the file cannot be written; the old file stays.
        """
        check_path("path", path)
        record = {
            "version": _VERSION,
            "model": self._host.name,
            "options": {**self.options, **_schema(self.options)},
            "messages": self.messages,
        }
        text = json.dumps(record, ensure_ascii=False, indent=2, default=_as_text) + "\n"
        write_text(user_path(path), text, private=True)

    @classmethod
    def load(cls, host: ChatHost, path: str | Path) -> ChatSession:
        """Load a conversation written by ``save``, to continue it with this model.

        Raises:
            StorageError: the file cannot be read, or is not a saved chat.
        """
        source = user_path(path)
        try:
            record = parse_json(read_text(source))
        except OptionError as error:
            raise StorageError(error.marked) from error
        except ValueError as error:
            raise StorageError(f"{source} is not a saved chat: it is not JSON") from error
        _, messages, options = check_saved(record, source)
        host.check(options)
        chat = cls(host, **options)
        chat.messages = messages
        return chat


def check_saved(record: object, source: Path) -> tuple[str, list[Message], dict[str, Any]]:
    """Return the model's name, messages and options of what ``ChatSession.save`` wrote.

    Raises:
        StorageError: the file ``source`` is not a saved chat.
    """
    if not isinstance(record, dict) or record.get("version") != _VERSION:
        raise StorageError(f"{source} is not a saved chat of version {_VERSION}")
    messages, options = record.get("messages"), record.get("options")
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise StorageError(f"{source} is not a saved chat: its messages are malformed")
    return str(record.get("model") or ""), messages, options if isinstance(options, dict) else {}


def _schema(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema for a type, which is no JSON."""
    return {name: schema_of(value) for name, value in options.items() if name == "json_schema"}


def _as_text(value: object) -> str:
    """A picture's bytes, which are all in messages that JSON does not know."""
    from localrt.models.vision.picture import data_uri, picture_bytes

    return data_uri(picture_bytes(value))


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise OptionError(f"a tool's result must be text or JSON: {error}") from error


def _is_message(value: Any) -> bool:
    try:
        check_messages([value])
    except OptionError:
        return False
    parts = value["content"] if isinstance(value.get("content"), list) else []
    return (
        value["role"] in _ROLES
        and isinstance(value.get("content", 0), str | list | None)
        and all(isinstance(part, dict) for part in parts)
        and isinstance(value.get("tool_call_id", ""), str)
    )


def _already_answering() -> LocalrtError:
    return LocalrtError("this chat is already answering: wait, or cancel() it first")
