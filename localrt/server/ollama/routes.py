"""The endpoints of Ollama's ``/api`` that answer: chat, generate, embed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from localrt.server.dialect import Endpoint, Generation, prompts_of
from localrt.server.errors import JsonResponse
from localrt.server.generating import answer, until_gone
from localrt.server.messages import Note
from localrt.server.ollama import models
from localrt.server.ollama.calls import chat_call, generate_call, keep_alive_s
from localrt.server.ollama.reply import LINES, OllamaReply, ready
from localrt.server.service import ModelRequest, read_request
from localrt.server.texts import embedded


async def chat(request: Request) -> Response:
    """Answer a conversation (Ollama)."""
    return await _answered(request, "OLLAMA_CHAT", chat_call, chat=True)


async def generate(request: Request) -> Response:
    """Answer a prompt (Ollama)."""
    return await _answered(request, "OLLAMA_GENERATE", generate_call, chat=False)


async def _answered(
    request: Request,
    kind: str,
    read: Callable[[dict[str, object], Note], Generation | None],
    *,
    chat: bool,
) -> Response:
    began = time.monotonic()
    asked = await read_request(request, kind)
    fields, service = asked.fields, asked.service
    call = read(fields, service.note_once)
    wanted, ctx = (fields.get("options") or {}).get("num_ctx") or 0, asked.model.ctx
    if wanted > (ctx or wanted):
        note = f"a client asks for a context of {wanted} tokens (num_ctx), this server has {ctx}"
        service.note_once("num_ctx", f"{note}: start it with --ctx {wanted}")
    keep_s = keep_alive_s(fields.get("keep_alive"))
    if call is not None or keep_s != 0 or asked.model.state != "unloaded":
        _keep(asked)  # otherwise the next request would find it gone at once

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
    asked = await read_request(request, "OLLAMA_EMBED")
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
    asked = await read_request(request, "OLLAMA_EMBEDDINGS")
    _keep(asked)
    found = await embedded(asked, [asked.fields["prompt"]], truncate=True)
    return JsonResponse({"embedding": found.vectors[0].tolist()})


def _keep(asked: ModelRequest) -> None:
    """Set how long the model stays loaded, if the client says so."""
    seconds = keep_alive_s(asked.fields.get("keep_alive"))
    if seconds is not None:
        asked.service.models.keep(asked.model.name, seconds)


ROUTES = (
    Endpoint("/api/chat", "POST", chat, "OLLAMA_CHAT_RESPONSE", "OLLAMA_CHAT", LINES),
    Endpoint(
        "/api/generate", "POST", generate, "OLLAMA_GENERATE_RESPONSE", "OLLAMA_GENERATE", LINES
    ),
    Endpoint("/api/embed", "POST", embed, "OLLAMA_EMBED_RESPONSE", "OLLAMA_EMBED"),
    Endpoint("/api/embeddings", "POST", embeddings, "OLLAMA_EMBEDDING", "OLLAMA_EMBEDDINGS"),
    *models.ROUTES,
)
