"""The endpoints of Ollama's ``/api`` about models: which there are, which run, what one is."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from localrt.serve.bodies import read_fields
from localrt.serve.endpoints import service_of
from localrt.serve.errors import ApiError, JsonResponse
from localrt.serve.facts import known_facts
from localrt.serve.models import Offered
from localrt.version import __version__

__all__ = ["ROUTES"]

_PROTOCOL = "0.12.0"  # Ollama's: clients refuse older ones
_FOR_EVER = timedelta(days=36500)


async def running(_: Request) -> Response:
    """GET /, by which clients see whether somebody is there"""
    return PlainTextResponse("localrt is running")


async def version(_: Request) -> Response:
    """GET /api/version"""
    return JsonResponse({"version": _PROTOCOL, "localrt": __version__})


async def tags(request: Request) -> Response:
    """GET /api/tags"""
    offered = service_of(request).models.offered()
    return JsonResponse({"models": await asyncio.to_thread(_listed, offered)})


async def ps(request: Request) -> Response:
    """GET /api/ps"""
    service = service_of(request)
    at_work = {served.name: served for served in service.models.at_work()}
    offered = [one for one in service.models.offered() if one.name in at_work]
    found = await asyncio.to_thread(_listed, offered)
    for one, entry in zip(offered, found, strict=True):
        vram = at_work[one.name].model.status().vram
        left = _FOR_EVER if one.unload_s is None else timedelta(seconds=one.unload_s)
        entry |= {
            "size": one.ram + (vram.used if vram else 0),
            "size_vram": vram.used if vram else 0,
            "expires_at": (datetime.now(UTC) + left).isoformat(),
            "context_length": one.ctx,
        }
    return JsonResponse({"models": found})


async def show(request: Request) -> Response:
    """POST /api/show"""
    service = service_of(request)
    fields = await read_fields(request, "OLLAMA_SHOW", service.options, service.bodies)
    offered = service.models.find(fields.get("model") or fields["name"])
    facts = await asyncio.to_thread(known_facts, offered)
    return JsonResponse(
        {
            "license": "",
            "modelfile": f"FROM {offered.name}\n",
            "parameters": "" if offered.ctx is None else f"num_ctx {offered.ctx}",
            "template": facts.template,
            "modified_at": _modified(offered),
            "details": facts.details(),
            "model_info": facts.info(offered.ctx),
            "capabilities": facts.capabilities,
        }
    )


async def not_here(request: Request) -> Response:
    """What Ollama does with models, and this server does not"""
    raise ApiError(
        501, f"{request.url.path} is not supported: manage models with `localrt list`, `pull`, `rm`"
    )


def _listed(offered: Sequence[Offered]) -> list[dict[str, Any]]:
    return [
        {
            "name": one.name,
            "model": one.name,
            "modified_at": _modified(one),
            "size": one.nbytes or 0,
            "digest": hashlib.sha256(f"{one.name} {one.nbytes}".encode()).hexdigest(),
            "details": known_facts(one).details(),
        }
        for one in offered
    ]


def _modified(offered: Offered) -> str:
    try:
        since = 0.0 if offered.path is None else offered.path.stat().st_mtime
    except OSError:
        since = 0.0
    return datetime.fromtimestamp(since, UTC).isoformat()


ROUTES = (
    ("/", "GET", running),
    ("/api/version", "GET", version),
    ("/api/tags", "GET", tags),
    ("/api/ps", "GET", ps),
    ("/api/show", "POST", show),
    ("/api/create", "POST", not_here),
    ("/api/copy", "POST", not_here),
    ("/api/push", "POST", not_here),
    ("/api/delete", "DELETE", not_here),
)
