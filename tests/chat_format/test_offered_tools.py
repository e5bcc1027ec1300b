"""Tools of any name and shape, told to any template, and the calls that come back."""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import Any

import pytest

import localrt
from localrt.chat_format.chat_template import ChatTemplate, PlainTemplate
from localrt.chat_format.messages import Offers
from localrt.service.requests import RequestBuilder
from tests.chat_format.call_templates import TEMPLATES, calling, tool
from tests.conftest import CHATML
from tests.scripted import answer_to, with_template

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
        (
            [tool("f", parameters={"$ref": "#/$defs/a", "$defs": {"a": STRING}})],
            [("f", ["city"])],
        ),
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
