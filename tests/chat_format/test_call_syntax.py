"""Calls are read back as templates write them, in every syntax, and nothing else is a call."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from localrt import split_thinking
from localrt.chat_format.call_syntaxes import named_syntax
from localrt.chat_format.chat_template import ChatTemplate
from localrt.chat_format.json_schemas import ABSENT, accepted, parameters_of
from localrt.chat_format.messages import for_template
from localrt.chat_format.parser import HarmonyParser, TextParser, is_harmony
from localrt.chat_format.template_syntax import TemplateSyntax
from localrt.chat_format.thinking import thoughts_apart
from tests.chat_format.call_templates import (
    ALONE,
    KINDS,
    TEMPLATES,
    UNWRITABLE,
    WORDLESS,
    calling,
    chat,
    each,
    ids_of,
    tool,
)

_USER = {"role": "user", "content": "Hello?"}
_ENDS = ("<|im_end|>\n", "<|message_sep|>\n\n", "[e~[\n", "<turn|>\n")
_ENDS += ("<|return|>", "<|end|>", "<|eot|>")

_strings = st.text(
    st.sampled_from("\"'\\\n\t<>{}[]()|,:=&%é日🎈ab1 /"), max_size=12
) | st.sampled_from(
    ["", "2", "true", "True", "null", "None", "-1.5", "[]", "{}", "</", '{"a": 1}', "a, b", "\n"]
)
_numbers = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
_keys = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
_values = st.recursive(
    st.none() | st.booleans() | _numbers | _strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=3),
    max_leaves=6,
)
_arguments = st.dictionaries(_keys, _values, max_size=4)
_names = st.sampled_from(["weather", "get-it", "a.b_c", "x2"])
_calls = st.lists(
    st.tuples(_names, _arguments), min_size=1, max_size=3, unique_by=lambda call: call[0]
)
_words = st.text(st.sampled_from("Hi! \nyou,é'"), max_size=20).map(str.strip)
_cuts = st.lists(st.integers(1, 30), min_size=1, max_size=8)


@cache
def known(name: str) -> tuple[ChatTemplate, TemplateSyntax]:
    template = ChatTemplate(TEMPLATES[name])
    return template, TemplateSyntax.of(template)


def tools_of(calls: Sequence[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The tools that were called, each argument with its type."""
    found = []
    for name, arguments in calls:
        properties = {key: {"type": kind(value)} for key, value in arguments.items()}
        schema = {"type": "object", "properties": properties}
        found.append(tool(name, parameters=schema))
    return found


def kind(value: Any) -> str:
    names = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for item in value.values() for text in strings(item)]
    if isinstance(value, list):
        return [text for item in value for text in strings(item)]
    return [value] if isinstance(value, str) else []


def answer_of(
    template: ChatTemplate, syntax: TemplateSyntax, message: dict[str, Any], tools: Any
) -> tuple[str, str]:
    """What an assistant writes that gives ``message``, and the prompt before it."""
    prompt = template.render([_USER], tools=tools)
    given = [_USER, message]
    if is_harmony(template.source):
        given = thoughts_apart(given)
    shaped = for_template(given, arguments_as_text=syntax.calls.as_text)
    whole = template.render(shaped, tools=tools, add_generation_prompt=False)
    assert whole.startswith(prompt)
    answer = whole[len(prompt) :]
    return next((answer.removesuffix(end) for end in _ENDS if answer.endswith(end)), answer), prompt


def parser_of(template: ChatTemplate, syntax: TemplateSyntax, tools: Any, prompt: str) -> Any:
    if is_harmony(template.source):
        return HarmonyParser()
    marks = (mark for mark, _ in syntax.frame.thinking)
    opened = next((mark for mark in marks if prompt.rstrip().endswith(mark)), "")
    return TextParser(syntax.calls, tools, thinking=opened, frame=syntax.frame)


def fed(parser: Any, text: str, cuts: Sequence[int]) -> str:
    shown, at, step = "", 0, 0
    while at < len(text):
        shown += parser.push(text[at : at + cuts[step % len(cuts)]])
        at, step = at + cuts[step % len(cuts)], step + 1
    return shown + str(parser.flush())


def as_json(calls: Sequence[Any]) -> list[str]:
    """For comparison: to Python, 1 is True."""
    return [json.dumps(call, sort_keys=True) for call in calls]


