"""The endpoints of OpenAI's Responses. Finished responses are kept for a while."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localrt.server.dialect import EVENT_STREAM, Endpoint, Payload
from localrt.server.errors import ApiError, JsonResponse, invalid
from localrt.server.generating import answer, prompt_tokens
from localrt.server.responses.calls import Item, items_of, responses_call
from localrt.server.responses.reply import ResponseReply
from localrt.server.service import ResponseStore, Stored, read_request, service_of

_MOST_ITEMS = 100  # items of a page


async def create(request: Request) -> Response:
    """Answer items, or follow on an earlier response."""
    asked = await read_request(request, "RESPONSES")
    fields, service = asked.fields, asked.service
    items = _items(fields, service.responses)
    call = responses_call(fields, items, service.note_once)

    def keep(response: Payload) -> None:
        if fields.get("store") is not False:
            service.responses.put(response, items)

    return await answer(asked, call, partial(ResponseReply, fields=fields, keep=keep))


async def stored(request: Request) -> Response:
    """A response of the last hour."""
    return JsonResponse(_found(request).response)


async def cancel(request: Request) -> Response:
    """The response, which has ended before."""
    return JsonResponse(_found(request).response)


async def delete(request: Request) -> Response:
    """Forget a response."""
    name = str(_found(request).response["id"])
    service_of(request).responses.remove(name)
    return JsonResponse({"id": name, "object": "response", "deleted": True})


async def input_items(request: Request) -> Response:
    """The items that a response answers."""
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
    """Count the tokens of items."""
    asked = await read_request(request, "INPUT_TOKENS")
    fields, service = asked.fields, asked.service
    call = responses_call(fields, _items(fields, service.responses), service.note_once)
    count = await prompt_tokens(asked, call)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": count})


def _items(fields: dict[str, Any], store: ResponseStore) -> list[Item]:
    """Return the items of a request, after those of the response that it follows.

    Raises:
        ApiError: 400, there are no items, or that response is gone.
    """
    earlier: list[Item] = []
    if name := fields.get("previous_response_id"):
        stored = store.get(name)
        if stored is None:
            raise _unknown(name, 400, "previous_response_id", "previous_response_not_found")
        earlier = stored.conversation()
    given = items_of(fields.get("input"))
    # A reference has the id of an item in an earlier response or its input.
    named = {"item_reference"}
    items = [(item["type"] in named and store.item(str(item["id"]))) or item for item in given]
    if not earlier and not items:
        raise invalid("there is nothing to answer: send input, or previous_response_id", "input")
    return [*earlier, *items]


def _found(request: Request) -> Stored:
    """Return the response that the path names.

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


ROUTES = (
    Endpoint("/v1/responses", "POST", create, "RESPONSE", "RESPONSES", EVENT_STREAM),
    Endpoint(
        "/v1/responses/input_tokens", "POST", input_tokens, "INPUT_TOKENS_COUNT", "INPUT_TOKENS"
    ),
    Endpoint("/v1/responses/{id}", "GET", stored, "RESPONSE"),
    Endpoint("/v1/responses/{id}", "DELETE", delete, "RESPONSE_DELETED"),
    Endpoint("/v1/responses/{id}/cancel", "POST", cancel, "RESPONSE"),
    Endpoint("/v1/responses/{id}/input_items", "GET", input_items, "ITEMS"),
)
