"""What comes of an answer, by what its model would write: calls, thoughts, stops, limits."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import localrt
from localrt.answering.requests import RequestBuilder
from localrt.models.templates.chat_template import ChatTemplate
from localrt.text.harmony import HARMONY_CALL
from tests.scripted import answer_to, with_template
from tests.text.call_templates import TEMPLATES, chat, each
from tests.text.test_call_syntax import answer_of

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
OSLO = ("weather", '{"city": "Oslo"}')
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
_CALLS = each(
    '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>',
    between="\n",
)
OPENED = chat(_CALLS, prompt="<think>\n", think="{{ m.reasoning_content }}\n</think>\n\n")


@pytest.fixture(scope="module")
def builder(tiny: localrt.Model) -> Any:
    return cache(lambda template: with_template(tiny, template))


# -- thoughts that are never closed ----------------------------------------------------------------

HERMES = TEMPLATES["Hermes, Qwen"]
HM = "<think>\nHm.\n"


@pytest.mark.parametrize(
    ("template", "said", "shown", "calls"),
    [
        pytest.param(HERMES, f"<think>\nHm.\n{CALL}", "<think>\nHm.\n", [OSLO], id="at the end"),
        pytest.param(
            HERMES, f"<think>\nHm.\n{CALL}\n{CALL}", "<think>\nHm.\n", [OSLO] * 2, id="two"
        ),
        pytest.param(OPENED, f"Hm.\n{CALL}", "<think>\nHm.\n", [OSLO], id="opened by the template"),
        pytest.param(OPENED, CALL, "<think>\n", [OSLO], id="no thought at all"),
        pytest.param(
            HERMES,
            f"<think>\nHm.\n{CALL}\n</think>\nNo.",
            f"<think>\nHm.\n{CALL}\n</think>\nNo.",
            [],
            id="an example, and closed",
        ),
        pytest.param(
            HERMES,
            f"<think>I use <tool_call>.</think>{CALL}",
            "<think>I use <tool_call>.</think>",
            [OSLO],
            id="a mention, and a call",
        ),
        pytest.param(
            HERMES, f"<think>{CALL} is it.", f"<think>{CALL} is it.", [], id="thought on behind it"
        ),
        pytest.param(
            HERMES,
            "<think><tool_call>\n" + '{"name": "sing", "arguments": {}}\n</tool_call>',
            "<think><tool_call>\n" + '{"name": "sing", "arguments": {}}\n</tool_call>',
            [],
            id="of no tool",
        ),
    ],
)
def test_thoughts_that_end_with_calls(
    builder: Any, template: str, said: str, shown: str, calls: list[Any]
) -> None:
    text, found, reason = answer_to(builder(template), said, tools=[WEATHER])
    assert (text, found) == (shown, calls)
    assert reason == ("tool_calls" if calls else "stop")


# -- stop strings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "said", "stop", "shown"),
    [
        (HERMES, "<think>\nOne.\n\nTwo.\n</think>\n\nYes.\n\nNo.", "\n\n", "Yes."),
        (OPENED, "One.\n\nTwo.\n</think>\n\nYes.\n\nNo.", "\n\n", "Yes."),
        (OPENED, "END of it</think>END", "END", ""),
        (HERMES, "Yes. <think>END</think>", "END", "Yes. <think>"),
        (HERMES, "One.\n\nTwo.", "\n\n", "One."),
        (
            TEMPLATES["gpt-oss"],
            "<|channel|>analysis<|message|>END<|end|><|start|>assistant"
            "<|channel|>final<|message|>Yes.END",
            "END",
            "Yes.",
        ),
    ],
)
def test_stops_count_in_the_answer(
    builder: Any, template: str, said: str, stop: str, shown: str
) -> None:
    text, _, reason = answer_to(builder(template), said, stop=stop)
    assert localrt.split_thinking(text).answer == shown
    assert reason == "stop"


# -- answers that are cut --------------------------------------------------------------------------


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("choice", ["auto", "weather"])
@pytest.mark.parametrize("until", ["eather", "slo", "end"])
def test_half_a_call_is_nothing(builder: Any, name: str, choice: str, until: str) -> None:
    """Cut by ``max_tokens``, in the middle of its name, of its arguments, or before its end."""
    requests: RequestBuilder = builder(TEMPLATES[name])
    syntax = requests._syntax
    if choice != "auto" and (syntax.forced is not syntax.calls or "[CALL_ID]" in TEMPLATES[name]):
        pytest.skip("it is forced in other words than the template's")
    call_id = "functions.weather:0" if name == "Kimi K2" else "abcdefgh0"
    function = {"name": "weather", "arguments": OSLO[1]}
    calls = [{"id": call_id, "type": "function", "function": function}]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    wish, _ = answer_of(ChatTemplate(TEMPLATES[name]), syntax, message, [WEATHER])
    wish = wish.strip()
    if name == "gpt-oss" and choice != "auto":  # as it is forced, not as the template has it
        spelling = HARMONY_CALL
        wish = f"{spelling.before}weather{spelling.middle}{OSLO[1]}"
    whole = answer_to(requests, wish, tools=[WEATHER], tool_choice=choice)
    assert whole == ("", [OSLO], "tool_calls")
    cut = wish[: len(wish) - 1 if until == "end" else wish.index(until)]
    size = len(requests.tokenizer.encode(cut, add_special=False, parse_special=True))
    given: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": size}
    text, found, reason = answer_to(requests, wish, **given)
    assert (text, reason) == ("", "length")
    assert found in ([], [OSLO])
    assert until == "end" or not found


@pytest.mark.parametrize(
    ("name", "said", "size", "shown", "calls"),
    [
        ("Hermes, Qwen", f"Hm.\n{CALL}", 20, "Hm.", []),
        ("Hermes, Qwen", f"Hm. {CALL}", 9, "Hm.", []),
        ("Hermes, Qwen", f"{CALL}\n{CALL}", len(CALL) + 30, "", [OSLO]),
        ("Hermes, Qwen", f"<think>{CALL}</think>", 30, "<think>", []),
        ("Hermes, Qwen", "a < b, and", 3, "a <", []),
        ("Llama", '{"name": "weather", "parameters": {}}', 24, "", []),
        ("Llama", '{"name": "Oslo", "size": 3}', 24, '{"name": "Oslo", "size":', []),
    ],
)
def test_answers_that_are_cut(
    builder: Any, name: str, said: str, size: int, shown: str, calls: list[Any]
) -> None:
    found = answer_to(builder(TEMPLATES[name]), said, tools=[WEATHER], max_tokens=size)
    assert found == (shown, calls, "length")
