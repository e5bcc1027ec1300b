"""Anthropic's endpoints."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from localrt.server.anthropic.calls import messages_call
from localrt.server.anthropic.reply import MessageReply
from localrt.server.dialect import EVENT_STREAM, Endpoint, Payload
from localrt.server.errors import JsonResponse
from localrt.server.generating import answer, prompt_tokens
from localrt.server.models import Offered
from localrt.server.service import Service, read_request, service_of


async def messages(request: Request) -> Response:
    """Answer a conversation (Anthropic)."""
    asked = await read_request(request, "MESSAGES")
    return await answer(asked, messages_call(asked.fields, asked.service.note_once), MessageReply)


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation (Anthropic)."""
    asked = await read_request(request, "COUNT_TOKENS")
    count = await prompt_tokens(asked, messages_call(asked.fields))
    return JsonResponse({"input_tokens": count})


async def models(request: Request) -> Response:
    """GET /v1/models, for a client that sends ``anthropic-version``"""
    service = service_of(request)
    data = [_model(service, offered) for offered in service.models.offered()]
    ids = [one["id"] for one in data] or [None]
    ends = {"first_id": ids[0], "last_id": ids[-1]}
    return JsonResponse({"data": data, "has_more": False, **ends})


async def model(request: Request) -> Response:
    """GET /v1/models/NAME, for a client that sends ``anthropic-version``"""
    service = service_of(request)
    found = service.models.find(request.path_params["name"], exact=True)
    return JsonResponse(_model(service, found))


def _model(service: Service, offered: Offered) -> Payload:
    since = datetime.fromtimestamp(service.started, UTC).isoformat()
    return {
        "type": "model",
        "id": offered.name,
        "display_name": offered.name,
        "created_at": since,
        "lifecycle": "active",
        "max_input_tokens": offered.ctx,
    }


ROUTES = (
    Endpoint("/v1/messages", "POST", messages, "MESSAGE", "MESSAGES", EVENT_STREAM),
    Endpoint("/v1/messages/count_tokens", "POST", count_tokens, "COUNTED_TOKENS", "COUNT_TOKENS"),
)
