"""What every endpoint begins with: the server that was asked, and the checked body."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from localrt.serve.bodies import read_fields
from localrt.serve.service import Service

__all__ = ["fields_of", "service_of"]


def service_of(request: Request) -> Service:
    """The server that ``request`` came to."""
    service = request.app.state.service
    assert isinstance(service, Service), "the app was made by create_app"
    return service


async def fields_of(request: Request, kind: str) -> dict[str, Any]:
    """The body of a request for a model that there is, checked as a ``kind`` of ``REQUESTS``.

    Raises:
        ApiError: a field is not what it should be, or there is no such model.
        ClientDisconnect: nobody waits for an answer.
    """
    service = service_of(request)
    fields = await read_fields(request, kind, service.options, service.bodies)
    service.models.find(fields.get("model"))
    return fields
