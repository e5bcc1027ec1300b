"""Tools of any shape are told to any template; calls are found however their text is cut."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import localrt
from localrt.chat_format.call_syntaxes import named_syntax
from localrt.chat_format.chat_template import ChatTemplate, PlainTemplate
from localrt.chat_format.messages import Offers, arguments_of, for_template
from localrt.chat_format.notations import Framed, JsonArguments, JsonCalls, PythonCalls
from localrt.chat_format.parser import CallSyntax, HarmonyParser, TextParser
from localrt.chat_format.template_syntax import TemplateSyntax
from localrt.chat_format.thinking import thoughts_apart
from localrt.engine.types import ToolCall
from localrt.service.requests import RequestBuilder
from tests.chat_format.call_templates import TEMPLATES, calling, tool
from tests.conftest import CHATML, write_tiny_model
from tests.inside import core_of
from tests.scripted import answer_to, with_template

WEATHER = tool(
    "weather",
    description="The weather of a city.",
    parameters={
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
PARIS = {"city": "Paris", "days": 2}
_JSON = json.dumps({"name": "weather", "arguments": PARIS})
_LLAMA = json.dumps({"name": "weather", "parameters": PARIS})
_CODER = (
    "<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n2\n</parameter>\n</function>"
)

# The mark or the name of a template, what its model writes, and what of it is shown.
SPELLINGS: dict[str, tuple[str, str, str]] = {
    "qwen-thinking": (
        "<tool_call>",
        f"<think>I use <tool_call>.</think>\n<tool_call>\n{_JSON}\n</tool_call>\n",
        "<think>I use <tool_call>.</think>\n",
    ),
    "qwen-coder": ("<tool_call>", f"<tool_call>\n{_CODER}\n</tool_call>", ""),
    "qwen-coder, forgotten ends": (
        "<tool_call>",
        "<tool_call><function=weather>\n<parameter=city>\nParis\n<parameter=days>\n2\n"
        "</function></tool_call>",
        "",
    ),
    "not closed": ("<tool_call>", f"<tool_call>\n{_JSON}", ""),
    "qwen, fenced": ("<tool_call>", f"```json\n{_JSON}\n```", ""),
    "qwen, fenced after words": ("<tool_call>", f"I look:\n\n```json\n{_JSON}\n```", "I look:"),
    "qwen, fenced before words": ("<tool_call>", f"```json\n[{_JSON}]\n```\nI look.", "I look."),
    "qwen-coder, no opening": ("<tool_call>", f"I look.\n{_CODER}\n</tool_call>", "I look."),
    "qwen-coder, no marks": ("<tool_call>", f"I look.\n{_CODER}\n", "I look."),
    "llama": ("<|python_tag|>", _LLAMA, ""),
    "llama, fenced after words": ("<|python_tag|>", f"So:\n```json\n{_LLAMA}\n```", "So:"),
    "llama, space first": ("<|python_tag|>", f"\n\n{_LLAMA}", ""),
    "llama, marked": ("<|python_tag|>", f"<|python_tag|>{_LLAMA}", ""),
    "llama, built in": ("<|python_tag|>", '<|python_tag|>weather.call(city="Paris", days=2)', ""),
    "llama, python": ("<|python_tag|>", '[weather(city="Paris", days=2)]', ""),
    "gemma": ("tool_code", '```tool_code\nprint(weather("Paris", days=2))\n```', ""),
}


@cache
def syntax_of(template: str) -> CallSyntax:
    """How the template of this name writes calls, or a template that only has this mark."""
    if template in TEMPLATES:
        return TemplateSyntax.of(ChatTemplate(TEMPLATES[template])).calls
    return named_syntax(f"{{% {template} %}}")


def pieces(text: str, cuts: list[int]) -> Iterator[str]:
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return (text[a:b] for a, b in itertools.pairwise(edges))


def read(reader: TextParser | HarmonyParser, parts: Iterator[str]) -> tuple[str, list[Any]]:
    shown = "".join([*map(reader.push, parts)])
    shown += reader.flush()
    return shown, [(call.name, json.loads(call.arguments)) for call in reader.calls]


@pytest.mark.parametrize("name", SPELLINGS)
@given(cuts=st.lists(st.integers(0, 400), max_size=12))
def test_a_call_is_found_however_its_text_is_cut(name: str, cuts: list[int]) -> None:
    template, text, shown = SPELLINGS[name]
    reader = TextParser(syntax_of(template), [WEATHER])
    found, calls = read(reader, pieces(text, cuts))
    assert calls == [("weather", PARIS)]
    assert found.strip() == shown.strip()
    whole, _ = read(TextParser(syntax_of(template), [WEATHER]), iter([text]))
    assert whole == found


def test_a_fence_within_a_fenced_call() -> None:
    call = json.dumps({"name": "weather", "arguments": {"city": "```json\n{}\n```"}})
    for cuts in range(1, 9):
        text = f"So:\n```json\n{call}\n``` See."
        parts = (text[at : at + cuts] for at in range(0, len(text), cuts))
        shown, calls = read(TextParser(named_syntax("<tool_call>"), [WEATHER]), parts)
        assert calls == [("weather", {"city": "```json\n{}\n```"})]
        assert "".join(shown.split()) == "So:See."


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("<tool_call>", "<tool_call>\n{not json}\n</tool_call> and more"),
        ("<tool_call>", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
        ("<tool_call>", '<tool_call>{"name": "weather", "argum'),
        ("<tool_call>", "a < b, <tool and <tool_"),
        ("<tool_call>", "<tool_call><function=weather>\n<parameter=city>\nPar"),
        ("<tool_call>", 'So:\n```json\n{"name": "unknown", "arguments": {}}\n``` is a call.'),
        ("<tool_call>", 'So:\n```json\n{"name": "x"}\n```\n\n```python\n1\n```\n'),
        ("<tool_call>", "So:\n```json\n[1]\n``` and <function=other>\n</function>."),
        ("<tool_call>", "So: <function=weather>\n<parameter=city>\nPar"),
        ("<|python_tag|>", '{"answer": 42}'),
        ("<|python_tag|>", '{"name": "unknown", "parameters": {}}'),
        ("<|python_tag|>", '{"name": "weather", '),
        ("<|python_tag|>", "<|python_tag|>import os\nos.remove('/')"),
        ("[TOOL_CALLS]", "[TOOL_CALLS] nonsense"),
        ("DeepSeek V3.1", "<｜tool▁calls▁begin｜>what<｜tool▁calls▁end｜>"),
        ("FireFunction, Phi", "functools[1]"),
        ("tool_code", "```tool_code\nx = 1\n```"),
        ("tool_code", "```tool_code\nweather(__import__('os'))\n```"),
    ],
)
def test_what_is_malformed_stays_text(template: str, text: str) -> None:
    shown, calls = read(TextParser(syntax_of(template), [WEATHER]), iter(text))
    assert calls == []
    assert shown == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<|channel|>commentary to=functions.weather<|message|>{oops", "{oops"),
        ('{"a": 1}', '{"a": 1}'),
    ],
)
def test_what_is_no_call_in_a_channel_stays_text(text: str, shown: str) -> None:
    for parts in (text, [text]):
        assert read(HarmonyParser(), iter(parts)) == (shown, [])


def test_thinking_that_the_prompt_has_opened() -> None:
    reader = TextParser(named_syntax("<tool_call>"), [WEATHER], thinking="<think>")
    text = f"A <tool_call> may help.</think><tool_call>{_JSON}</tool_call>"
    shown, calls = read(reader, iter(text))
    assert localrt.split_thinking(shown).thinking == "A <tool_call> may help."
    assert calls == [("weather", PARIS)]
    assert (
        read(TextParser(None, thinking="<think>"), iter("Hm</think>x"))[0] == "<think>\nHm</think>x"
    )


# -- messages ------------------------------------------------------------------------------------


def test_messages_for_templates() -> None:
    messages: list[Any] = [
        {"role": "user", "content": "?"},
        calling(("weather", '{"a":1}'), ids="c1"),
        {"role": "tool", "tool_call_id": "c1", "content": {"t": 20}},
    ]
    shaped = for_template(messages)
    assert shaped[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert shaped[2] == {
        "role": "tool",
        "tool_call_id": "c1",
        "content": '{"t": 20}',
        "name": "weather",
    }
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a":1}'  # not changed
    as_text = for_template(shaped, arguments_as_text=True)
    assert json.loads(as_text[1]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    same = ToolCall("c1", "weather", '{"a":1}')
    again = for_template([{"role": "assistant", "content": "", "tool_calls": [same]}])
    assert again[0]["tool_calls"] == shaped[1]["tool_calls"]
    assert for_template([{"role": "assistant", "content": "x", "tool_calls": None}])
    assert for_template([{"role": "assistant", "tool_calls": ["odd"], "content": ""}])
    thought = thoughts_apart([{"role": "assistant", "content": "<think>Hm.</think>Yes."}])
    assert thought[0].items() >= {"content": "Yes.", "thinking": "Hm."}.items()


CUT = '{"city": "Par'
NESTED = '{"a":' + "[" * 100_000


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        *[(nothing, {}) for nothing in ("", "  ", "null", None, "[]", [], '""', "{}")],
        (CUT, {"arguments": CUT}),
        (NESTED, {"arguments": NESTED}),
        ('"x"', {"arguments": '"x"'}),
        ("[1]", {"arguments": "[1]"}),
        ([1], {"arguments": "[1]"}),
        ("7", {"arguments": "7"}),
        ('{"a": 1e999}', {"arguments": '{"a": 1e999}'}),  # infinite: no JSON spells it
        ('{"a": NaN}', {"arguments": '{"a": NaN}'}),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_arguments_in_a_history(given: Any, right: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
    messages: list[Any] = [{"role": "user", "content": "?"}]
    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    values, text = (for_template(messages, arguments_as_text=as_text) for as_text in (False, True))
    assert values[1]["tool_calls"][0]["function"]["arguments"] == right
    assert json.loads(text[1]["tool_calls"][0]["function"]["arguments"]) == right
    if isinstance(given, str):
        assert arguments_of(ToolCall("c", "f", given)) == right
    by_key = "{% for k, v in f.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
    read = "{% set args = f.arguments %}{% if args is string %}{% set args = args | from_json %}"
    read += "{% endif %}{{ args | tojson }}"
    calls = "{% for c in messages[1].tool_calls %}{% set f = c.function %}BODY{% endfor %}"
    keys, whole = (ChatTemplate(calls.replace("BODY", body)) for body in (by_key, read))
    assert keys.render(values) == "".join(f"{key}={value};" for key, value in right.items())
    assert [json.loads(whole.render(each)) for each in (values, text)] == [right, right]


def test_arguments_that_are_json_text_stay_as_they_were_written() -> None:
    shaped = for_template([calling(("f", '{ "a":1}'))], arguments_as_text=True)
    assert shaped[0]["tool_calls"][0]["function"]["arguments"] == '{ "a":1}'


@pytest.mark.parametrize(
    "mark", ["<tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "FireFunction, Phi"]
)
@pytest.mark.parametrize("nothing", ['""', "null", "[]", "{}", '" "'])
def test_a_call_with_nothing_for_arguments(mark: str, nothing: str) -> None:
    call = f'{{"name": "weather", "arguments": {nothing}}}'
    functools = mark == "FireFunction, Phi"
    text = f"functools[{call}]" if functools else f"{mark}{call}"
    reader = TextParser(syntax_of(mark), [WEATHER])
    assert read(reader, iter(text)) == ("", [("weather", {})])


# -- with a model --------------------------------------------------------------------------------

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }} <tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %} {{ k }}={{ v }}{% endfor %}</tool_call>"
    "{% endfor %}{% if m.role == 'tool' %} from {{ m.name }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAYS_CALL = re.escape('Hm.<tool_call>{"name": "weather", "arguments": {"city": "X"}}</tool_call>')


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[localrt.Model]:
    pytest.importorskip("llguidance")  # makes a random model say what the tests want
    folder = write_tiny_model(tmp_path_factory.mktemp("tools"), template=TEMPLATE, context=1024)
    with localrt.load(folder, format="f32") as model:
        yield model


def test_a_stream_says_what_to_call(model: localrt.Model) -> None:
    chunks = list(model.stream("?", tools=[WEATHER], regex=SAYS_CALL))
    assert "".join(chunk.text for chunk in chunks) == "Hm."
    assert chunks[-1].finish_reason == "tool_calls"
    (call,) = chunks[-1].tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "X"})
    assert re.fullmatch("[a-z0-9]{9}", call.id)
    assert not any(chunk.tool_calls for chunk in chunks[:-1])
    cut = model.generate("?", tools=[WEATHER], regex=SAYS_CALL, max_tokens=20)
    assert (cut.finish_reason, cut.tool_calls) == ("length", ())
    assert cut.text == "Hm."
    plain = model.generate("?", regex=SAYS_CALL)
    assert "<tool_call>" in plain.text
    assert plain.finish_reason == "stop"
    (answer,) = model.generate_batch(["?"], tools=[WEATHER], regex=SAYS_CALL)
    assert (answer.text, answer.tool_calls[0].name) == ("Hm.", "weather")


@pytest.mark.parametrize("tools", [["weather"], "weather", [WEATHER, None]])
def test_tools_that_are_none(model: localrt.Model, tools: Any) -> None:
    with pytest.raises(localrt.OptionError, match="tools must be a list"):
        model.stream("?", tools=tools)


def test_a_chat_goes_on_with_results(model: localrt.Model) -> None:
    chat = model.chat("Be brief.", tools=[WEATHER], max_tokens=4)
    answer = chat.send("How is it?", regex=SAYS_CALL, max_tokens=200)
    (call,) = answer.tool_calls
    assert chat.messages[-1]["content"] == "Hm."
    assert chat.messages[-1]["tool_calls"][0]["id"] == call.id
    with pytest.raises(localrt.OptionError, match="wait for their results"):
        chat.send()
    with pytest.raises(localrt.OptionError, match="no call"):
        chat.add_tool_result("nothing", "x")
    with pytest.raises(localrt.OptionError, match="JSON"):
        chat.add_tool_result(call, object())
    chat.add_tool_result(call, {"t": 20})
    after = chat.send(ignore_eos=True)
    assert after.metrics.cached_tokens > 100  # the conversation went on where it was
    roles = [message["role"] for message in chat.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    ids = core_of(model).requests.render(chat.messages, [WEATHER])
    rendered = model.detokenize(ids, skip_special=False)
    assert "<tool_call>weather city=X</tool_call>" in rendered
    assert '{"t": 20} from weather' in rendered
    with pytest.raises(localrt.OptionError, match="nothing to answer"):
        chat.send()


def test_calls_are_saved_with_a_chat(model: localrt.Model, tmp_path: Path) -> None:
    chat = model.chat(tools=[WEATHER])
    (call,) = chat.send("?", regex=SAYS_CALL).tool_calls
    chat.save(tmp_path / "chat.json")
    again = model.load_chat(tmp_path / "chat.json")
    again.tools = [WEATHER]
    again.add_tool_result(call.id, "fine")
    assert again.send(max_tokens=2, ignore_eos=True).text
    assert chat.send("never mind the call", max_tokens=2, ignore_eos=True).text


def test_a_template_that_opens_thinking(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    template = (
        "{% for m in messages %}<|im_start|>{{ m.content.split('</think>')[-1] }}<|im_end|>"
        "{% endfor %}<think>\n"
    )
    folder = write_tiny_model(tmp_path, template=template)
    with localrt.load(folder) as model:
        options: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
        answer = model.generate("hi", **options)
        assert answer.text.startswith("<think>\n")
        assert localrt.split_thinking(answer.text).open
        assert not model.generate("hi", raw=True, **options).text.startswith("<think>")
        assert model.generate("hi", regex="no").text == "no"


def test_what_hands_over_to_a_tool_ends_an_answer(tmp_path: Path) -> None:
    """gpt-oss' files do not always say that ``<|call|>`` does."""
    folder = write_tiny_model(
        tmp_path,
        template="<|channel|><|message|>{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    names = ["<|call|>", "<|channel|>", "<|message|>"]
    file = folder / "tokenizer.json"
    for name, old in zip(names, ["w", "x", "y"], strict=True):  # the vocabulary keeps its size
        data = json.loads(file.read_text("utf-8"))
        number = data["model"]["vocab"].pop(old)
        data["model"]["vocab"][name] = number
        special = {"id": number, "content": name, "special": True}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        data["added_tokens"].append({**special, **flags})
        data["added_tokens"].sort(key=lambda token: token["id"])
        file.write_text(json.dumps(data))
    with localrt.load(folder) as model:
        call = model.tokenizer.token_id("<|call|>")
        assert call in model.tokenizer.special_ids
        bias = {call: 1000.0}
        answer = model.generate("hi", logit_bias=bias, max_tokens=5)
        assert (answer.finish_reason, answer.token_ids) == ("stop", ())
        raw = model.generate("hi", raw=True, logit_bias=bias, max_tokens=5)
        assert raw.finish_reason == "length"


LONE, WHOLE = r'"x\ud83d y \ud83d\ude00"', "x\ufffd y \U0001f600"


@pytest.mark.parametrize(
    ("notation", "text"),
    [
        (JsonCalls(), f'{{"name": "weather", "arguments": {{"city": {LONE}}}}}'),
        (PythonCalls(), f'weather(city={LONE[:8]} y \U0001f600")'),
        (Framed("", r"\s*", "", JsonArguments()), f'weather {{"city": {LONE}}}'),
    ],
)
def test_a_lone_surrogate_in_arguments_is_replaced(notation: Any, text: str) -> None:
    """Strict readers refuse a whole event for one."""
    (call,) = notation.parse(text, {"weather": {}})
    assert json.loads(call.arguments) == {"city": WHOLE}
    assert call.arguments.encode("utf-8")


NAMES = ["weather", "get weather", "a/b:c", "météo", "天気 予報", "x.y-z", "1st", "n" * 300, "<a>"]
STRING = {"type": "object", "properties": {"city": {"type": "string"}}}
STRICT = (  # As some published templates: a description, and one type for each property.
    "{% for t in tools or [] %}{{ t.function.name + t.function.description }}"
    "{% for k, v in t.function.parameters.properties.items() %}{{ k + v.type + v.description }}"
    "{% endfor %}{% endfor %}" + CHATML
)


@pytest.fixture(scope="module")
def builder(tiny: localrt.Model) -> Any:
    return cache(lambda template: with_template(tiny, template))


def prompt_of(requests: RequestBuilder, messages: Any, tools: Any) -> str:
    ids = requests.render(messages, tools)
    return requests.tokenizer.decode(ids, skip_special=False)


@pytest.mark.parametrize(
    "template", ["Hermes, Qwen", "GLM", "Kimi K2", "LFM 2.5", "Mistral, named"]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_tool_of_any_name_is_called_by_it(builder: Any, template: str, name: str) -> None:
    pytest.importorskip("llguidance")
    requests: RequestBuilder = builder("{{ tools | tojson if tools }}" + TEMPLATES[template])
    tools = [tool("get_weather"), tool(name)]
    _, calls, reason = answer_to(requests, "", tools=tools, tool_choice=name, max_tokens=900)
    assert (calls, reason) == ([(name, "{}")], "tool_calls")


def test_names_in_the_history_are_those_that_the_model_knows(builder: Any) -> None:
    requests: RequestBuilder = builder("{{ tools | tojson if tools }}" + TEMPLATES["Hermes, Qwen"])
    called = calling(("get weather", {}), ids="c1")
    messages = [
        {"role": "user", "content": "?"},
        called,
        {"role": "tool", "tool_call_id": "c1", "name": "get weather", "content": "fine"},
    ]
    written = prompt_of(requests, messages, [tool("get weather"), tool("get_weather")])
    assert written.count('{"name": "get_weather_2", "arguments": {}}') == 1
    assert "get weather" not in written
    assert called == calling(("get weather", {}), ids="c1")  # not changed


def offer_of(tools: Any, template: str = STRICT) -> Any:
    return Offers(ChatTemplate(template)).of(tools)


@pytest.mark.parametrize(
    ("tools", "functions"),
    [
        ([tool("f", parameters=None)], [("f", [])]),
        ([tool("f")], [("f", [])]),
        ([tool("f", parameters={})], [("f", [])]),
        ([tool("f", parameters=STRING, description=None)], [("f", ["city"])]),
        ([{"name": "f", "parameters": STRING}], [("f", ["city"])]),
        ([{"type": "function", "name": "f", "parameters": STRING}], [("f", ["city"])]),
        ([{"function": {"name": "f"}}], [("f", [])]),
        (
            [MappingProxyType(tool("f", parameters=MappingProxyType(STRING))["function"])],
            [("f", ["city"])],
        ),
        ([tool("f"), tool("g"), tool("f", parameters=STRING)], [("f", ["city"]), ("g", [])]),
        ([tool("f", parameters={"$ref": "#/$defs/a", "$defs": {"a": STRING}})], [("f", ["city"])]),
        (
            [tool("f", parameters={"properties": {"a": {"type": ["string", "null"]}}})],
            [("f", ["a"])],
        ),
    ],
)
def test_tools_of_any_shape_are_shown(tools: Any, functions: Any) -> None:
    offer = offer_of(tools)
    assert [
        (each["name"], list(each["parameters"]["properties"])) for each in offer.functions
    ] == functions
    assert offer.text == ""
    assert [each["function"]["name"] for each in offer.tools] == [name for name, _ in functions]


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{# tools #}" + CHATML,
        "{% if tools %}{{ raise_exception('no') }}{% endif %}" + CHATML,
        PlainTemplate(),
    ],
    ids=["none", "none, though it says tools", "refused", "no template"],
)
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Hi"}],
        [{"role": "developer", "content": [{"type": "text", "text": "Rules."}]}],
    ],
)
def test_a_template_without_tools_tells_them_in_the_system_prompt(
    builder: Any, template: Any, messages: Any
) -> None:
    requests: RequestBuilder = builder(template)
    tools = [tool("weather", description="It rains.", parameters=STRING)]
    written = prompt_of(requests, messages, tools)
    assert '"city"' in written
    assert "It rains." in written
    assert ("Rules." in written) == (messages[0]["role"] != "user")
    for said in (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        '{"name": "weather", "arguments": {"city": "Oslo"}}',
    ):
        found = answer_to(requests, said, tools=tools, messages=messages)
        assert found == ("", [("weather", '{"city": "Oslo"}')], "tool_calls")
    assert answer_to(requests, "Dry.", tools=tools)[0].strip() == "Dry."
