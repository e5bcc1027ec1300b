"""Converts chunks to Ollama's replies, as one object or lines; embeds texts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from localrt.chat_format.messages import arguments_of
from localrt.chat_format.thinking import ThoughtStream
from localrt.engine.types import Chunk, ToolCall
from localrt.server.dialect import Endpoint, Generation, Payload, Reply, TokenBytes, prompts_of
from localrt.server.errors import ApiError, JsonResponse, ollama_error, to_json
from localrt.server.generating import answer, until_gone
from localrt.server.messages import Note
from localrt.server.ollama.calls import CHAT, GENERATE, KEEP, chat_call, generate_call, keep_alive_s
from localrt.server.request_schema import (
    FLAG,
    IDS,
    STRING,
    Field,
    RequestSchema,
    list_of,
    required,
    shared,
)
from localrt.server.service import ModelRequest, read_request
from localrt.server.texts import embedded

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


class OllamaReply(Reply):
    """A message if ``chat``, else a text.

    ``began`` is the ``time.monotonic`` at which the request arrived.
    """

    media_type = LINES

    def __init__(
        self, call: Generation, model: str, tokenizer: TokenBytes, *, chat: bool, began: float
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
    read: Callable[[dict[str, object], Note], Generation | None],
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
        return await answer(asked, call, partial(OllamaReply, chat=chat, began=began))

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
