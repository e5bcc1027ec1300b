"""OpenAI's endpoints that answer: chat and text completions."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from localrt.server.dialect import EVENT_STREAM, Endpoint
from localrt.server.generating import answer
from localrt.server.openai.calls import chat_call, completion_call
from localrt.server.openai.reply import ChatReply, TextReply
from localrt.server.service import read_request


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    asked = await read_request(request, "CHAT")
    return await answer(asked, chat_call(asked.fields, asked.service.note_once), ChatReply)


async def completions(request: Request) -> Response:
    """Write on from a text."""
    asked = await read_request(request, "COMPLETION")
    return await answer(asked, completion_call(asked.fields), TextReply)


ROUTES = (
    Endpoint(
        "/v1/chat/completions", "POST", chat_completions, "CHAT_RESPONSE", "CHAT", EVENT_STREAM
    ),
    Endpoint(
        "/v1/completions", "POST", completions, "COMPLETION_RESPONSE", "COMPLETION", EVENT_STREAM
    ),
)
