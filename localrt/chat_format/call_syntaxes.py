"""The table of tool-call syntaxes, and the search for the one that a chat template writes.

A template renders one call, and the row that spells it so is taken, or else the first whose marks
are in the text. Templates that write no calls (LFM 2, Granite 3, Gemma 3) or that the sandbox
refuses are searched for the marks themselves, and then the model's vocabulary. A syntax that is not
in the table is unknown: calls stay text.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

from localrt.chat_format.notations import (
    ID,
    NAMED,
    NUMBERED,
    Arguments,
    Framed,
    JsonArguments,
    JsonCalls,
    KeywordArguments,
    Mid,
    Notation,
    PythonCalls,
    QuotedArguments,
    Spelling,
    TaggedArguments,
)
from localrt.chat_format.parser import CallSyntax, expression, marks_in
from localrt.common.errors import TemplateError

# -- probes ----------------------------------------------------------------------------------------

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]
"""Messages, tools, and whether the beginning of an answer is added; it may raise TemplateError."""
FIRST, _SECOND = "zq_alpha", "zq_beta"
"""The name of the tool that is called."""
KEY, VALUE = "zqa", "zvc"
"""The argument of calls in probes."""
TEXT = "Ztext zq¶"
"""The text of an answer in probes."""
_SECONDS = 10.0  # for all probes; a usual template takes a hundredth of it
_USER = "Zuser zq¶"
_ARGUMENTS = {KEY: VALUE}


def _tool(name: str) -> dict[str, object]:
    properties = {
        "zqa": {"type": "string", "description": "A word."},
        "zqc": {"type": "integer", "description": "A count."},
    }
    parameters = {"type": "object", "properties": properties, "required": ["zqa"]}
    return {
        "type": "function",
        "function": {"name": name, "description": "A probe.", "parameters": parameters},
    }


TOOLS = (_tool(FIRST), _tool(_SECOND))
"""The probes' tools."""


class UnreadableError(Exception):
    """A template writes calls in an unknown way."""


@dataclass(frozen=True, slots=True)
class Probes:
    """Renders probes with a template: all results are the text after the user's message.

    ``prompt`` is the beginning of an answer, ``plain`` the answer ``TEXT``. ``as_text`` passes the
    arguments of calls as JSON text, ``empty`` is the content beside calls without text.
    """

    render: Render
    until: float
    prompt: str = ""
    plain: str = ""
    as_text: bool = False
    call_id: str = "zid0call0"  # nine characters, as Mistral's templates want
    empty: str | None = ""

    @classmethod
    def of(cls, render: Render) -> Probes:
        """Start probing ``render``.

        Raises:
            TemplateError: it refuses the simplest probes.
            UnreadableError: the user's message is missing in its text.
        """
        first = cls(render, time.monotonic() + _SECONDS)
        return cls(render, first.until, first._behind_user(None), first.message(TEXT))

    def call(self, text: str = "", **fields: object) -> str:
        """Render an answer with a call."""
        arguments = json.dumps(_ARGUMENTS) if self.as_text else _ARGUMENTS
        function = {"name": FIRST, "arguments": arguments}
        made = {"id": self.call_id, "type": "function", "function": function}
        return self.message(text or self.empty, tool_calls=[made], **fields)

    def written_call(self) -> tuple[str, bool]:
        """Render one call in the first form that the template takes; empty if it writes none.

        Also says whether arguments have to be passed as JSON text.
        """
        forms = product(("", None), (False, True), (self.call_id, f"functions.{FIRST}:0"))
        for empty, as_text, call_id in forms:
            form = replace(self, empty=empty, as_text=as_text, call_id=call_id)
            try:
                text = form.call()
            except (TemplateError, UnreadableError):
                continue
            if FIRST in text and VALUE in text and f"{{'{KEY}'" not in text:
                return text, as_text
        return "", False

    def message(self, text: str | None, **fields: object) -> str:
        """Render an answer with this text."""
        return self._behind_user({"role": "assistant", "content": text, **fields})

    def _behind_user(self, answer: Mapping[str, object] | None) -> str:
        if time.monotonic() > self.until:
            raise UnreadableError("the template takes too long")
        messages: list[Mapping[str, object]] = [{"role": "user", "content": _USER}]
        if answer is not None:
            messages.append(answer)
        _, found, behind = self.render(messages, TOOLS, answer is None).rpartition(_USER)
        if not found:
            raise UnreadableError("the user's words are gone")
        return behind


