"""The parts that the schemas of all dialects are made of."""

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
TEXT = nullable(STRING)
FLAG: Schema = {"type": ["boolean", "null"]}
IDS = list_of({"type": "integer", "minimum": 0, "maximum": MOST_ID}, minItems=1)

# What is in them is read whatever it is: see ``contents`` and ``functions``.
CONTENT: Schema = {
    "description": "a text, or a list of parts",
    "type": ["string", "array", "object", "null"],
    "items": {"type": ["string", "object"]},
}
ARGUMENTS: Schema = {"type": ["string", "object", "null"]}
TOOLS = nullable(list_of({"type": "object"}))
TOOL_CHOICE: Schema = {
    "description": '"none", "auto", "required", or an object with the type of a choice',
    "anyOf": [{"enum": ["none", "auto", "required", "any", None]}, whole(type=STRING)],
}
STOPS: Schema = {"type": ["string", "array", "null"], "maxItems": 16, "items": STRING}
