"""The fields of OpenAI's Responses, as JSON Schema. Fields that are not listed are ignored."""

from __future__ import annotations

from typing import Any

from localrt.server.schema_parts import (
    CONTENT,
    COUNT,
    FLAG,
    MOST_ID,
    STRING,
    TEXT,
    TOOL_CHOICE,
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

__all__ = [
    "INPUT_TOKENS",
    "INPUT_TOKENS_COUNT",
    "ITEMS",
    "RESPONSE",
    "RESPONSES",
    "RESPONSE_DELETED",
]


_FORMAT: Schema = {
    **nullable(
        object_of(
            "type",
            type={"enum": ["text", "json_object", "json_schema"]},
            name=TEXT,
            schema={"type": "object"},
        )
    ),
    **where("type", "json_schema", {"required": ["schema"]}),
}

_PROMPT: dict[str, Any] = {
    "model": TEXT,
    "input": {
        "description": "a text or a list of items with the fields of their types",
        "anyOf": [
            STRING,
            list_of(object_of(type=TEXT, id=TEXT, role=TEXT, content=CONTENT)),
            {"type": "null"},
        ],
    },
    "instructions": TEXT,
    "previous_response_id": TEXT,
    "tools": TOOLS,
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": FLAG,
    "reasoning": nullable(object_of(effort=TEXT)),
    "text": nullable(object_of(format=_FORMAT)),
    "truncation": {"enum": ["auto", "disabled", None]},
}

INPUT_TOKENS = object_of(**_PROMPT)

RESPONSES = object_of(
    **_PROMPT,
    max_output_tokens=integer(1, MOST_ID),
    temperature=number(0, 100),
    top_p=number(0, 1),
    top_logprobs=integer(0, 20),
    include=nullable(list_of(STRING)),
    metadata=nullable({"type": "object"}),
    store=FLAG,
    stream=FLAG,
    background=FLAG,
)

# -- responses -------------------------------------------------------------------------------------

RESPONSE = whole(
    id=STRING,
    object={"const": "response"},
    created_at=COUNT,
    status={"enum": ["completed", "incomplete"]},
    model=STRING,
    output=list_of(whole(id=STRING, type=STRING)),
    usage=whole(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT),
)
ITEMS = whole(object={"const": "list"}, data=list_of(whole(id=STRING, type=STRING)), has_more=FLAG)
RESPONSE_DELETED = whole(id=STRING, object={"const": "response"}, deleted={"const": True})
INPUT_TOKENS_COUNT = whole(object={"const": "response.input_tokens"}, input_tokens=COUNT)