# -- rows ------------------------------------------------------------------------------------------

TURN_ENDS = ("<|call|>", "<|return|>", "<|eom_id|>", "<|calls|>")
"""Control tokens after which a tool has to be called: of gpt-oss, Llama and Solar."""
_JSON = JsonArguments()


@dataclass(frozen=True, slots=True)
class _SyntaxRow:
    """One spelling: ``section (opening name middle arguments closing)* end``.

    ``gap`` is between calls, None if the template writes one call only.
    """

    section: str
    opening: str
    middle: str
    closing: str
    end: str
    arguments: Arguments
    gap: str | None

    @property
    def spelling(self) -> Spelling:
        """The same for writing calls."""
        several = self.gap is not None
        return Spelling(
            self.section + self.opening,
            self.middle,
            self.closing + self.end,
            self.arguments,
            f"{self.closing}{self.gap}{self.opening}" if several else "",
            self.middle if several else "",
        )

    @property
    def texts(self) -> tuple[str, ...]:
        """All literals, to find marks in."""
        own = (self.section, self.opening, self.middle, self.closing, self.end)
        match self.arguments:
            case TaggedArguments(opening=opening, mids=mids):
                return (*own, opening, *(text for mid in mids for text in (mid.before, mid.after)))
            case QuotedArguments(quote=quote):
                return (*own, quote)
        return own

    def frame(self, mark: str, end: str) -> Framed:
        """The notation that reads the text between ``mark`` and ``end``."""
        middle = expression(self.middle, strip=False)
        opening, lead = self.opening, mark
        if end and opening.strip() == mark:  # every call has its own marks, and a name may be text
            opening = lead = ""
        arguments = self.arguments
        if isinstance(arguments, TaggedArguments):
            arguments = replace(arguments, closing=self.closing.strip())
        return Framed(
            opening=expression(opening),
            middle=middle if middle.startswith(r"\s*") else rf"\s*{middle}",
            closing=expression(self.closing),
            arguments=arguments,
            section=expression(self.section),
            between=expression(self.end or end),
            mark=lead,
            end=end,
        )

    def writes(self, text: str) -> bool:
        """Whether ``text`` begins the call of the probe in this spelling."""
        match self.arguments:
            case TaggedArguments(opening=opening, mids=mids):
                given = f"{opening}{KEY}{mids[0].before}{VALUE}{mids[0].after}"
            case KeywordArguments():
                given = f"{KEY}='{VALUE}'"
            case QuotedArguments(quote=quote):
                given = f"{{{KEY}:{quote}{VALUE}{quote}}}"
            case _:
                given = f'{{"{KEY}": "{VALUE}"}}'
        written = f"{self.section}{self.opening}{FIRST}{self.middle}{given}"
        pattern = re.escape(written.strip()).replace(NAMED, FIRST)
        pattern = pattern.replace(ID, r"[\w.:\-]+").replace(NUMBERED, r"\d+")
        return re.search(pattern, text) is not None

    def count_marks(self, text: str) -> int:
        """The number of this row's marks if all are in ``text``, else -1."""
        marks = marks_in(*self.texts)
        return len(marks) if all(mark in text for mark in marks) else -1


@dataclass(frozen=True, slots=True)
class _Family:
    """The rows with one opening mark; ``names`` are the texts that stand for it in templates."""

    syntax: CallSyntax
    rows: tuple[_SyntaxRow, ...]
    names: tuple[str, ...] = ()

    def is_named(self, text: str) -> bool:
        """Whether one of the names is in ``text``."""
        return any(name in text for name in self.names)

    def spelled_in(self, text: str) -> CallSyntax:
        """The syntax with the spelling that fits ``text`` best, by default the first."""
        if not self.rows:
            return self.syntax
        row = max(self.rows, key=lambda row: (row.writes(text), row.count_marks(text)))
        before = row.spelling.before.removeprefix(self.syntax.primed)
        return replace(self.syntax, spelling=replace(row.spelling, before=before))


