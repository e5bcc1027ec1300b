"""Converts messages and tools of any dialect to the form of chat templates.

No content is refused: placeholders replace what cannot be shown, and a part of an unknown kind is
shown as it is, without fields that only its vendor can read. Pictures stay unchanged: ``media``
handles them depending on the model. Models call functions: a tool that takes a text becomes a
function with one argument, and a tool that only its vendor's server can run is left out.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from localrt.chat_format.messages import kind_in_words
from localrt.chat_format.thinking import THOUGHT_FIELDS
from localrt.common.files import parse_json
from localrt.documents.kinds import kind_of
from localrt.server.errors import invalid

Fields = Mapping[str, Any]
PromptMessage = dict[str, Any]
"""A message in the form of chat templates, except that its content may be ``MultimodalContent``."""
Note = Callable[[str, str], None]
"""Called with a kind and a line to log, once per kind."""


def unnoted(kind: str, text: str) -> None:
    """A ``Note`` that discards its text."""


_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
_OPAQUE = 256  # a text of this many characters without a space is not readable
_KIND = 60  # the most characters of a part's type
_UNSHOWN = ("id", "type", "status", "signature", "cache_control", "annotations", "citations")
_ARGUMENTS = ("arguments", "input", "args", "action", "operation")
_THOUGHTS = ("thinking", "reasoning", "reasoning_content")  # part types with thoughts
_IN_THOUGHTS = (*_THOUGHTS, "content", "summary", "text")
_RESULTS = ("content", "output", "result")
_FUNCTIONS = "functions"  # the namespace of tools without one
_MEDIA = ("image", "screenshot", "audio", "video")
DOCUMENT = "document"  # a kind of ``Media``; its part has ``name``, ``media_type`` and ``data``


@dataclass(frozen=True, slots=True)
class Media:
    """A picture, sound, video or document as its client sent it: the ``part`` of a content.

    ``words`` replace it for a text-only model.
    """

    kind: str
    part: Fields
    words: str


Pieces: TypeAlias = Sequence["str | Media"]


@dataclass(frozen=True, slots=True)
class MultimodalContent:
    """A content of texts and media; ``between`` separates adjacent texts."""

    pieces: Pieces
    between: str

    def in_words(self) -> str:
        """Return the content for a text-only model."""
        return self.between.join(
            piece if isinstance(piece, str) else piece.words for piece in self.pieces
        )


Content: TypeAlias = str | MultimodalContent


def joined(contents: Sequence[Content], between: str) -> Content:
    """Join several contents into one."""
    if all(isinstance(content, str) for content in contents):
        return between.join(map(str, contents))
    pieces: list[str | Media] = []
    for content in contents:
        pieces += [content] if isinstance(content, str) else content.pieces
    return MultimodalContent(pieces, between)


def thought(text: str) -> dict[str, str]:
    """Return the fields of an assistant's thought, under the names that templates use."""
    return dict.fromkeys(THOUGHT_FIELDS, text)


def flat_name(name: str, namespace: object) -> str:
    """Return the name that models see for a tool in a namespace."""
    if not isinstance(namespace, str) or namespace in ("", _FUNCTIONS):
        return name
    return f"{namespace.rstrip('_')}__{name.lstrip('_')}"


def made_call(call_id: object, name: str, arguments: object) -> PromptMessage:
    """Return a call in an assistant's form; ``arguments`` is their text, or a value."""
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": arguments}
    return {"id": str(call_id or ""), "type": "function", "function": function}


def messages_of(
    role: str, content: object, note: Note, *, between: str = "\n\n"
) -> list[PromptMessage]:
    """Return the messages for one of ``role`` with this ``content``: tool results get their own.

    ``between`` separates the texts of a message. Empty content gives no message.
    """
    if isinstance(content, str):
        return [{"role": role, "content": without_billing(content, role)}]
    return list(_messages(role, content, note, between))


def without_billing(text: str, role: str = "system") -> str:
    """Remove Claude Code's first line from a system prompt: it is meant for its vendor's servers
    and differs in each request, which would make prompt caches useless.
    """
    return _BILLING.sub("", text) if role in ("system", "developer") else text


def content_of(content: object, note: Note, between: str = "\n\n") -> Content:
    """Convert a content, which is a text, a part, or a list of both, to our form."""
    if content is None or isinstance(content, str):
        return content or ""
    pieces = [piece for part in _parts(content) if (piece := _shown(part, note))]
    if all(isinstance(piece, str) for piece in pieces):
        return between.join(map(str, pieces))
    return MultimodalContent(pieces, between)


def text_of(content: object, note: Note, between: str = "\n\n") -> str:
    """Return the text of a content, with placeholders for media."""
    found = content_of(content, note, between)
    return found if isinstance(found, str) else found.in_words()


def _parts(content: object) -> list[Any]:
    return content if isinstance(content, list) else [] if content is None else [content]


