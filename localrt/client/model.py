"""A model behind a server with OpenAI's HTTP protocol, used like a local one.

``connect`` returns a ``RemoteModel`` for what the terminal app and ``localrt run`` do with a model:
chats with streamed answers, options, cancelling. What a server does not tell (its memory, speed,
tokens) is None or an estimate. No other URL is ever contacted.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from localrt.chat import ChatSession
from localrt.chat_format.histories import text_of
from localrt.chat_format.messages import check_text_only
from localrt.chat_format.thinking import split_thinking
from localrt.client.answer import AnswerReader, ListedModel, events, listed_models, refusal
from localrt.client.http import Exchange
from localrt.client.servers import Address, LocalServer, read_address
from localrt.common.closing import Closing
from localrt.common.errors import CancelledError, LocalrtError, OptionError
from localrt.common.formatting import one_line
from localrt.common.progress import Progress, ProgressCallback
from localrt.engine.options import SAMPLING_NAMES, Options, read_options
from localrt.engine.types import Chunk, Message, Tools
from localrt.history.pictures import read_picture
from localrt.service.status import ModelInfo

_LOCAL_ANSWER_S = 10.0  # for a server on this machine
_LIST_S = 60.0
_LONGEST_LIST = 8 << 20
_LONGEST_REFUSAL = 64 << 10
_BECAUSE_OF_TOOLS = (400, 422, 500, 501)  # in a server's refusal of tools
_BYTES_A_TOKEN = 4  # an estimate: a template adds about this many tokens per message
# Sent under their own names: OpenAI's, then those that vLLM, llama.cpp or localrt's server also
# know.
_SENT = (*sorted(SAMPLING_NAMES), "max_tokens", "ignore_eos", "grammar")
# The names in localrt's server, vLLM and llama.cpp.
_THINKING_LIMITS = ("thinking_tokens", "thinking_token_budget", "thinking_budget_tokens")
# Options without a meaning for a server, and their values when not set.
_HERE: dict[str, object] = {"draft": "auto", "overflow": "error", "parallel_tool_calls": True}
_HERE |= dict.fromkeys(("tree_budget", "tree_depth"))
_HERE |= dict.fromkeys(("context_tokens", "regex", "logprobs", "min_indent", "line_seconds"))


def connect(
    url: str,
    model: str | None = None,
    *,
    api_key: str | None = None,
    progress: ProgressCallback | None = None,
    cancel: threading.Event | None = None,
) -> RemoteModel:
    """Return a model of the server at ``url``, such as ``http://localhost:8000/v1``.

    Args:
        url: where vLLM, ``localrt serve`` or another server of OpenAI's protocol is.
        model: its name there; None takes the first that the server lists.
        api_key: goes to that server and nowhere else.
        progress: called while waiting; may raise ``CancelledError``.
        cancel: set it from another thread to stop with ``CancelledError``.

    Raises:
        OptionError: the address or the key is malformed.
        LocalrtError: the server cannot be reached, refuses, or speaks another protocol.
    """
    address = read_address(url, api_key)

    def look() -> None:
        if cancel is not None and cancel.is_set():
            raise CancelledError("connecting was cancelled")
        if progress is not None:
            progress(Progress(f"connecting to {address.place}", 0, None, ""))

    listed = list_remote(address, look=look, required=model is None)
    return RemoteModel(address, *_chosen(address, model, listed))


def list_remote(
    address: Address,
    *,
    look: Callable[[], None] = lambda: None,
    required: bool = True,
    most_s: float = _LIST_S,
) -> list[ListedModel]:
    """Return the models of a server within ``most_s``; ``look`` may raise to stop waiting.

    Not every server lists them: unless the list is ``required``, it is then empty.

    Raises:
        LocalrtError: it cannot be reached, refuses, or speaks another protocol.
    """
    end = time.monotonic() + most_s

    def look_until() -> None:
        look()
        if time.monotonic() > end:
            raise LocalrtError(f"{address.origin} does not answer within {most_s:g} s")

    with Exchange(address, "GET", address.base + "/models", look=look_until) as exchange:
        head = exchange.head()
        body = exchange.read(_LONGEST_LIST if head.status_code == 200 else _LONGEST_REFUSAL)
    if head.status_code == 200:
        return listed_models(body, address)
    if head.status_code in (404, 405) and not required:
        return []
    raise refusal(address, head.status_code, head.headers, body)


def models_of(server: LocalServer) -> list[ListedModel]:
    """Return the models that a server of this machine lists.

    Raises:
        LocalrtError: it does not answer: it is starting, suspended, or gone.
    """
    return list_remote(read_address(server.url, server.key), most_s=_LOCAL_ANSWER_S)


def load_at(server: LocalServer, name: str) -> ListedModel:
    """Have a server of this machine load a model, and return it with the context that it has then.

    Raises:
        LocalrtError: it does not answer, or cannot load the model.
    """
    address = read_address(server.url, server.key)
    body = json.dumps({"model": name, "stream": False}).encode()
    with Exchange(address, "POST", "/api/generate", body, look=lambda: None) as exchange:
        head = exchange.head()
        text = exchange.read(_LONGEST_REFUSAL)
    if head.status_code != 200:
        raise refusal(address, head.status_code, head.headers, text)
    return next(each for each in models_of(server) if each.name == name)


def _chosen(
    address: Address, name: str | None, listed: Sequence[ListedModel]
) -> tuple[ListedModel, tuple[str, ...]]:
    """Return the model to use, and notes for the user."""
    notes: list[str] = []
    if address.key is not None and not address.is_private:
        notes.append(f"The API key goes to {address.place} unencrypted: use https")
    names = ", ".join(one_line(each.name, 80) for each in listed[:8])
    if name is None and not listed:
        raise LocalrtError(f"{address.origin} lists no models: give the name of one")
    if name is None:
        if len(listed) > 1:
            notes.append(f"{address.place} has {names}: this is the first; give a name for another")
        return listed[0], tuple(notes)
    found = next((each for each in listed if each.name == name), None)
    if found is None and listed:
        notes.append(f"{address.place} does not list {one_line(name, 80)}; it has {names}")
    return found or ListedModel(name, 0), tuple(notes)


class RemoteModel(Closing):
    """One model of a server. Use ``connect``; close it, or use it as a context manager.

    ``info.ctx`` is 0 if the server does not tell, ``info.device`` its host and port. The server
    chooses options that are not set.
    """

    def __init__(self, address: Address, listed: ListedModel, notes: tuple[str, ...] = ()) -> None:
        self._address = address
        self._closed = threading.Event()
        self._refused_tools = threading.Event()
        self.name = listed.name
        self.defaults: dict[str, Any] = {}
        self.info = ModelInfo(
            name=listed.name,
            path=Path(),
            architecture="",
            parameters=0,
            layers=0,
            vocab_size=0,
            engine="remote",
            device=address.place,
            format="",
            weight_bytes=0,
            context_length=listed.ctx,
            ctx=listed.ctx,
            has_chat_template=True,
            exactness="",
            notes=notes,
            sees=listed.sees,
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        """See ``ChatModel``: a server lists adapters as models."""
        return ()

    def chat(
        self,
        system: str | None = None,
        *,
        tools: Tools | None = None,
        **options: Any,
    ) -> ChatSession:
        """Start a conversation, like ``Model.chat``."""
        return ChatSession(self, system=system, tools=tools, **options)

    def load_chat(self, path: str | Path) -> ChatSession:
        """Load a conversation saved with ``ChatSession.save``."""
        return ChatSession.load(self, path)

    def count(self, prompt: str | Sequence[Message]) -> int:
        """Estimate the tokens of a text or a conversation: the server's tokenizer is unknown."""
        return _text_tokens(prompt) if isinstance(prompt, str) else _estimated_tokens(prompt)

    def status(self, *, lanes: bool | None = None) -> None:
        """None: a server's memory and passes are unknown."""

    def advise(self) -> None:
        """None: what would help a server is unknown."""

    def unload(self) -> None:
        """``close``."""
        self.close()

    def close(self) -> None:
        """End running answers as cancelled."""
        self._closed.set()

    # -- chats: see ``localrt.chat.ChatHost`` ------------------------------------------------------

    @property
    def ctx(self) -> int:
        """The context's tokens; 0 if the server does not tell."""
        return self.info.ctx

    @property
    def takes_tools(self) -> bool:
        """Whether no tools have been refused so far."""
        return not self._refused_tools.is_set()

    def check(self, options: Mapping[str, object]) -> None:
        """Raise an error for impossible options, and for those that need a local model."""
        for name, usual in _HERE.items():
            if options.get(name) not in (None, usual):
                raise OptionError(
                    f"{name} is for models on this machine: leave it out with a server"
                )
        read_options(options)

    def open_chat(self) -> _Conversation:
        """Start a new conversation."""
        return _Conversation(self._address, self.info, self._closed, self._refused_tools)


