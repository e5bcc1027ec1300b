"""The vendors' own Python clients against a running server: what only one dialect has."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from localrt.common.progress import Progress
from localrt.hub import ResolvedModel
from localrt.server import ollama_models
from localrt.server.errors import ApiError
from localrt.server.ollama import keep_alive_s
from localrt.server.service import ResponseStore
from tests.server.conftest import Running, serving
from tests.server.dialects import HI, client_of, colours

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0}
CHAT: dict[str, Any] = {**GREEDY, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
RESPONSE: dict[str, Any] = {**GREEDY, "max_output_tokens": 12}
MESSAGE: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "extra_body": {"temperature": 0}}
OLLAMA: dict[str, Any] = {"model": "tiny", "options": {"temperature": 0, "num_predict": 12}}


@pytest.fixture
def openai(server: Running) -> Any:
    return client_of("openai", server.url)


@pytest.fixture
def anthropic(server: Running) -> Any:
    return client_of("anthropic", server.url)


@pytest.fixture
def ollama(server: Running) -> Any:
    return client_of("ollama", server.url)


# -- OpenAI's chat and text completions ------------------------------------------------------------


def test_form_of_a_chat(openai: Any) -> None:
    create = openai.chat.completions.create
    whole, again = (create(messages=HI, **CHAT) for _ in range(2))
    assert (whole.object, whole.choices[0].logprobs) == ("chat.completion", None)
    assert whole._request_id.startswith("req_")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    assert again.usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1
    usage = {"stream_options": {"include_usage": True}}
    events = list(create(messages=HI, stream=True, **usage, **CHAT))
    assert events[0].choices[0].delta.role == "assistant"
    assert events[-1].choices == []
    assert len({event.id for event in events}) == 1
    assert all(event.usage is None for event in events[:-1])


def test_choices_and_seed(openai: Any) -> None:
    create = openai.chat.completions.create
    options: dict[str, Any] = {**CHAT, "messages": HI, "temperature": 1.5, "seed": 7, "n": 3}
    one, two = create(**options), create(**options)
    texts = [choice.message.content for choice in one.choices]
    assert [choice.index for choice in one.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in two.choices]
    assert one.usage.completion_tokens == 36


def test_log_probabilities_of_a_chat(openai: Any) -> None:
    options = {**CHAT, "messages": HI, "logprobs": True, "top_logprobs": 3}
    got = openai.chat.completions.create(**options)
    content = got.choices[0].logprobs.content
    assert len(content) == 12
    assert b"".join(bytes(one.bytes) for one in content).decode("utf-8", "replace")
    for one in content:
        assert len(one.top_logprobs) == 3
        assert one.logprob == max(top.logprob for top in one.top_logprobs) <= 0


def test_text_completions(openai: Any, server: Running) -> None:
    create, ids = openai.completions.create, server.model.tokenize("hi")
    texts = [create(prompt=prompt, **CHAT).choices[0].text for prompt in ("hi", ["hi"], ids, [ids])]
    expected = server.model.generate("hi", raw=True, temperature=0, max_tokens=12, ignore_eos=True)
    assert texts == [expected.text] * 4
    many = create(prompt=["hi", "ho"], n=2, echo=True, **CHAT)
    assert [choice.text[:2] for choice in many.choices] == ["hi", "hi", "ho", "ho"]
    events = list(create(prompt="hi", stream=True, **CHAT))
    assert "".join(event.choices[0].text for event in events) == expected.text


def test_embeddings(openai: Any, server: Running) -> None:
    expected = server.model.embed(["hi", "ho"])
    got = openai.embeddings.create(model="tiny", input=["hi", "ho"])  # asks for base64
    assert [one.embedding for one in got.data] == [pytest.approx(row.tolist()) for row in expected]
    assert got.usage.prompt_tokens == 4


# -- OpenAI's Responses ----------------------------------------------------------------------------


def test_events_of_a_response(openai: Any) -> None:
    whole = openai.responses.create(input="hi", **RESPONSE)
    assert (whole.object, whole.model, whole.status) == ("response", "tiny", "incomplete")
    with openai.responses.stream(input="hi", **RESPONSE) as stream:
        events = list(stream)
    assert events[-1].response.output_text == whole.output_text
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if not event.type.endswith("delta")]
    assert list(dict.fromkeys(kinds)) == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        *("response.content_part.added", "response.output_text.done"),
        *("response.content_part.done", "response.output_item.done", "response.incomplete"),
    ]
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    found = openai.responses.create(input="hi", **more, **RESPONSE).output[0].content[0].logprobs
    assert [len(one.top_logprobs) for one in found] == [2] * 12


def test_previous_response(openai: Any) -> None:
    create = openai.responses.create
    hi, why = ({"role": "user", "content": text} for text in ("hi", "why?"))
    first = create(input="hi", **RESPONSE)
    follows = {"previous_response_id": first.id, "instructions": "Be brief."}
    second = create(input="why?", **follows, **RESPONSE)
    said = {"role": "assistant", "content": first.output_text}
    by_hand = create(input=[hi, said, why], instructions="Be brief.", **RESPONSE)
    assert second.output_text == by_hand.output_text
    assert second.previous_response_id == first.id
    # What the client got can be sent back as it is.
    again = create(input=[hi, *first.output, why], instructions="Be brief.", **RESPONSE)
    assert again.output_text == by_hand.output_text
    then = create(previous_response_id=first.id, **RESPONSE)
    assert then.usage.input_tokens > first.usage.input_tokens
    unkept = create(input="hi", store=False, **RESPONSE)
    with pytest.raises(pytest.importorskip("openai").BadRequestError) as caught:
        create(input="why?", previous_response_id=unkept.id, **RESPONSE)
    assert caught.value.code == "previous_response_not_found"


def test_item_references(openai: Any) -> None:
    """The ``ai`` package sends items back by their ids alone."""
    create = openai.responses.create
    hi, why = {"role": "user", "content": "hi", "id": "msg_hi"}, {"role": "user", "content": "why?"}
    first = create(input=[hi], **RESPONSE)
    second = create(input=[hi, *first.output, why], **RESPONSE)
    references = [{"type": "item_reference", "id": id} for id in ("msg_hi", first.output[0].id)]
    assert create(input=[*references, why], **RESPONSE).output_text == second.output_text
    assert create(input=[{"id": "msg_hi"}], **RESPONSE).output_text == first.output_text


RED = colours("red")
REGEX = {"type": "grammar", "syntax": "regex", "definition": "red"}
CALLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"type": "custom", "name": "paint", "format": REGEX},
        {"type": "custom_tool_call", "name": "paint", "input": "red"},
    ),
    (
        {
            "type": "namespace",
            "name": "mcp__art__",
            "tools": [{"type": "function", "name": "paint", "parameters": RED}],
        },
        {"type": "function_call", "namespace": "mcp__art__", "name": "paint"},
    ),
    (
        {"type": "tool_search", "execution": "client", "parameters": RED},
        {"type": "tool_search_call", "execution": "client", "arguments": {"colour": "red"}},
    ),
]


@pytest.mark.parametrize(("tool", "expected"), CALLS)
def test_calls_of_a_response(openai: Any, tool: Any, expected: Any) -> None:
    pytest.importorskip("llguidance", reason="needs the structured extra")
    fields = {**RESPONSE, "max_output_tokens": 300, "tools": [tool], "input": "hi"}
    fields |= {"tool_choice": "required", "parallel_tool_calls": False}
    got = openai.responses.create(**fields)
    (call,) = [item.model_dump() for item in got.output]
    assert got.status == "completed"
    assert {name: call[name] for name in expected} == expected
    with openai.responses.stream(**fields) as stream:
        (streamed,) = stream.get_final_response().output
    same = {**streamed.model_dump(), "id": call["id"], "call_id": call["call_id"]}
    assert same | call == same
    output = {"type": expected["type"] + "_output", "call_id": call["call_id"], "output": "done"}
    for before in ({"previous_response_id": got.id}, {}):
        items = [output] if before else [*HI, *got.output, output]
        after = openai.responses.create(input=items, **before, **RESPONSE)
        assert after.usage.output_tokens


def test_store_limits() -> None:
    now = 0.0
    store = ResponseStore(most=2, most_bytes=500, seconds=10, now=lambda: now)
    for name in "abc":
        store.put({"id": name}, [{"id": f"item {name}"}, {"id": "both"}])
    assert [store.get(name) is not None for name in "abc"] == [False, True, True]
    assert [store.item(f"item {name}") is not None for name in "abc"] == [False, True, True]
    store.put({"id": "large", "text": "x" * 490}, [])
    assert store.get("c") is None
    now = 11.0
    assert store.get("large") is None


# -- Anthropic's Messages --------------------------------------------------------------------------


def test_models(openai: Any, anthropic: Any) -> None:
    for library in (openai, anthropic):
        (listed,) = library.models.list()
        assert listed.id == library.models.retrieve("tiny").id == "tiny"
    assert (listed.type, listed.display_name) == ("model", "tiny")
    with pytest.raises(pytest.importorskip("openai").NotFoundError) as caught:
        openai.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"
    missing = pytest.importorskip("anthropic").NotFoundError
    with pytest.raises(missing) as caught:
        anthropic.models.retrieve("nothing")
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "not_found_error"


def test_events_of_a_message(anthropic: Any) -> None:
    with anthropic.messages.stream(messages=HI, **MESSAGE) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert (final.type, final.role, final.model) == ("message", "assistant", "tiny")
    whole = anthropic.messages.create(messages=HI, **MESSAGE)
    assert whole._request_id.startswith("req_")
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1


def test_thinking_block(thinker: Running) -> None:
    create = client_of("anthropic", thinker.url).messages.create
    fields: dict[str, Any] = {"model": thinker.name, "messages": HI, "max_tokens": 40}
    got = create(thinking={"type": "enabled", "budget_tokens": 5}, **fields)
    assert [block.type for block in got.content] == ["thinking", "text"]
    assert got.content[0].signature
    assert got.usage.output_tokens_details.thinking_tokens == 5
    # Back to the model, and without thinking, which is how it is when nothing is said.
    messages = [*HI, {"role": "assistant", "content": got.content}, *HI]
    plain = create(**{**fields, "messages": messages})
    assert [block.type for block in plain.content] == ["text"]


# -- Ollama ----------------------------------------------------------------------------------------


def test_ollamas_answers(ollama: Any, server: Running) -> None:
    got = ollama.chat(messages=HI, **OLLAMA)
    assert (got.model, got.message.role) == ("tiny", "assistant")
    assert got.total_duration >= got.eval_duration > 0
    got = ollama.generate(prompt="hi", system="Be brief.", **OLLAMA)
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, *HI]
    expected = server.model.generate(messages, temperature=0, max_tokens=12)
    assert got.response == expected.text
    raw = ollama.generate(prompt="hi", raw=True, **OLLAMA)
    assert raw.response == server.model.generate("hi", raw=True, temperature=0, max_tokens=12).text


def test_num_ctx(ollama: Any, server: Running) -> None:
    messages = [*HI, {"role": "assistant", "content": "a" * 60}, *HI]

    def chat(messages: Any, most: int = 200, **options: Any) -> Any:
        options |= {"temperature": 0, "num_predict": most}
        return ollama.chat(model="tiny", messages=messages, options=options)

    alone = chat(HI, 1)
    whole, cut = chat(messages, num_ctx=400), chat(messages, num_ctx=64)
    assert whole.prompt_eval_count > cut.prompt_eval_count == alone.prompt_eval_count
    assert cut.prompt_eval_count + cut.eval_count <= 64
    server.notes.clear()
    server.service._noted.clear()
    for _ in range(2):
        chat(HI, 1, num_ctx=1 << 20)
    assert sum("--ctx 1048576" in note for note in server.notes) == 1


def test_tokens_from_a_cache(server: Running) -> None:
    """Their count is left out where there are none, as in Ollama."""
    body = {"model": "tiny", "prompt": "asked once more", "options": {"num_predict": 2}}
    server.request("POST", "/api/generate", {**body, "stream": False})
    _, text, _ = server.request("POST", "/api/generate", body)
    last = json.loads(text.splitlines()[-1])
    assert 0 < last["prompt_eval_cached_count"] < last["prompt_eval_count"]


def test_ollamas_embeddings(ollama: Any, server: Running) -> None:
    assert ollama.embed(model="tiny", input=["hi", "ho"]).prompt_eval_count == 4
    one = ollama.embeddings(model="tiny", prompt="hi")
    assert list(one.embedding) == pytest.approx(server.model.embed(["hi"])[0].tolist())
    assert ollama.embed(model="tiny", input="x" * 600).prompt_eval_count == server.model.info.ctx
    with pytest.raises(pytest.importorskip("ollama").ResponseError, match="context"):
        ollama.embed(model="tiny", input="x" * 600, truncate=False)


def test_what_there_is(ollama: Any, server: Running) -> None:
    (listed,) = ollama.list().models
    assert (listed.model, listed.details.family) == ("tiny", "LlamaForCausalLM")
    (runs,) = ollama.ps().models
    assert (runs.name, runs.context_length) == ("tiny", server.model.info.ctx)
    shown = ollama.show("tiny")
    assert "completion" in shown.capabilities
    assert shown.modelinfo["general.parameter_count"] > 0
    assert "<|im_start|>" in shown.template
    assert server.request("GET", "/")[:2] == (200, "localrt is running")
    assert server.request("GET", "/api/version")[1]["version"]
    body = json.dumps([ollama.list().model_dump(mode="json"), shown.model_dump(mode="json")])
    assert str(server.model.info.path) not in body


def test_load_and_keep_alive(ollama: Any) -> None:
    assert ollama.generate(model="tiny", keep_alive="10m").done_reason == "load"
    assert ollama.chat(model="tiny", keep_alive=0).done_reason == "unload"
    given = (None, 5, "5m", "-1", "-1m")
    assert [*map(keep_alive_s, given)] == [None, 5, 300, -1, -60]


def test_pull(ollama: Any, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = pytest.importorskip("ollama").ResponseError
    assert [*ollama.pull("tiny", stream=True)][-1].status == "success"
    with pytest.raises(refused, match="--allow-pull"):
        ollama.pull("org/name")
    cancelled = threading.Event()

    def resolve(name: str, *, progress: Any, cancel: threading.Event, **_: Any) -> ResolvedModel:
        for done in (0, 5, 10):
            progress(Progress("download", done, 10, "bytes", "m.gguf"))
        if name == "org/endless":
            cancel.wait(60)
            cancelled.set()
        if name == "org/none":
            raise ApiError(404, "no such model")
        return ResolvedModel(name, Path("m.gguf"), None, "hub")

    monkeypatch.setattr(ollama_models, "resolve", resolve)
    with serving(server.model, name="tiny", allow_pull=True) as running:
        puller = client_of("ollama", running.url)
        assert puller.pull("org/name").status == "success"
        first, *steps, last = puller.pull("org/name", stream=True)
        assert (first.status, last.status) == ("pulling manifest", "success")
        assert [(step.completed, step.total) for step in steps] == [(0, 10), (5, 10), (10, 10)]
        with pytest.raises(refused, match="no such model"):
            list(puller.pull("org/none", stream=True))
        with pytest.raises(refused, match="no model of the hub"):
            puller.pull("/etc/passwd")
        endless = puller.pull("org/endless", stream=True)
        next(endless)
        endless.close()
        assert cancelled.wait(60)


# -- localrt's own ---------------------------------------------------------------------------------


def test_thinking_limits(thinker: Running) -> None:
    for fields, thought in (
        ({}, 40),
        ({"thinking_tokens": 5}, 5),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 0),
    ):
        status, got, _ = thinker.chat(**fields)
        assert status == 200, got
        assert got["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}
