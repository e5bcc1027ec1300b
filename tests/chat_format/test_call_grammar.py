"""Calls that must be made: in the words of the template, with arguments that fit the schema."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import pytest

import localrt
from localrt.chat_format.call_grammar import call_grammar
from localrt.chat_format.chat_template import ChatTemplate
from localrt.chat_format.parser import HARMONY_CALL, is_harmony
from localrt.chat_format.structured import SPACES
from localrt.chat_format.template_syntax import TemplateSyntax
from tests.chat_format.call_templates import KINDS, TEMPLATES, chat, each, tool
from tests.chat_format.test_call_syntax import fed, parser_of
from tests.chat_format.test_structured import byte_tokenizer
from tests.conftest import write_tiny_model
from tests.inside import core_of
from tests.scripted import with_template

PAINT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "colour": {"type": "string", "enum": ["red", "dark blue"]},
        "note": {"type": "string"},
        "coats": {"type": "integer", "minimum": 1, "maximum": 9},
        "where": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "tags": {"$ref": "#/$defs/tags"}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["colour", "where"],
    "additionalProperties": False,
    "$defs": {"tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2}},
}
TOOLS = [tool("paint", parameters=PAINT), tool("stop-it")]


@cache
def known(name: str) -> tuple[ChatTemplate, TemplateSyntax, Any]:
    template = ChatTemplate(TEMPLATES[name])
    syntax = TemplateSyntax.of(template)
    spelling = HARMONY_CALL if is_harmony(template.source) else syntax.calls.spelling
    assert spelling is not None
    functions = [tool["function"] for tool in TOOLS]
    grammar, left_out = call_grammar(spelling, functions, json.dumps, spaces=SPACES)
    assert not left_out - {"maxItems"}  # of PAINT's tags
    lark = llguidance.LLMatcher.grammar_from_lark(grammar)
    matcher = llguidance.LLMatcher(byte_tokenizer(), lark, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return template, syntax, matcher


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_allowed_is_read(name: str, seed: int) -> None:
    template, syntax, matcher = known(name)
    matcher, draw, written = matcher.deep_copy(), random.Random(seed), bytearray()
    likely = set(b"<>\"}]'/|,abcxp1:_ \n")
    while not matcher.is_stopped():
        packed = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(packed, count=256, bitorder="little")).tolist()
        usual = [byte for byte in allowed if byte in likely or byte > 127]
        if len(written) > 600:  # a text need not end by chance
            pytest.skip("a text without an end")
        written.append(draw.choice(usual or allowed))
        assert matcher.consume_token(written[-1])
    parser = parser_of(template, syntax, TOOLS, "")
    text = written.decode("utf-8", "replace")
    assert fed(parser, text, [5]).strip() == ""
    (call,) = parser.calls
    given = json.loads(call.arguments)
    assert call.name in ("paint", "stop-it")
    if call.name == "paint":
        assert given["colour"] in ("red", "dark blue")
        assert isinstance(given["where"]["x"], int | float)
        assert 1 <= given.get("coats", 1) <= 9
        assert set(given) <= set(PAINT["properties"])
    else:
        assert given == {}


TEXT, LIST = {"type": "string"}, {"type": "array", "items": {"type": "string"}}
SHORT = {"type": "string", "maxLength": 3}
LOST: list[tuple[str, dict[str, Any], set[str]]] = [
    ("Llama", {**SHORT, "pattern": "^a"}, set()),
    *(
        (name, schema, set())
        for name in ("GLM", "Seed-OSS", "MiniCPM", "DeepSeek V4", "LFM 2.5", "Gemma 4", "Llama")
        for schema in ({"type": "integer", "minimum": 1}, {"anyOf": [TEXT, {"type": "null"}]})
    ),
    *(
        (name, {**SHORT, "pattern": "^a", "format": "date"}, {"maxLength", "pattern", "format"})
        for name in ("GLM", "Seed-OSS", "MiniCPM", "DeepSeek V4", "LFM 2.5", "Gemma 4")
    ),
    ("GLM", {"type": ["string", "integer"], "minimum": 1}, {"minimum"}),
    ("DeepSeek V4", {"anyOf": [TEXT, LIST]}, set()),
    ("Gemma 4", {**LIST, "minItems": 2}, {"minItems"}),
]


def grammar_of(name: str, parameters: dict[str, Any]) -> tuple[str, set[str]]:
    spelling = TemplateSyntax.of(ChatTemplate(TEMPLATES[name])).calls.spelling or HARMONY_CALL
    functions = [{"name": "f", "parameters": parameters}]
    return call_grammar(spelling, functions, json.dumps, spaces=SPACES)


@pytest.mark.parametrize(("name", "schema", "left_out"), LOST)
def test_what_text_is_not_bound_by_is_told(
    name: str, schema: dict[str, Any], left_out: set[str]
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": {"short": SHORT}}
    grammar, found = grammar_of(name, parameters)
    assert found == left_out
    lark = llguidance.LLMatcher.grammar_from_lark(grammar)
    assert not llguidance.LLMatcher(byte_tokenizer(), lark, log_level=0).get_error()


@pytest.mark.parametrize("name", ["GLM", "Llama"])
def test_what_arguments_together_are_not_bound_by_is_told(name: str) -> None:
    parameters = {
        "properties": {"a": TEXT, "b": TEXT},
        "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        "minProperties": 1,
        "dependentRequired": {"a": ["b"]},
    }
    _, found = grammar_of(name, parameters)
    assert found == (set() if name == "Llama" else parameters.keys() - {"properties"})


# -- with a model ----------------------------------------------------------------------------------

_SHORT = tool(
    "paint",
    parameters={
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "coats": {"enum": [1, 2]}},
        "required": ["colour", "coats"],
        "additionalProperties": False,
    },
)
_PREFILLED = chat(
    each("[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}"),
    prompt="<think>\n",
    think="{{ m.reasoning_content }}\n</think>\n\n",
)


def test_a_bound_answer_begins_where_the_template_begins_answers(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, template=TEMPLATES["functionary 3.2"], context=2048)
    with localrt.load(folder) as model:
        made = core_of(model).requests.make("?", regex="yes|no")
        assert model.detokenize(made.prompt).endswith(">>>all\n")
        for tools in (None, [_SHORT]):
            assert model.generate("?", tools=tools, regex="yes|no").text in ("yes", "no")


def test_a_call_that_must_be_made_comes_behind_a_thought(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, template=_PREFILLED, context=2048)
    with localrt.load(folder) as model:
        for limit in (0, 5):
            thinking = {"thinking": True, "thinking_tokens": limit, "seed": 3}
            answer = model.generate("?", tools=[_SHORT], tool_choice="paint", **thinking)
            assert answer.metrics.thinking_tokens == limit
            assert localrt.split_thinking(answer.text).answer == ""
            assert [call.name for call in answer.tool_calls] == ["paint"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tool_choice": "sing", "tools": [_SHORT]}, "no such tool"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tool_choice": 3}, "tool_choice must be"),
        ({"tool_choice": "paint", "tools": [_SHORT], "regex": "a"}, "and regex cannot be combined"),
        ({"tool_choice": "required", "raw": True}, "needs messages"),
    ],
)
def test_a_choice_that_cannot_be_made(
    tiny: localrt.Model, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(localrt.OptionError, match=message):
        tiny.generate("hi", **options)


_TREE = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}


@pytest.mark.parametrize("name", ["GLM", "Gemma 4"])
def test_a_schema_may_contain_itself(tiny: localrt.Model, name: str) -> None:
    options = {"tools": [tool("f", parameters=_TREE)], "tool_choice": "f"}
    made = with_template(tiny, TEMPLATES[name]).make("?", **options)
    assert made.constraint is not None


def test_no_tool_is_shown_where_none_may_be_called(tiny: localrt.Model) -> None:
    plain = tiny.generate("hi", max_tokens=4, temperature=0)
    unused = tiny.generate("hi", tools=[_SHORT], tool_choice="none", max_tokens=4, temperature=0)
    assert unused.metrics.prompt_tokens == plain.metrics.prompt_tokens
