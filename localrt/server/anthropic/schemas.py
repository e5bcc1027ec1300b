"""The fields of Anthropic's Messages, as JSON Schema. Fields that are not listed are ignored."""

from __future__ import annotations

from typing import Any

from localrt.server.schema_parts import (
    CONTENT,
    COUNT,
    FILLED,
    FLAG,
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
    where,
    whole,
)

__all__ = ["ANTHROPIC_ERROR", "COUNTED_TOKENS", "COUNT_TOKENS", "MESSAGE", "MESSAGES"]


_TOOL_CHOICE: Schema = {
    **nullable(object_of("type", type=STRING, name=STRING, disable_parallel_tool_use=FLAG)),
    **where("type", "tool", {"required": ["name"]}),
}

_THINKING: Schema = {
    **nullable(
        object_of(
            "type",
            type=STRING,
            budget_tokens=integer(0, MOST_ID),
        )
    ),
    **where("type", "enabled", {"required": ["budget_tokens"]}),
}

_OUTPUT = nullable(
    object_of(
        effort=TEXT,
        format=nullable(whole(type={"enum": ["json_schema"]}, schema={"type": "object"})),
    )
)

_PROMPT: dict[str, Any] = {
    "model": FILLED,
    "messages": list_of(
        object_of("role", role={"enum": ["user", "assistant", "system"]}, content=CONTENT),
        minItems=1,
    ),
    "system": CONTENT,
    "tools": TOOLS,
    "tool_choice": _TOOL_CHOICE,
    "thinking": _THINKING,
    "output_config": _OUTPUT,
}

COUNT_TOKENS = object_of("model", "messages", **_PROMPT)

MESSAGES = object_of(
    "model",
    "messages",
    "max_tokens",
    **_PROMPT,
    max_tokens={"type": "integer", "minimum": 1, "maximum": MOST_ID},
    temperature=number(0, 100),
    top_p=number(0, 1),
    top_k=integer(-1, MOST_ID),
    stop_sequences=STOPS,
    stream=FLAG,
)

# -- responses -------------------------------------------------------------------------------------

MESSAGE = whole(
    id=STRING,
    type={"const": "message"},
    role={"const": "assistant"},
    model=STRING,
    content=list_of(whole(type={"enum": ["text", "thinking", "tool_use"]})),
    stop_reason=STRING,
    stop_sequence=TEXT,
    usage=whole(input_tokens=COUNT, output_tokens=COUNT),
)
COUNTED_TOKENS = whole(input_tokens=COUNT)
ANTHROPIC_ERROR = whole(type={"const": "error"}, error=whole(type=STRING, message=STRING))