def _messages(role: str, content: object, note: Note, between: str) -> Iterator[PromptMessage]:
    pieces: list[str | Media] = []
    fields: PromptMessage = {}

    def gathered() -> Iterator[PromptMessage]:
        if pieces or fields:
            found = MultimodalContent(tuple(pieces), between)
            media = role == "user" and any(isinstance(piece, Media) for piece in pieces)
            words = found if media else without_billing(found.in_words(), role)
            yield {"role": role, "content": words, **fields}
        pieces.clear()
        fields.clear()

    for part in _parts(content):
        kind = _kind(part)
        if isinstance(part, Mapping) and (call := _call(kind, part)) is not None:
            fields.setdefault("tool_calls", []).append(call)
        elif isinstance(part, Mapping) and (answered := _answered(kind, part)) is not None:
            yield from gathered()
            result = next((part[name] for name in _RESULTS if part.get(name)), "")
            yield {"role": "tool", "tool_call_id": answered, "content": content_of(result, note)}
        elif kind in _THOUGHTS:
            words = next((part[name] for name in _IN_THOUGHTS if part.get(name)), "")
            if not words:
                note("thoughts", "thoughts that only their maker can read are left out")
            before = fields.get(THOUGHT_FIELDS[0])
            if words := "\n\n".join(filter(None, (before, text_of(words, note)))):
                fields |= thought(words)
        elif (piece := _shown(part, note)) or kind == "text":
            pieces.append(piece)
    yield from gathered()


def _kind(part: object) -> str:
    return str(part.get("type") or "")[:_KIND] if isinstance(part, Mapping) else ""


def _call(kind: str, part: Fields) -> PromptMessage | None:
    """Return the call in a part; None if it has no id: it was then run elsewhere."""
    own = kind.endswith("tool_use") or kind == "tool_call"
    call_id = part.get("call_id") or (part.get("id") if own else None)
    if not call_id or not kind.endswith(("_call", "tool_use")):
        return None
    given = next((part[name] for name in _ARGUMENTS if part.get(name) is not None), None)
    if isinstance(given, str) and "arguments" not in part:
        given = {"input": given}
    elif isinstance(given, Mapping) and "action" in part:
        given = {name: value for name, value in given.items() if name != "type"}
    name = str(part.get("name") or kind.removesuffix("_call"))
    return made_call(call_id, flat_name(name, part.get("namespace")), given)


def _answered(kind: str, part: Fields) -> str | None:
    """Return the id of the call whose result the part is, or None."""
    call_id = part.get("tool_use_id") or part.get("call_id")
    return str(call_id) if call_id and kind.endswith(("tool_result", "_output")) else None


# -- words -----------------------------------------------------------------------------------------


def _shown(part: object, note: Note) -> str | Media:
    """Return a part as text or media; "" if there is nothing to show."""
    if isinstance(part, str):
        return part
    try:
        return _words(part, note) if isinstance(part, Mapping) else json.dumps(part)
    except RecursionError:
        return "[left out: nested too deeply]"


def _words(part: Fields, note: Note) -> str | Media:
    kind = _kind(part)
    for text in (part.get("text"), part.get("refusal")):
        if isinstance(text, str):
            return text
    if kind in ("text", "refusal", "redacted_thinking"):
        return ""  # null, or encrypted thoughts
    inner = part.get(kind)
    found = inner if isinstance(inner, Mapping) else part
    name = next((found[key] for key in ("title", "filename", "name") if found.get(key)), None)
    known = None if kind.endswith("_call") else kind_in_words(kind)
    shown = f"[{known} left out{f': {name}' if isinstance(name, str) else ''}]"
    media_type, data = encoded(found)
    if known and data and kind_of(str(name), media_type):
        name = name if isinstance(name, str) else "the document"
        return Media(DOCUMENT, {"name": name, "media_type": media_type, "data": data}, shown)
    words = _document(found, note)
    if words:
        return f"{name}\n{words}" if isinstance(name, str) else words
    if known in _MEDIA:
        return Media(known, part, shown)
    if kind:
        note(f"content {kind}", f"messages hold {kind}: the model is shown words in its place")
    if known is not None:
        return shown
    fields = _readable(part)
    if not kind:
        return json.dumps(fields, ensure_ascii=False) if fields else ""
    shown = f": {json.dumps(fields, ensure_ascii=False)}" if fields else " left out"
    return f"[{kind}{shown}]"


def _document(part: Fields, note: Note) -> str:
    """Return the text of a document, search result or similar, if it has any."""
    source = part.get("source")
    if isinstance(source, Mapping):
        if source.get("type") == "text":
            return str(source.get("data") or "")
        if source.get("type") == "content":
            return text_of(source.get("content"), note)
    if words := _decoded(*encoded(part)):
        return words
    if isinstance(part.get("transcript"), str):
        return str(part["transcript"])
    return text_of(part.get("content"), note)


