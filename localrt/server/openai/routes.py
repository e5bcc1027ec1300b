"""OpenAI's endpoints that compute: chat and text completions, and embeddings."""

from __future__ import annotations

import base64

from starlette.requests import Request
from starlette.responses import Response

from localrt.server.dialect import EVENT_STREAM, Endpoint, prompts_of
from localrt.server.errors import JsonResponse
from localrt.server.generating import answer
from localrt.server.openai.calls import chat_call, completion_call
from localrt.server.openai.reply import ChatReply, TextReply
from localrt.server.service import read_request
from localrt.server.texts import embedded


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    asked = await read_request(request, "CHAT")
    return await answer(asked, chat_call(asked.fields, asked.service.note_once), ChatReply)


async def completions(request: Request) -> Response:
    """Write on from a text."""
    asked = await read_request(request, "COMPLETION")
    return await answer(asked, completion_call(asked.fields), TextReply)


async def embeddings(request: Request) -> Response:
    """Vectors of texts."""
    asked = await read_request(request, "EMBEDDINGS")
    fields = asked.fields
    name, vectors, read = await embedded(
        asked, prompts_of(fields["input"]), dimensions=fields.get("dimensions")
    )
    if fields.get("encoding_format") == "base64":
        rows: list[object] = [base64.b64encode(row.tobytes()).decode() for row in vectors]
    else:
        rows = vectors.tolist()
    data = [
        {"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": read, "total_tokens": read}
    return JsonResponse({"object": "list", "data": data, "model": name, "usage": usage})


ROUTES = (
    Endpoint(
        "/v1/chat/completions", "POST", chat_completions, "CHAT_RESPONSE", "CHAT", EVENT_STREAM
    ),
    Endpoint(
        "/v1/completions", "POST", completions, "COMPLETION_RESPONSE", "COMPLETION", EVENT_STREAM
    ),
    Endpoint("/v1/embeddings", "POST", embeddings, "EMBEDDINGS_RESPONSE", "EMBEDDINGS"),
)
