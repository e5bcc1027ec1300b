"""The fields of Anthropic's Messages, as JSON Schema. Fields that are not listed are ignored."""

from __future__ import annotations

from localrt.server.schemas.parts import (
    CONTENT,
    FILLED,
    FLAG,
    MOST_ID,
    OBJECT,
    STOPS,
    STRING,
    TEXT,
    Schema,
    fields,
    integer,
    list_of,
    nullable,
    object_of,
    where,
    whole,
)

_FORMAT = nullable(whole(type={"enum": ["json_schema"]}, schema=OBJECT))

_PROMPT: dict[str, Schema] = {
    **fields("tools"),
    "model": FILLED,
    "messages": list_of(
        object_of(
            "role",
            role={"enum": ["user", "assistant", "system"]},
            content=CONTENT,
            output_config=nullable(object_of(effort=TEXT)),
        ),
        minItems=1,
    ),
    "system": CONTENT,
    "tool_choice": {
        **nullable(object_of("type", type=STRING, name=STRING, disable_parallel_tool_use=FLAG)),
        **where("type", "tool", {"required": ["name"]}),
    },
    "thinking": {
        **nullable(object_of("type", type=STRING, budget_tokens=integer(0, MOST_ID))),
        **where("type", "enabled", {"required": ["budget_tokens"]}),
    },
    "output_config": nullable(object_of(effort=TEXT, format=_FORMAT)),
    "output_format": _FORMAT,  # its name in the beta
}

REQUESTS: dict[str, Schema] = {
    "COUNT_TOKENS": object_of("model", "messages", **_PROMPT),
    "MESSAGES": object_of(
        "model",
        "messages",
        "max_tokens",
        **_PROMPT,
        **fields("temperature", "top_p", "top_k", "stream"),
        max_tokens={"type": "integer", "minimum": 1, "maximum": MOST_ID},
        stop_sequences=STOPS,
    ),
}
