"""The endpoints that fill in the middle."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from localrt.serve.calls import Call
from localrt.serve.endpoints import fields_of, service_of
from localrt.serve.generating import answer
from localrt.serve.infill.calls import fim_call, infill_call
from localrt.serve.infill.reply import InfillReply
from localrt.serve.payloads import ChatShape, Completion
from localrt.serve.replies import Reply, TokenBytes

__all__ = ["ROUTES"]


async def infill(request: Request) -> Response:
    """POST /infill"""
    fields = await fields_of(request, "INFILL")

    def reply(_: TokenBytes, call: Call, name: str) -> Reply:
        return InfillReply(name, fields)

    return await answer(request, service_of(request), infill_call(fields), reply)


async def fim_completions(request: Request) -> Response:
    """POST /v1/fim/completions"""
    fields = await fields_of(request, "FIM")
    return await answer(request, service_of(request), fim_call(fields), _fim_reply)


def _fim_reply(tokens: TokenBytes, call: Call, name: str) -> Reply:
    return Completion(ChatShape(tokens, call), call, name)


ROUTES = (
    ("/infill", "POST", infill),
    ("/v1/infill", "POST", infill),
    ("/v1/fim/completions", "POST", fim_completions),
)
