"""Tools of any dialect as functions, and how a client knows each of them when it is called.

Models call functions. A tool that takes a text is one with one argument; a tool that only its
vendor's server can carry out is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from localrt.server.contents import Fields, Note, flat_name
from localrt.server.errors import invalid

_SCHEMAS = ("parameters", "input_schema", "inputSchema")
_OF_TOOLS = ("name", "description", "strict", "format", *_SCHEMAS)
_COMBINED = ("properties", "$ref", "allOf", "anyOf", "oneOf")
_TEXT = "input"  # the argument of a tool that takes a text
_MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
# Tools that clients carry out and whose parameters only their vendors' models know, by the
# beginnings of their types.
_OF_CLIENTS: Mapping[str, tuple[str, Mapping[str, Any], Sequence[str]]] = {
    "bash": ("Run a command in bash.", {"command": _STRING, "restart": {"type": "boolean"}}, ()),
    "local_shell": (
        "Run a program with its arguments.",
        {
            "command": {"type": "array", "items": _STRING},
            "working_directory": _STRING,
            "timeout_ms": _INTEGER,
        },
        ("command",),
    ),
    "text_editor": (
        "View, create and edit text files.",
        {
            "command": {"enum": ["view", "create", "str_replace", "insert"]},
            **dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text"), _STRING),
            "insert_line": _INTEGER,
            "view_range": {"type": "array", "items": _INTEGER},
        },
        ("command", "path"),
    ),
}


class Known(NamedTuple):
    """A tool as its client knows it: the ``type`` of the tool, its name, and its namespace."""

    type: str
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Offered:
    """Tools of a request: ``functions`` in OpenAI's form, which templates take. ``known`` has by
    their names those that are something else for the client, ``left_out`` the names of the rest.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    known: dict[str, Known] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)


def offered(tools: Sequence[Fields] | None, note: Note) -> Offered:
    """What ``tools`` offer a model.

    Raises:
        ApiError: 400, a function has no name.
    """
    found = Offered()
    for number, tool in enumerate(tools or ()):
        for kind, namespace, given in _leaves(tool):
            name = given.get("name")
            if not isinstance(name, str) or not name:
                if kind == "function":
                    raise invalid(f"tools[{number}] must have a name", f"tools[{number}]")
                name = kind
            function = _function(kind, given)
            if function is None:
                found.left_out.add(name)
                why = "is left out: only its vendor's server can run it"
                note(f"tool {kind:.60}", f"a tool of the type {kind:.60} {why}")
                continue
            flat = flat_name(name, namespace)
            found.functions.append({"type": "function", "function": {**function, "name": flat}})
            if kind not in ("function", "custom") or flat != name or _takes_text(kind, given):
                found.known[flat] = Known(kind, name, namespace)
    return found


def chosen(given: str | Fields | None, tools: Offered) -> tuple[str, list[dict[str, Any]]]:
    """Whether a tool is called, in the library's words, and the functions that may be.

    Raises:
        ApiError: 400, there is no such tool, or none at all.
    """
    functions = tools.functions
    choice = {"type": given} if isinstance(given, str) else given or {"type": "auto"}
    kind = str(choice["type"])
    if kind == "allowed_tools":
        choice = _inner(choice, kind)
        allowed = {_chosen_name(one) for one in _mappings(choice.get("tools"))}
        functions = [one for one in functions if one["function"]["name"] in allowed]
        kind = str(choice.get("mode") or "auto")
    if kind in _MODES:
        mode = _MODES[kind]
        if mode == "required" and not functions:
            if not tools.left_out:
                raise invalid(
                    "a tool must be called (tool_choice), and there are none", "tool_choice"
                )
            mode = "auto"
        return mode, functions
    name = _chosen_name(choice)
    if any(one["function"]["name"] == name for one in functions):
        return name, functions
    if kind in ("function", "custom", "tool") and name not in tools.left_out:
        raise invalid(f"tool_choice names {name[:200]!r}, which is not in tools", "tool_choice")
    return "auto", functions


def text_argument(arguments: str) -> str:
    """The text that a tool which takes one was called with."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    text = value.get(_TEXT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _leaves(tool: Fields, namespace: str | None = None) -> Iterator[tuple[str, str | None, Fields]]:
    """The tools in one, each with its type, its namespace and its fields."""
    kind = str(tool.get("type") or "function")
    if kind == "namespace":
        for one in _mappings(tool.get("tools")):
            yield from _leaves(one, str(tool.get("name") or ""))
        return
    inner = tool.get(kind)
    fields = {name: tool[name] for name in _OF_TOOLS if name in tool}
    yield kind, namespace, inner if isinstance(inner, Mapping) else fields


def _function(kind: str, given: Fields) -> dict[str, Any] | None:
    """The function that a model calls for a tool; None if only a server could carry it out."""
    schema = next((given[one] for one in _SCHEMAS if isinstance(given.get(one), Mapping)), None)
    if _takes_text(kind, given):
        return _text_function(given)
    if kind in ("function", "custom") or (schema or {}).get("type") == "object":
        shown = {one: given[one] for one in given if one not in _SCHEMAS and given[one]}
        schema = dict(schema or {})
        if not any(one in schema for one in _COMBINED):
            schema = {**schema, "type": "object", "properties": {}}
        return {**shown, "parameters": schema}
    known = next((one for stem, one in _OF_CLIENTS.items() if kind.startswith(stem)), None)
    if known is None:
        return None
    description, properties, required = known
    parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {"description": description, "parameters": parameters}


def _takes_text(kind: str, given: Fields) -> bool:
    return kind == "custom" and not any(one in given for one in _SCHEMAS)


def _text_function(given: Fields) -> dict[str, Any]:
    """A function with one argument, a text; the model is told the grammar that it must follow."""
    wanted = _inner(_inner(given, "format"), "grammar")  # Chat has it one level deeper
    argument: dict[str, Any] = dict(_STRING)
    description = str(given.get("description") or "")
    if isinstance(wanted.get("definition"), str):
        syntax, definition = wanted.get("syntax") or "given", wanted["definition"]
        if syntax == "regex":
            argument["pattern"] = f"^(?:{definition})$"
        description += f"\n\nThe {_TEXT} follows this {syntax} grammar:\n{definition}"
    return {
        "description": description.strip(),
        "parameters": {
            "type": "object",
            "properties": {_TEXT: argument},
            "required": [_TEXT],
            "additionalProperties": False,
        },
    }


def _chosen_name(choice: Fields) -> str:
    """The name of the function that a choice is of."""
    kind = str(choice.get("type") or "function")
    found = _inner(choice, kind)
    return flat_name(str(found.get("name") or kind), found.get("namespace"))


def _inner(fields: Fields, name: str) -> Fields:
    """The fields in the one of this name, where there is such a level."""
    inner = fields.get(name)
    return inner if isinstance(inner, Mapping) else fields


def _mappings(value: Any) -> list[Fields]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
