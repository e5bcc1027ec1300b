"""The parts that the schemas of all dialects are made of, and the fields that they share."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

# No more than any tokenizer needs a number for.
MOST_ID = (1 << 31) - 1


def object_of(*required: str, **properties: Schema) -> Schema:
    """An object with these fields, of which the ``required`` ones must be there."""
    return {"type": "object", "required": list(required), "properties": properties}


def whole(**properties: Schema) -> Schema:
    """An object with all of these fields."""
    return object_of(*properties, **properties)


def list_of(items: Schema, **more: Any) -> Schema:
    """A list of ``items``; ``more`` are further keywords of it."""
    return {"type": "array", "items": items, **more}


def number(low: float, high: float) -> Schema:
    """A number within bounds, or null."""
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


def integer(low: int, high: int) -> Schema:
    """A whole number within bounds, or null."""
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def nullable(schema: Schema) -> Schema:
    """``schema``, or null."""
    return {**schema, "type": [schema["type"], "null"]}


def where(field: str, value: str, then: Schema) -> Schema:
    """An object follows ``then`` where its ``field`` has this ``value``."""
    return {"if": {"properties": {field: {"const": value}}, "required": [field]}, "then": then}


STRING: Schema = {"type": "string"}
FILLED: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer"}
OBJECT: Schema = {"type": "object"}
TEXT = nullable(STRING)
FLAG: Schema = {"type": ["boolean", "null"]}
IDS = list_of({"type": "integer", "minimum": 0, "maximum": MOST_ID}, minItems=1)

# What is in them is read whatever it is: see ``messages``.
CONTENT: Schema = {
    "description": "a text, or a list of parts",
    "type": ["string", "array", "object", "null"],
    "items": {"type": ["string", "object"]},
}
ARGUMENTS: Schema = {"type": ["string", "object", "null"]}
TOOLS = nullable(list_of(OBJECT))
TOOL_CHOICE: Schema = {
    "description": '"none", "auto", "required", or an object with the type of a choice',
    "anyOf": [{"enum": ["none", "auto", "required", "any", None]}, whole(type=STRING)],
}
STOPS: Schema = {"type": ["string", "array", "null"], "maxItems": 16, "items": STRING}

_FIELDS: dict[str, Schema] = {
    "temperature": number(0, 100),
    "top_k": integer(-1, MOST_ID),
    "top_p": number(0, 1),
    "min_p": number(0, 1),
    "typical_p": number(0, 1),
    "seed": integer(-(1 << 63), (1 << 63) - 1),
    "stop": STOPS,
    "repeat_penalty": number(0.01, 100),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "top_logprobs": integer(0, 20),
    "dimensions": integer(1, MOST_ID),
    "stream": FLAG,
    "tools": TOOLS,
}


def fields(*names: str) -> dict[str, Schema]:
    """The schemas of fields that several dialects have under the same name."""
    return {name: _FIELDS[name] for name in names}
