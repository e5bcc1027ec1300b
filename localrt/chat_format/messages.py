"""Prepares messages and tools for a chat template.

Tool calls in messages are put in the shape that templates take; parts that are not text (pictures,
sounds, files) are refused. Tools get what all templates can show: plain ASCII names, each
once (the last tool wins), and a description, a type and properties. If a template refuses tools
or leaves them out, the system prompt lists them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

from localrt.chat_format.call_syntaxes import HERMES_CALL
from localrt.chat_format.chat_template import MessageTemplate
from localrt.chat_format.json_schemas import DECODER, accepted, parameters_of
from localrt.common.errors import OptionError, TemplateError
from localrt.common.option_names import option
from localrt.engine.types import ToolCall


def functions_to_call(
    choice: str, tools: Sequence[Mapping[str, object]]
) -> list[Mapping[str, object]]:
    """The functions of ``tools`` that ``choice`` allows: all for "required", else the named one.

    Raises:
        OptionError: there is none.
    """
    functions = [tool.get("function", tool) for tool in tools]
    named = [each for each in functions if isinstance(each, Mapping) and each.get("name")]
    if choice == "required":
        if not named:
            raise OptionError(f"{option('tool_choice')} is 'required', and there are no tools")
        return named
    found = [each for each in named if each["name"] == choice]
    if not found:
        raise OptionError(
            f"{option('tool_choice')} is {choice[:200]!r}, and there is no such tool in tools"
        )
    return found


def arguments_of(call: ToolCall) -> dict[str, object]:
    """The arguments of ``call`` as values; if they are not an object, one that holds their text."""
    return _as_object(call.arguments)


def for_template(messages: Sequence[object], *, arguments_as_text: bool = False) -> list[Any]:
    """Put ``messages`` in the shape that chat templates take.

    A call's arguments become a mapping, as most templates want, or JSON text; a tool's result gets
    the name of the called tool. Anything of unknown shape is not changed.
    """
    names: dict[str, str] = {}
    shaped: list[object] = []
    for message in messages:
        if not isinstance(message, Mapping):
            shaped.append(message)
            continue
        message = dict(message)
        calls = message.get("tool_calls")
        if isinstance(calls, list | tuple) and calls:
            message["tool_calls"] = [_shaped_call(call, arguments_as_text, names) for call in calls]
        elif message.get("role") == "assistant" and message.get("content") is None:
            message["content"] = ""
        if message.get("role") == "tool":
            message["content"] = _result(message.get("content"))
            name = names.get(str(message.get("tool_call_id")))
            if name is not None:
                message.setdefault("name", name)
        shaped.append(message)
    return shaped


def _shaped_call(call: Any, as_text: bool, names: dict[str, str]) -> object:
    if isinstance(call, ToolCall):
        call = call.to_dict()
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    given = function.get("arguments")
    arguments: Any = _as_object(given)
    if as_text:
        is_object = isinstance(given, str) and _value(given) == arguments
        arguments = given if is_object else json.dumps(arguments, ensure_ascii=False)
    if isinstance(call.get("id"), str) and isinstance(function.get("name"), str):
        names[call["id"]] = function["name"]
    return {**call, "function": {**function, "arguments": arguments}}


def _as_object(arguments: object) -> dict[str, object]:
    """Convert a call's arguments, or their JSON text, to an object: empty for no arguments, and
    with the text in it if they are not an object.
    """
    value = _value(arguments) if isinstance(arguments, str) else arguments
    if isinstance(value, Mapping):
        return dict(value)
    if value in (None, "", []):
        return {}
    text = arguments if isinstance(arguments, str) else json.dumps(value, default=str)
    return {"arguments": text}


def _value(text: str) -> Any:
    """The value of ``text`` as JSON; the stripped text itself if it is not JSON."""
    try:
        return DECODER.decode(text.strip())
    except (ValueError, RecursionError):
        return text.strip()


def _result(content: object) -> object:
    """A tool's result for a template: text and lists of parts unchanged, all else as JSON text."""
    parts = isinstance(content, list) and all(
        isinstance(part, Mapping) and "type" in part for part in content
    )
    if isinstance(content, str) or parts:
        return content
    return json.dumps(content, ensure_ascii=False, default=str)


_OTHERS = {
    "image": "a picture",
    "screenshot": "a picture",
    "audio": "a sound",
    "video": "a video",
    "file": "a file",
    "document": "a file",
}
_THOUGHTS = ("thinking", "reasoning")  # parts whose text is in a field named as their type


def check_text_only(messages: Sequence[object], *, pictures: bool = False, blind: str = "") -> None:
    """Check that all parts of all contents are text, or ``pictures``.

    ``blind`` is why a vision model cannot see.

    Raises:
        OptionError: one is not.
    """
    for number, message in enumerate(messages, 1):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            other = _other_than_text(part) if isinstance(part, Mapping) else None
            if pictures and other is not None and part.get("type") == "image":
                continue
            if other is not None and blind:
                raise OptionError(f"message {number} has {other}: {blind}")
            if other is not None:
                reads = "text and pictures" if pictures else "text"
                raise OptionError(
                    f"message {number} has {other}, and the model reads {reads} only: leave it out"
                )


def kind_in_words(kind: str) -> str | None:
    """The kind of a part of this type, such as image or file; None if unknown."""
    return next((word for word in _OTHERS if word in kind), None)


def _other_than_text(part: Mapping[str, object]) -> str | None:
    """Describe a part of a content in words; None if it is text."""
    kind = str(part.get("type", ""))
    if kind in _THOUGHTS:
        return None
    word = kind_in_words(kind)
    if word is None and isinstance(part.get("text"), str):
        return None
    named = None if word is None else _OTHERS[word]
    return f"{named or 'a part without text'} ({kind:.40})" if kind else "a part without a type"