@pytest.mark.parametrize("name", KINDS)
@given(calls=_calls, text=_words, thought=_words, cuts=_cuts)
def test_what_a_template_writes_is_read_back(
    name: str, calls: list[tuple[str, dict[str, Any]]], text: str, thought: str, cuts: list[int]
) -> None:
    template, syntax = known(name)
    calls = calls[:1] if name in ALONE else calls
    assume(not unwritable(name, calls))
    text = "" if name in WORDLESS else text
    thought = "" if "reasoning_content" not in TEMPLATES[name] else thought
    message = calling(*calls, text=text, ids=ids_of(name), reasoning_content=thought)
    tools = tools_of(calls)
    answer, prompt = answer_of(template, syntax, message, tools)
    parser = parser_of(template, syntax, tools, prompt)
    shown = fed(parser, answer, cuts)
    found = [(call.name, json.loads(call.arguments)) for call in parser.calls]
    assert as_json(found) == as_json(calls)
    parts = split_thinking(shown)
    assert (parts.thinking, parts.answer.strip()) == (thought, text)
    if name == "Kimi K2" or "CALL_ID" in answer:  # ids that are shown stay
        assert [call.id for call in parser.calls] == [c["id"] for c in message["tool_calls"]]


def unwritable(name: str, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> bool:
    """Whether the template of this name cannot write calls with these strings."""
    found = UNWRITABLE.get(name)
    return bool(found) and any(re.search(found, each) for each in strings([a for _, a in calls]))


@pytest.mark.parametrize("name", KINDS)
@given(text=st.text(st.sampled_from("<>|[]{}():\"'`,=/tol_caTHfun\n é"), max_size=40), cuts=_cuts)
def test_text_without_calls_stays_as_it_is(name: str, text: str, cuts: list[int]) -> None:
    template, syntax = known(name)
    message = {"role": "assistant", "content": text}
    answer, prompt = answer_of(template, syntax, message, None)
    tools = tools_of([("weather", {"city": "Oslo"})])
    parser = parser_of(template, syntax, tools, prompt)
    assert fed(parser, answer, cuts) == text
    assert parser.calls == ()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ending", ["", "\n", " <", "\n<to", ' {"na'])
def test_no_split_of_a_stream_changes_an_answer(name: str, ending: str) -> None:
    """Cut or not, wherever it ends and whatever is held back there."""
    template, syntax = known(name)
    call = ("weather", {"city": "a <b, c"})
    tools = tools_of([call])
    message = calling(call, text="" if name in WORDLESS else "Hi < you", ids=ids_of(name))
    answer, prompt = answer_of(template, syntax, message, tools)

    def read(pieces: Sequence[str], *, cut: bool) -> tuple[str, list[str]]:
        parser = parser_of(template, syntax, tools, prompt)
        shown = "".join([*map(parser.push, pieces)]) + parser.flush(cut=cut)
        return shown, [call.arguments for call in parser.calls]

    for end in (*range(0, len(answer), 19), len(answer)):
        text = answer[:end] + ending
        for cut in (False, True):
            whole = read([text], cut=cut)
            assert read(list(text), cut=cut) == whole
            for at in range(max(1, len(text) - 20), len(text)):
                assert read([text[:at], text[at:]], cut=cut) == whole


@pytest.mark.parametrize(
    ("thinking", "forced", "shown"),
    [("<think>", True, "<think>\na <"), ("", False, "a <"), ("", True, "a")],
)
def test_one_character_at_the_end_of_an_answer(thinking: str, forced: bool, shown: str) -> None:
    """It may begin a call, and is sure to only where there is nothing else to write."""
    parser = TextParser(named_syntax(""), [tool("f")], thinking=thinking, forced=forced)
    assert parser.push("a <") + parser.flush(cut=True) == shown


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Qwen Coder, Qwen 3.5, Nemotron 3", '<tool_call>{"name": "f", "arguments": {"a": 1}}'),
        (
            "Hermes, Qwen",
            "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
        ),
        (
            "Hermes, Qwen",
            "<tool_call><function=f ><parameter=a >1</parameter></function></tool_call>",
        ),
        ("GLM", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'),
        ("GLM", "<tool_call>f<arg_key> a </arg_key> <arg_value>1</arg_value></tool_call>"),
        ("Hermes, Qwen", '{"name": "f", "arguments": {"a": 1}}'),
        ("DeepSeek V3.2", '{0}<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>{1}'),
        ("Cohere's actions", '<|START_ACTION|>[{"tool_name": "f", "parameters": {"a": 1}}]'),
        ("Gemma 4", "<|tool_call>call:f{ a: 1 }<tool_call|>"),
        ("LFM 2.5", "<|tool_call_start|>[f(a=1)]"),
    ],
)
def test_calls_in_other_words_are_read_too(name: str, text: str) -> None:
    """What models write that is not quite what their templates do."""
    invoke = '<｜DSML｜function_calls><｜DSML｜invoke name="f">'
    text = (
        text.format(invoke, "</｜DSML｜invoke></｜DSML｜function_calls>") if "{0}" in text else text
    )
    parser = TextParser(known(name)[1].calls, tools_of([("f", {"a": 1})]))
    assert fed(parser, text, [3]) == ""
    assert [(call.name, json.loads(call.arguments)) for call in parser.calls] == [("f", {"a": 1})]


