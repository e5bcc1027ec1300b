"""Building blocks of all dialects' schemas, and their common fields."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

# Larger than any token id.
MOST_ID = (1 << 31) - 1


def object_of(*required: str, **properties: Schema) -> Schema:
    """Return an object's schema with these fields, of which ``required`` ones must be present."""
    return {"type": "object", "required": list(required), "properties": properties}


def whole(**properties: Schema) -> Schema:
    """Return an object's schema with all of these fields required."""
    return object_of(*properties, **properties)


def list_of(items: Schema, **more: object) -> Schema:
    """Return a list's schema; ``more`` are further keywords of it."""
    return {"type": "array", "items": items, **more}


def number(low: float, high: float) -> Schema:
    """Return the schema of a number within bounds, or null."""
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


def integer(low: int, high: int) -> Schema:
    """Return the schema of an integer within bounds, or null."""
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def nullable(schema: Schema) -> Schema:
    """Return ``schema``, with null allowed."""
    return {**schema, "type": [schema["type"], "null"]}


def where(field: str, value: str, then: Schema) -> Schema:
    """Apply ``then`` to an object whose ``field`` has this ``value``."""
    return {"if": {"properties": {field: {"const": value}}, "required": [field]}, "then": then}


STRING: Schema = {"type": "string"}
FILLED: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer"}
OBJECT: Schema = {"type": "object"}
TEXT = nullable(STRING)
FLAG: Schema = {"type": ["boolean", "null"]}
IDS = list_of({"type": "integer", "minimum": 0, "maximum": MOST_ID}, minItems=1)

_AT = "data:image/png;base64,..., or a URL if the server fetches pictures"
# Any content is accepted: see ``messages``.
CONTENT: Schema = {
    "description": "a text, or a list of parts",
    "type": ["string", "array", "object", "null"],
    "items": {
        "type": ["string", "object"],
        "properties": {
            "type": {"examples": ["text", "image_url", "input_image", "image"]},
            "image_url": {"description": f"of a picture: {_AT}, or an object with it as url"},
            "source": {
                "description": "of a picture: base64 as data, with base64 as type, or a URL as url"
            },
        },
    },
}
# OpenAI's Chat has ``json_schema``, its Responses and llama.cpp ``schema``.
_FORM = object_of(name=TEXT, description=TEXT, schema=nullable(OBJECT), strict=FLAG)
FORMAT = nullable(
    object_of(
        "type",
        type={"enum": ["text", "json_object", "json_schema"]},
        schema=nullable(OBJECT),
        json_schema=nullable(_FORM),
    )
)
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
    "format": {
        "description": '"json", or a JSON schema',
        "anyOf": [{"enum": ["json", "", None]}, OBJECT],
    },
    "stream": FLAG,
    "tools": TOOLS,
}


def fields(*names: str) -> dict[str, Schema]:
    """Return the schemas of fields that several dialects have under the same name."""
    return {name: _FIELDS[name] for name in names}