def _family(
    mark: str,
    end: str,
    *rows: _SyntaxRow,
    notations: tuple[Notation, ...] = (),
    names: tuple[str, ...] | None = None,
    call_start: str = "",
    bare: bool = False,
    primed: str = "",
    recipients: tuple[str, ...] = (),
) -> _Family:
    """``rows`` between ``mark`` and ``end``; without ``notations``, each is read as a frame, and
    without ``names``, the mark is the name.
    """
    frames = tuple(row.frame(mark, end) for row in rows)
    marks = marks_in(mark, end, *(text for row in rows for text in row.texts))
    syntax = CallSyntax(
        mark,
        end,
        notations or frames,
        marks=marks,
        call_start=call_start,
        bare=bare,
        primed=primed,
        recipients=recipients,
    )
    return _Family(syntax, rows, (mark,) if names is None else names)


def _row(text: str, arguments: Arguments = _JSON, gap: str | None = "") -> _SyntaxRow:
    """The row of a call as it is written: with NAME and ARGS, and in ⟦ ⟧ what each call repeats."""
    section, opened, rest = text.partition("⟦")
    each, _, end = (rest if opened else text).partition("⟧")
    opening, _, rest = each.partition("NAME")
    middle, _, closing = rest.rpartition("ARGS")
    return _SyntaxRow(section if opened else "", opening, middle, closing, end, arguments, gap)


def _tags(opening: str, before: str, after: str, gap: str = "\n") -> TaggedArguments:
    return TaggedArguments(opening, (Mid(before, after),), "", gap=gap)


# -- the table -------------------------------------------------------------------------------------

_OBJECT = '{"name": "NAME", "arguments": ARGS}'
_HERMES = _row(f"<tool_call>\n{_OBJECT}\n</tool_call>", gap="\n")
HERMES_CALL = _HERMES.spelling
"""The call syntax that most models know."""
_CODER_PAIRS = replace(_tags("<parameter=", ">\n", "\n</parameter>"), forgotten=True)
_GLM_PAIRS = _tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
_TOOL_CALL = _family(
    "<tool_call>",
    "</tool_call>",
    _HERMES,
    # Qwen Coder and Qwen 3.5, GLM 4.5, GLM 4.7
    _row("<tool_call>\n<function=NAME>\nARGS\n</function>\n</tool_call>", _CODER_PAIRS, "\n"),
    _row("<tool_call>NAME\nARGS\n</tool_call>", _GLM_PAIRS, "\n"),
    _row(
        "<tool_call>NAMEARGS</tool_call>",
        _tags("<arg_key>", "</arg_key><arg_value>", "</arg_value>", gap=""),
    ),
    notations=(
        JsonCalls(),
        Framed("<function=", r"\s*>", "</function>", replace(_CODER_PAIRS, closing="</function>")),
        Framed("", r"\s*(?=<arg_key>|$)", "", _GLM_PAIRS),
    ),
    bare=True,
)


def _dsml(section: str) -> _Family:
    after = "</｜DSML｜parameter>"
    mids = (
        Mid('" string="true">', after, string=True),
        Mid('" string="false">', after, string=False),
    )
    pairs = TaggedArguments('<｜DSML｜parameter name="', mids, "", gap="\n")
    mark, end = f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"
    each = '⟦<｜DSML｜invoke name="NAME">\nARGS\n</｜DSML｜invoke>⟧'
    return _family(mark, end, _row(f"{mark}\n{each}\n{end}", pairs, "\n"))


