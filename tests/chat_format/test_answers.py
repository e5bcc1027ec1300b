"""What comes of an answer, by what its model would write: calls, thoughts, stops, limits."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.chat_format.chat_template import ChatTemplate
from localrt.chat_format.notations import ID, NAMED, NUMBERED
from localrt.chat_format.parser import HARMONY_CALL
from localrt.service.requests import RequestBuilder
from tests.chat_format.call_templates import (
    KINDS,
    LEADS,
    TEMPLATES,
    calling,
    chat,
    each,
    ids_of,
    tool,
)
from tests.chat_format.test_call_syntax import answer_of
from tests.conftest import CHATML, write_tiny_model
from tests.inside import core_of
from tests.scripted import answer_to, with_template

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = tool("weather", parameters=CITY)
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
        (HERMES, f"{HM}{CALL}", HM, [OSLO]),
        (OPENED, f"Hm.\n{CALL}", HM, [OSLO]),
        (HERMES, f"<think>I use <tool_call>.</think>{CALL}", "<think>I use <tool_call>.</think>",
         [OSLO]),
        (HERMES, f"{HM}{CALL}\n</think>\nNo.", None, []),  # an example, and closed
        (HERMES, '<think><tool_call>\n{"name": "sing", "arguments": {}}\n</tool_call>', None, []),
    ],
)  # fmt: skip
def test_thoughts_that_end_with_calls(
    builder: Any, template: str, said: str, shown: str | None, calls: list[Any]
) -> None:
    text, found, reason = answer_to(builder(template), said, tools=[WEATHER])
    assert (text, found) == (said if shown is None else shown, calls)
    assert reason == ("tool_calls" if calls else "stop")


# -- stop strings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "said", "stop", "shown"),
    [
        (HERMES, "<think>\nOne.\n\nTwo.\n</think>\n\nYes.\n\nNo.", "\n\n", "Yes."),
        (OPENED, "One.\n\nTwo.\n</think>\n\nYes.\n\nNo.", "\n\n", "Yes."),
        (HERMES, "Yes. <think>END</think>", "END", "Yes. <think>"),
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


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("choice", ["auto", "weather"])
def test_half_a_call_is_nothing(builder: Any, name: str, choice: str) -> None:
    """Cut by ``max_tokens``: behind its first character, if it is nothing but a call, in the middle
    of its name, of its arguments, or before its end.
    """
    requests: RequestBuilder = builder(TEMPLATES[name])
    syntax = requests._syntax
    if choice != "auto" and (syntax.forced is not syntax.calls or "[CALL_ID]" in TEMPLATES[name]):
        pytest.skip("it is forced in other words than the template's")
    wish = call_in(requests, name, forced=choice != "auto")
    whole = answer_to(requests, wish, tools=[WEATHER], tool_choice=choice)
    assert whole == ("", [OSLO], "tool_calls")
    ends = [wish.index("eather"), wish.index("slo"), len(wish) - 1]
    if choice != "auto" and name != "gpt-oss":  # else it may be text, or is never alone
        ends.append(1)
    for end in ends:
        size = len(requests.tokenizer.encode(wish[:end], add_special=False, parse_special=True))
        given: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": size}
        text, found, reason = answer_to(requests, wish, **given)
        assert (text, reason) == ("", "length")
        assert not found or (found == [OSLO] and end == len(wish) - 1)


@pytest.mark.parametrize(
    ("name", "said", "size", "shown", "calls"),
    [
        ("Hermes, Qwen", f"Hm.\n{CALL}", 20, "Hm.", []),
        ("Hermes, Qwen", f"{CALL}\n{CALL}", len(CALL) + 30, "", [OSLO]),
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


# -- a schema beside tools -------------------------------------------------------------------------

COLOUR: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
RED = '{"colour": "red"}'


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("wanted", ["answer", "call", "forced"])
def test_a_schema_beside_tools_binds_what_is_no_call(builder: Any, name: str, wanted: str) -> None:
    pytest.importorskip("llguidance")
    requests: RequestBuilder = builder(TEMPLATES[name])
    syntax = requests._syntax
    given: dict[str, Any] = {"tools": [WEATHER], "json_schema": COLOUR}
    if wanted == "answer":
        found = answer_to(requests, syntax.answer + RED, **given)
        assert found == (RED, [], "stop")
        return
    if wanted == "forced":
        given["tool_choice"] = "weather"
    text, calls, reason = answer_to(requests, call_in(requests, name), **given)
    assert (text, calls, reason) == ("", [OSLO], "tool_calls")


@pytest.mark.parametrize("name", KINDS)
def test_a_call_that_must_be_made_may_be_several(builder: Any, name: str) -> None:
    pytest.importorskip("llguidance")
    requests: RequestBuilder = builder(TEMPLATES[name])
    spelling = requests._syntax.forced.spelling
    assert spelling is not None
    if not spelling.joint:
        pytest.skip("the template writes one call only")
    texts = ("before", "middle", "after", "joint", "later")
    known = {each: getattr(spelling, each).replace(ID, "abcdefgh0") for each in texts}
    known = {each: text.replace(NAMED, "weather") for each, text in known.items()}
    spelling = replace(spelling, **known)
    wish = call_in(requests, name)
    given = wish[len(spelling.before + "weather" + spelling.middle) : -len(spelling.after) or None]
    more = f"{spelling.joint}weather{spelling.later}".replace(NUMBERED, "1")
    wish = wish[: len(wish) - len(spelling.after)] + more + given + spelling.after
    for choice in ("required", "auto"):
        schema = COLOUR if choice == "auto" else None
        options = {"tools": [WEATHER], "tool_choice": choice, "json_schema": schema}
        assert answer_to(requests, wish, **options) == ("", [OSLO] * 2, "tool_calls")


def call_in(requests: RequestBuilder, name: str, *, forced: bool = True) -> str:
    """A call of ``weather``, letter by letter as it is ``forced``, or as the template has it."""
    if name == "gpt-oss" and forced:
        return f"{HARMONY_CALL.before}weather{HARMONY_CALL.middle}{OSLO[1]}"
    message = calling(OSLO, ids=ids_of(name))
    answer, _ = answer_of(ChatTemplate(TEMPLATES[name]), requests._syntax, message, [WEATHER])
    return LEADS.get(name, "") + answer.strip()


SWITCHED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
LOOK = tool("look", parameters=None)
THINKERS = {
    "switched off by a closed thought": SWITCHED,
    "opened by the template": OPENED,
    "a thought with other marks": TEMPLATES["Seed-OSS"],
    "an answer with marks": TEMPLATES["Cohere's actions"],
    "a word behind the thought": TEMPLATES["Apriel"],
    "channels": TEMPLATES["gpt-oss"],
    "a mark before text": TEMPLATES["Solar"],
}


@pytest.mark.parametrize("template", THINKERS.values(), ids=THINKERS)
@pytest.mark.parametrize(
    ("options", "ends"),
    [
        ({}, "by itself"),
        ({"thinking": False}, "by itself"),
        ({"thinking": True}, "with the turn"),
        ({"thinking": "high", "thinking_tokens": 2}, "by itself"),
    ],
    ids=str,
)
@pytest.mark.parametrize("tools", [None, [LOOK]], ids=["alone", "beside tools"])
def test_a_schema_binds_the_answer_behind_the_thoughts(
    builder: Any, template: str, options: dict[str, Any], tools: Any, ends: str
) -> None:
    pytest.importorskip("llguidance")
    requests: RequestBuilder = builder(template)
    tags = requests._thinking._syntax.tags
    assert tags is not None
    thinks = bool(options.get("thinking"))
    if ends == "with the turn":
        wish = "Hm. So" if thinks else ""
    else:
        close = tags.closes(tools=bool(tools))[0].removesuffix(requests._syntax.answer)
        mark = requests._syntax.answer if tools or not thinks else ""
        wish = (f"Hm. So{close}{mark}" if thinks else mark) + RED
    text, calls, reason = answer_to(
        requests, wish, tools=tools, json_schema=COLOUR, max_tokens=4000, **options
    )
    parts = localrt.split_thinking(text)
    assert bool(parts.thinking) == thinks
    assert (reason, calls) == ("stop", []) or (tools and reason == "tool_calls")
    assert calls or json.loads(parts.answer)["colour"] in ("red", "blue")


# -- channels --------------------------------------------------------------------------------------

_A, _C, _F = (f"<|channel|>{name}" for name in ("analysis", "commentary", "final"))
_NEXT = "<|end|><|start|>assistant"
_CALLED = f'{_C} to=functions.weather <|constrain|>json<|message|>{{"city": "Oslo"}}<|call|>'


@pytest.mark.parametrize(
    ("said", "shown", "calls"),
    [
        (f"{_A}<|message|>Hm.{_NEXT}{_CALLED}", ("Hm.", ""), [OSLO]),
        (
            f"{_A}<|message|>Hm.{_NEXT}{_C}<|message|>I look.{_NEXT}"
            f"{_A}<|message|>So.{_NEXT}{_CALLED}",
            ("Hm.", "I look."),
            [OSLO],
        ),
        (
            f"{_A}<|message|>Hm.{_NEXT}{_C}<|message|>First this. {_NEXT}{_F}<|message|>Four.",
            ("Hm.", "First this. Four."),
            [],
        ),
        (
            f"{_A}<|message|>Hm.{_NEXT}{_A}<|message|>So.{_NEXT}{_F}<|message|>Yes.<|return|>",
            ("Hm.\n\nSo.", "Yes."),
            [],
        ),
    ],
)
def test_channels_of_one_answer(
    builder: Any, said: str, shown: tuple[str, str], calls: list[Any]
) -> None:
    text, found, _ = answer_to(builder(TEMPLATES["gpt-oss"]), said, tools=[WEATHER])
    parts = localrt.split_thinking(text)
    assert (parts.thinking, parts.answer, found) == (*shown, calls)


# As the published one: a message with calls has thoughts or words, and not both.
EITHER = TEMPLATES["gpt-oss"].replace(
    "{% if m.tool_calls %}",
    "{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}"
    "{% if m.tool_calls %}",
    1,
)


@pytest.mark.parametrize("content", ["I look.", [{"type": "text", "text": "I look."}], "", None])
@pytest.mark.parametrize("thought", ["Hm.", ""])
def test_words_thoughts_and_calls_in_a_history_of_channels(
    builder: Any, content: Any, thought: str
) -> None:
    requests: RequestBuilder = builder(EITHER)
    said = calling(OSLO, text=content, ids="c1", reasoning_content=thought, thinking=thought)
    dry = {"role": "tool", "tool_call_id": "c1", "content": "Dry."}
    messages: Any = [{"role": "user", "content": "?"}, said, dry]
    ids = requests.render(messages, [WEATHER])
    written = requests.tokenizer.decode(ids, skip_special=False)
    assert ("Hm." in written) == bool(thought)
    assert ("I look." in written) == bool(content)
    assert "to=functions.weather" in written
    assert "Dry." in written


# Names for the third token, how the template writes it, and whether it ends an answer.
ENDS = {
    "<|im_end|>": (CHATML, True),
    "<end_of_turn>": (CHATML, True),
    "<|eot_id|>": (CHATML.replace("'\n'", "'\n\n'"), True),
    "<|END_OF_TURN_TOKEN|>": (CHATML, True),
    "<|user|>": (CHATML, False),  # no known end
    "<|end_of_turn|>": ("{{ messages[0].content }}<|end_of_turn|>", False),  # before an answer
    "<|end_of_text|>": (CHATML + "{{ raise_exception() if messages[1] }}", False),
    "<EOT>": (None, False),  # a base model
}


def with_ends(folder: Path, names: dict[str, str], template: str | None, special: bool) -> Path:
    """A model whose files declare the first token alone as an end, with other names for tokens."""
    write_tiny_model(folder, template=template)
    config, spec = (folder / f"tokenizer{name}.json" for name in ("_config", ""))
    config.write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": template}))
    tokens = json.loads(spec.read_text("utf-8"))
    tokens["added_tokens"][2]["special"] = special
    spec.write_text(json.dumps(tokens))
    for path in folder.glob("*.json"):
        text = path.read_text("utf-8").replace('"eos_token_id": 2', '"eos_token_id": 0')
        for old, new in names.items():
            text = text.replace(old, new)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("name", "special"), [("<|im_end|>", False), *((name, True) for name in ENDS)]
)
def test_ends_that_the_files_do_not_declare(tmp_path: Path, name: str, special: bool) -> None:
    template, ends = ENDS[name]
    folder = with_ends(tmp_path, {"<|im_end|>": name}, template, special)
    with localrt.load(folder, draft="off") as model:
        requests = core_of(model).requests
        text, _, _ = answer_to(requests, f"Paris.{name}And", max_tokens=50)
        assert text == "Paris." if ends and special else text.endswith("And")
        assert requests.make("Paris", raw=True).eos_ids == {0}


def test_message_ends_of_gpt_oss(tmp_path: Path) -> None:
    names = {"<|endoftext|>": "<|return|>", "<|im_start|>": "<|call|>", "<|im_end|>": "<|end|>"}
    with localrt.load(with_ends(tmp_path, names, CHATML, True), draft="off") as model:
        assert core_of(model).requests.make("Paris").eos_ids == {0, 1}
