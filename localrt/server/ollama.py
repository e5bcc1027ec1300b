"""Ollama's ``/api``: chat, generate and embed. Replies are one object, or lines.

``ollama_models.py`` has what it says about models.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localrt.chat_format.messages import arguments_of
from localrt.chat_format.thinking import ThoughtStream
from localrt.common.errors import OptionError
from localrt.common.formatting import parse_duration
from localrt.engine.types import Chunk, ToolCall
from localrt.server.dialect import (
    Endpoint,
    GenerationRequest,
    Payload,
    ResponseWriter,
    TokenBytes,
    effort,
    prompts_of,
)
from localrt.server.errors import ApiError, JsonResponse, invalid, ollama_error, to_json
from localrt.server.generating import answer, until_gone
from localrt.server.messages import (
    Fields,
    Note,
    PromptMessage,
    content_of,
    made_call,
    offered,
    text_of,
    thought,
    unnoted,
)
from localrt.server.request_schema import (
    ARGUMENTS,
    CONTENT,
    FILLED,
    FLAG,
    IDS,
    STRING,
    TEXT,
    Field,
    RequestSchema,
    Table,
    integer,
    list_of,
    nullable,
    object_of,
    object_schema,
    options_of,
    required,
    shared,
)
from localrt.server.service import ModelRequest, read_request
from localrt.server.texts import embedded

# -- fields ----------------------------------------------------------------------------------------

KEEP: Table = {
    "model": required(FILLED),
    "keep_alive": Field(
        {
            "description": 'seconds, or a time such as "5m"; below zero: for ever',
            "type": ["number", "string", "null"],
        }
    ),
}
_IMAGES = nullable(list_of(STRING))  # in base64
_OPTIONS: Table = {
    **shared("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop"),
    **shared("repeat_penalty", "presence_penalty", "frequency_penalty"),
    "num_predict": Field(
        integer(-2), "max_tokens", lambda given: int(given) if given > 0 else None
    ),
    "num_ctx": Field(
        integer(-1), "context_tokens", lambda given: int(given) if given > 0 else None
    ),
}
_ASK: Table = {
    **KEEP,
    **shared("stream", "top_logprobs", "format"),
    "options": Field(nullable(object_schema(_OPTIONS))),
    "think": Field({"type": ["boolean", "string", "null"]}),
    "logprobs": Field(FLAG),
}
_CALL = object_of("function", id=TEXT, function=object_of("name", name=FILLED, arguments=ARGUMENTS))
_MESSAGE = object_of(
    "role",
    role={"enum": ["system", "developer", "user", "assistant", "tool"]},
    content=CONTENT,
    thinking=TEXT,
    images=_IMAGES,
    tool_calls=nullable(list_of(_CALL)),
    tool_name=TEXT,
    tool_call_id=TEXT,
)
CHAT = RequestSchema(
    {
        **_ASK,
        **shared("tools"),
        "messages": Field(nullable(list_of(_MESSAGE))),
        "truncate": Field(FLAG),
    }
)
GENERATE = RequestSchema(
    {
        **_ASK,
        **dict.fromkeys(("prompt", "suffix", "system", "template"), Field(TEXT)),
        "context": Field(nullable(list_of({}))),
        "images": Field(_IMAGES),
        "raw": Field(FLAG),
    }
)
EMBED = RequestSchema(
    {
        **KEEP,
        **shared("dimensions"),
        "input": required(
            {
                "description": "a text, token ids, or a list of these",
                "anyOf": [STRING, list_of(STRING), IDS, list_of(IDS)],
            }
        ),
        "truncate": Field(FLAG),
    }
)
EMBEDDINGS = RequestSchema({**KEEP, "prompt": required(STRING)})

LINES = "application/x-ndjson"

# -- calls -----------------------------------------------------------------------------------------


def chat_call(fields: Fields, note: Note = unnoted) -> GenerationRequest | None:
    """Return the call for a chat; None without messages: such a request only loads the model.

    A final assistant message is the beginning of the answer. If a conversation outgrows the
    context, or ``num_ctx``, the oldest turns are left out, unless ``truncate`` is false.

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