_ATEM_TO, _ATEM_NEXT = " to={}<|message|>", "<|eom|><|start|>assistant"
_ATEM_PAIRS = _tags('<atem:parameter name="', '">', "</atem:parameter>")
_MINI_PAIRS = TaggedArguments(
    '<param name="', (Mid('">', "</param>"), Mid('"><![CDATA[', "]]></param>", string=True)), ""
)
_HY_PAIRS = _tags(
    "<arg_key:opensource>",
    "</arg_key:opensource>\n<arg_value:opensource>",
    "</arg_value:opensource>",
)
_PYTHON = Framed("", r"\(", r"\)", KeywordArguments(escaped=True), section=r"\[", between=r",|\]")
_NAMED_JSON = r"(?=[\s\[{])\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\])?"
_KIMI_MIDDLE = r":(?P<index>\d+)\s*<\|tool_call_argument_begin\|>"
_OF_JSON = (JsonCalls(),)
_FAMILIES = (
    _family(  # Muse
        "<atem:function_calls>",
        "</atem:function_calls>",
        _row(
            f'{_ATEM_TO.format(NAMED)}<atem:function_calls>\n<atem:invoke name="NAME">\nARGS'
            "\n</atem:invoke>\n</atem:function_calls>",
            _ATEM_PAIRS,
            _ATEM_NEXT,
        ),
        notations=(_row('<atem:invoke name="NAME">ARGS</atem:invoke>', _ATEM_PAIRS).frame("", ""),),
        recipients=(_ATEM_NEXT + _ATEM_TO, _ATEM_TO),
    ),
    _family(  # Mistral
        "[TOOL_CALLS]",
        "",
        _row(f'[TOOL_CALLS][⟦{_OBJECT[:-1]}, "id": "{ID}"}}⟧]', gap=", "),
        _row("[TOOL_CALLS]NAME[ARGS]ARGS"),
        _row(f"[TOOL_CALLS]NAME[CALL_ID]{ID}[ARGS]ARGS"),
        notations=(*_OF_JSON, Framed("", _NAMED_JSON, "", _JSON, between=r"\[TOOL_CALLS\]")),
    ),
    _family(  # Kimi K2
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        _row(
            f"<|tool_calls_section_begin|>⟦<|tool_call_begin|>functions.NAME:{NUMBERED}"
            "<|tool_call_argument_begin|>ARGS<|tool_call_end|>⟧<|tool_calls_section_end|>"
        ),
        notations=(
            Framed(
                r"<\|tool_call_begin\|>\s*functions\.",
                _KIMI_MIDDLE,
                r"<\|tool_call_end\|>",
                _JSON,
                id_form="functions.{name}:{index}",
            ),
        ),
    ),
    _family(  # LFM
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        _row(
            "<|tool_call_start|>[⟦NAME(ARGS)⟧]<|tool_call_end|>",
            KeywordArguments(escaped=False),
            ", ",
        ),
        notations=(
            replace(_PYTHON, arguments=KeywordArguments(escaped=False)),
            _PYTHON,
            JsonCalls(),
            PythonCalls(),
        ),
        names=("<|tool_call_start|>", "<|tool_list_start|>"),
    ),
    _family(  # Seed-OSS
        "<seed:tool_call>",
        "</seed:tool_call>",
        _row(
            "<seed:tool_call>\n<function=NAME>\nARGS\n</function>\n</seed:tool_call>",
            _tags("<parameter=", ">", "</parameter>"),
            "\n",
        ),
    ),
    _family(  # MiniMax M2
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        _row(
            '<minimax:tool_call>\n⟦<invoke name="NAME">\nARGS\n</invoke>⟧\n</minimax:tool_call>',
            _tags('<parameter name="', '">', "</parameter>"),
            "\n",
        ),
    ),
    _family(  # MiniCPM
        '<function name="',
        "</function>",
        _row('<function name="NAME">ARGS</function>', _MINI_PAIRS, "\n"),
    ),
    _family(  # Hunyuan
        "<tool_calls:opensource>",
        "</tool_calls:opensource>",
        _row(
            "<tool_calls:opensource>\n⟦<tool_call:opensource>NAME<tool_sep:opensource>\nARGS"
            "\n</tool_call:opensource>⟧\n</tool_calls:opensource>",
            _HY_PAIRS,
            "\n",
        ),
    ),
    _dsml("function_calls"),  # DeepSeek V3.2
    _dsml("tool_calls"),  # DeepSeek V4
    _family(  # DeepSeek V3 and R1, and V3.1
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        _row(
            "<｜tool▁calls▁begin｜>⟦<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGS"
            "\n```<｜tool▁call▁end｜>⟧<｜tool▁calls▁end｜>",
            gap="\n",
        ),
        _row(
            "<｜tool▁calls▁begin｜>⟦<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>⟧"
            "<｜tool▁calls▁end｜>"
        ),
    ),
    _family(  # Solar
        "<|tool_calls|>",
        "<|calls|>",
        _row(
            f"<|tool_calls|>⟦<|tool_call:begin|>{ID}<|tool_call:name|>NAME<|tool_call:args|>ARGS"
            "<|tool_call:end|>⟧<|calls|>"
        ),
    ),
    _family(  # Gemma 4
        "<|tool_call>",
        "<tool_call|>",
        _row("<|tool_call>call:NAMEARGS<tool_call|>", QuotedArguments('<|"|>')),
    ),
    _family(  # Command R7B and A
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        _row(
            f'<|START_ACTION|>[\n⟦    {{"tool_call_id": "{NUMBERED}", "tool_name": "NAME", '
            '"parameters": ARGS}⟧\n]<|END_ACTION|>',
            gap=",\n",
        ),
        notations=(JsonCalls(name="tool_name", id=""),),
    ),
    _family(  # Command R+
        "Action:\n```json\n[",
        "```",
        _row(
            'Action:\n```json\n[\n⟦    {\n        "tool_name": "NAME",\n        "parameters": ARGS'
            "\n    }⟧\n]```",
            gap=",\n",
        ),
        notations=(JsonCalls(name="tool_name", id=""),),
        call_start="[",
    ),
    _family(  # Apertus
        "<|tools_prefix|>",
        "<|tools_suffix|>",
        _row('<|tools_prefix|>[⟦{"NAME": ARGS}⟧]<|tools_suffix|>', gap=", "),
        notations=(JsonCalls(name=None),),
    ),
    _family(  # MiniMax M1, Apriel
        "<tool_calls>",
        "</tool_calls>",
        _row(f"<tool_calls>\n⟦{_OBJECT}⟧\n</tool_calls>", gap="\n"),
        _row(f"<tool_calls>[⟦{_OBJECT}⟧]</tool_calls>", gap=", "),
        notations=_OF_JSON,
    ),
    _family(  # Nemotron Nano
        "<TOOLCALL>",
        "</TOOLCALL>",
        _row(f"<TOOLCALL>[⟦{_OBJECT}⟧]</TOOLCALL>", gap=", "),
        notations=_OF_JSON,
    ),
    _family(  # FireFunction, Phi
        "functools[",
        "",
        _row(f"functools[⟦{_OBJECT}⟧]", gap=", "),
        notations=_OF_JSON,
        call_start="[",
    ),
    _family(  # Phi, and Granite 3, which writes no closing mark
        "<|tool_call|>",
        "<|/tool_call|>",
        _row(f"<|tool_call|>[⟦{_OBJECT}⟧]", gap=", "),
        _row(f"<|tool_call|>[⟦{_OBJECT}⟧]<|/tool_call|>", gap=", "),
        notations=_OF_JSON,
    ),
    _family(  # GigaChat 3
        "<|message_sep|>\n\nfunction call<|role_sep|>",
        "",
        _row(f"<|message_sep|>\n\nfunction call<|role_sep|>\n{_OBJECT}", gap=None),
        notations=_OF_JSON,
    ),
    _family(  # GigaChat 3.1
        "<|function_call|>",
        "",
        _row(f"<|function_call|>{_OBJECT}", gap=None),
        notations=_OF_JSON,
    ),
    _TOOL_CALL,
    _family(
        "<function=", "</function>", _row("<function=NAME>ARGS</function>"), names=()
    ),  # functionary 3.1
    _family(">>>", "", _row(">>>NAME\nARGS"), names=(), primed=">>>"),
    _family(  # Llama 3
        "<|python_tag|>",
        "",
        _row('{"name": "NAME", "parameters": ARGS}', gap=None),
        notations=(JsonCalls(), PythonCalls()),
        names=("<|python_tag|>", "Environment: ipython"),
        bare=True,
    ),
    _family("```tool_code", "```", notations=(PythonCalls(),), names=("tool_code",)),  # Gemma 3
)


