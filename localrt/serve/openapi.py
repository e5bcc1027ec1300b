"""The description of the server that ``/openapi.json`` publishes (OpenAPI 3.1)."""

from __future__ import annotations

from typing import Any

from localrt.serve import schemas
from localrt.version import __version__

__all__ = ["describe"]

_ERRORS = {
    "400": "a field is not what it should be",
    "401": "the key is missing or wrong",
    "403": "a web page that may not ask",
    "404": "another model, or no such path",
    "405": "another method",
    "408": "the request did not come in time",
    "413": "the request is too large",
    "429": "too many answers are running or queued",
    "500": "the model failed",
    "501": "an optional part is not installed",
    "503": "out of memory, or stopping",
}


def describe(*, keyed: bool = False) -> dict[str, Any]:
    """The whole document; ``keyed`` says that requests need a key."""
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "localrt",
            "version": __version__,
            "description": "A local model behind OpenAI's protocol. Unknown fields are ignored.",
        },
        "paths": {
            "/v1/chat/completions": _post(
                "Answer a conversation", "CHAT", "CHAT_RESPONSE", streams=True
            ),
            "/v1/completions": _post(
                "Write on from a text", "COMPLETION", "COMPLETION_RESPONSE", streams=True
            ),
            "/v1/embeddings": _post("Vectors of texts", "EMBEDDINGS", "EMBEDDINGS_RESPONSE"),
            "/v1/models": _get("The model that runs", _json("MODELS")),
            "/v1/models/{name}": {
                **_get("One model", _json("MODEL")),
                "parameters": [
                    {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
                ],
            },
            "/health": _get("Whether the server is up", {"application/json": {}}, keyed=False),
            "/metrics": _get("Counts for Prometheus", {"text/plain": {}}),
        },
        "components": {
            "schemas": {name: getattr(schemas, name) for name in schemas.__all__ if name.isupper()},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    if keyed:
        document["security"] = [{"key": []}]
    return document


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _responses(content: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"200": {"description": "as asked for", "content": content}}
    for status, description in _ERRORS.items():
        found[status] = {"description": description, "content": _json("ERROR")}
    return found


def _post(summary: str, body: str, response: str, *, streams: bool = False) -> dict[str, Any]:
    content = _json(response)
    if streams:
        content["text/event-stream"] = {}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": _json(body)},
            "responses": _responses(content),
        }
    }


def _get(summary: str, content: dict[str, Any], *, keyed: bool = True) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": summary, "responses": _responses(content)}
    if not keyed:
        operation["security"] = []
    return {"get": operation}
