"""Reads JSON schemas as they are meant: values end, and objects have the members that are named.

JSON Schema lets an object have any other members, and a list any items after those of a tuple. A
small model that may write them does not stop. Knows no grammars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from typing import Any

from localrt.chat_format.argument_types import list_of, strings_of, target

# What says that an object has members, or a list items, that are not named.
_OTHERS = (
    *("additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties"),
    *("dependentRequired", "dependentSchemas", "dependencies"),
)
_REST = {"items", "additionalItems", "unevaluatedItems", "contains", "maxItems"}
_UNKNOWN = dict.fromkeys(_OTHERS)  # where a reference leads nowhere
_MOST = 50_000  # schemas to look at; some are parts of many others
_PASSES = 50


def closed(schema: object) -> object:
    """Return ``schema`` without the members and items that it allows only by not naming them.

    What says that it allows others (``additionalProperties``, ``patternProperties``, ...) stays, as
    does an object that names no members. The schemas of one object (``allOf``, ``anyOf``, ``$ref``
    and what is beside them) name its members together, and each of them stays open by itself.
    """
    with suppress(RecursionError):
        root, left = deepcopy(schema), _MOST
        nodes, joint, stay = [*_parts(root, root, within=True)], dict[int, list[Any]](), set[int]()
        for node in nodes:
            if _is_alone(node):
                continue
            parts = joint[id(node)] = [*_parts(node, root)]
            values = [each for part in parts for each in _values(part)]
            said, others = Counter(place for place, _ in values), _has_others(parts)
            several = [value for place, value in values if others or said[place] > 1]
            inner = {id(each) for value in several for each in _parts(value, root, within=True)}
            stay |= {*map(id, parts[1:]), *inner}
            left -= len(parts) + len(inner)
            if left < 0:
                return schema
        for node in nodes:
            if id(node) not in stay:
                _close(node, joint.get(id(node), [node]))
        return root
    return schema


def _is_alone(schema: Any) -> bool:
    """Whether one schema at a time says what an object has: also one of several, or another."""
    keys = [key for key in ("allOf", "anyOf", "oneOf", "$ref", "if") if key in schema]
    if not keys:
        return not {"properties", "patternProperties"} <= schema.keys()
    says = _names(schema) or _has_others([schema])
    return len(keys) == 1 and not says and len(list_of(schema.get("allOf"))) < 2


def _close(schema: Any, parts: list[Any]) -> None:
    names = [name for part in parts for name in _names(part)]
    may_be_larger = _least(schema, "minProperties") > len({*names})
    if names and not may_be_larger and not _has_others(parts):
        schema["properties"] = {**_map(schema.get("properties"))}
        for name in names:
            schema["properties"].setdefault(name, {})
        schema["additionalProperties"] = False
        schema.pop("unevaluatedProperties", None)
    for key, rest in (("prefixItems", "items"), ("items", "additionalItems")):
        length = len(list_of(schema.get(key)))
        ends = len(parts) == 1 and not (_REST - {key}) & schema.keys()
        if ends and length >= max(1, _least(schema, "minItems")):
            schema[rest] = False


def _has_others(parts: list[Any]) -> bool:
    return any(part.get(key, False) is not False for part in parts for key in _OTHERS)


def _parts(schema: object, root: object, *, within: bool = False) -> Iterator[Any]:
    """Yield ``schema`` and all schemas of the same value, each once; or those ``within`` it too."""
    left, seen = [schema], set[int]()
    while left:
        part = left.pop()
        if isinstance(part, Mapping) and id(part) not in seen:
            seen.add(id(part))
            yield part
            inner = [each for key in ("allOf", "anyOf", "oneOf") for each in list_of(part.get(key))]
            inner += map(part.get, ("if", "then", "else"))
            if "$ref" in part:
                referred = target(part["$ref"], root)
                inner.append(referred if isinstance(referred, Mapping) else _UNKNOWN)
            if within:
                inner += (each for _, each in _values(part))
                inner += (
                    each
                    for key in ("$defs", "definitions")
                    for each in _map(part.get(key)).values()
                )
            left += reversed(inner)


def _values(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield the schemas of values within a value, and their places there."""
    for key in ("properties", "patternProperties"):
        yield from ((f"{key}/{name}", each) for name, each in _map(schema.get(key)).items())
    for key in ("items", "prefixItems", "additionalProperties", "contains"):
        value = schema.get(key)
        yield from (
            (f"{key}/{n}", each)
            for n, each in enumerate(value if isinstance(value, list) else [value])
        )


def _names(schema: Any) -> list[str]:
    return [*_map(schema.get("properties")), *strings_of(schema.get("required"))]


def _map(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _least(schema: Any, key: str) -> float:
    least = schema.get(key)
    return least if isinstance(least, int | float) else 0


# -- values that end -------------------------------------------------------------------------------


def can_end(schema: object) -> bool:
    """Whether a value of ``schema`` can end. It cannot if it has to contain another one."""
    parts, ends = [*_parts(schema, schema, within=True)], set[int]()

    def ended(part: object) -> bool:
        return not isinstance(part, Mapping) or id(part) in ends

    for _ in range(_PASSES):
        before = len(ends)
        for part in reversed(parts):
            ways = [ways for key in ("anyOf", "oneOf") if (ways := list_of(part.get(key)))]
            every = all(map(ended, _needed(part, schema)))
            if every and all(any(map(ended, each)) for each in ways):
                ends.add(id(part))
        if len(ends) == before:
            return ended(schema)
    return True


def _needed(schema: Any, root: object) -> list[Any]:
    """The schemas that each value fits, or contains a value of."""
    if "const" in schema or "enum" in schema:
        return []
    found = [*list_of(schema.get("allOf")), target(schema.get("$ref"), root)]
    if schema.get("type") == "object":
        found += map(_map(schema.get("properties")).get, strings_of(schema.get("required")))
    if schema.get("type") == "array":
        items = [*list_of(schema.get("prefixItems")), schema.get("items")]
        found += [each for place, each in enumerate(items) if place < _least(schema, "minItems")]
    return found
