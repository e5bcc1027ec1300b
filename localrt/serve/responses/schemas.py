"""The fields of OpenAI's Responses, as JSON Schema. Fields that are not listed are ignored."""

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
from localrt.serve.schemas import EFFORTS

__all__ = ["INPUT_TOKENS", "INPUT_TOKENS_COUNT", "RESPONSE", "RESPONSES", "RESPONSE_DELETED"]

_PART: Schema = {
    **whole(type=STRING),
    "allOf": [
        where("type", kind, whole(text=STRING))
        for kind in ("input_text", "output_text", "reasoning_text", "summary_text", "text")
    ]
    + [where("type", "refusal", whole(refusal=STRING))],
}
_PARTS = list_of(_PART)
_CONTENT: Schema = {
    "description": "a text or a list of parts",
    "anyOf": [STRING, _PARTS],
}
_MESSAGE = object_of(
    "role",
    "content",
    role={"enum": ["user", "assistant", "system", "developer"]},
    content=_CONTENT,
)
_ITEM: Schema = {
    "type": "object",
    "properties": {"type": TEXT},
    "allOf": [
        {
            "if": {"properties": {"type": {"enum": ["message", None]}}},
            "then": _MESSAGE,
        },
        where("type", "function_call", whole(call_id=FILLED, name=FILLED, arguments=STRING)),
        where("type", "function_call_output", whole(call_id=FILLED, output=_CONTENT)),
        where("type", "reasoning", object_of(summary=_PARTS, content=nullable(_PARTS))),
    ],
}

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

_TOOL: Schema = {
    **whole(type=STRING),
    **where(
        "type",
        "function",
        object_of(
            "name",
            name={"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,128}$"},
            description=TEXT,
            parameters=nullable({"type": "object"}),
        ),
    ),
}

_TOOL_CHOICE: Schema = {
    "description": '"none", "auto", "required", or an object that names a function',
    "anyOf": [
        {"enum": ["none", "auto", "required", None]},
        whole(type={"enum": ["function"]}, name=STRING),
    ],
}

_PROMPT: dict[str, Any] = {
    "model": TEXT,
    "input": {
        "description": "a text or a list of items with the fields of their types",
        "anyOf": [FILLED, list_of(_ITEM, minItems=1)],
    },
    "instructions": TEXT,
    "previous_response_id": TEXT,
    "tools": nullable(list_of(_TOOL)),
    "tool_choice": _TOOL_CHOICE,
    "parallel_tool_calls": FLAG,
    "reasoning": nullable(object_of(effort={"enum": [*EFFORTS, None]})),
    "text": nullable(object_of(format=_FORMAT)),
    "truncation": {"enum": ["auto", "disabled", None]},
}

INPUT_TOKENS = object_of("input", **_PROMPT)

RESPONSES = object_of(
    "input",
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
    output=list_of(whole(id=STRING, type={"enum": ["reasoning", "message", "function_call"]})),
    usage=whole(input_tokens=COUNT, output_tokens=COUNT, total_tokens=COUNT),
)
RESPONSE_DELETED = whole(id=STRING, object={"const": "response"}, deleted={"const": True})
INPUT_TOKENS_COUNT = whole(object={"const": "response.input_tokens"}, input_tokens=COUNT)
