"""OpenAI's own Python client against a running server."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import localrt
from tests.chat_format.call_templates import TEMPLATES
from tests.conftest import write_tiny_model
from tests.loading.test_loading import write_model
from tests.server.conftest import Running, serving
from tests.server.dialects import HI, events_in

openai = pytest.importorskip("openai")

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def client(server: Running) -> Any:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


def test_form_of_a_chat(client: Any, silence: bool) -> None:
    whole = client.chat.completions.create(model="tiny", messages=HI, **GREEDY)
    again = client.chat.completions.create(model="tiny", messages=HI, **GREEDY)
    assert (whole.object, whole.choices[0].logprobs) == ("chat.completion", None)
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    assert again.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    events = list(
        client.chat.completions.create(
            model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-1].choices == []
    assert len({event.id for event in events}) == 1
    assert all(event.usage is None for event in events[:-1])
    plain = list(client.chat.completions.create(model="", messages=HI, stream=True, **GREEDY))
    assert all(event.usage is None for event in plain)
    assert plain[-1].choices[0].finish_reason == "length"


def test_choices_and_seed(client: Any) -> None:
    options: dict[str, Any] = {**GREEDY, "temperature": 1.5, "seed": 7, "n": 3}
    one = client.chat.completions.create(model="tiny", messages=HI, **options)
    two = client.chat.completions.create(model="tiny", messages=HI, **options)
    texts = [choice.message.content for choice in one.choices]
    assert [choice.index for choice in one.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in two.choices]
    assert one.usage.completion_tokens == 36
    streamed: dict[int, str] = {}
    for event in client.chat.completions.create(model="tiny", messages=HI, stream=True, **options):
        choice = event.choices[0]
        streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert [streamed[index] for index in range(3)] == texts
    negative = client.chat.completions.create(model="tiny", messages=HI, **{**options, "seed": -1})
    assert len(negative.choices) == 3


def test_log_probabilities_of_a_chat(client: Any, server: Running) -> None:
    got = client.chat.completions.create(
        model="tiny", messages=HI, logprobs=True, top_logprobs=3, **GREEDY
    )
    content = got.choices[0].logprobs.content
    assert len(content) == 12
    assert b"".join(bytes(one.bytes) for one in content).decode("utf-8", "replace")
    for one in content:
        assert len(one.top_logprobs) == 3
        assert one.logprob == max(top.logprob for top in one.top_logprobs) <= 0
    streamed = client.chat.completions.create(
        model="tiny", messages=HI, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    )
    found = [
        one
        for event in streamed
        if event.choices[0].logprobs
        for one in event.choices[0].logprobs.content
    ]
    assert [one.logprob for one in found] == [one.logprob for one in content]


def test_text_completions(client: Any, server: Running) -> None:
    ids = server.model.tokenize("hi")
    texts = [
        client.completions.create(model="tiny", prompt=prompt, **GREEDY).choices[0].text
        for prompt in ("hi", ["hi"], ids, [ids])
    ]
    expected = server.model.generate("hi", raw=True, temperature=0, max_tokens=12, ignore_eos=True)
    assert texts == [expected.text] * 4
    many = client.completions.create(model="tiny", prompt=["hi", "ho"], n=2, echo=True, **GREEDY)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert [choice.text[:2] for choice in many.choices] == ["hi", "hi", "ho", "ho"]
    assert many.usage.prompt_tokens == 4
    events = list(client.completions.create(model="tiny", prompt="hi", stream=True, **GREEDY))
    assert "".join(event.choices[0].text for event in events) == expected.text


def test_models(client: Any) -> None:
    (listed,) = client.models.list().data
    assert listed.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


def test_embeddings(client: Any, server: Running) -> None:
    expected = server.model.embed(["hi", "ho"])
    got = client.embeddings.create(model="tiny", input=["hi", "ho"])  # asks for base64
    assert [one.embedding for one in got.data] == [pytest.approx(row.tolist()) for row in expected]
    assert got.usage.prompt_tokens == 4


@pytest.mark.parametrize("path", ["/v1/embeddings", "/api/embed"])
@pytest.mark.parametrize("dimensions", [None, 64, 8])
@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ("hi", ["hi"]),
        ([5, 6], [[5, 6]]),
        ([[5, 6]], [[5, 6]]),
        ("", [" "]),
        (["", "a"], [" ", "a"]),
        ([], []),
    ],
)
def test_vectors(server: Running, path: str, given: Any, texts: Any, dimensions: Any) -> None:
    body = {"model": "tiny", "input": given, "dimensions": dimensions}
    status, got, _ = server.request("POST", path, body)
    assert status == 200, got
    found = [one["embedding"] for one in got["data"]] if "data" in got else got["embeddings"]
    cut = [row[: dimensions or 64] for row in (server.model.embed(texts) if texts else ())]
    expected = [pytest.approx((row / (row @ row) ** 0.5).tolist(), 1e-4) for row in cut]
    assert found == expected


# -- forms of the answer ---------------------------------------------------------------------------

ENUM = {"enum": ["ab", "b"]}
SAID, CHOSEN = r'"ab"|"b"', "ab|b[.]"
# Fields for the form of an answer, as several servers name them, and what the answer then is.
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": ENUM}}}, SAID),
    ({"response_format": {"type": "json_object", "schema": ENUM}}, SAID),
    ({"response_format": {"type": "json_schema", "schema": ENUM}}, SAID),  # llama.cpp
    ({"json_schema": ENUM}, SAID),
    ({"grammar": 'root ::= "ab" | "b."'}, CHOSEN),
    ({"json_schema": json.dumps(ENUM)}, SAID),  # SGLang
    ({"regex": "ab|b[.]"}, CHOSEN),
    ({"format": ENUM}, SAID),  # Ollama
    ({"format": ENUM, "json_schema": ENUM, "regex": "", "grammar": None}, SAID),
]
OBJECTS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"format": "json"},
]
ASKED = {"/v1/chat/completions": {"messages": HI}, "/v1/completions": {"prompt": "hi"}}


def texts_of(answer: Any) -> list[str]:
    """The text of each choice, whole or from the events of a stream."""
    if isinstance(answer, dict):
        return [one.get("text") or one["message"]["content"] for one in answer["choices"]]
    deltas = [event["choices"][0] for event in events_in(answer)]
    return ["".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in deltas)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize(("fields", "form"), [*FORMS, *((one, r"[{]") for one in OBJECTS)])
def test_forms(server: Running, path: str, fields: Any, form: str, stream: bool) -> None:
    pytest.importorskip("llguidance")
    body = {**ASKED[path], **fields, "max_tokens": 16, "stream": stream}
    status, got, headers = server.request("POST", path, body)
    assert status == 200, got
    (text,) = texts_of(got)
    assert re.match(form, text.lstrip()) if form == r"[{]" else re.fullmatch(form, text), text
    assert not any("schema" in name for name in headers)


def test_form_behind_an_echo(server: Running) -> None:
    """The prompt does not have the form."""
    pytest.importorskip("llguidance")
    body = {"prompt": "hi", "echo": True, "json_schema": ENUM, "max_tokens": 16}
    for stream in (False, True):
        _, got, _ = server.request("POST", "/v1/completions", {**body, "stream": stream})
        (text,) = texts_of(got)
        assert re.fullmatch(f"hi({SAID})", text)


# -- a real model ----------------------------------------------------------------------------------


@pytest.mark.llamacpp
def test_llamacpp_engine(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="needs the llamacpp extra")
    path = write_model(tmp_path / "m.gguf", "llama", "F32")
    with localrt.load(path, engine="llamacpp", ctx=128) as model:
        expected = model.generate("ab", raw=True, temperature=0, max_tokens=6, ignore_eos=True)
        with (
            serving(model) as running,
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="any") as client,
            ThreadPoolExecutor(3) as pool,
        ):
            options: dict[str, Any] = {**GREEDY, "max_tokens": 6, "model": running.model.name}
            answers = list(
                pool.map(lambda _: client.completions.create(prompt="ab", **options), range(3))
            )
            assert [one.choices[0].text for one in answers] == [expected.text] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_loosened_schema(server: Running, stream: bool) -> None:
    pytest.importorskip("llguidance")
    schema = {"enum": ["ab", "b"], "pattern": "^(?=a)ab", "not": {"const": int(stream)}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    status, _, headers = server.chat("hi", response_format=wanted, max_tokens=20, stream=stream)
    assert status == 200
    assert not any("schema" in name for name in headers)
    told = [line for line in server.notes if "a schema is followed without" in line]
    assert "pattern" in told[-1]
    assert "not" in told[-1].split("without", 1)[1]


def test_what_does_not_bind_a_forced_call(tmp_path: Path) -> None:
    """The template writes arguments as text in tags, and a grammar cannot look into these."""
    pytest.importorskip("llguidance")
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    folder = write_tiny_model(tmp_path, template=TEMPLATES["GLM"])
    with localrt.load(folder, draft="off") as model, serving(model) as running:
        for stream in (False, True):
            options = {"tools": tools, "tool_choice": "required", "max_tokens": 4, "stream": stream}
            running.chat(**options)
        assert any("followed without maxLength" in note for note in running.notes)
