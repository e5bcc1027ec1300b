"""The description of the server that ``/openapi.json`` publishes (OpenAPI 3.1)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from localrt.common.version import __version__
from localrt.server.dialect import Endpoint
from localrt.server.schemas import SCHEMAS

_ERRORS = {
    "400": "a field is wrong",
    "401": "the key is missing or wrong",
    "403": "the web page is not allowed",
    "404": "no such model or path",
    "405": "the path does not have this method",
    "408": "the request did not arrive in time",
    "413": "the request is too large",
    "415": "unknown compression",
    "429": "too many answers are running or queued",
    "500": "the model failed",
    "501": "an optional part is not installed",
    "503": "out of memory, overloaded or stopping",
}
_PARAMETER = re.compile(r"{(\w+)[^}]*}")
OPEN = ("/", "/health", "/openapi.json")
"""Paths that need no key."""


def describe(endpoints: Iterable[Endpoint], *, keyed: bool = False) -> dict[str, object]:
    """Return the whole document; ``keyed`` says that requests need a key."""
    paths: dict[str, dict[str, object]] = {}
    for one in endpoints:
        if one.answer:
            path = paths.setdefault(_PARAMETER.sub(r"{\1}", one.path), {})
            path[one.method.lower()] = _operation(one)
            if names := _PARAMETER.findall(one.path):
                path["parameters"] = [
                    {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                    for name in names
                ]
    document: dict[str, object] = {
        "openapi": "3.1.0",
        "info": {
            "title": "localrt",
            "version": __version__,
            "description": "Local models behind the protocols of OpenAI, Anthropic and Ollama. "
            "Unknown fields are ignored.",
        },
        "paths": paths,
        "components": {
            "schemas": dict(SCHEMAS),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    if keyed:
        document["security"] = [{"key": []}, {"x-api-key": []}]
    return document


def _operation(one: Endpoint) -> dict[str, object]:
    error = "ERROR"
    if one.path.startswith("/api/"):
        error = "OLLAMA_ERROR"
    elif one.path.startswith("/v1/messages"):
        error = "ANTHROPIC_ERROR"
    answers = {**_content(one.answer), **(_content(one.stream) if one.stream else {})}
    found = {"200": {"description": "the answer", "content": answers}}
    for status, description in _ERRORS.items():
        found[status] = {"description": description, "content": _content(error)}
    operation: dict[str, object] = {
        "summary": (one.handler.__doc__ or "").strip().removesuffix("."),
        "responses": found,
    }
    if one.body:
        operation["requestBody"] = {"required": True, "content": _content(one.body)}
    if one.path in OPEN:
        operation["security"] = []
    return operation


def _content(kind: str) -> dict[str, object]:
    """Return the content of a media type, or of JSON with this schema."""
    if "/" in kind:
        return {kind: {}}
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind}"}}}