def generate_call(fields: Fields, note: Note = unnoted) -> GenerationRequest | None:
    """Return the call for a prompt; None without one: such a request only loads the model.

    Raises:
        ApiError: 400, fields that are not supported.
    """
    for name, instead in (
        ("template", "start the server with --chat-template"),
        ("context", "send the conversation to /api/chat"),
    ):
        if fields.get(name):
            raise invalid(f"{name} is not supported: {instead}", name)
    prompt = content_of([*_images(fields), fields.get("prompt") or ""], note)
    system = fields.get("system")
    if fields.get("suffix"):
        given: dict[str, object] = {"prompt": prompt, "suffix": fields["suffix"]}
    elif not prompt:
        return None
    elif fields.get("raw"):
        given = {"prompt": prompt, "raw": True}
    else:
        turns = [{"role": "system", "content": system}] if system else []
        given = {"prompt": [*turns, {"role": "user", "content": prompt}]}
    return _call(fields, given, _options(fields))


def keep_alive_s(duration: float | str | None) -> float | None:
    """Return the seconds to keep a model loaded; negative: forever; None: unset.

    Raises:
        ApiError: 400, it is not a duration.
    """
    if not isinstance(duration, str):
        return duration
    try:
        return parse_duration(duration)
    except OptionError as error:
        raise invalid(f"keep_alive: {error}", "keep_alive") from error


def _call(
    fields: Fields, prompt: dict[str, object], options: dict[str, object]
) -> GenerationRequest:
    return GenerationRequest(
        prompts=[prompt],
        options=options,
        stream=fields.get("stream") is not False,
        logprobs=bool(fields.get("logprobs")),
    )


def _options(fields: Fields) -> dict[str, Any]:
    options = options_of(_OPTIONS, fields.get("options") or {})
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


def _messages(sent: Sequence[Fields], note: Note) -> list[PromptMessage]:
    """Return messages in the form of chat templates: calls get ids, to which results refer."""
    messages: list[PromptMessage] = []
    waiting: list[tuple[str, str]] = []  # (id, name) of calls without a result so far
    for number, message in enumerate(sent, 1):
        role, content = message["role"], message.get("content")
        parts = content if isinstance(content, list) else [content or ""]
        read = content_of if role in ("user", "tool") else text_of
        shown: PromptMessage = {"role": role, "content": read([*_images(message), *parts], note)}
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


def _result(name: str | None, call_id: str | None, waiting: list[tuple[str, str]]) -> PromptMessage:
    """Return a result's message. Its call is the one with its id, else the first unanswered one
    with its name, else the first unanswered one.
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
    """Return the pictures, which come before the text."""
    return [{"type": "image", "data": data} for data in message.get("images") or ()]


# -- replies ---------------------------------------------------------------------------------------


class OllamaWriter(ResponseWriter):
    """A message if ``chat``, else a text.

    ``began`` is the ``time.monotonic`` at which the request arrived.
    """

    media_type = LINES

    def __init__(
        self,
        call: GenerationRequest,
        model: str,
        tokenizer: TokenBytes,
        *,
        chat: bool,
        began: float,
    ) -> None:
        super().__init__(call, model, tokenizer)
        self._chat, self._began = chat, began
        self._thoughts = ThoughtStream()

    def whole(self, chunks: Sequence[Chunk]) -> Payload:
        (chunk,) = chunks
        thinking, text = self._thoughts.push(chunk.text, last=True)
        return {**self._piece(thinking, text, chunk, chunk.tool_calls), **self._end(chunk)}

    def alive(self) -> bytes:
        return line({**self._head(), **self._content("", ""), "done": False})

    def delta(self, index: int, chunk: Chunk) -> Iterator[bytes]:
        """Return a line for text to show, and one for the end."""
        ends = chunk.finish_reason is not None
        thinking, text = self._thoughts.push(chunk.text, last=ends)
        if thinking or text or chunk.tool_calls or (self.call.logprobs and chunk.logprobs):
            piece = self._piece(thinking, text, chunk, chunk.tool_calls)
            yield line({**piece, "done": False})
        if ends:
            yield line({**self._head(), **self._content("", ""), **self._end(chunk)})

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield line(ollama_error(error))

    def _head(self) -> Payload:
        return {"model": self.model, "created_at": now()}

    def _piece(self, thinking: str, text: str, chunk: Chunk, calls: Sequence[ToolCall]) -> Payload:
        shown = self.logprobs(chunk) if self.call.logprobs else []
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
        written, cached = metrics.completion_tokens, metrics.cached_tokens
        all_s, read_s = time.monotonic() - self._began, metrics.ttft_s or 0.0
        write_s = (metrics.tpot_s or 0.0) * max(0, written - 1)
        return {
            "done": True,
            "done_reason": "length" if chunk.finish_reason == "length" else "stop",
            "total_duration": _nanoseconds(all_s),
            "load_duration": _nanoseconds(all_s - read_s - write_s),
            "prompt_eval_count": metrics.prompt_tokens,
            **({"prompt_eval_cached_count": cached} if cached else {}),
            "prompt_eval_duration": _nanoseconds(read_s),
            "eval_count": written,
            "eval_duration": _nanoseconds(write_s),
        }


def ready(model: str, *, chat: bool, keep_s: float | None, seconds: float) -> Payload:
    """Return the answer to a request that only loads or unloads a model."""
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
    """Return one line of a stream."""
    return to_json(payload) + b"\n"


def now() -> str:
    """Return the time in Ollama's format."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e9))  # clients divide by it


