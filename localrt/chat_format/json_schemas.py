"""Reads JSON schemas: what types a value may have, and schemas whose values end.

Arguments of calls that are plain text become strings or other values by the tool's schema. It
follows local references, ``allOf``, ``anyOf`` and ``oneOf``, lists of types, and enums, and does
not check values. A small model that may write unnamed members or items does not stop: ``closed``
leaves them out. Knows no grammars.
"""

from __future__ import annotations

import ast
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
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
        nodes, joint, stay = (
            [*_inner(root, root, within=True)],
            dict[int, list[Any]](),
            set[int](),
        )
        for node in nodes:
            if _is_alone(node):
                continue
            parts = joint[id(node)] = [*_inner(node, root)]
            values = [each for part in parts for each in _values(part)]
            said, others = Counter(place for place, _ in values), _has_others(parts)
            several = [value for place, value in values if others or said[place] > 1]
            inner = {id(each) for value in several for each in _inner(value, root, within=True)}
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


def _inner(schema: object, root: object, *, within: bool = False) -> Iterator[Any]:
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
    parts, ends = [*_inner(schema, schema, within=True)], set[int]()

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
