"""The fields of OpenAI's Responses and Conversations, as JSON Schema; others are ignored."""

from __future__ import annotations

from localrt.server.schemas.parts import (
    CONTENT,
    FLAG,
    FORMAT,
    MOST_ID,
    OBJECT,
    STRING,
    TEXT,
    TOOL_CHOICE,
    Schema,
    fields,
    integer,
    list_of,
    nullable,
    object_of,
)

_PROMPT: dict[str, Schema] = {
    **fields("tools"),
    "model": TEXT,
    "service_tier": TEXT,
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
    "tool_choice": TOOL_CHOICE,
    "parallel_tool_calls": FLAG,
    "reasoning": nullable(object_of(effort=TEXT)),
    "text": nullable(object_of(format=FORMAT)),
    "truncation": {"enum": ["auto", "disabled", None]},
}

_FOLD = list_of({}, minItems=3, maxItems=3)  # start, end, label
_MESSAGE = object_of(
    "content", type=TEXT, role=TEXT, content=CONTENT, folds=nullable(list_of(_FOLD))
)
_MESSAGES = list_of(_MESSAGE, maxItems=20)

REQUESTS: dict[str, Schema] = {
    "CONVERSATION": object_of(
        metadata=nullable(OBJECT),
        items=nullable(_MESSAGES),
        instructions=TEXT,
        options=nullable(OBJECT),
        shown=TEXT,
    ),
    "CONVERSATION_ITEMS": object_of("items", items=_MESSAGES, after=TEXT),
    "DOCUMENT": object_of("filename", "file_data", filename=STRING, file_data=STRING),
    "CONVERSATION_ANSWER": object_of(model=TEXT, after=TEXT, tools=FLAG),
    "CALL_DECISION": object_of("decision", decision={"enum": ["once", "always", "refuse"]}),
    "INPUT_TOKENS": object_of(**_PROMPT),
    "RESPONSES": object_of(
        **_PROMPT,
        **fields("temperature", "top_p", "top_logprobs", "stream"),
        max_output_tokens=integer(1, MOST_ID),
        include=nullable(list_of(STRING)),
        metadata=nullable(OBJECT),
        store=FLAG,
        background=FLAG,
    ),
}