# -- templates that tell little, or mean harm ------------------------------------------------------


@pytest.mark.parametrize(
    ("mark", "opening"),
    [
        ("<tool_call>", "<tool_call>"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_begin|>"),
        ("<|tool_call|>", "<|tool_call|>"),
        ("<|tool_list_start|>", "<|tool_call_start|>"),
        ("nothing", "<tool_call>"),
    ],
)
def test_a_template_that_writes_no_calls_is_known_by_its_marks(mark: str, opening: str) -> None:
    syntax = TemplateSyntax.of(ChatTemplate("{# " + mark + " #}" + chat("")))
    assert syntax.calls.opening == opening


def test_a_template_without_any_mark_is_known_by_the_models_own_tokens() -> None:
    for token, opening in (
        ("<|tool_call_start|>", "<|tool_call_start|>"),
        ("[TOOL_CALLS]", "[TOOL_CALLS]"),
        ("tool_code", "<tool_call>"),  # a word of any vocabulary
    ):
        assert named_syntax(chat(""), {token}.__contains__).opening == opening
    assert named_syntax("[TOOL_CALLS]", {"<|tool_call|>"}.__contains__).opening == "[TOOL_CALLS]"


@pytest.mark.parametrize(
    "body",
    [
        "{{ raise_exception('no') }}",
        "{{ messages | tojson }}",
        "{{ messages }}",
        "{% for i in range(10 ** 9) %}{{ i }}{% endfor %}",
        "{% for m in messages %}{{ (m | string) * 100 }}{% endfor %}",
        "{% for m in messages %}{{ m | string | reverse }}{% endfor %}",
        chat("{{ m.tool_calls }}"),
        chat("{{ m.tool_calls | tojson | upper }}"),
        chat("{{ (m.tool_calls | tojson) * 3 }}"),
        chat("{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}"),
        chat("{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"),
        chat("{% for c in m.tool_calls or [] %}<<<<{{ c.function.name * 99 }}>>>>{% endfor %}"),
        chat("{% for c in m.tool_calls or [] %}{{ '(((((a+)+)+)+' }}{{ c }}{% endfor %}"),
    ],
)
def test_no_template_breaks_the_search(body: str) -> None:
    syntax = TemplateSyntax.of(ChatTemplate(body))
    parser = TextParser(syntax.calls, tools_of([("weather", {})]), frame=syntax.frame)
    assert fed(parser, "A plain (answer).", [2]) == "A plain (answer)."
    assert parser.calls == ()


def test_a_template_that_shows_arguments_as_they_are_is_given_json() -> None:
    """As a mapping, they would come out as Python shows one."""
    source = chat(
        "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
        "{{ c.function.arguments }}{% endfor %}"
    )
    syntax = TemplateSyntax.of(ChatTemplate(source))
    assert syntax.calls.as_text
    text = '[TOOL_CALLS]weather[ARGS]{"city": "Oslo", "days": null}'
    parser = TextParser(syntax.calls, [])
    assert fed(parser, text, [3]) == ""
    assert json.loads(parser.calls[0].arguments) == {"city": "Oslo", "days": None}


def test_a_template_that_writes_calls_only_where_there_is_no_content() -> None:
    """DeepSeek's: it concatenates the arguments, and ends the calls after the second one."""
    call = (
        "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' "
    )
    call += "+ c.function.arguments + '\n```<｜tool▁call▁end｜>' }}"
    source = chat(
        "{% if m.content is none %}{% for c in m.tool_calls %}"
        "{% if loop.first %}<｜tool▁calls▁begin｜>"
        + call
        + "{% else %}\n"
        + call
        + "<｜tool▁calls▁end｜>{% endif %}{% endfor %}{% endif %}",
        text="{{ m.content or '' }}",
    )
    calls = TemplateSyntax.of(ChatTemplate(source)).calls
    assert (calls.opening, calls.closing) == ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
    one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```<｜tool▁call▁end｜>"
    for count in (1, 2):
        parser = TextParser(calls, [])
        assert fed(parser, calls.opening + "\n".join([one] * count) + calls.closing, [5]) == ""
        assert [call.name for call in parser.calls] == ["weather"] * count


@pytest.mark.parametrize(
    "call",
    [
        "<call>{{ f.name }}<args>{{ f.arguments | tojson }}</call>",
        '<tool_call>[<invoke name="{{ f.name }}">{{ f.arguments | tojson }}</invoke>]</tool_call>',
        "{{ f.name }} with {{ f.arguments }}",
    ],
)
def test_calls_of_an_unknown_kind_stay_text(call: str) -> None:
    source = chat(each(call))
    syntax = TemplateSyntax.of(ChatTemplate(source))
    assert syntax.unknown
    for text in ('<call>weather<args>{"city": "Oslo"}</call>', "weather with nothing"):
        parser = TextParser(syntax.calls, tools_of([("weather", {"city": "Oslo"})]))
        assert fed(parser, text, [3]) == text
        assert parser.calls == ()


def test_no_syntax_of_a_published_template_is_unknown() -> None:
    assert not [name for name in TEMPLATES if known(name)[1].unknown]


DEFS: dict[str, Any] = {
    "$defs": {
        "size": {"enum": ["s", "m", "10"]},
        "count": {"type": "integer"},
        "loop": {"$ref": "#/$defs/loop"},
        "tree": {"anyOf": [{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/tree"}, {"type": "null"}]},
        **{f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 3} for n in range(30)},
        "d30": {"type": "integer"},
        "a/b": {"type": "boolean"},
    },
    "definitions": {"old": {"anyOf": [{"type": "number"}, {"type": "null"}]}},
}
STRING, INTEGER, NUMBER, NULL = ({"type": t} for t in ("string", "integer", "number", "null"))


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        # Text stays text.
        (STRING, "5", "5"),
        (STRING, '{"a": 1}', '{"a": 1}'),
        (STRING, "None", "None"),
        ({"enum": ["1", "true"]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"const": "null"}, "null", "null"),
        ({"$ref": "#/$defs/size"}, "10", "10"),
        # Numbers.
        (INTEGER, " 5.0 ", 5),
        (INTEGER, "5.5", 5.5),
        (NUMBER, "5.0", 5.0),
        (NUMBER, "1e999", "1e999"),
        ({"type": "array"}, "[1, -1e999]", "[1, -1e999]"),
        (INTEGER, "", ABSENT),
        (INTEGER, "None", ABSENT),
        ({"allOf": [NUMBER, INTEGER]}, "5.0", 5),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": 7}, "7", 7),
        # With null.
        ({"anyOf": [INTEGER, NULL]}, "5.0", 5),
        ({"oneOf": [INTEGER, NULL]}, "None", None),
        ({"type": ["integer", "null"]}, "", None),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"$ref": "#/definitions/old"}, "2.5", 2.5),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "", ""),
        # Several types.
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "integer"]}, "5.5", "5.5"),
        ({"anyOf": [{"type": "array"}, STRING]}, '["a"]', ["a"]),
        # Truth.
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "FALSE", False),
        ({"$ref": "#/$defs/a~1b"}, "True", True),
        # Lists and objects.
        ({"type": "array"}, "[1, 'a', None]", [1, "a", None]),
        ({"type": "object"}, '{"a": true}', {"a": True}),
        # Nothing is said, or nothing that can be read.
        ({}, "5", 5),
        ({}, "", ""),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        # Many ways lead to the same schema.
        ({"$ref": "#/$defs/tree"}, "5", 5),
        ({"$ref": "#/$defs/d0"}, "5.0", 5),
        ({"$ref": "https://example.org/s.json"}, "x", "x"),
        ({"type": 3, "enum": "x", "anyOf": {}}, "x", "x"),
    ],
)
def test_text_is_read_as_the_schema_says(schema: Any, text: str, value: Any) -> None:
    found = accepted(schema, DEFS).read(text)
    assert found is value if value is ABSENT else (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("schema", "properties", "required"),
    [
        ({"properties": {"a": STRING}, "required": ["a", "b"]}, {"a"}, {"a"}),
        ({"$ref": "#/$defs/o", "$defs": {"o": {"properties": {"a": STRING}}}}, {"a"}, set()),
        (
            {
                "allOf": [
                    {"properties": {"a": STRING}, "required": ["a"]},
                    {"properties": {"b": STRING}},
                ]
            },
            {"a", "b"},
            {"a"},
        ),
        ({"anyOf": [{"properties": {"a": STRING}, "required": ["a"]}, {}]}, {"a"}, set()),
        (None, set(), set()),
        ([1], set(), set()),
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}], "properties": {"a": STRING}}, {"a"}, set()),
    ],
)
def test_parameters_wherever_they_stand(schema: Any, properties: set[str], required: Any) -> None:
    found, needed = parameters_of(schema)
    assert (set(found), needed) == (properties, required)
