"""Ollama's chat and generate: a request in the library's words, and the answer in Ollama's.

It reads fields that have been checked against ``schemas``, and starts nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from localrt.chat_format.messages import arguments_of
from localrt.chat_format.thinking import ThoughtStream
from localrt.common.errors import OptionError
from localrt.common.formatting import parse_duration
from localrt.engine.types import Chunk, ToolCall
from localrt.server.errors import (
    ApiError,
    invalid,
    ollama_error,
    to_json,
)
from localrt.server.functions import (
    Fields,
    Message,
    Note,
    made_call,
    offered,
    text_of,
    thought,
    unnoted,
)
from localrt.server.openai.calls import (
    ANY_SEED,
    SEEDS,
    Generation,
    effort,
    stops,
)
from localrt.server.openai.reply import token_payloads
from localrt.server.replies import Payload, TokenBytes

_SAME_NAMES = (
    *("temperature", "top_p", "min_p", "typical_p"),
    *("presence_penalty", "frequency_penalty"),
)
_IMAGE = {"type": "image"}


def chat_call(fields: Fields, note: Note = unnoted) -> Generation | None:
    """The call of a chat; None without messages: the model is only to be loaded.

    A last message of the assistant is the beginning of the answer. Where a conversation outgrows
    the context, or ``num_ctx``, the oldest turns are left out, unless ``truncate`` is false.

    Raises:
        ApiError: 400, fields that are not supported.
    """
    if not fields.get("messages"):
        return None
    options = _options(fields)
    if fields.get("truncate") is not False:
        options["overflow"] = "drop_oldest"
    messages = _messages(fields["messages"], note)
    last = messages[-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        last["prefix"] = True
    tools = offered(fields.get("tools"), note)
    return _call(fields, {"prompt": messages, "tools": tools.functions or None}, options)


def generate_call(fields: Fields, note: Note = unnoted) -> Generation | None:
    """The call of a prompt; None without one: the model is only to be loaded.

    Raises:
        ApiError: 400, fields that are not supported.
    """
    for name, instead in (
        ("template", "start the server with --chat-template"),
        ("context", "send the conversation to /api/chat"),
    ):
        if fields.get(name):
            raise invalid(f"{name} is not supported: {instead}", name)
    prompt = text_of([fields.get("prompt") or "", *_images(fields)], note)
    system = fields.get("system")
    if fields.get("suffix"):
        given: dict[str, Any] = {"prompt": prompt, "suffix": fields["suffix"]}
    elif not prompt:
        return None
    elif fields.get("raw"):
        given = {"prompt": prompt, "raw": True}
    else:
        turns = [{"role": "system", "content": system}] if system else []
        given = {"prompt": [*turns, {"role": "user", "content": prompt}]}
    return _call(fields, given, _options(fields))


def keep_alive_s(given: float | str | None) -> float | None:
    """Seconds that a model is to stay loaded; below zero: for ever. None says nothing.

    Raises:
        ApiError: 400, it is no time.
    """
    if not isinstance(given, str):
        return given
    try:
        return parse_duration(given)
    except OptionError as error:
        raise invalid(f"keep_alive: {error}", "keep_alive") from error


def _call(fields: Fields, prompt: dict[str, Any], options: dict[str, Any]) -> Generation:
    return Generation(
        prompts=[prompt],
        options=options,
        stream=fields.get("stream") is not False,
        logprobs=bool(fields.get("logprobs")),
    )


def _options(fields: Fields) -> dict[str, Any]:
    given = fields.get("options") or {}
    options = {name: given[name] for name in _SAME_NAMES if given.get(name) is not None}
    options |= stops(given.get("stop"))
    if given.get("seed") not in (None, ANY_SEED):
        options["seed"] = int(given["seed"]) % SEEDS
    if given.get("top_k") is not None:
        options["top_k"] = max(0, int(given["top_k"]))
    if given.get("repeat_penalty") is not None:
        options["repetition_penalty"] = given["repeat_penalty"]
    if (given.get("num_ctx") or 0) > 0:
        options["context_tokens"] = int(given["num_ctx"])
    if (given.get("num_predict") or -1) > 0:  # below zero: as many as it takes
        options["max_tokens"] = int(given["num_predict"])
    if fields.get("format"):
        wanted = fields["format"]
        options["json_schema"] = {"type": "object"} if wanted == "json" else wanted
    think = fields.get("think")
    if think not in (None, ""):
        options["thinking"] = effort(think) if isinstance(think, str) else think
    if fields.get("logprobs"):
        options["logprobs"] = fields.get("top_logprobs") or 0
    return options


# -- messages --------------------------------------------------------------------------------------


def _messages(given: Sequence[Fields], note: Note) -> list[Message]:
    """Messages as chat templates take them: calls get ids, by which results name them."""
    messages: list[Message] = []
    waiting: list[tuple[str, str]] = []  # ids and names of calls that have no result yet
    for number, message in enumerate(given, 1):
        role, content = message["role"], message.get("content")
        parts = content if isinstance(content, list) else [content or ""]
        content = text_of([*parts, *_images(message)], note)
        shown: Message = {"role": role, "content": content}
        if message.get("thinking"):
            shown |= thought(message["thinking"])
        if message.get("tool_calls"):
            calls = []
            for at, call in enumerate(message["tool_calls"]):
                name = call["function"]["name"]
                call_id = call.get("id") or f"call_{number}_{at}"
                waiting.append((call_id, name))
                calls.append(made_call(call_id, name, call["function"].get("arguments")))
            shown["tool_calls"] = calls
        if role == "tool":
            shown |= _result(message.get("tool_name"), message.get("tool_call_id"), waiting)
        messages.append(shown)
    return messages


def _result(name: str | None, call_id: str | None, waiting: list[tuple[str, str]]) -> Message:
    """Which call a result is of: that of its id, else the first of that name that waits for one,
    or simply the first.
    """
    fitting = (
        next((one for one in waiting if one[at] == given), None)
        for at, given in ((0, call_id), (1, name))
    )
    call = next(filter(None, fitting), None) or next(iter(waiting), None)
    if call is None:
        return {"name": name} if name else {}
    waiting.remove(call)
    return {"tool_call_id": call[0], "name": name or call[1]}


def _images(message: Fields) -> list[Fields]:
    return [_IMAGE] * len(message.get("images") or ())


# -- answers ---------------------------------------------------------------------------------------


LINES = "application/x-ndjson"


class OllamaReply:
    """The response to a ``call`` of the model that is called ``model``. See ``Reply``.

    ``chat`` says whether it is a message, or a text. ``began`` is when the request came, on
    ``time.monotonic``'s clock.
    """

    media_type = LINES

    def __init__(
        self, call: Generation, model: str, tokenizer: TokenBytes, *, chat: bool, began: float
    ) -> None:
        self._call, self._model, self._tokenizer = call, model, tokenizer
        self._chat, self._began = chat, began
        self._thoughts = ThoughtStream()

    def whole(self, chunks: Sequence[Chunk]) -> Payload:
        """The answer."""
        (chunk,) = chunks
        thinking, text = self._thoughts.push(chunk.text, last=True)
        return {**self._piece(thinking, text, chunk, chunk.tool_calls), **self._end(chunk)}

    def begin(self) -> Iterator[bytes]:
        """Nothing."""
        yield from ()

    def alive(self) -> bytes:
        """A piece without text."""
        return line({**self._head(), **self._content("", ""), "done": False})

    def delta(self, index: int, chunk: Chunk) -> Iterator[bytes]:
        """A line for what there is to show, and one for the end."""
        ends = chunk.finish_reason is not None
        thinking, text = self._thoughts.push(chunk.text, last=ends)
        if thinking or text or chunk.tool_calls or (self._call.logprobs and chunk.logprobs):
            piece = self._piece(thinking, text, chunk, chunk.tool_calls)
            yield line({**piece, "done": False})
        if ends:
            yield line({**self._head(), **self._content("", ""), **self._end(chunk)})

    def end(self) -> Iterator[bytes]:
        """Nothing: the last line has said it."""
        yield from ()

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """An error in place of a line."""
        yield line(ollama_error(error))

    def _head(self) -> Payload:
        return {"model": self._model, "created_at": now()}

    def _piece(self, thinking: str, text: str, chunk: Chunk, calls: Sequence[ToolCall]) -> Payload:
        shown = token_payloads(self._tokenizer, chunk) if self._call.logprobs else []
        more = {"logprobs": shown} if shown else {}
        return {**self._head(), **self._content(thinking, text, calls), **more}

    def _content(self, thinking: str, text: str, calls: Sequence[ToolCall] = ()) -> Payload:
        thought = {"thinking": thinking} if thinking else {}
        if not self._chat:
            return {"response": text, **thought}
        message: Payload = {"role": "assistant", "content": text, **thought}
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "function": {"index": at, "name": call.name, "arguments": arguments_of(call)},
                }
                for at, call in enumerate(calls)
            ]
        return {"message": message}

    def _end(self, chunk: Chunk) -> Payload:
        metrics = chunk.metrics
        written = metrics.completion_tokens
        all_s, read_s = time.monotonic() - self._began, metrics.ttft_s or 0.0
        write_s = (metrics.tpot_s or 0.0) * max(0, written - 1)
        return {
            "done": True,
            "done_reason": "length" if chunk.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(all_s),
            "load_duration": _nanoseconds(all_s - read_s - write_s),
            "prompt_eval_count": metrics.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(read_s),
            "eval_count": written,
            "eval_duration": _nanoseconds(write_s),
        }


def ready(model: str, *, chat: bool, keep_s: float | None, seconds: float) -> Payload:
    """The answer to a request that only has a model loaded, or unloaded."""
    said: Payload = {"message": {"role": "assistant", "content": ""}} if chat else {"response": ""}
    return {
        "model": model,
        "created_at": now(),
        **said,
        "done": True,
        "done_reason": "unload" if keep_s == 0 else "load",
        "load_duration": _nanoseconds(seconds),
    }


def line(payload: Payload) -> bytes:
    """One line of a stream."""
    return to_json(payload) + b"\n"


def now() -> str:
    """The time, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e9))  # clients divide by it
