"""Calls of tools in what a model writes: found as it comes, and taken out of the shown text.

The chat template tells which spelling a model was taught. What is malformed stays text. The other
way round, messages with calls are put into the shape that templates take. It knows no engine.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localrt.engine.types import ToolCall
from localrt.text.call_syntax import (
    Call,
    Parser,
    parse_deepseek,
    parse_json,
    parse_mistral,
    parse_python,
    parse_python_or_json,
    parse_tagged,
    signatures,
)
from localrt.text.thinking import CLOSE, OPEN, overlap

__all__ = [
    "TURN_ENDS",
    "TextParser",
    "ToolForm",
    "as_message_calls",
    "for_template",
    "make_call",
    "tool_form",
]


@dataclass(frozen=True, slots=True)
class ToolForm:
    """One way to mark calls. ``opening`` text begins them, ``closing`` (or the end) ends them.

    ``needles`` are what the templates of such models contain, by default the opening. ``kept`` is
    how much of the opening belongs to the call. With ``bare``, an answer that is nothing but JSON,
    fenced or not, may be a call too, of a tool that was given.
    """

    opening: str
    closing: str
    parse: Parser
    needles: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    kept: str = ""
    bare: bool = False


_HERMES = ToolForm("<tool_call>", "</tool_call>", parse_tagged, bare=True)
_IPYTHON = ("<|python_tag|>", "Environment: ipython")
_DEEPSEEK_MARKS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
# In the order in which templates are looked through.
_FORMS = (
    ToolForm(
        "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", parse_deepseek, markers=_DEEPSEEK_MARKS
    ),
    ToolForm("[TOOL_CALLS]", "", parse_mistral, markers=("[ARGS]", "[CALL_ID]")),
    _HERMES,
    ToolForm("functools[", "", parse_json, needles=("functools",), kept="["),
    ToolForm("<|tool_call|>", "<|/tool_call|>", parse_json),
    ToolForm("<|python_tag|>", "", parse_python_or_json, needles=_IPYTHON, bare=True),
    ToolForm("```tool_code", "```", parse_python, needles=("tool_code",)),
)

# Control tokens after which a tool has to be called, of gpt-oss and Llama.
TURN_ENDS = ("<|call|>", "<|return|>", "<|eom_id|>")

_BARE = ("{", "[", "```json")  # how an answer that may be nothing but JSON begins


def tool_form(template: str) -> ToolForm:
    """How the models of a chat template, given as its source, mark calls; Hermes' way by default.

    gpt-oss, whose messages all have a channel, is ``localrt.text.harmony``'s.
    """
    for form in _FORMS:
        if any(needle in template for needle in form.needles or (form.opening,)):
            return form
    return _HERMES


class TextParser:
    """Text as it comes to what may be shown; ``calls`` are those that were found.

    ``form`` is None where no tools were given. ``thinking`` says that the prompt itself has opened
    the model's thinking: the shown text then begins with ``<think>``. Within thinking, no call is
    looked for.
    """

    def __init__(
        self,
        form: ToolForm | None,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        thinking: bool = False,
    ) -> None:
        self._form = form
        self._tools = signatures(tools)
        self._first = f"{OPEN}\n" if thinking else ""
        self._thinking = thinking
        self._open = False
        self._held = ""
        self._begun = thinking  # whether anything but space has come
        self._bare = False  # the answer began like JSON, and is held back until its end
        self.calls: tuple[ToolCall, ...] = ()
        self.markers: tuple[str, ...] = (OPEN, CLOSE)
        if form is not None:
            self.markers += (form.opening, form.closing, *form.markers)

    def push(self, piece: str) -> str:
        """Text that is certain not to be part of a call."""
        shown, self._first = self._first, ""
        if self._form is None:
            return shown + piece
        self._held += piece
        while self._bare is False and (found := self._step(self._form)) is not None:
            shown += found
        return shown

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        shown, self._first = self._first, ""
        held, self._held, form = self._held, "", self._form
        if form is None:
            return shown
        if self._open:
            return shown + self._ended(form, held, closed=False)
        if self._bare:
            calls = form.parse(_unfenced(held), self._tools) or []
            if calls and all(call.name in self._tools for call in calls):
                self.calls += tuple(map(make_call, calls))
                return shown
        return shown + held

    def _step(self, form: ToolForm) -> str | None:
        """The next piece of shown text; None when more text has to come first."""
        held = self._held
        if self._open:
            body, closed, rest = held.partition(form.closing) if form.closing else (held, "", "")
            if not closed:
                return None
            self._held, self._open = rest, False
            return self._ended(form, body, closed=True)
        if self.calls and not self._begun:  # space after a call is nobody's
            self._held = held = held.lstrip()
        if not held:
            return None
        if not self._begun and not self.calls:
            start = held.lstrip()
            if form.bare and any(mark.startswith(start[: len(mark)]) for mark in _BARE):
                self._bare = any(start.startswith(mark) for mark in _BARE)
                return None
            self._begun = bool(start)
        marks = (CLOSE,) if self._thinking else (form.opening, OPEN)
        at, mark = min(((held.find(m), m) for m in marks if m in held), default=(-1, ""))
        if at < 0:
            cut = len(held) - max(overlap(held, m) for m in marks)
            shown, self._held = held[:cut], held[cut:]
            self._begun = self._begun or bool(shown.strip())
            return shown or None
        self._held = held[at + len(mark) :]
        if mark == form.opening:
            self._open, self._begun = True, False
            self._held = form.kept + self._held
            return held[:at]
        self._thinking = mark == OPEN
        return held[: at + len(mark)]

    def _ended(self, form: ToolForm, body: str, *, closed: bool) -> str:
        """A call's text is whole: what of it is to be shown."""
        calls = form.parse(body, self._tools)
        if calls is None:
            self._begun = True
            opening = form.opening.removesuffix(form.kept) if form.kept else form.opening
            return opening + body + (form.closing if closed else "")
        self.calls += tuple(map(make_call, calls))
        return ""