class _Conversation:
    """The client's side of a conversation: see ``ChatCache``. The server may keep a cache.

    ``refused_tools`` is set if the server refuses a request because of its tools.
    """

    def __init__(
        self,
        address: Address,
        model: ModelInfo,
        closed: threading.Event,
        refused_tools: threading.Event,
    ) -> None:
        self._address = address
        self._model = model
        self._closed = closed
        self._refused_tools = refused_tools
        self.tokens = 0
        self.kv_nbytes = 0

    def answer(
        self,
        messages: Sequence[Message],
        options: Mapping[str, object],
        *,
        tools: Sequence[Mapping[str, object]] | None,
        cancel: threading.Event,
        on_progress: ProgressCallback | None,
    ) -> Generator[Chunk, None, None]:
        """Request the next turn of ``messages``; the server chooses options that are not set.

        Raises:
            LocalrtError: the server refuses, fails or disconnects; earlier chunks stay valid.
        """
        if not self._model.sees:  # localrt's server would show the model words instead
            check_text_only(messages)
        address = self._address
        reader = AnswerReader(address, _estimated_tokens(messages))

        def look() -> None:
            if self._closed.is_set() or cancel.is_set():
                raise _StoppedError
            if on_progress is not None and not reader.metrics.completion_tokens:
                on_progress(Progress("prefill", 0, None, "tokens"))

        begun = messages[-1] if messages and "token_ids" in messages[-1] else None
        old = split_thinking(begun["content"]) if begun is not None else None
        if old is not None and old.open:  # servers continue answers, not thoughts
            messages, begun = messages[:-1], None
        body = _body(self._model.name, messages, read_options(options), options, tools)
        path = address.base + "/chat/completions"
        try:
            with Exchange(address, "POST", path, body, look=look) as exchange:
                head = exchange.head()
                kind = head.headers.get("content-type", "").strip().lower()
                if head.status_code != 200 or not kind.startswith("text/event-stream"):
                    refused = refusal(
                        address, head.status_code, head.headers, exchange.read(_LONGEST_REFUSAL)
                    )
                    if tools and head.status_code in _BECAUSE_OF_TOOLS and "tool" in str(refused):
                        self._refused_tools.set()
                    raise refused
                if begun is not None:
                    yield Chunk(begun["content"], (), reader.metrics)
                for event in events(exchange.pieces(), address):
                    if event is None:
                        reader.reason = reader.reason or "stop"
                    elif text := reader.push(event):
                        yield Chunk(text, (), reader.metrics)
            if reader.reason is None:
                raise LocalrtError(
                    f"{address.origin} ended in the middle of the answer: what came is kept, "
                    "send again"
                )
        except _StoppedError:
            yield Chunk(reader.end(), (), reader.metrics, "cancelled")
            return
        except LocalrtError:
            if reader.reason is None:  # otherwise only the end of the stream was lost
                raise
        metrics = reader.metrics
        self.tokens = metrics.prompt_tokens + metrics.completion_tokens
        reason = "tool_calls" if reader.calls and reader.reason == "stop" else reader.reason
        info = {"finish_reason": reader.told_reason}
        yield Chunk(reader.end(), (), metrics, reason, tool_calls=reader.calls, info=info)

    def save_while(self, exists: Callable[[], bool]) -> None:
        """Nothing is saved."""

    def park(self, to: str) -> int:
        """There is no KV cache to save."""
        return 0

    def close(self) -> None:
        """Nothing to free."""


