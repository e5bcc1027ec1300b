"""The fields of Ollama's ``/api``, as JSON Schema. Fields that are not listed are ignored."""

from __future__ import annotations

from typing import Any

from localrt.server.schema_parts import (
    ARGUMENTS,
    CONTENT,
    COUNT,
    FILLED,
    FLAG,
    IDS,
    MOST_ID,
    STOPS,
    STRING,
    TEXT,
    TOOLS,
    Schema,
    integer,
    list_of,
    nullable,
    number,
    object_of,
    whole,
)

__all__ = [
    "OLLAMA_CHAT",
    "OLLAMA_CHAT_RESPONSE",
    "OLLAMA_EMBED",
    "OLLAMA_EMBEDDING",
    "OLLAMA_EMBEDDINGS",
    "OLLAMA_EMBED_RESPONSE",
    "OLLAMA_ERROR",
    "OLLAMA_GENERATE",
    "OLLAMA_GENERATE_RESPONSE",
    "OLLAMA_PS",
    "OLLAMA_PULL",
    "OLLAMA_SHOW",
    "OLLAMA_SHOWN",
    "OLLAMA_STATUS",
    "OLLAMA_TAGS",
    "OLLAMA_VERSION",
]


_OPTIONS = nullable(
    object_of(
        temperature=number(0, 100),
        top_k=integer(-1, MOST_ID),
        top_p=number(0, 1),
        min_p=number(0, 1),
        typical_p=number(0, 1),
        seed=integer(-(1 << 63), (1 << 63) - 1),
        stop=STOPS,
        num_predict=integer(-2, MOST_ID),
        num_ctx=integer(-1, MOST_ID),
        repeat_penalty=number(0.01, 100),
        presence_penalty=number(-2, 2),
        frequency_penalty=number(-2, 2),
    )
)
_KEEP_ALIVE: Schema = {
    "description": 'seconds, or a time such as "5m"; below zero: for ever',
    "type": ["number", "string", "null"],
}
_IMAGES = nullable(list_of({}))

_ASK: dict[str, Any] = {
    "model": FILLED,
    "options": _OPTIONS,
    "format": {
        "description": '"json", or a JSON schema',
        "anyOf": [{"enum": ["json", "", None]}, {"type": "object"}],
    },
    "think": {"type": ["boolean", "string", "null"]},
    "stream": FLAG,
    "keep_alive": _KEEP_ALIVE,
    "logprobs": FLAG,
    "top_logprobs": integer(0, 20),
}

_CALL = object_of("function", id=TEXT, function=object_of("name", name=FILLED, arguments=ARGUMENTS))
_MESSAGE = object_of(
    "role",
    role={"enum": ["system", "developer", "user", "assistant", "tool"]},
    content=CONTENT,
    thinking=TEXT,
    images=_IMAGES,
    tool_calls=nullable(list_of(_CALL)),
    tool_name=TEXT,
    tool_call_id=TEXT,
)

OLLAMA_CHAT = object_of(
    "model",
    **_ASK,
    messages=nullable(list_of(_MESSAGE)),
    tools=TOOLS,
    truncate=FLAG,
)

OLLAMA_GENERATE = object_of(
    "model",
    **_ASK,
    prompt=TEXT,
    suffix=TEXT,
    system=TEXT,
    template=TEXT,
    context=nullable(list_of({})),
    images=_IMAGES,
    raw=FLAG,
)

OLLAMA_EMBED = object_of(
    "model",
    "input",
    model=FILLED,
    input={
        "description": "a text, or a list of texts",
        "anyOf": [STRING, list_of(STRING), IDS],
    },
    truncate=FLAG,
    dimensions=integer(1, MOST_ID),
    keep_alive=_KEEP_ALIVE,
)
OLLAMA_EMBEDDINGS = object_of(
    "model", "prompt", model=FILLED, prompt=STRING, keep_alive=_KEEP_ALIVE
)

_NAMED: Schema = {
    **object_of(model=FILLED, name=FILLED, stream=FLAG),
    "anyOf": [{"required": ["model"]}, {"required": ["name"]}],
}
OLLAMA_SHOW = _NAMED
OLLAMA_PULL = _NAMED

# -- responses -------------------------------------------------------------------------------------

_ANSWER: dict[str, Schema] = {
    "model": STRING,
    "created_at": STRING,
    "done": {"const": True},
    "done_reason": {"enum": ["stop", "length", "load", "unload"]},
}
_VECTOR = list_of({"type": "number"})
_DETAILS = whole(family=STRING, format=STRING, parameter_size=STRING, quantization_level=STRING)

OLLAMA_CHAT_RESPONSE = whole(**_ANSWER, message=whole(role={"const": "assistant"}, content=STRING))
OLLAMA_GENERATE_RESPONSE = whole(**_ANSWER, response=STRING)
OLLAMA_EMBED_RESPONSE = whole(model=STRING, embeddings=list_of(_VECTOR))
OLLAMA_EMBEDDING = whole(embedding=_VECTOR)
OLLAMA_TAGS = whole(
    models=list_of(
        whole(name=STRING, model=STRING, modified_at=STRING, size=COUNT, details=_DETAILS)
    )
)
OLLAMA_PS = whole(
    models=list_of(
        whole(name=STRING, size=COUNT, size_vram=COUNT, expires_at=STRING, context_length=COUNT)
    )
)
OLLAMA_SHOWN = whole(
    details=_DETAILS, model_info={"type": "object"}, capabilities=list_of(STRING), template=STRING
)
OLLAMA_STATUS = whole(status=STRING)
OLLAMA_VERSION = whole(version=STRING)
OLLAMA_ERROR = whole(error=STRING)
