"""The description of the server that ``/openapi.json`` publishes (OpenAPI 3.1)."""

from __future__ import annotations

from typing import Any

from localrt.common.version import __version__
from localrt.server.anthropic import schemas as anthropic
from localrt.server.infill import schemas as infill
from localrt.server.ollama import schemas as ollama
from localrt.server.openai import schemas
from localrt.server.responses import schemas as responses

_EVENTS = "text/event-stream"
_NO_SCHEMAS = ("EFFORTS", "THINKING_LIMITS")

_ERRORS = {
    "400": "a field is not what it should be",
    "401": "the key is missing or wrong",
    "403": "a web page that may not ask",
    "404": "another model, or no such path",
    "405": "another method",
    "408": "the request did not come in time",
    "413": "the request is too large",
    "415": "the request's compression is not known",
    "429": "too many answers are running or queued",
    "500": "the model failed",
    "501": "an optional part is not installed",
    "503": "out of memory, or stopping",
}


_ANY_JSON: dict[str, Any] = {"application/json": {}}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}


def describe(*, keyed: bool = False) -> dict[str, Any]:
    """The whole document; ``keyed`` says that requests need a key."""
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "localrt",
            "version": __version__,
            "description": "Local models behind the protocols of OpenAI, Anthropic and Ollama. "
            "Unknown fields are ignored.",
        },
        "paths": {**_openai(), **_anthropic(), **_ollama(), **_about()},
        "components": {
            "schemas": {
                name: getattr(module, name)
                for module in (schemas, responses, infill, anthropic, ollama)
                for name in module.__all__
                if name not in _NO_SCHEMAS
            },
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    if keyed:
        document["security"] = [{"key": []}, {"x-api-key": []}]
    return document


def _openai() -> dict[str, Any]:
    return {
        "/v1/chat/completions": _post(
            "Answer a conversation", "CHAT", "CHAT_RESPONSE", stream=_EVENTS
        ),
        "/v1/completions": _post(
            "Write on from a text", "COMPLETION", "COMPLETION_RESPONSE", stream=_EVENTS
        ),
        "/v1/responses": _post(
            "Answer items, or follow on an earlier response",
            "RESPONSES",
            "RESPONSE",
            stream=_EVENTS,
        ),
        "/v1/responses/input_tokens": _post(
            "Count the tokens of items", "INPUT_TOKENS", "INPUT_TOKENS_COUNT"
        ),
        "/v1/responses/{id}": {
            "get": _operation("A response of the last hour", _json("RESPONSE")),
            "delete": _operation("Forget a response", _json("RESPONSE_DELETED")),
            "parameters": [_ID],
        },
        "/v1/responses/{id}/cancel": {
            "post": _operation("The response, which has ended before", _json("RESPONSE")),
            "parameters": [_ID],
        },
        "/v1/responses/{id}/input_items": {
            "get": _operation("The items that a response answers", _json("ITEMS")),
            "parameters": [_ID],
        },
        "/v1/fim/completions": _post(
            "Fill in the middle (Mistral)", "FIM", "CHAT_RESPONSE", stream=_EVENTS
        ),
        "/infill": _post(
            "Fill in the middle (llama.cpp)", "INFILL", "INFILL_RESPONSE", stream=_EVENTS
        ),
        "/v1/embeddings": _post("Vectors of texts", "EMBEDDINGS", "EMBEDDINGS_RESPONSE"),
        "/v1/rerank": _post("Documents by how well they answer", "RERANK", "RERANKED"),
        "/tokenize": _post("Tokens of a text or a conversation", "TOKENIZE", "TOKENIZED"),
        "/detokenize": _post("The text of tokens", "DETOKENIZE", "DETOKENIZED"),
        "/v1/models": {"get": _operation("The models that there are", _json("MODELS"))},
        "/v1/models/{name}": {
            "get": _operation("One model", _json("MODEL")),
            "parameters": [{**_ID, "name": "name"}],
        },
    }


def _anthropic() -> dict[str, Any]:
    return {
        "/v1/messages": _post(
            "Answer a conversation (Anthropic)",
            "MESSAGES",
            "MESSAGE",
            stream=_EVENTS,
            error="ANTHROPIC_ERROR",
        ),
        "/v1/messages/count_tokens": _post(
            "Count the tokens of a conversation (Anthropic)",
            "COUNT_TOKENS",
            "COUNTED_TOKENS",
            error="ANTHROPIC_ERROR",
        ),
    }


def _ollama() -> dict[str, Any]:
    def asked(summary: str, body: str, response: str, *, streams: bool = True) -> dict[str, Any]:
        stream = "application/x-ndjson" if streams else None
        return _post(f"{summary} (Ollama)", body, response, stream=stream, error="OLLAMA_ERROR")

    def told(summary: str, response: str) -> dict[str, Any]:
        return {"get": _operation(f"{summary} (Ollama)", _json(response), error="OLLAMA_ERROR")}

    return {
        "/api/chat": asked("Answer a conversation", "OLLAMA_CHAT", "OLLAMA_CHAT_RESPONSE"),
        "/api/generate": asked("Answer a prompt", "OLLAMA_GENERATE", "OLLAMA_GENERATE_RESPONSE"),
        "/api/embed": asked(
            "Vectors of texts", "OLLAMA_EMBED", "OLLAMA_EMBED_RESPONSE", streams=False
        ),
        "/api/embeddings": asked(
            "The vector of a text", "OLLAMA_EMBEDDINGS", "OLLAMA_EMBEDDING", streams=False
        ),
        "/api/show": asked("What a model is", "OLLAMA_SHOW", "OLLAMA_SHOWN", streams=False),
        "/api/pull": asked("Download a model of the hub", "OLLAMA_PULL", "OLLAMA_STATUS"),
        "/api/tags": told("The models that there are", "OLLAMA_TAGS"),
        "/api/ps": told("The models that are loaded", "OLLAMA_PS"),
        "/api/version": told("The protocol's version", "OLLAMA_VERSION"),
    }


def _about() -> dict[str, Any]:
    return {
        "/health": {"get": _operation("Whether the server is up", _ANY_JSON, security=[])},
        "/tokenizer_info": {"get": _operation("The tokenizer (vLLM)", _ANY_JSON)},
        "/props": {"get": _operation("The context and the template (llama.cpp)", _ANY_JSON)},
        "/api/v0/models": {"get": _operation("The models that there are (LM Studio)", _ANY_JSON)},
        "/metrics": {"get": _operation("Counts for Prometheus", {"text/plain": {}})},
    }


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _operation(
    summary: str, content: dict[str, Any], *, error: str = "ERROR", **more: Any
) -> dict[str, Any]:
    found = {"200": {"description": "as asked for", "content": content}}
    for status, description in _ERRORS.items():
        found[status] = {"description": description, "content": _json(error)}
    return {"summary": summary, "responses": found, **more}


def _post(
    summary: str, body: str, response: str, *, stream: str | None = None, error: str = "ERROR"
) -> dict[str, Any]:
    content = {**_json(response), **({} if stream is None else {stream: {}})}
    request = {"required": True, "content": _json(body)}
    return {"post": _operation(summary, content, error=error, requestBody=request)}
