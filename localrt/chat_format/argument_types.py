"""Converts plain-text arguments of calls to strings or other values, by the tool's schema.

It follows local references, ``allOf``, ``anyOf`` and ``oneOf``, lists of types, and enums. It does
not check values: those that the schema forbids are kept.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote

ABSENT = object()
"""Stands for the value of an argument that has only a name."""

_DEEPEST = 32  # references, and schemas within schemas


def _refused(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        _refused(digits)
    return value


DECODER = json.JSONDecoder(strict=False, parse_constant=_refused, parse_float=_finite)
"""Accepts new lines within strings, which models write, but neither infinity nor NaN."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """``kinds`` are the accepted JSON schema types, empty if the schema does not say. ``choices``
    are the accepted strings, None for any.
    """

    kinds: frozenset[str] = frozenset()
    choices: tuple[str, ...] | None = None

    @property
    def is_text(self) -> bool:
        """Whether only strings are accepted."""
        return self.kinds == {"string"}

    def read(self, text: str) -> Any:
        """Convert ``text`` to a value; ``ABSENT`` if it is empty or null, but must not be."""
        kinds = self.kinds
        may_be_text = not kinds or "string" in kinds
        if self.is_text or (may_be_text and (not text.strip() or text in (self.choices or ()))):
            return text
        try:
            word = text.strip().lower() if kinds == {"boolean"} else text
            value = literal(word) if text.strip() else None
        except (ValueError, RecursionError):
            return text
        kind = kind_of(value)
        only_whole = "integer" in kinds and "number" not in kinds
        if only_whole and isinstance(value, float) and value.is_integer():
            value, kind = int(value), "integer"
        if not kinds or kind in kinds or (kind == "integer" and "number" in kinds):
            return value
        if may_be_text:
            return text
        return ABSENT if value is None else value


_Kinds: TypeAlias = frozenset[str] | None
_Words: TypeAlias = list[str] | None
Types: TypeAlias = Mapping[str, Accepted]
"""What each parameter of a function accepts."""


def parameters_of(schema: object, root: object = None) -> tuple[dict[str, object], frozenset[str]]:
    """The properties of an object, and the required ones; ``schema`` is part of ``root``."""
    properties: dict[str, object] = {}
    required: tuple[str, ...] = ()
    for part, binding in _parts(schema, schema if root is None else root):
        own = part.get("properties")
        own = own if isinstance(own, Mapping) else {}
        properties |= {name: value for name, value in own.items() if name not in properties}
        required += strings_of(part.get("required")) if binding else ()
    return properties, frozenset(required) & properties.keys()


def accepted(schema: object, root: object) -> Accepted:
    """What ``schema``, which is part of ``root``, accepts."""
    kinds, words = _accepted(schema, root, {})
    return Accepted(kinds or frozenset(), None if words is None else tuple(words))


_LISTS = ("allOf", "anyOf", "oneOf")
BOUNDS = {
    "string": "format maxLength minLength pattern",
    "number": "exclusiveMaximum exclusiveMinimum maximum minimum multipleOf",
    "array": "contains maxItems minItems prefixItems uniqueItems",
    "object": "dependentRequired dependentSchemas maxProperties minProperties patternProperties "
    "propertyNames",
    "inside": "additionalProperties items properties required",
    "choice": "anyOf oneOf",
    "words": "const enum",
}
"""Keywords that restrict values further than their types do, in groups."""


def bounds(schema: object, root: object, groups: Iterable[str]) -> set[str]:
    """The keywords of ``groups`` that ``schema``, a part of ``root``, or its alternatives have."""
    wanted = {"if", "not"}.union(*(BOUNDS[group].split() for group in groups))
    found = ((key, part[key]) for part, _ in _parts(schema, root) for key in wanted & part.keys())
    return {key for key, value in found if (key, value) != ("additionalProperties", True)}


def _parts(schema: object, root: object) -> Iterator[tuple[Mapping[str, object], bool]]:
    """Yield ``schema`` and those that it consists of, each once, and whether a value must fit it:
    it need not fit an alternative.
    """
    left, seen = [(schema, True)], set[int]()
    while left:
        part, binding = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part := resolved(part, root), Mapping):
            yield part, binding
            inner = [(each, key) for key in _LISTS for each in list_of(part.get(key))]
            left += [(each, binding and key == "allOf") for each, key in reversed(inner)]


def resolved(schema: Any, root: object) -> object:
    """Return ``schema``, with a reference replaced by the schema that it refers to."""
    for _ in range(_DEEPEST):
        found = target(schema.get("$ref"), root) if isinstance(schema, Mapping) else None
        if not isinstance(found, Mapping):
            return schema
        others = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**found, **others}
    return {}


def target(reference: object, root: object) -> object:
    """Return the part of ``root`` that ``reference`` (``#/$defs/NAME``) leads to, or None."""
    if not isinstance(reference, str) or not f"{reference}/".startswith("#/"):
        return None
    found = root
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _accepted(
    schema: object, root: object, seen: dict[int, tuple[_Kinds, _Words]], depth: int = 0
) -> tuple[_Kinds, _Words]:
    """The types that a schema allows, and the strings that it lists; None if it does not say."""
    if id(schema) not in seen:  # many references may lead to it
        seen[id(schema)] = None, None  # for references to itself meanwhile
        seen[id(schema)] = _read(resolved(schema, root), root, seen, depth)
    return seen[id(schema)]


def _read(
    schema: object, root: object, seen: dict[int, tuple[_Kinds, _Words]], depth: int
) -> tuple[_Kinds, _Words]:
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return None, None
    every, *choices = (
        [_accepted(each, root, seen, depth + 1) for each in list_of(schema.get(key))]
        for key in _LISTS
    )
    const = [schema["const"]] if "const" in schema else None
    listed = schema.get("enum", const)
    said: list[_Kinds] = []
    kind = schema.get("type")
    if isinstance(kind, str | list):
        said.append(frozenset([kind] if isinstance(kind, str) else strings_of(kind)))
    for values in (schema.get("enum"), const):
        if isinstance(values, list):
            said.append(frozenset(map(kind_of, values)))
    said += [kinds for kinds, _ in every]
    for ways in filter(None, choices):
        known = [kinds for kinds, _ in ways if kinds is not None]
        if len(known) == len(ways):
            said.append(frozenset().union(*known))
    found: _Kinds = None
    for each in said:
        if each is not None:
            found = each if found is None else _both(found, each) or found
    if found is None and ("properties" in schema or "items" in schema):
        found = frozenset(["object" if "properties" in schema else "array"])
    if found and schema.get("nullable") is True:
        found |= {"null"}
    if isinstance(listed, list):
        return found, list(strings_of(listed))
    parts = next(filter(None, choices), None)
    words = next((words for _, words in every if words is not None), None)
    if words is None and parts:
        one = [words for _, words in parts if words is not None]
        return found, [word for words in one for word in words] if len(one) == len(parts) else None
    if words is None and found is not None and "string" not in found:
        words = []
    return found, words


def _both(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    """The kinds that both allow; every integer is also a number."""
    whole = {"integer"} if "integer" in one | other and "number" in one | other else set()
    return (one & other) | (whole if not {"number"} <= one & other else frozenset())


def list_of(value: object) -> list[object]:
    """Return ``value`` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def strings_of(value: object) -> tuple[str, ...]:
    """Return the strings in ``value``, if it is a list."""
    return tuple(each for each in list_of(value) if isinstance(each, str))


def kind_of(value: object) -> str:
    """The JSON schema type of ``value``."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def literal(text: str) -> object:
    """Parse a value written as JSON, or else as Python.

    Raises:
        ValueError: it is neither.
    """
    text = text.strip()
    try:
        return DECODER.decode(text)
    except ValueError:
        pass
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except (SyntaxError, TypeError, MemoryError) as error:
        raise ValueError(str(error)) from None
    return value