_Tool: TypeAlias = Mapping[str, Any]
_KEPT = 16
_LONGEST = 128  # characters of a name
_UNUSUAL = re.compile(r"[^\w.\-]")
_ASK = {"role": "user", "content": "Hello?"}
_PLAIN = (
    "You may call these functions:\n{}\nTo call one, write this and nothing else, once a call:\n{}"
    "\nIts result comes in <tool_response>."
)


@dataclass(frozen=True, slots=True)
class Offer:
    """``functions`` that a model may call; ``caller_names`` maps the model's names to the caller's.

    ``tools`` are those for the template, None if it takes none: ``text``, which describes them, is
    then part of the system prompt.
    """

    functions: Sequence[_Tool] = ()
    caller_names: Mapping[str, str] = field(default_factory=dict)
    tools: Sequence[_Tool] | None = None
    text: str = ""

    def named(self, name: str) -> str:
        """The model's name of the tool that the caller calls ``name``."""
        return next((shown for shown, own in self.caller_names.items() if own == name), name)

    def shown(self, messages: Sequence[object]) -> Sequence[Any]:
        """Return the conversation with the model's names of tools, and with the tools' ``text``."""
        if any(shown != own for shown, own in self.caller_names.items()):
            messages = [self._renamed(message) for message in messages]
        if not self.text:
            return messages
        first = messages[0] if messages else None
        if not isinstance(first, Mapping) or first.get("role") not in ("system", "developer"):
            return [{"role": "system", "content": self.text}, *messages]
        content = first.get("content")
        if isinstance(content, list | tuple):
            joined: object = [*content, {"type": "text", "text": f"\n\n{self.text}"}]
        else:
            joined = f"{content}\n\n{self.text}" if content else self.text
        return [{**first, "content": joined}, *messages[1:]]

    def _renamed(self, message: object) -> object:
        if not isinstance(message, Mapping):
            return message
        message = dict(message)
        if message.get("role") == "tool" and isinstance(message.get("name"), str):
            message["name"] = self.named(message["name"])
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [self._renamed_call(call) for call in calls]
        return message

    def _renamed_call(self, call: Any) -> object:
        call = call.to_dict() if hasattr(call, "to_dict") else call
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return call
        return {**call, "function": {**function, "name": self.named(function["name"])}}


NO_TOOLS = Offer()


class Offers:
    """Makes the offers of tools for the model with ``template``."""

    def __init__(self, template: MessageTemplate) -> None:
        self._template = template
        self._cached = lru_cache(_KEPT)(self._offer)

    def of(self, tools: Sequence[_Tool] | None) -> Offer:
        """The offer of ``tools``, which must have names."""
        return self._cached(json.dumps(tools, default=_as_json)) if tools else NO_TOOLS

    def _offer(self, tools: str) -> Offer:
        last = {tool.get("function", tool)["name"]: tool for tool in json.loads(tools)}
        own = dict(_shown_names(list(last)))
        usual = [_usual(tool, shown) for shown, tool in zip(own, last.values(), strict=True)]
        functions = [tool["function"] for tool in usual]
        for form in (usual, [_plain(tool) for tool in usual]):
            if self._shows(form, own):
                return Offer(functions, own, form)
        lines = "\n".join(json.dumps(each, ensure_ascii=False) for each in functions)
        call = HERMES_CALL.call("NAME", "{ARGUMENTS}")
        return Offer(functions, own, None, _PLAIN.format(lines, call))

    def _shows(self, tools: Sequence[_Tool], names: Mapping[str, str]) -> bool:
        if not self._template.takes_tools:
            return False
        try:
            written = self._template.render([_ASK], tools=tools)
        except TemplateError:
            return False
        return all(name in written or json.dumps(name)[1:-1] in written for name in names)


def _as_json(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)


def _shown_names(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each tool's name for the model, and its own name."""
    taken = {name for name in names if _is_usual(name)}
    for name in names:
        shown = name
        if not _is_usual(name):
            stem = _UNUSUAL.sub("_", name)
            if len(stem) > _LONGEST:
                digest = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:8]
                stem = f"{stem[: _LONGEST - 9]}_{digest}"
            shown, number = stem, 2
            while shown in taken:
                shown, number = f"{stem}_{number}", number + 1
            taken.add(shown)
        yield shown, name


def _is_usual(name: str) -> bool:
    return len(name) <= _LONGEST and not _UNUSUAL.search(name)


def _usual(tool: _Tool, name: str) -> dict[str, Any]:
    function = tool.get("function", tool)
    outer = {} if function is tool else {key: tool[key] for key in tool if key != "function"}
    own = {key: value for key, value in function.items() if key != "type"}
    given = function.get("parameters")
    parameters = dict(given) if isinstance(given, Mapping) else {}
    if not isinstance(parameters.get("properties"), Mapping):
        parameters = {**parameters, "type": "object", "properties": parameters_of(parameters)[0]}
    description = function.get("description") or ""
    told = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", **outer, "function": {**own, **told}}


def _plain(tool: _Tool) -> dict[str, Any]:
    """Return ``tool`` with exactly one type and a description for each parameter."""
    function = tool["function"]
    parameters = function["parameters"]
    properties = {}
    for key, value in parameters["properties"].items():
        known = dict(value) if isinstance(value, Mapping) else {}
        kinds = sorted(accepted(value, parameters).kinds - {"null"})
        described = {"type": kinds[0] if kinds else "string", "description": ""}
        properties[key] = {**described, **known, "type": described["type"]}
    parameters = {**parameters, "properties": properties}
    return {**tool, "function": {**function, "parameters": parameters}}
