"""The endpoints by which clients find out what there is: models, and how much fits one's context.

The same facts in the forms of OpenAI, vLLM, llama.cpp and LM Studio.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localrt.serve.anthropic import routes as anthropic
from localrt.serve.endpoints import service_of
from localrt.serve.errors import ANTHROPIC_HEADER, JsonResponse
from localrt.serve.facts import known_facts
from localrt.serve.models import Offered
from localrt.version import __version__

__all__ = ["ROUTES"]


async def models(request: Request) -> Response:
    """GET /v1/models"""
    if ANTHROPIC_HEADER in request.headers:
        return await anthropic.models(request)
    service = service_of(request)
    offered, started = service.models.offered(), service.started
    data = await asyncio.to_thread(lambda: [_openai(one, started) for one in offered])
    return JsonResponse({"object": "list", "data": data})


async def model(request: Request) -> Response:
    """GET /v1/models/NAME"""
    if ANTHROPIC_HEADER in request.headers:
        return await anthropic.model(request)
    service = service_of(request)
    found = service.models.find(request.path_params["name"], exact=True)
    return JsonResponse(await asyncio.to_thread(_openai, found, service.started))


async def studio_models(request: Request) -> Response:
    """GET /api/v0/models, LM Studio's"""
    offered = service_of(request).models.offered()
    data = await asyncio.to_thread(lambda: [_lm_studio(one) for one in offered])
    return JsonResponse({"object": "list", "data": data})


async def studio_model(request: Request) -> Response:
    """GET /api/v0/models/NAME, LM Studio's"""
    found = service_of(request).models.find(request.path_params["name"], exact=True)
    return JsonResponse(await asyncio.to_thread(_lm_studio, found))


async def props(request: Request) -> Response:
    """GET /props, llama.cpp's; ``?model=`` says of which"""
    service = service_of(request)
    offered = service.models.find(request.query_params.get("model"))
    facts = await asyncio.to_thread(known_facts, offered)
    return JsonResponse(
        {
            "default_generation_settings": {"n_ctx": offered.ctx or facts.ctx or 0},
            "total_slots": service.options.max_running,
            "model_alias": offered.name,
            "chat_template": facts.template,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"localrt-{__version__}",
        }
    )


def _openai(offered: Offered, started: int) -> dict[str, Any]:
    """With the context by the names of several servers; unknown before a model is loaded."""
    ctx, facts = offered.ctx, known_facts(offered)
    served = {} if ctx is None else {"max_model_len": ctx, "context_length": ctx}
    meta = {
        "n_ctx": ctx,
        "n_ctx_train": facts.ctx,
        "n_embd": facts.width,
        "n_params": facts.parameters or None,
        "size": offered.nbytes,
    }
    return {
        "id": offered.name,
        "object": "model",
        "created": started,
        "owned_by": "localrt",
        **served,
        "meta": {name: value for name, value in meta.items() if value is not None},
        **({} if offered.base is None else {"parent": offered.base}),
        "status": {
            "value": offered.state,
            "ram": offered.ram,
            **({} if offered.unload_s is None else {"unload_s": round(offered.unload_s, 1)}),
        },
    }


def _lm_studio(offered: Offered) -> dict[str, Any]:
    facts = known_facts(offered)
    loaded = offered.state != "unloaded"
    return {
        "id": offered.name,
        "object": "model",
        "type": "llm",
        "publisher": offered.name.rpartition("/")[0],
        "arch": facts.family,
        "compatibility_type": facts.format,
        "quantization": facts.quantization,
        "state": "loaded" if loaded else "not-loaded",
        "max_context_length": facts.ctx or offered.ctx,
        **({"loaded_context_length": offered.ctx} if loaded else {}),
        "capabilities": ["tool_use"] if "tools" in facts.capabilities else [],
    }


ROUTES = (
    ("/v1/models", "GET", models),
    ("/v1/models/{name:path}", "GET", model),
    ("/api/v0/models", "GET", studio_models),
    ("/api/v0/models/{name:path}", "GET", studio_model),
    ("/props", "GET", props),
)
