"""The user's own endpoints: conversations, and what belongs to them, for the server's owner alone.

Tools run with the owner's rights, and settings are the owner's: both need a sure owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from localrt import system
from localrt.server.answers import Answers
from localrt.server.bodies import read_fields
from localrt.server.dialect import Endpoint, Payload
from localrt.server.errors import ApiError, JsonResponse
from localrt.server.options import is_loopback
from localrt.server.request_schema import RequestSchema
from localrt.server.service import service_of

Work = Callable[[Answers, Request, Payload], Any]


def _check_owner(request: Request) -> bool:
    """Whether the request is surely from the conversations' owner, with whose rights tools run:
    without a key, only some systems say which user sends a request.

    Raises:
        ApiError: 403, it is from somebody else.
    """
    options, headers = service_of(request).options, request.headers
    if not (is_loopback(options.host) or options.conversations):
        raise ApiError(403, "conversations are off: they need localrt serve --conversations")
    page = headers.get("origin")
    if options.api_key is not None:
        return True  # the guard has checked it
    if page is not None and urlsplit(page).netloc.lower() != headers.get("host", "").lower():
        why = "without a key, conversations are for the server's own page alone"
        raise ApiError(403, f"{why}: start it with --api-key, and send the key")
    own = system.is_own_client(request.scope["client"], request.scope["server"])
    if own is False:
        why = "without a key, conversations are for the user who runs the server"
        raise ApiError(403, f"{why}: start it with --api-key, and send the key")
    return own is not None


def owners_endpoint(
    path: str, method: str, work: Work, body: RequestSchema | None = None, *, tools: bool = False
) -> Endpoint:
    """Return an endpoint for the owner alone. Work on the history, which is on the disk, runs in a
    thread unless it is a coroutine. ``tools``: they may run, or settings change; tools also if the
    body has this field.
    """
    in_loop = iscoroutinefunction(work)

    async def handle(request: Request) -> Response:
        sure, service, fields = _check_owner(request), service_of(request), {}
        if body is not None:
            fields = await read_fields(request, body, service.options, service.bodies)
        if not sure and (tools or fields.get("tools")):
            raise ApiError(403, "tools and settings need localrt serve --api-key on this system")
        given = request.app.state.answers, request, fields
        found = await (work(*given) if in_loop else asyncio.to_thread(work, *given))
        return found if isinstance(found, Response) else JsonResponse(found)

    return Endpoint(path, method, handle)
