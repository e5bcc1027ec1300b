"""Request schema: one table of fields a dialect, from which its checks and its options come.

A ``Field`` is a row: what values it takes (JSON Schema), and which option of the library it sets.
A ``RequestSchema`` checks bodies against such a table; its errors are one sentence that names the
field. Fields that are in no table are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import fastjsonschema

from localrt.server.errors import invalid

Schema: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Field:
    """A field with values of this ``schema``. ``option`` is the library's name of the option that
    it sets, to its value or to what ``convert`` returns; None leaves it unset.
    """

    schema: Schema
    option: str | None = None
    convert: Callable[[Any], Any] | None = None
    required: bool = False


Table: TypeAlias = Mapping[str, Field]


def required(schema: Schema, option: str | None = None) -> Field:
    """Return a field that every request must have."""
    return Field(schema, option, required=True)


def object_schema(table: Table) -> Schema:
    """Return the schema of an object with these fields."""
    return {
        "type": "object",
        "required": [name for name, field in table.items() if field.required],
        "properties": {name: field.schema for name, field in table.items()},
    }


def options_of(table: Table, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the library's options that ``fields`` set; of two for one option, the last counts."""
    options = {}
    for name, field in table.items():
        value = fields.get(name) if field.option else None
        if value is not None and field.convert is not None:
            value = field.convert(value)
        if value is not None:
            options[field.option] = value
    return options  # type: ignore[return-value]  # rows without an option have no value


