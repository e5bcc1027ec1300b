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
            "/v1/models": {"get": _operation("The model that runs", _json("MODELS"))},
            "/v1/models/{name}": {
                "get": _operation("One model", _json("MODEL")),
                "parameters": [
                    {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
                ],
            },
            "/health": {
                "get": _operation("Whether the server is up", {"application/json": {}}, security=[])
            },
            "/metrics": {"get": _operation("Counts for Prometheus", {"text/plain": {}})},
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


def _operation(summary: str, content: dict[str, Any], **more: Any) -> dict[str, Any]:
    responses = {"200": {"description": "as asked for", "content": content}}
    for status, description in _ERRORS.items():
        responses[status] = {"description": description, "content": _json("ERROR")}
    return {"summary": summary, "responses": responses, **more}


def _post(summary: str, body: str, response: str, *, streams: bool = False) -> dict[str, Any]:
    content = {**_json(response), **({"text/event-stream": {}} if streams else {})}
    request = {"required": True, "content": _json(body)}
    return {"post": _operation(summary, content, requestBody=request)}
