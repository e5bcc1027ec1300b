"""Tools as a model is told of them: in the way that its chat template takes, or in plain words.

A template is given what all can show: names of usual letters, one tool of a name (the last), and a
description, a type and properties for each. What it refuses, or leaves out, stands in the system
prompt.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeAlias

from localrt.chat_format.argument_types import accepted, parameters_of
from localrt.chat_format.known_syntaxes import HERMES_CALL
from localrt.chat_format.templates.chat_template import MessageTemplate
from localrt.common.errors import TemplateError

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
    """``functions`` that a model may call; ``own`` are the caller's names for them.

    ``tools`` is what the template is given, None where it takes none: their ``text`` is then a part
    of the system prompt.
    """

    functions: Sequence[_Tool] = ()
    own: Mapping[str, str] = field(default_factory=dict)
    tools: Sequence[_Tool] | None = None
    text: str = ""

    def named(self, name: str) -> str:
        """The name that the model knows, of the caller's."""
        return next((shown for shown, own in self.own.items() if own == name), name)

    def shown(self, messages: Sequence[Any]) -> Sequence[Any]:
        """A conversation with the names that the model knows, and with the tools' ``text``."""
        if any(shown != own for shown, own in self.own.items()):
            messages = [self._renamed(message) for message in messages]
        if not self.text:
            return messages
        first = messages[0] if messages else None
        if not isinstance(first, Mapping) or first.get("role") not in ("system", "developer"):
            return [{"role": "system", "content": self.text}, *messages]
        content = first.get("content")
        if isinstance(content, list | tuple):
            joined: Any = [*content, {"type": "text", "text": f"\n\n{self.text}"}]
        else:
            joined = f"{content}\n\n{self.text}" if content else self.text
        return [{**first, "content": joined}, *messages[1:]]

    def _renamed(self, message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message
        message = dict(message)
        if message.get("role") == "tool" and isinstance(message.get("name"), str):
            message["name"] = self.named(message["name"])
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [self._renamed_call(call) for call in calls]
        return message

    def _renamed_call(self, call: Any) -> Any:
        call = call.to_dict() if hasattr(call, "to_dict") else call
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return call
        return {**call, "function": {**function, "name": self.named(function["name"])}}


NO_TOOLS = Offer()


class Offers:
    """Those of the model with ``template``."""

    def __init__(self, template: MessageTemplate) -> None:
        self._template = template
        self._made = lru_cache(_KEPT)(self._offer)

    def of(self, tools: Sequence[_Tool] | None) -> Offer:
        """What is offered with ``tools``, which have names."""
        return self._made(json.dumps(tools, default=str)) if tools else NO_TOOLS

    def _offer(self, tools: str) -> Offer:
        last = {tool.get("function", tool)["name"]: tool for tool in json.loads(tools)}
        own = dict(_shown_names(list(last)))
        usual = [_usual(tool, shown) for shown, tool in zip(own, last.values(), strict=True)]
        functions = [tool["function"] for tool in usual]
        for form in (usual, [_plain(tool) for tool in usual]):
            if self._shows(form, own):
                return Offer(functions, own, form)
        lines = "\n".join(json.dumps(each, ensure_ascii=False) for each in functions)
        spelling = HERMES_CALL
        call = f"{spelling.before}NAME{spelling.middle}{{ARGUMENTS}}{spelling.after}"
        return Offer(functions, own, None, _PLAIN.format(lines, call))

    def _shows(self, tools: Sequence[_Tool], names: Mapping[str, str]) -> bool:
        if not self._template.takes_tools:
            return False
        try:
            written = self._template.render([_ASK], tools=tools)
        except TemplateError:
            return False
        return all(name in written or json.dumps(name)[1:-1] in written for name in names)


def _shown_names(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What models are told, and the name itself."""
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
    """``tool`` with one type and a description for each parameter."""
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
