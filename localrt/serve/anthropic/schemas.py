"""The fields of Anthropic's Messages, as JSON Schema. Fields that are not listed are ignored."""

from __future__ import annotations

from typing import Any

from localrt.serve.schema_parts import (
    COUNT,
    FILLED,
    FLAG,
    MOST_ID,
    STRING,
    TEXT,
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


def _blocks(*, description: str, **thens: Schema) -> Schema:
    """A text, or a list of blocks; ``thens`` are what blocks of a type must be."""
    block = {**whole(type=STRING), "allOf": [where("type", *item) for item in thens.items()]}
    return {"description": description, "anyOf": [STRING, list_of(block)]}


_TEXT_BLOCK = whole(text=STRING)
_TEXTS = _blocks(description="a text or a list of text blocks", text=_TEXT_BLOCK)
_CONTENT = _blocks(
    description="a text or a list of blocks with the fields of their types",
    text=_TEXT_BLOCK,
    thinking=whole(thinking=STRING),
    tool_use=whole(id=FILLED, name=FILLED, input={"type": "object"}),
    tool_result=object_of(
        "tool_use_id", tool_use_id=FILLED, content={"anyOf": [_TEXTS, {"type": "null"}]}
    ),
)

_TOOL: Schema = {
    **object_of(
        "name",
        name={"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"},
        type=TEXT,
        description=TEXT,
        input_schema={"type": "object"},
    ),
}

_TOOL_CHOICE: Schema = {
    **nullable(
        object_of(
            "type",
            type={"enum": ["auto", "any", "tool", "none"]},
            name=STRING,
            disable_parallel_tool_use=FLAG,
        )
    ),
    **where("type", "tool", {"required": ["name"]}),
}

_THINKING: Schema = {
    **nullable(
        object_of(
            "type",
            type={"enum": ["enabled", "disabled", "adaptive", "between_tools"]},
            budget_tokens=integer(0, MOST_ID),
        )
    ),
    **where("type", "enabled", {"required": ["budget_tokens"]}),
}

_OUTPUT = nullable(
    object_of(
        effort={"enum": ["low", "medium", "high", "xhigh", "max", None]},
        format=nullable(whole(type={"enum": ["json_schema"]}, schema={"type": "object"})),
    )
)

_PROMPT: dict[str, Any] = {
    "model": FILLED,
    "messages": list_of(
        whole(role={"enum": ["user", "assistant", "system"]}, content=_CONTENT), minItems=1
    ),
    "system": {"description": _TEXTS["description"], "anyOf": [*_TEXTS["anyOf"], {"type": "null"}]},
    "tools": nullable(list_of(_TOOL)),
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
    stop_sequences=nullable(list_of(FILLED, maxItems=16)),
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
