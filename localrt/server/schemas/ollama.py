"""The fields of Ollama's ``/api``, as JSON Schema. Fields that are not listed are ignored."""

from __future__ import annotations

from localrt.server.schemas.parts import (
    ARGUMENTS,
    CONTENT,
    FILLED,
    FLAG,
    IDS,
    MOST_ID,
    STRING,
    TEXT,
    Schema,
    fields,
    integer,
    list_of,
    nullable,
    object_of,
)

_KEEP: dict[str, Schema] = {
    "model": FILLED,
    "keep_alive": {
        "description": 'seconds, or a time such as "5m"; below zero: for ever',
        "type": ["number", "string", "null"],
    },
}
_IMAGES: Schema = {
    "description": "pictures in base64: PNG, JPEG, WebP or GIF",
    **nullable(list_of(STRING)),
}

_ASK: dict[str, Schema] = {
    **_KEEP,
    **fields("stream", "top_logprobs"),
    "options": nullable(
        object_of(
            **fields("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "stop"),
            **fields("repeat_penalty", "presence_penalty", "frequency_penalty"),
            num_predict=integer(-2, MOST_ID),
            num_ctx=integer(-1, MOST_ID),
        )
    ),
    **fields("format"),
    "think": {"type": ["boolean", "string", "null"]},
    "logprobs": FLAG,
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
_NAMED: Schema = {
    **object_of(model=FILLED, name=FILLED, stream=FLAG),
    "anyOf": [{"required": ["model"]}, {"required": ["name"]}],
}

REQUESTS: dict[str, Schema] = {
    "OLLAMA_CHAT": object_of(
        "model", **_ASK, **fields("tools"), messages=nullable(list_of(_MESSAGE)), truncate=FLAG
    ),
    "OLLAMA_GENERATE": object_of(
        "model",
        **_ASK,
        prompt=TEXT,
        suffix=TEXT,
        system=TEXT,
        template=TEXT,
        context=nullable(list_of({})),
        images=_IMAGES,
        raw=FLAG,
    ),
    "OLLAMA_EMBED": object_of(
        "model",
        "input",
        **_KEEP,
        **fields("dimensions"),
        input={
            "description": "a text, token ids, or a list of these",
            "anyOf": [STRING, list_of(STRING), IDS, list_of(IDS)],
        },
        truncate=FLAG,
    ),
    "OLLAMA_EMBEDDINGS": object_of("model", "prompt", **_KEEP, prompt=STRING),
    "OLLAMA_SHOW": _NAMED,
    "OLLAMA_PULL": _NAMED,
}
