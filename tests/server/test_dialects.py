"""What every protocol must do, asked in each by its own client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from tests.server.conftest import Running, Script
from tests.server.dialects import (
    BODIES,
    COLOUR,
    DIALECTS,
    LACKS,
    PAINT,
    Answer,
    Question,
    events_in,
)


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(server: Running, dialect: str, **asked: Any) -> Answer:
    """The answer; whole and streamed it is the same."""
    if any(asked.get(name) for name in LACKS.get(dialect, ())):
        pytest.skip(f"{dialect} has no field for it")
    question = Question(**asked)
    whole = DIALECTS[dialect](server.url, server.name, question)
    streamed = DIALECTS[dialect](server.url, server.name, replace(question, stream=True))
    assert streamed == whole
    return whole


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_answer(server: Running, dialect: str, system: str | None) -> None:
    got = ask(server, dialect, system=system)
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    expected = server.model.generate(messages, temperature=0, max_tokens=12)
    assert got == Answer(expected.text, "length", expected.metrics.prompt_tokens, 12)


def test_answer_that_is_begun(server: Running, dialect: str) -> None:
    got = ask(server, dialect, begun="Well")
    messages: list[Any] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Well", "prefix": True},
    ]
    assert got.text == server.model.generate(messages, temperature=0, max_tokens=12).text


def test_stop_string(server: Running, dialect: str) -> None:
    text = server.model.generate("hi", temperature=0, max_tokens=12).text
    got = ask(server, dialect, stop=text[3])
    assert (got.text, got.reason) == (text[: text.index(text[3])], "stop")


def test_tool_call(server: Running, dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance", reason="needs the structured extra")
    monkeypatch.setitem(server.model.defaults, "tool_choice", "required")
    got = ask(server, dialect, tool=PAINT, most=300)
    ((name, arguments),) = got.calls
    assert (got.text, got.reason, name) == ("", "tool_calls", "paint")
    assert arguments["colour"] in ("red", "blue")


LONE = (
    r'{"name": "pa\ud83dint", "id": "a\udc00",'
    r' "arguments": {"a\ud800": ["x\ud83d y \ud83d\ude00"]}}'
)
TOOLS_OF: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"type": "function", "function": PAINT},
    "/v1/messages": {"name": "paint", "input_schema": COLOUR},
}


def calls_in(value: Any) -> Iterator[Any]:
    """The arguments of every call in an answer or in its events, of any dialect."""
    if isinstance(value, Mapping):
        given = [value.get(key) for key in ("arguments", "input", "partial_json")]
        yield from (each for each in given if each)
        for each in value.values():
            yield from calls_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from calls_in(each)


@pytest.mark.parametrize("path", TOOLS_OF)
def test_a_lone_surrogate_reaches_no_strict_reader(
    server: Running, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader such as pydantic's refuses the whole line for one, even behind a backslash."""
    strict = pytest.importorskip("pydantic_core").from_json
    call = re.escape(f"<tool_call>{LONE}</tool_call>")
    monkeypatch.setitem(server.model.defaults, "regex", call)
    body = {**BODIES[path], "tools": [TOOLS_OF[path]], "max_tokens": 300}
    for stream in (False, True):
        status, got, _ = server.request("POST", path, {**body, "stream": stream})
        assert status == 200, got
        text = got if isinstance(got, str) else json.dumps(got)
        lines = [line.removeprefix("data: ") for line in text.splitlines()]
        found = [strict(line) for line in lines if line.startswith("{")]
        calls = [strict(one) if isinstance(one, str) else one for one in calls_in(found)]
        assert calls
        assert all(one == {"a\ufffd": ["x\ufffd y \U0001f600"]} for one in calls)


@pytest.mark.parametrize(
    ("data", "most", "text", "stop"),
    [
        ("aé日b".encode(), 4, "aé", None),
        ("aé日b".encode(), 4, "aé", "x"),
        ("🦜".encode(), 3, "", None),
        (b"a\xe6", 9, "a\ufffd", None),  # it is the model that ends here
        (b"a\xe6b", 9, "a\ufffdb", None),
    ],
)
def test_a_cut_answer_ends_with_a_whole_character(
    talking: Running, script: Script, data: bytes, most: int, text: str, stop: str | None
) -> None:
    script.say(data)
    answer = talking.model.generate("hi", max_tokens=most, logprobs=0, stop=stop)
    assert answer.text == text
    spelled = map(talking.model.tokenizer.token_bytes, answer.token_ids)
    assert b"".join(spelled) == data[:most]
    _, got, _ = talking.chat(max_tokens=most, logprobs=True, stop=stop)
    (choice,) = got["choices"]
    found = [one["bytes"] for one in choice["logprobs"]["content"]]
    assert bytes(byte for part in found for byte in part) == data[:most]
    assert choice["message"]["content"] == text


def test_thinking(thinker: Running, dialect: str) -> None:
    got = ask(thinker, dialect, think="low", most=20)
    assert (got.text, got.reason) == ("", "length")
    assert got.thought
    assert "think>" not in got.thought
    plain = ask(thinker, dialect, think=False, most=20)
    assert plain.text
    assert not plain.thought


# -- forms of the answer ---------------------------------------------------------------------------

ENUM = {"enum": ["ab", "b"]}
SAID, CHOSEN = r'"ab"|"b"', "ab|b[.]"


def texts_of(answer: Any) -> list[str]:
    """The text of each choice, whole or from the events of a stream."""
    if isinstance(answer, dict):
        return [one.get("text") or one["message"]["content"] for one in answer["choices"]]
    deltas = [event["choices"][0] for event in events_in(answer)]
    return ["".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in deltas)]


@pytest.mark.parametrize(
    ("path", "fields", "form"),
    [
        ("/v1/chat/completions", {"json_schema": ENUM}, SAID),
        ("/v1/completions", {"grammar": 'root ::= "ab" | "b."'}, CHOSEN),
        # The prompt does not have the form.
        ("/v1/completions", {"echo": True, "json_schema": ENUM}, f"hi({SAID})"),
    ],
)
def test_forms(server: Running, path: str, fields: Any, form: str) -> None:
    pytest.importorskip("llguidance")
    for stream in (False, True):
        body = {**BODIES[path], **fields, "max_tokens": 16, "stream": stream}
        status, got, _ = server.request("POST", path, body)
        assert status == 200, got
        (text,) = texts_of(got)
        assert re.fullmatch(form, text), text


def test_loosened_schema(server: Running) -> None:
    pytest.importorskip("llguidance")
    schema = {"enum": ["ab", "b"], "pattern": "^(?=a)ab", "not": {"const": 0}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    assert server.chat("hi", response_format=wanted, max_tokens=20)[0] == 200
    told = [line for line in server.notes if "a schema is followed without" in line]
    assert "pattern" in told[-1]
    assert "not" in told[-1].split("without", 1)[1]