# -- endpoints -------------------------------------------------------------------------------------


async def chat(request: Request) -> Response:
    """Answer a conversation (Ollama)."""
    return await _answered(request, CHAT, chat_call, chat=True)


async def generate(request: Request) -> Response:
    """Answer a prompt (Ollama)."""
    return await _answered(request, GENERATE, generate_call, chat=False)


async def _answered(
    request: Request,
    schema: RequestSchema,
    read: Callable[[dict[str, object], Note], GenerationRequest | None],
    *,
    chat: bool,
) -> Response:
    began = time.monotonic()
    asked = await read_request(request, schema)
    fields, service = asked.fields, asked.service
    call = read(fields, service.note_once)
    wanted, ctx = (fields.get("options") or {}).get("num_ctx") or 0, asked.model.ctx
    if wanted > (ctx or wanted):
        note = f"a client asks for a context of {wanted} tokens (num_ctx), this server has {ctx}"
        service.note_once("num_ctx", f"{note}: start it with --ctx {wanted}")
    keep_s = keep_alive_s(fields.get("keep_alive"))
    if call is not None or keep_s != 0 or asked.model.state != "unloaded":
        _keep(asked)  # otherwise it could be unloaded before the next request

    if call is not None:
        return await answer(asked, call, partial(OllamaWriter, chat=chat, began=began))

    async def load() -> None:
        async with asked.using():
            pass

    if keep_s != 0:
        with service.admitted():
            await until_gone(request, load())
    seconds = time.monotonic() - began
    return JsonResponse(ready(fields["model"], chat=chat, keep_s=keep_s, seconds=seconds))


async def embed(request: Request) -> Response:
    """Vectors of texts (Ollama)."""
    began = time.monotonic()
    asked = await read_request(request, EMBED)
    fields = asked.fields
    _keep(asked)
    name, vectors, read = await embedded(
        asked,
        prompts_of(fields["input"]),
        dimensions=fields.get("dimensions"),
        truncate=fields.get("truncate") is not False,
    )
    return JsonResponse(
        {
            "model": name,
            "embeddings": vectors.tolist(),
            "total_duration": round((time.monotonic() - began) * 1e9),
            "prompt_eval_count": read,
        }
    )


async def embeddings(request: Request) -> Response:
    """The vector of a text (Ollama)."""
    asked = await read_request(request, EMBEDDINGS)
    _keep(asked)
    found = await embedded(asked, [asked.fields["prompt"]], truncate=True)
    return JsonResponse({"embedding": found.vectors[0].tolist()})


def _keep(model_request: ModelRequest) -> None:
    """Set how long the model stays loaded, if the client says so."""
    seconds = keep_alive_s(model_request.fields.get("keep_alive"))
    if seconds is not None:
        model_request.service.models.keep(model_request.model.name, seconds)


ROUTES = (
    Endpoint("/api/chat", "POST", chat),
    Endpoint("/api/generate", "POST", generate),
    Endpoint("/api/embed", "POST", embed),
    Endpoint("/api/embeddings", "POST", embeddings),
)
