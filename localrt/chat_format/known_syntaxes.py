"""Syntaxes of calls that probing a template (``call_probe``) does not find, by their marks.

- One mark, several notations: models write ``<tool_call>`` or ``[TOOL_CALLS]`` with the notations
  of other templates, and Llama writes Python or JSON, with or without ``<|python_tag|>``.
- Templates that write no calls: those of LFM, Granite, Phi and Gemma 3 only show tools.
- Templates that the sandbox refuses: some of Kimi's append to lists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

from localrt.chat_format.argument_notations import (
    JsonArguments,
    KeywordArguments,
    Mid,
    TaggedArguments,
)
from localrt.chat_format.notations import NAMED, Framed, JsonCalls, PythonCalls, Spelling
from localrt.chat_format.parser import CallSyntax

TURN_ENDS = ("<|call|>", "<|return|>", "<|eom_id|>", "<|calls|>")
"""Control tokens after which a tool has to be called: of gpt-oss, Llama and Solar."""
HERMES_CALL = Spelling(
    '<tool_call>\n{"name": "',
    '", "arguments": ',
    "}\n</tool_call>",
    JsonArguments(),
    joint='}\n</tool_call>\n<tool_call>\n{"name": "',
    later='", "arguments": ',
)
"""The call syntax that most models know."""
_HERMES = CallSyntax(
    "<tool_call>",
    "</tool_call>",
    (
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
    ),
    bare=True,
    spelling=HERMES_CALL,
)
_MISTRAL = CallSyntax(
    "[TOOL_CALLS]",
    "",
    (
        JsonCalls(),
        Framed(
            "",
            r"(?=[\s\[{])\s*(?:\[CALL_ID\]\s*(?P<id>\w+)\s*)?(?:\[ARGS\])?",
            "",
            JsonArguments(),
            between=r"\[TOOL_CALLS\]",
        ),
    ),
    marks=("[ARGS]", "[CALL_ID]"),
)
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
_PYTHON = Framed("", r"\(", r"\)", KeywordArguments(escaped=True), section=r"\[", between=r",|\]")
_LFM = CallSyntax("<|tool_call_start|>", "<|tool_call_end|>", (_PYTHON, JsonCalls(), PythonCalls()))
_LLAMA = CallSyntax("<|python_tag|>", "", (JsonCalls(), PythonCalls()), bare=True)
_GRANITE = CallSyntax("<|tool_call|>", "<|/tool_call|>", (JsonCalls(),))
_GEMMA = CallSyntax("```tool_code", "```", (PythonCalls(),))
_ATEM_PAIRS = TaggedArguments(
    '<atem:parameter name="', (Mid('">', "</atem:parameter>"),), "</atem:invoke>", gap="\n"
)
_ATEM_TO, _ATEM_NEXT = " to={}<|message|>", "<|eom|><|start|>assistant"
_ATEM_OPENING = f'{_ATEM_TO.format(NAMED)}<atem:function_calls>\n<atem:invoke name="'
_ATEM_CLOSING = "\n</atem:invoke>\n</atem:function_calls>"
_ATEM_JOINT = _ATEM_CLOSING + _ATEM_NEXT + _ATEM_OPENING
_ATEM = CallSyntax(  # Muse
    "<atem:function_calls>",
    "</atem:function_calls>",
    (Framed('<atem:invoke name="', '">', "</atem:invoke>", _ATEM_PAIRS),),
    recipients=(_ATEM_NEXT + _ATEM_TO, _ATEM_TO),
    spelling=Spelling(_ATEM_OPENING, '">\n', _ATEM_CLOSING, _ATEM_PAIRS, _ATEM_JOINT, '">\n'),
)
# Texts to look for in a template, in this order, and the syntaxes that they stand for.
_BY_MARK = (
    ("<atem:function_calls>", _ATEM),
    ("[TOOL_CALLS]", _MISTRAL),
    ("<|tool_calls_section_begin|>", _KIMI),
    ("<|tool_call_start|>", _LFM),
    ("<|tool_list_start|>", _LFM),
    ("<tool_call>", _HERMES),
    ("<|tool_call|>", _GRANITE),
    ("<|python_tag|>", _LLAMA),
    ("Environment: ipython", _LLAMA),
    ("tool_code", _GEMMA),
)


def known_syntax(
    template: str, has_token: Callable[[str], bool] = lambda mark: False
) -> CallSyntax:
    """The syntax whose mark is in a template's source, or else is a token of the model's vocabulary
    (``has_token``), or else that of Hermes.
    """
    in_source = (syntax for mark, syntax in _BY_MARK if mark in template)
    # The other texts are words that any vocabulary may have.
    tokens = ((mark, syntax) for mark, syntax in _BY_MARK if mark[0] in "<[")
    in_vocabulary = (syntax for mark, syntax in tokens if has_token(mark))
    return next(chain(in_source, in_vocabulary), _HERMES)


def known_with(probed: CallSyntax, template: str) -> CallSyntax:
    """Add to ``probed`` the known notations for its mark, or for bare JSON."""
    same = next((known for _, known in _BY_MARK if known.opening == probed.opening), None)
    if not probed.opening and known_syntax(template).bare:
        same = known_syntax(template)
    if same is None:
        return probed
    return replace(
        probed,
        opening=same.opening,
        closing=probed.closing or same.closing,
        notations=(*probed.notations, *same.notations),
        marks=tuple(dict.fromkeys((*probed.marks, *same.marks))),
        bare=probed.bare or same.bare,
    )
