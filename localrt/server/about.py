"""Lists models and facts about them without running them.

Facts are read from file headers and returned in the forms of OpenAI, vLLM and llama.cpp.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from localrt.chat_format.chat_template import load_template
from localrt.chat_format.template_syntax import find_syntax
from localrt.common.errors import LocalrtError
from localrt.common.formatting import format_count
from localrt.common.version import __version__
from localrt.hub.files import quantization_label
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import ENCODERS
from localrt.models.vision.cost import PictureCost, picture_cost
from localrt.models.weight_files import model_stamp
from localrt.server import anthropic
from localrt.server.dialect import Endpoint
from localrt.server.errors import ANTHROPIC_HEADER, JsonResponse
from localrt.server.models import ModelEntry
from localrt.server.service import service_of


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model. ``format`` is ``"gguf"`` or ``"safetensors"``; ``ctx`` is the model's
    trained context in tokens. ``template`` is empty if the model has none; ``picture`` is the cost
    of a picture for a vision model.
    """

    family: str
    format: str
    parameters: int
    quantization: str
    ctx: int | None
    width: int | None
    template: str
    capabilities: tuple[str, ...]
    picture: PictureCost | None = None

    def details(self) -> dict[str, object]:
        """Return the details that lists of models contain."""
        return {
            "parent_model": "",
            "format": self.format,
            "family": self.family,
            "families": [self.family],
            "parameter_size": format_count(self.parameters).replace(" ", ""),
            "quantization_level": self.quantization,
        }

    def info(self, ctx: int | None) -> dict[str, object]:
        """Return facts by their GGUF names; ``ctx`` is the context that the server uses."""
        sizes = {"context_length": ctx or self.ctx, "embedding_length": self.width}
        if self.picture is not None:
            sizes["vision.picture_tokens"] = self.picture.tokens
            sizes["vision.picture_memory"] = self.picture.room_bytes
        return {
            "general.architecture": self.family,
            "general.parameter_count": self.parameters,
            **{f"{self.family}.{name}": size for name, size in sizes.items() if size is not None},
        }


_UNKNOWN = ModelFacts("unknown", "unknown", 0, "unknown", None, None, "", ("completion",))


def known_facts(offered: ModelEntry) -> ModelFacts:
    """Return the facts of a model; if its files cannot be read, all are unknown.

    Whether a loaded model takes pictures is taken from the model, since not every engine or device
    supports them.
    """
    facts = _UNKNOWN
    with suppress(LocalrtError, OSError):
        if offered.path is not None:
            facts = facts_of(offered.path)
    if offered.sees is None:
        return facts
    others = tuple(name for name in facts.capabilities if name != "vision")
    return replace(facts, capabilities=(*others, "vision") if offered.sees else others)


def facts_of(path: Path) -> ModelFacts:
    """Return the facts in the files at ``path``.

    Raises:
        LocalrtError: they cannot be read.
    """
    return _facts_of(path, model_stamp(path))


@lru_cache(maxsize=256)
def _facts_of(path: Path, _: str) -> ModelFacts:
    with closing(open_checkpoint(path)) as checkpoint:
        template = load_template(checkpoint)
        tensors = checkpoint.tensors.values()
        formats: Counter[str] = Counter()
        for tensor in tensors:
            formats[tensor.format.name] += tensor.nbytes
        main = formats.most_common(1)[0][0] if formats else "unknown"
        capabilities = ["embedding" if checkpoint.architecture in ENCODERS else "completion"]
        if template is not None and template.takes_tools:
            capabilities.append("tools")
        if template is not None and find_syntax(template).tags is not None:
            capabilities.append("thinking")
        picture = _picture(path)
        if picture is not None:
            capabilities.append("vision")
        return ModelFacts(
            family=checkpoint.architecture,
            format=checkpoint.kind,
            parameters=sum(prod(tensor.shape) for tensor in tensors),
            quantization=quantization_label(path.stem) or main.upper(),
            ctx=_whole(checkpoint.config.get("max_position_embeddings")),
            width=_whole(checkpoint.config.get("hidden_size")),
            template="" if template is None else template.source,
            capabilities=tuple(capabilities),
            picture=picture,
        )


def _picture(path: Path) -> PictureCost | None:
    with suppress(LocalrtError):  # the encoder is damaged, but the decoder may be intact
        return picture_cost(path)
    return None


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


# -- endpoints -------------------------------------------------------------------------------------


async def models(request: Request) -> Response:
    """The models that there are."""
    if ANTHROPIC_HEADER in request.headers:
        return await anthropic.models(request)
    service = service_of(request)
    offered, started = service.models.offered(), service.started
    data = await asyncio.to_thread(lambda: [_openai(one, started) for one in offered])
    return JsonResponse({"object": "list", "data": data})


async def model(request: Request) -> Response:
    """One model."""
    if ANTHROPIC_HEADER in request.headers:
        return await anthropic.model(request)
    service = service_of(request)
    found = service.models.find(request.path_params["name"], exact=True)
    return JsonResponse(await asyncio.to_thread(_openai, found, service.started))


async def props(request: Request) -> Response:
    """The context and the template (llama.cpp)."""
    service = service_of(request)
    offered = service.models.find(request.query_params.get("model"))
    facts = await asyncio.to_thread(known_facts, offered)
    return JsonResponse(
        {
            "default_generation_settings": {"n_ctx": offered.ctx or facts.ctx or 0},
            "total_slots": service.options.max_running,
            "model_alias": offered.name,
            "chat_template": facts.template,
            "modalities": {"vision": "vision" in facts.capabilities, "audio": False},
            "build_info": f"localrt-{__version__}",
        }
    )


def _openai(offered: ModelEntry, started: int) -> dict[str, object]:
    """Describe a model, with its context under several servers' names; unknown until loaded."""
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
        "capabilities": facts.capabilities,
        "chat": bool(facts.template),
        **({} if offered.base is None else {"parent": offered.base}),
        "status": {
            "value": offered.state,
            "ram": offered.ram,
            **({} if offered.unload_s is None else {"unload_s": round(offered.unload_s, 1)}),
        },
    }


ROUTES = (
    Endpoint("/v1/models", "GET", models),
    Endpoint("/v1/models/{name:path}", "GET", model),
    Endpoint("/props", "GET", props),
)