class RequestSchema:
    """The checks of a request's body, an object with the fields of ``table``; ``more`` are further
    keywords of its JSON Schema.
    """

    def __init__(self, table: Table, **more: object) -> None:
        self.table = table
        self._schema = {**object_schema(table), **more}
        self._integers = frozenset(
            name for name, field in table.items() if "integer" in field.schema.get("type", ())
        )

    @cached_property
    def _validate(self) -> Callable[[object], object]:
        found: Callable[[object], object] = fastjsonschema.compile(
            self._schema, use_default=False, use_formats=False
        )
        return found

    def prepare(self) -> None:
        """Compile the checks before requests arrive: concurrent ones would each compile their own,
        using megabytes.
        """
        getattr(self, "_validate")  # noqa: B009  it is kept

    def check(self, value: object) -> dict[str, Any]:
        """Return ``value`` if it follows the schema, with whole numbers as integers.

        Raises:
            ApiError: 400, with the first wrong field.
        """
        try:
            self._validate(value)
        except fastjsonschema.JsonSchemaValueException as error:
            message, param = _described(error)
            raise invalid(message, param) from error
        assert isinstance(value, dict), "every schema is an object's"
        return {
            name: int(found) if name in self._integers and isinstance(found, float) else found
            for name, found in value.items()
        }

    def options(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return the library's options that checked ``fields`` set."""
        return options_of(self.table, fields)


# -- errors ----------------------------------------------------------------------------------------

_WHERE = re.compile(r"^data\.?")


def _described(error: Any) -> tuple[str, str | None]:
    """Return what is wrong in words, and the field concerned, if there is one."""
    where = param = _WHERE.sub("", error.name)
    if error.rule == "anyOf" and "description" in error.definition:
        rest = f"must be {error.definition['description']}"
    elif error.rule in _WORDS:
        rest = _WORDS[error.rule](error.rule_definition)
    elif error.rule == "required":
        missing = [name for name in error.rule_definition if name not in error.value]
        rest, param = f"must have {' and '.join(missing)}", where or missing[0]
    else:
        rest = error.message.removeprefix(error.name).strip()
    return f"{where or 'the body'} {rest}", param or None


def _kinds(types: str | list[str]) -> str:
    kinds = [types] if isinstance(types, str) else [kind for kind in types if kind != "null"]
    return "must be " + " or ".join(_KINDS[kind] for kind in kinds)


def _values(choices: list[object]) -> str:
    return "must be " + " or ".join(json.dumps(value) for value in choices if value is not None)


_KINDS = {
    "array": "a list",
    "boolean": "true or false",
    "integer": "a whole number",
    "null": "null",
    "number": "a number",
    "object": "an object",
    "string": "a text",
}
# What a value must be, by the schema rule that it violates.
_WORDS: Mapping[str, Callable[[Any], str]] = {
    "type": _kinds,
    "enum": _values,
    "const": lambda value: _values([value]),
    "minimum": lambda least: f"must be at least {least}",
    "maximum": lambda most: f"must be at most {most}",
    "minItems": lambda least: "must not be empty" if least == 1 else f"must have {least} items",
    "maxItems": lambda most: f"must have at most {most} items",
    "minLength": lambda least: "must not be empty",
    "maxLength": lambda most: f"must have at most {most} characters",
    "maxProperties": lambda most: f"must have at most {most} fields",
}

# -- schemas of values -----------------------------------------------------------------------------

MOST_ID = (1 << 31) - 1  # larger than any token id
SEEDS = 1 << 64


def object_of(*required: str, **properties: Schema) -> Schema:
    """Return an object's schema with these fields, of which ``required`` ones must be present."""
    return {"type": "object", "required": list(required), "properties": properties}


def list_of(items: Schema, **more: object) -> Schema:
    """Return a list's schema; ``more`` are further keywords of it."""
    return {"type": "array", "items": items, **more}


def number(low: float, high: float) -> Schema:
    """Return the schema of a number within bounds, or null."""
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


def integer(low: int, high: int = MOST_ID) -> Schema:
    """Return the schema of an integer within bounds, or null."""
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def nullable(schema: Schema) -> Schema:
    """Return ``schema``, with null allowed."""
    return {**schema, "type": [schema["type"], "null"]}


STRING: Schema = {"type": "string"}
FILLED: Schema = {"type": "string", "minLength": 1}
OBJECT: Schema = {"type": "object"}
TEXT = nullable(STRING)
FLAG: Schema = {"type": ["boolean", "null"]}
IDS = list_of({"type": "integer", "minimum": 0, "maximum": MOST_ID}, minItems=1)
CONTENT: Schema = {"type": ["string", "array", "object", "null"]}
CONTENT["items"] = {"type": ["string", "object"]}  # any part is accepted: see ``messages``
# OpenAI's Chat has ``json_schema``, its Responses and llama.cpp ``schema``.
FORMAT = nullable(
    object_of(
        "type",
        type={"enum": ["text", "json_object", "json_schema"]},
        schema=nullable(OBJECT),
        json_schema=nullable(
            object_of(name=TEXT, description=TEXT, schema=nullable(OBJECT), strict=FLAG)
        ),
    )
)
ARGUMENTS: Schema = {"type": ["string", "object", "null"]}
TOOLS = nullable(list_of(OBJECT))
TOOL_CHOICE: Schema = {
    "description": '"none", "auto", "required", or an object with the type of a choice',
    "anyOf": [
        {"enum": ["none", "auto", "required", "any", None]},
        object_of("type", type=STRING),
    ],
}
STOPS: Schema = {"type": ["string", "array", "null"], "maxItems": 16, "items": STRING}


# -- fields that several dialects have -------------------------------------------------------------


def stop_strings(stop: str | Sequence[str]) -> list[str] | None:
    """Return the stop strings without empty ones, or None."""
    return [text for text in ([stop] if isinstance(stop, str) else stop) if text] or None


def limit(given: float) -> int | None:
    """Return a limit of tokens; below 0 there is none."""
    return None if given < 0 else int(given)


_SHARED: Table = {
    "temperature": Field(number(0, 100), "temperature"),
    "top_k": Field(integer(-1), "top_k", lambda given: max(0, int(given))),  # -1: off
    "top_p": Field(number(0, 1), "top_p"),
    "min_p": Field(number(0, 1), "min_p"),
    "typical_p": Field(number(0, 1), "typical_p"),
    # -1: a new one each time
    "seed": Field(
        integer(-(1 << 63), (1 << 63) - 1),
        "seed",
        lambda given: None if given == -1 else int(given) % SEEDS,
    ),
    "stop": Field(STOPS, "stop", stop_strings),
    "repeat_penalty": Field(number(0.01, 100), "repetition_penalty"),
    "presence_penalty": Field(number(-2, 2), "presence_penalty"),
    "frequency_penalty": Field(number(-2, 2), "frequency_penalty"),
    "top_logprobs": Field(integer(0, 20)),
    "dimensions": Field(integer(1)),
    "format": Field(
        {
            "description": '"json", or a JSON schema',
            "anyOf": [{"enum": ["json", "", None]}, OBJECT],
        }
    ),
    "stream": Field(FLAG),
    "tools": Field(TOOLS),
}


def shared(*names: str) -> Table:
    """Return the rows of fields that several dialects have under the same name."""
    return {name: _SHARED[name] for name in names}
