"""A JSON schema without what the grammar engine cannot do: it then allows more, and never less.

It asks ``fits`` what can be done, keyword by keyword, so it holds no list that would grow old. A
schema that is malformed stays so.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["loosened", "outline"]

_MOST = 200  # keywords of a schema that are tried one by one
_SECONDS = 1.0  # for trying them
_NESTED = ("properties", "$defs", "definitions", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_KEPT = (
    *("type", "required", "enum", "const", "$ref", "$id", "$schema", "$comment"),
    *("title", "description", "default", "examples", "deprecated"),
)
_OUTLINE = ("type", "required", "enum", "const", "$ref", "additionalProperties")


def loosened(schema: Any, fits: Callable[[Any], bool]) -> tuple[Any, tuple[str, ...]]:
    """``schema`` as far as it ``fits``, and the keywords that were left out."""
    for one_of in (True, False):
        work = _Loosening(fits, one_of=one_of)
        found = work.schema(schema)
        if fits(found):
            break
    return found, tuple(sorted(work.left_out))


def outline(schema: Any) -> Any:
    """What ``schema`` says of types, names and enums."""
    if not isinstance(schema, Mapping):
        return schema
    found = {key: schema[key] for key in _OUTLINE if key in schema}
    for key in ("properties", "$defs", "definitions"):
        if isinstance(schema.get(key), Mapping):
            found[key] = {name: outline(each) for name, each in schema[key].items()}
    if isinstance(schema.get("items"), Mapping):
        found["items"] = outline(schema["items"])
    ways = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(ways, list):
        found["anyOf"] = [outline(each) for each in ways]
    return found


class _Loosening:
    def __init__(self, fits: Callable[[Any], bool], *, one_of: bool) -> None:
        self.left_out: set[str] = set()
        self._fits = fits
        self._one_of = one_of
        self._until = time.monotonic() + _SECONDS
        self._tried: dict[str, bool] = {}

    def schema(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        found: dict[str, Any] = {}
        for key, value in schema.items():
            if key in _NESTED and isinstance(value, Mapping):
                inner = {name: self.schema(each) for name, each in value.items()}
                if key == "patternProperties":
                    inner = {name: each for name, each in inner.items() if self._may(key, name, {})}
                found[key] = inner
            elif key in _LISTS and isinstance(value, list):
                found[key] = [self.schema(each) for each in value]
            elif key in ("items", "additionalProperties"):
                found[key] = self.schema(value)
            elif key in _KEPT or self._may(key, value, schema):
                found[key] = value
        reference = found.get("$ref")
        if isinstance(reference, str) and not reference.startswith("#"):
            self.left_out.add("$ref")
            del found["$ref"]
        if "oneOf" in found and not self._one_of:
            self.left_out.add("oneOf")
            found.setdefault("anyOf", found["oneOf"])
            del found["oneOf"]
        return found

    def _may(self, key: str, value: Any, schema: Mapping[str, Any]) -> bool:
        """Whether a keyword of ``schema`` works on its own."""
        alone = {key: {value: {}} if key == "patternProperties" else value}
        if "type" in schema:
            alone["type"] = schema["type"]
        text = json.dumps(alone)
        if text not in self._tried:
            may_try = len(self._tried) < _MOST and time.monotonic() < self._until
            self._tried[text] = may_try and self._fits(alone)
        if not self._tried[text]:
            self.left_out.add(key)
        return self._tried[text]