def _unfenced(text: str) -> str:
    """What is within ```json and ```, if that is all there is."""
    return text.strip().removeprefix("```json").removesuffix("```")


def make_call(call: Call) -> ToolCall:
    """``call`` with an id: its own, or a new one of nine characters, as Mistral's models want."""
    return ToolCall(call.id or uuid.uuid4().hex[:9], call.name, call.arguments)


# -- messages ------------------------------------------------------------------------------------


def as_message_calls(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
    """``calls`` as an assistant's message has them."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
    ]


def for_template(messages: Sequence[Any], *, arguments_as_text: bool = False) -> list[Any]:
    """``messages`` in the shape that chat templates take.

    A call's arguments become a mapping, as most want them, or JSON text; the message of a tool gets
    the name of what was called. What has an unknown shape stays as it is.
    """
    names: dict[str, str] = {}
    shaped: list[Any] = []
    for message in messages:
        if not isinstance(message, Mapping):
            shaped.append(message)
            continue
        message = dict(message)
        calls = message.get("tool_calls")
        if isinstance(calls, list | tuple) and calls:
            message["tool_calls"] = [_shaped_call(call, arguments_as_text, names) for call in calls]
        if message.get("role") == "tool":
            message["content"] = _result(message.get("content"))
            name = names.get(str(message.get("tool_call_id")))
            if name is not None:
                message.setdefault("name", name)
        shaped.append(message)
    return shaped


def _shaped_call(call: Any, as_text: bool, names: dict[str, str]) -> Any:
    if isinstance(call, ToolCall):
        call = as_message_calls([call])[0]
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if as_text and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except ValueError:
            value = None
        arguments = value if isinstance(value, dict) else arguments
    if isinstance(call.get("id"), str) and isinstance(function.get("name"), str):
        names[call["id"]] = function["name"]
    return {**call, "function": {**function, "arguments": arguments}}


def _result(content: Any) -> Any:
    """What a tool gave, as text: lists of parts and texts as they are, all else as JSON."""
    parts = isinstance(content, list) and all(
        isinstance(part, Mapping) and "type" in part for part in content
    )
    if isinstance(content, str) or parts:
        return content
    return json.dumps(content, ensure_ascii=False, default=str)
