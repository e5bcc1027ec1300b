"""The endpoints of OpenAI's Responses. Those that have been answered are kept for a while."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localrt.serve.calls import Call
from localrt.serve.endpoints import fields_of, service_of
from localrt.serve.errors import ApiError, JsonResponse, invalid
from localrt.serve.generating import answer, prompt_tokens
from localrt.serve.replies import Payload, Reply, TokenBytes
from localrt.serve.responses.calls import Item, items_of, responses_call
from localrt.serve.responses.reply import ResponseReply
from localrt.serve.responses.store import ResponseStore, Stored

__all__ = ["ROUTES"]


async def create(request: Request) -> Response:
    """POST /v1/responses"""
    fields, service = await fields_of(request, "RESPONSES"), service_of(request)
    items = _items(fields, service.responses)
    call = responses_call(fields, items, service.note_once)

    def keep(response: Payload) -> None:
        if fields.get("store") is not False:
            service.responses.put(response, items)

    def reply(tokens: TokenBytes, call: Call, name: str) -> Reply:
        return ResponseReply(call, name, tokens, fields, keep)

    return await answer(request, service, call, reply)


async def stored(request: Request) -> Response:
    """GET or DELETE /v1/responses/ID, and POST /v1/responses/ID/cancel: it has ended before"""
    found = _found(request)
    if request.method == "DELETE":
        name = found.response["id"]
        service_of(request).responses.remove(name)
        return JsonResponse({"id": name, "object": "response", "deleted": True})
    return JsonResponse(found.response)


async def input_items(request: Request) -> Response:
    """GET /v1/responses/ID/input_items"""
    items, query = list(_found(request).items), request.query_params
    if query.get("order") != "asc":
        items.reverse()
    limit = query.get("limit", "20")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:4]) <= _MOST_ITEMS):
        raise invalid(f"limit must be from 1 to {_MOST_ITEMS}, is {limit[:20]!r}", "limit")
    ids = [item["id"] for item in items]
    start = ids.index(query["after"]) + 1 if query.get("after") in ids else 0
    end = start + int(limit)
    ends = ids[start:end] or [None]
    more = {"first_id": ends[0], "last_id": ends[-1], "has_more": end < len(items)}
    return JsonResponse({"object": "list", "data": items[start:end], **more})


async def input_tokens(request: Request) -> Response:
    """POST /v1/responses/input_tokens"""
    fields, service = await fields_of(request, "INPUT_TOKENS"), service_of(request)
    call = responses_call(fields, _items(fields, service.responses), service.note_once)
    count = await prompt_tokens(request, service, call)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": count})


ROUTES = (
    ("/v1/responses", "POST", create),
    ("/v1/responses/input_tokens", "POST", input_tokens),
    ("/v1/responses/{id}", "GET DELETE", stored),
    ("/v1/responses/{id}/cancel", "POST", stored),
    ("/v1/responses/{id}/input_items", "GET", input_items),
)
_MOST_ITEMS = 100  # that a page has


def _items(fields: dict[str, Any], store: ResponseStore) -> list[Item]:
    """The items of a request, with those of the response that it follows on.

    Raises:
        ApiError: 400, there are none, or that response is gone.
    """
    earlier: list[Item] = []
    if name := fields.get("previous_response_id"):
        stored = store.get(name)
        if stored is None:
            raise _unknown(name, 400, "previous_response_id", "previous_response_not_found")
        earlier = stored.conversation()
    given = items_of(fields.get("input"))
    # A reference has the id of an item of an earlier response, or of its input.
    named = {"item_reference"}
    items = [(item["type"] in named and store.item(str(item["id"]))) or item for item in given]
    if not earlier and not items:
        raise invalid("there is nothing to answer: send input, or previous_response_id", "input")
    return [*earlier, *items]


def _found(request: Request) -> Stored:
    """The response of the path.

    Raises:
        ApiError: 404, it is not there.
    """
    name = request.path_params["id"]
    found = service_of(request).responses.get(name)
    if found is None:
        raise _unknown(name, 404)
    return found


def _unknown(name: str, status: int, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(
        status,
        f"there is no response {name[:200]!r}: they are kept for an hour, while the server runs, "
        "unless store is false",
        param=param,
        code=code,
    )
