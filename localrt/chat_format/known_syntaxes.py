"""The published syntaxes of calls, for templates that say nothing of the calls in an answer.

A template is asked first (``call_probe``): these are hints. They also help where a model writes its
calls in another way than its template does, behind the same mark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from localrt.chat_format.notations import (
    Framed,
    JsonArguments,
    JsonCalls,
    KeywordArguments,
    Mid,
    PythonCalls,
    QuotedArguments,
    Spelling,
    TaggedArguments,
)
from localrt.chat_format.parser import CallSyntax

TURN_ENDS = ("<|call|>", "<|return|>", "<|eom_id|>", "<|calls|>")
"""Control tokens after which a tool has to be called: of gpt-oss, Llama and Solar."""


_JSON = (JsonCalls(),)
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
        TaggedArguments(
            "<arg_key>",
            tuple(Mid(f"</arg_key>{gap}<arg_value>", "</arg_value>") for gap in ("\n", "")),
            "",
        ),
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
_DEEPSEEK_MARKS = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")


def _dsml(section: str) -> CallSyntax:
    """DeepSeek V3.2's and V4's, whose sections have different names."""
    mark, end = f"<｜DSML｜{section}>", f"</｜DSML｜{section}>"
    parameter = "</｜DSML｜parameter>"
    arguments = TaggedArguments(
        '<｜DSML｜parameter name="',
        (
            Mid('" string="true">', parameter, string=True),
            Mid('" string="false">', parameter, string=False),
        ),
        "</｜DSML｜invoke>",
    )
    opening, closing = '<｜DSML｜invoke name="', "</｜DSML｜invoke>"
    return CallSyntax(mark, end, (Framed(opening, '">', closing, arguments),))


_KIMI = CallSyntax(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    (
        Framed(
            r"<\|tool_call_begin\|>\s*functions\.",
            r":(?P<index>\d+)\s*<\|tool_call_argument_begin\|>",
            r"<\|tool_call_end\|>",
            JsonArguments(),
            id_form="functions.{name}:{index}",
        ),
    ),
    marks=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
)
_GEMMA = CallSyntax(
    "<|tool_call>",
    "<tool_call|>",
    (Framed("call:", "", "", QuotedArguments('<|"|>')),),
    marks=('<|"|>',),
)
_LFM = CallSyntax(
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    (
        Framed("", r"\(", r"\)", KeywordArguments(escaped=True), section=r"\[", between=r",|\]"),
        *_PYTHON_OR_JSON,
    ),
)

# What a template contains, in the order in which templates are looked through.
_BY_NEEDLE: tuple[tuple[str, CallSyntax], ...] = (
    ("<｜DSML｜function_calls>", _dsml("function_calls")),
    ("<｜DSML｜tool_calls>", _dsml("tool_calls")),
    ("｜DSML｜", _dsml("function_calls")),
    (
        "<｜tool▁calls▁begin｜>",
        CallSyntax(
            "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", (_DEEPSEEK,), marks=_DEEPSEEK_MARKS
        ),
    ),
    ("[TOOL_CALLS]", CallSyntax("[TOOL_CALLS]", "", _MISTRAL, marks=("[ARGS]", "[CALL_ID]"))),
    ("<|tool_calls_section_begin|>", _KIMI),
    ("<tool_call|>", _GEMMA),
    ("<|tool_call_start|>", _LFM),
    ("<|tool_list_start|>", _LFM),
    ("<tool_call>", _HERMES),
    ("functools", CallSyntax("functools[", "", _JSON, kept="[")),
    ("<|tool_call|>", CallSyntax("<|tool_call|>", "<|/tool_call|>", _JSON)),
    (
        "<|START_ACTION|>",
        CallSyntax(
            "<|START_ACTION|>",
            "<|END_ACTION|>",
            (JsonCalls(name="tool_name", arguments=("parameters",)),),
        ),
    ),
    (
        "<|tools_prefix|>",
        CallSyntax("<|tools_prefix|>", "<|tools_suffix|>", (JsonCalls(name=None),)),
    ),
    ("<TOOLCALL>", CallSyntax("<TOOLCALL>", "</TOOLCALL>", _JSON)),
    ("<tool_calls>", CallSyntax("<tool_calls>", "</tool_calls>", _JSON)),
    ("<|python_tag|>", CallSyntax("<|python_tag|>", "", _PYTHON_OR_JSON, bare=True)),
    ("Environment: ipython", CallSyntax("<|python_tag|>", "", _PYTHON_OR_JSON, bare=True)),
    ("tool_code", CallSyntax("```tool_code", "```", (PythonCalls(),))),
)


def known_syntax(
    template: str, has_token: Callable[[str], bool] = lambda mark: False
) -> CallSyntax:
    """The syntax that a template's source speaks of, or else one whose mark is a token of the
    model's vocabulary (``has_token``); Hermes' where there is neither.

    gpt-oss, whose messages all have a channel, is ``localrt.chat_format.harmony``'s.
    """
    spoken_of = (syntax for needle, syntax in _BY_NEEDLE if needle in template)
    # Other needles are words of any vocabulary.
    marks = ((needle, syntax) for needle, syntax in _BY_NEEDLE if needle[0] in "<[｜")
    of_tokens = (syntax for needle, syntax in marks if has_token(needle))
    return next(chain(spoken_of, of_tokens), _HERMES)


def known_with(found: CallSyntax, template: str) -> CallSyntax:
    """``found`` in a template, with what else is known behind its mark, or of bare JSON."""
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