def written_syntax(text: str) -> CallSyntax | None:
    """The syntax in which ``text`` has the call of the probe; None if it is unknown."""
    exact = (each for each in _FAMILIES if any(row.writes(text) for row in each.rows))
    marked = (each for each in _FAMILIES if each.is_named(text) and _reads(each.syntax, text))
    family = next(chain(exact, marked), None)
    return None if family is None else family.spelled_in(text)


def named_syntax(
    template: str, has_token: Callable[[str], bool] = lambda mark: False
) -> CallSyntax:
    """The syntax whose mark is in a template's source, or else is a token of the model's vocabulary
    (``has_token``), or else that of Hermes.
    """
    named = (each for each in _FAMILIES if each.is_named(template))
    in_vocabulary = (
        each
        for each in _FAMILIES
        for mark in each.names
        if mark[0] in "<[" and has_token(mark)  # other texts are words that any may have
    )
    return next(chain(named, in_vocabulary), _TOOL_CALL).spelled_in(template)


def _reads(syntax: CallSyntax, text: str) -> bool:
    """Whether ``syntax`` reads the call of the probe behind its mark in ``text``."""
    _, _, body = text.partition(syntax.opening)
    if syntax.closing:
        body = body.partition(syntax.closing)[0]
    calls = syntax.parse(syntax.call_start + body, {}) or []
    return FIRST in [call.name for call in calls]