def _text_tokens(text: str) -> int:
    return -(-len(text.encode("utf-8", "replace")) // _BYTES_A_TOKEN)


def _estimated_tokens(messages: Sequence[Message]) -> int:
    """What pictures take differs between models."""
    return sum(_text_tokens(text_of(message)) + 4 for message in messages)


class _StoppedError(Exception):
    """The answer is no longer wanted."""


def _tool_choice(choice: str) -> object:
    if choice in ("auto", "none", "required"):
        return choice
    return {"type": "function", "function": {"name": choice}}


def _body(
    model: str,
    messages: Sequence[Message],
    options: Options,
    chosen: Mapping[str, object],
    tools: Sequence[Mapping[str, object]] | None,
) -> bytes:
    """Return the request's body, with only the options that are set."""
    fields: dict[str, object] = {
        "model": model,
        "messages": [_message(message) for message in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    fields |= {name: chosen[name] for name in _SENT if chosen.get(name) is not None}
    if options.stop:
        fields["stop"] = list(options.stop)
    if options.json_schema is not None:
        schema = json.loads(options.json_schema)
        named = {"name": "answer", "schema": schema, "strict": True}
        whole = {"type": "json_schema", "json_schema": named}
        fields["response_format"] = {"type": "json_object"} if schema is True else whole
    fields |= _thinking(options)
    if messages and messages[-1].get("prefix"):  # vLLM's names; others know "prefix"
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if tools:
        fields["tools"] = list(tools)
        fields["tool_choice"] = _tool_choice(options.tool_choice)
    try:
        return json.dumps(fields, allow_nan=False).encode("ascii")
    except (TypeError, ValueError) as error:
        raise OptionError(f"messages, tools and options must be JSON: {one_line(error)}") from error


def _thinking(options: Options) -> dict[str, Any]:
    """Return the fields for thinking, for OpenAI, vLLM, llama.cpp and localrt's server."""
    thinking, limit = options.thinking, options.thinking_tokens
    fields: dict[str, object] = {}
    if isinstance(thinking, str):
        fields["reasoning_effort"] = thinking
    elif thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": thinking, "thinking": thinking}
        if not thinking:
            fields["reasoning_effort"] = "none"
    if limit is not None:
        fields |= dict.fromkeys(_THINKING_LIMITS, limit)
    return fields


def _message(message: Message) -> dict[str, object]:
    """Return a message in a server's form: no earlier thinking, None for a call's empty text,
    pictures as data URIs.
    """
    found: dict[str, object] = {name: each for name, each in message.items() if name != "token_ids"}
    if isinstance(found["content"], list):
        found["content"] = [_part(part) for part in found["content"]]
    if found["role"] == "assistant" and isinstance(found["content"], str):
        if found.get("tool_calls"):
            found["content"] = found["content"] or None
        else:
            found["content"] = split_thinking(found["content"]).answer
    return found


def _part(part: Mapping[str, object]) -> dict[str, object]:
    if "image" not in part:
        return dict(part)
    return {"type": "image_url", "image_url": {"url": read_picture(part["image"]).data_uri}}
