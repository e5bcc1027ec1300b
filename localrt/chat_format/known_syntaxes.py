"""The published syntaxes of calls, for templates that write no calls.

Probing a template comes first (``call_probe``). The table also helps if a model writes calls in
another way than its template does, after the same mark.

gpt-oss is not in the table: each of its messages has a channel, for thinking, for calls, or for
the answer. Its parser shows thinking as ``<think>...</think>`` and takes calls out. The format is
OpenAI's (cookbook.openai.com/articles/openai-harmony):

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    <|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from localrt.chat_format.argument_notations import (
    JsonArguments,
    KeywordArguments,
    Mid,
    QuotedArguments,
    TaggedArguments,
)
from localrt.chat_format.notations import (
    Framed,
    JsonCalls,
    Notation,
    PythonCalls,
    Spelling,
    call_of,
)
from localrt.chat_format.parser import CallSyntax, make_call
from localrt.chat_format.thinking import CLOSE, OPEN, THOUGHT_FIELDS, overlap
from localrt.engine.types import ToolCall

TURN_ENDS = ("<|call|>", "<|return|>", "<|eom_id|>", "<|calls|>")
"""Control tokens after which a tool has to be called: of gpt-oss, Llama and Solar."""
_PYTHON_OR_JSON = (JsonCalls(), PythonCalls())
_TAGGED = (
    JsonCalls(),  # Hermes, Qwen
    Framed(  # Qwen coder
        "<function=",
        r"\s*>",
        "</function>",
        TaggedArguments(
            "<parameter=", (Mid(">\n", "\n</parameter>"),), "</function>", forgotten=True
        ),
    ),
    Framed(  # GLM
        "",
        r"\s*(?=<arg_key>|$)",
        "",
        TaggedArguments("<arg_key>", (Mid("</arg_key>\n<arg_value>", "</arg_value>"),), ""),
    ),
)
_MISTRAL = (
    JsonCalls(),
    Framed(
        "",
        r"(?=[\s\[{])\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\])?",
        "",
        JsonArguments(),
        between=r"\[TOOL_CALLS\]",
    ),
)
_DEEPSEEK = Framed(
    "<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?",
    r"(?:<｜tool▁sep｜>|\n```(?:json)?\n)",
    r"(?:```\s*)?<｜tool▁call▁end｜>",
    JsonArguments(),
)
HERMES_CALL = Spelling(
    '<tool_call>\n{"name": "',
    '", "arguments": ',
    "}\n</tool_call>",
    JsonArguments(),
    joint='}\n</tool_call>\n<tool_call>\n{"name": "',
    later='", "arguments": ',
)
"""A call in the way that most models know."""
_HERMES = CallSyntax("<tool_call>", "</tool_call>", _TAGGED, bare=True, spelling=HERMES_CALL)


def _row(
    opening: str, closing: str, *notations: Notation, needle: str = "", **more: Any
) -> tuple[str, CallSyntax]:
    return needle or opening, CallSyntax(opening, closing, notations, **more)


def _dsml(section: str, needle: str = "") -> tuple[str, CallSyntax]:
    """The syntax of DeepSeek V3.2 and V4, which differ in the name of the section."""
    closing, parameter = "</｜DSML｜invoke>", "</｜DSML｜parameter>"
    mids = (
        Mid('" string="true">', parameter, string=True),
        Mid('" string="false">', parameter, string=False),
    )
    arguments = TaggedArguments('<｜DSML｜parameter name="', mids, closing)
    call = Framed('<｜DSML｜invoke name="', '">', closing, arguments)
    return _row(f"<｜DSML｜{section}>", f"</｜DSML｜{section}>", call, needle=needle)


_KIMI = Framed(
    r"<\|tool_call_begin\|>\s*functions\.",
    r":(?P<index>\d+)\s*<\|tool_call_argument_begin\|>",
    r"<\|tool_call_end\|>",
    JsonArguments(),
    id_form="functions.{name}:{index}",
)
_LFM = ("<|tool_call_start|>", "<|tool_call_end|>")
_LFM_CALLS = (
    Framed("", r"\(", r"\)", KeywordArguments(escaped=True), section=r"\[", between=r",|\]"),
    *_PYTHON_OR_JSON,
)
# Texts to look for in a template (the opening by default), in this order, and their syntaxes.
_BY_NEEDLE: tuple[tuple[str, CallSyntax], ...] = (
    _dsml("function_calls"),
    _dsml("tool_calls"),
    _dsml("function_calls", "｜DSML｜"),
    _row(
        *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        _DEEPSEEK,
        marks=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    _row("[TOOL_CALLS]", "", *_MISTRAL, marks=("[ARGS]", "[CALL_ID]")),
    _row(
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        _KIMI,
        marks=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    _row(
        *("<|tool_call>", "<tool_call|>"),  # Gemma
        Framed("call:", "", "", QuotedArguments('<|"|>')),
        needle="<tool_call|>",
        marks=('<|"|>',),
    ),
    _row(*_LFM, *_LFM_CALLS),
    _row(*_LFM, *_LFM_CALLS, needle="<|tool_list_start|>"),
    ("<tool_call>", _HERMES),
    _row("functools[", "", JsonCalls(), needle="functools", kept="["),
    _row("<|tool_call|>", "<|/tool_call|>", JsonCalls()),
    _row(
        *("<|START_ACTION|>", "<|END_ACTION|>"),
        JsonCalls(name="tool_name", arguments=("parameters",)),
    ),
    _row("<|tools_prefix|>", "<|tools_suffix|>", JsonCalls(name=None)),
    _row("<TOOLCALL>", "</TOOLCALL>", JsonCalls()),
    _row("<tool_calls>", "</tool_calls>", JsonCalls()),
    _row("<|python_tag|>", "", *_PYTHON_OR_JSON, bare=True),
    _row("<|python_tag|>", "", *_PYTHON_OR_JSON, needle="Environment: ipython", bare=True),
    _row("```tool_code", "```", PythonCalls(), needle="tool_code"),
)


def known_syntax(
    template: str, has_token: Callable[[str], bool] = lambda mark: False
) -> CallSyntax:
    """The syntax whose mark is in a template's source, or else is a token of the model's vocabulary
    (``has_token``), or else that of Hermes.

    ``HarmonyParser`` handles gpt-oss.
    """
    spoken_of = (syntax for needle, syntax in _BY_NEEDLE if needle in template)
    # Other needles are words that any vocabulary may have.
    marks = ((needle, syntax) for needle, syntax in _BY_NEEDLE if needle[0] in "<[｜")
    of_tokens = (syntax for needle, syntax in marks if has_token(needle))
    return next(chain(spoken_of, of_tokens), _HERMES)


def known_with(found: CallSyntax, template: str) -> CallSyntax:
    """Add to ``found`` the known notations for its mark, or for bare JSON."""
    same = [known for _, known in _BY_NEEDLE if known.opening == found.opening]
    if not found.opening and known_syntax(template).bare:
        same = [known_syntax(template)]
    if not same:
        return found
    known = same[0]
    return replace(
        found,
        opening=known.opening,
        closing=found.closing or known.closing,
        notations=(*found.notations, *known.notations),
        marks=tuple(dict.fromkeys((*found.marks, *known.marks))),
        bare=found.bare or known.bare,
    )


_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_TO = "to="  # a header may begin with the recipient: the prompt ends with the role
_MARKERS = (_START, _CHANNEL, _MESSAGE, "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
HARMONY_CALL = Spelling(
    f"{_CHANNEL}commentary to=functions.", f" <|constrain|>json{_MESSAGE}", "", JsonArguments()
)
"""A call, after the role."""
HARMONY_ANSWER = f"{_CHANNEL}final{_MESSAGE}"
"""The beginning of an answer, after the role."""
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.\-]+)")
_MARK = re.compile("|".join(map(re.escape, _MARKERS)))


def is_harmony(template: str) -> bool:
    """Whether the source of a chat template has the channels of gpt-oss."""
    return _CHANNEL in template and _MESSAGE in template


def with_thoughts_joined(messages: Sequence[Any]) -> list[Any]:
    """Shape ``messages`` for a template of gpt-oss, which takes thoughts or text with calls, but
    not both: text before calls is appended to the thoughts.
    """
    shaped: list[Any] = []
    for message in messages:
        if isinstance(message, Mapping) and message.get("tool_calls") and message.get("content"):
            thought = next(filter(None, map(message.get, THOUGHT_FIELDS)), "")
            said = "\n\n".join(filter(None, (thought, _text(message["content"]))))
            message = {**message, "content": "", **dict.fromkeys(THOUGHT_FIELDS, said)}
        shaped.append(message)
    return shaped


def _text(content: Any) -> str:
    parts = content if isinstance(content, list | tuple) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))


class HarmonyParser:
    """See ``localrt.chat_format.parser.TextParser``. An answer begins with a message's header, or,
    with ``thinking``, within a message of thinking that the prompt has opened.
    """

    markers = _MARKERS

    def __init__(self, *, thinking: bool = False, names: Mapping[str, str] | None = None) -> None:
        self._names = names or {}
        self._first = f"{OPEN}\n" if thinking else ""
        self._header: str | None = None if thinking else ""  # None within a message's text
        self._text = ""  # the arguments of the call to _recipient
        self._recipient: str | None = None
        self.thinking = thinking
        self._held = ""
        self._said = False  # whether any text but thoughts has come
        self._unmarked = True  # no mark has come yet
        self.calls: tuple[ToolCall, ...] = ()

    def push(self, piece: str) -> str:
        """Add ``piece`` and return the text to show."""
        self._held += piece
        shown, self._first = self._first, ""
        while match := _MARK.search(self._held):
            shown += self._take(self._held[: match.start()]) + self._mark(match[0])
            self._held = self._held[match.end() :]
        cut = len(self._held) - max(overlap(self._held, mark) for mark in _MARKERS)
        shown += self._take(self._held[:cut])
        self._held = self._held[cut:]
        return shown

    def flush(self, *, cut: bool = False) -> str:
        """Return the held text at the end of the answer; drop a call that was ``cut``."""
        held, self._held = self._held, ""
        if cut and (self._recipient is not None or self._header):
            self._recipient = self._header = None
            return ""
        shown = self._take(held)
        if self._unmarked and self._header:  # the text only looked like a header
            shown, self._header = self._header, None
        return shown + self._end()

    def _take(self, text: str) -> str:
        """Handle text between two marks; return the part to show."""
        if self._header is not None:
            self._header += text
            # An answer without any header is shown unchanged.
            start = self._header.lstrip()[: len(_TO)]
            if self._header and self._unmarked and not _TO.startswith(start):
                shown, self._header = self._header, None
                return shown
            return ""
        if self._recipient is not None:
            self._text += text
            return ""
        if self.thinking:  # thoughts after the first shown text are dropped
            return "" if self._said else text
        self._said = self._said or bool(text.strip())
        return text

    def _mark(self, mark: str) -> str:
        self._unmarked = False
        if mark == "<|constrain|>":
            return ""
        if mark != _MESSAGE:
            shown = self._end() if self._header is None else ""
            # A header may have a role, followed by a channel.
            begins = mark != _CHANNEL or self._header is None
            self._header = "" if begins else self._header
            if mark == _CHANNEL:
                self._header = f"{self._header} "
            return shown
        header, self._header = self._header or "", None
        recipient = _RECIPIENT.search(header)
        if recipient is not None and recipient[1] not in ("user", "assistant"):
            self._recipient, self._text = recipient[1], ""
            return ""
        self.thinking = "analysis" in header
        return f"{OPEN}\n" if self.thinking and not self._said else ""

    def _end(self) -> str:
        """End a message: close thinking or add a call; return text to show."""
        if self.thinking:
            self.thinking = False
            return "" if self._said else f"\n{CLOSE}\n\n"
        if self._recipient is None:
            return ""
        name, self._recipient = self._recipient, None
        text, self._text = self._text, ""
        call = call_of(name, text)
        if call is None:
            return text
        self.calls += (make_call(call, self._names),)
        return ""