def encoded(part: Fields) -> tuple[str, str]:
    """Return the media type of a file and its bytes in base64; "" if it is not sent so."""
    source = part.get("source")
    if isinstance(source, Mapping) and source.get("type") not in ("text", "content"):
        return str(source.get("media_type")), str(source.get("data") or "")
    head, comma, data = str(part.get("file_data") or "").partition(",")
    return (head.removeprefix("data:"), data) if comma else ("", head)


def _decoded(media_type: str, data: object) -> str:
    """Return the text of a text file in base64; "" for other files."""
    if not media_type.startswith(("text/", "application/json", "application/xml")):
        return ""
    try:
        return base64.b64decode(str(data)).decode()
    except ValueError:
        return ""


def _readable(value: object) -> object:
    """Return ``value`` without ids and without encrypted or encoded bytes."""
    if isinstance(value, str):
        head = value[:_OPAQUE]
        return None if len(head) == _OPAQUE and not any(map(str.isspace, head)) else value
    if isinstance(value, Mapping):
        shown = {
            name: _readable(one)
            for name, one in value.items()
            if name not in _UNSHOWN and not name.endswith("_id") and "encrypted" not in name
        }
        return {name: one for name, one in shown.items() if one not in (None, "", [], {})}
    if isinstance(value, Sequence):
        return [one for one in map(_readable, value) if one is not None]
    return value


_SCHEMAS = ("parameters", "input_schema", "inputSchema")
_OF_TOOLS = ("name", "description", "strict", "format", *_SCHEMAS)
_COMBINED = ("properties", "$ref", "allOf", "anyOf", "oneOf")
_TEXT = "input"  # the argument of a tool that takes a text
_MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}
_STRING = {"type": "string"}


class Known(NamedTuple):
    """A tool as its client knows it: its type, name and namespace."""

    type: str
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of a request: ``functions`` in OpenAI's form, for templates. ``known`` has those
    that the client knows in another form, by name; ``left_out`` are the names of omitted tools.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    known: dict[str, Known] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)


def offered(tools: Sequence[Fields] | None, note: Note) -> ToolSet:
    """Return the tools to offer to a model.

    Raises:
        ApiError: 400, a function has no name.
    """
    found = ToolSet()
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


def chosen(tool_choice: str | Fields | None, tools: ToolSet) -> tuple[str, list[dict[str, Any]]]:
    """Return ``tool_choice`` for the library, and the functions that may be called.

    Raises:
        ApiError: 400, there is no such tool, or there are no tools.
    """
    functions = tools.functions
    choice = (
        {"type": tool_choice} if isinstance(tool_choice, str) else tool_choice or {"type": "auto"}
    )
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
    """Return the text argument of a call of a tool that takes a text."""
    try:
        value = parse_json(arguments)
    except ValueError:
        return arguments
    text = value.get(_TEXT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _leaves(tool: Fields, namespace: str | None = None) -> Iterator[tuple[str, str | None, Fields]]:
    """Yield the tools in an entry, each with its type, its namespace and its fields."""
    kind = str(tool.get("type") or "function")
    if kind == "namespace":
        for one in _mappings(tool.get("tools")):
            yield from _leaves(one, str(tool.get("name") or ""))
        return
    inner = tool.get(kind)
    fields = {name: tool[name] for name in _OF_TOOLS if name in tool}
    yield kind, namespace, inner if isinstance(inner, Mapping) else fields


def _function(kind: str, fields: Fields) -> Mapping[str, object] | None:
    """Return the function for a tool; None if only a server could run it."""
    schema = next((fields[one] for one in _SCHEMAS if isinstance(fields.get(one), Mapping)), None)
    if _takes_text(kind, fields):
        return _text_function(fields)
    if kind in ("function", "custom") or (schema or {}).get("type") == "object":
        shown = {one: fields[one] for one in fields if one not in _SCHEMAS and fields[one]}
        schema = dict(schema or {})
        if not any(one in schema for one in _COMBINED):
            schema = {**schema, "type": "object", "properties": {}}
        return {**shown, "parameters": schema}
    return None


def _takes_text(kind: str, fields: Fields) -> bool:
    return kind == "custom" and not any(one in fields for one in _SCHEMAS)


def _text_function(fields: Fields) -> dict[str, object]:
    """Return a function with one text argument; its description has the grammar to follow."""
    wanted = _inner(_inner(fields, "format"), "grammar")  # Chat has it one level deeper
    argument: dict[str, object] = dict(_STRING)
    description = str(fields.get("description") or "")
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
    """Return the name of the chosen function."""
    kind = str(choice.get("type") or "function")
    found = _inner(choice, kind)
    return flat_name(str(found.get("name") or kind), found.get("namespace"))


def _inner(fields: Fields, name: str) -> Fields:
    """Return the fields nested under ``name``, or ``fields`` if there are none."""
    inner = fields.get(name)
    return inner if isinstance(inner, Mapping) else fields


def _mappings(value: object) -> list[Fields]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []
