"""The endpoints of OpenAI's Responses. Those that have been answered are kept for a while."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localrt.serve.calls import Call
from localrt.serve.endpoints import fields_of, service_of
from localrt.serve.errors import ApiError, JsonResponse
from localrt.serve.generating import answer, prompt_tokens
from localrt.serve.replies import Payload, Reply, TokenBytes
from localrt.serve.responses.calls import conversation, responses_call
from localrt.serve.responses.reply import ResponseReply
from localrt.serve.responses.store import ResponseStore

__all__ = ["ROUTES"]


async def create(request: Request) -> Response:
    """POST /v1/responses"""
    fields = await fields_of(request, "RESPONSES")
    store = service_of(request).responses
    messages = _messages(fields, store)
    call = responses_call(fields, messages)

    def keep(response: Payload, message: dict[str, Any]) -> None:
        if fields.get("store") is not False:
            store.put(response, [*messages, message])

    def reply(tokens: TokenBytes, call: Call, name: str) -> Reply:
        return ResponseReply(call, name, tokens, fields, keep)

    return await answer(request, service_of(request), call, reply)


async def stored(request: Request) -> Response:
    """GET or DELETE /v1/responses/ID"""
    name, store = request.path_params["id"], service_of(request).responses
    found = store.get(name)
    if found is None:
        raise _unknown(name, 404)
    if request.method == "DELETE":
        store.remove(name)
        return JsonResponse({"id": name, "object": "response", "deleted": True})
    return JsonResponse(found.response)


async def input_tokens(request: Request) -> Response:
    """POST /v1/responses/input_tokens"""
    fields, service = await fields_of(request, "INPUT_TOKENS"), service_of(request)
    call = responses_call(fields, _messages(fields, service.responses))
    count = await prompt_tokens(request, service, call)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": count})


ROUTES = (
    ("/v1/responses", "POST", create),
    ("/v1/responses/input_tokens", "POST", input_tokens),
    ("/v1/responses/{id}", "GET DELETE", stored),
)


def _messages(fields: dict[str, Any], store: ResponseStore) -> list[dict[str, Any]]:
    """The conversation of a request, with the earlier one that it follows on."""
    earlier: list[dict[str, Any]] = []
    if name := fields.get("previous_response_id"):
        stored = store.get(name)
        if stored is None:
            raise _unknown(name, 400, "previous_response_id", "previous_response_not_found")
        earlier = list(stored.messages)
    return [*earlier, *conversation(fields["input"])]


def _unknown(name: str, status: int, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(
        status,
        f"there is no response {name[:200]!r}: they are kept for an hour, while the server runs, "
        "unless store is false",
        param=param,
        code=code,
    )
