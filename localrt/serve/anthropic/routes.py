"""The endpoints of Anthropic's Messages."""

from __future__ import annotations

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response

from localrt.serve.anthropic.calls import messages_call
from localrt.serve.anthropic.reply import MessageReply
from localrt.serve.calls import Call
from localrt.serve.endpoints import fields_of, service_of
from localrt.serve.errors import JsonResponse
from localrt.serve.generating import answer, prompt_tokens
from localrt.serve.models import Offered
from localrt.serve.replies import Payload, Reply, TokenBytes
from localrt.serve.service import Service

__all__ = ["ROUTES", "model", "models"]


async def messages(request: Request) -> Response:
    """POST /v1/messages"""
    fields, service = await fields_of(request, "MESSAGES"), service_of(request)
    return await answer(request, service, messages_call(fields, service.note_once), _reply)


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens"""
    call = messages_call(await fields_of(request, "COUNT_TOKENS"))
    count = await prompt_tokens(request, service_of(request), call)
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


def _reply(_: TokenBytes, call: Call, name: str) -> Reply:
    return MessageReply(call, name)


ROUTES = (
    ("/v1/messages", "POST", messages),
    ("/v1/messages/count_tokens", "POST", count_tokens),
)
