"""Ollama's own Python client against a running server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from localrt.hub import ResolvedModel
from localrt.progress import Progress
from localrt.serve.bodies import check_fields
from localrt.serve.errors import ApiError
from localrt.serve.ollama import models
from localrt.serve.ollama.calls import chat_call, keep_alive_s
from tests.serve.conftest import Running, needs_kernels, serving
from tests.waits import wait_for

ollama = pytest.importorskip("ollama")

HI = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"model": "tiny", "options": {"temperature": 0, "num_predict": 12}}
COLOUR = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "paint", "parameters": COLOUR}}]


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    made = ollama.Client(host=server.url)
    yield made
    made._client.close()


def test_a_chat_says_what_the_library_says(client: Any, server: Running) -> None:
    got = client.chat(messages=HI, **GREEDY)
    expected = server.model.generate("hi", temperature=0, max_tokens=12)
    assert (got.model, got.message.role, got.message.content) == (
        "tiny",
        "assistant",
        expected.text,
    )
    assert (got.done, got.done_reason) == (True, "length")
    assert got.prompt_eval_count == expected.metrics.prompt_tokens
    assert got.eval_count == 12
    assert got.total_duration >= got.eval_duration > 0


def test_a_streamed_chat_is_the_same(client: Any, silence: bool) -> None:
    whole = client.chat(messages=HI, **GREEDY)
    *pieces, last = client.chat(messages=HI, stream=True, **GREEDY)
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert not any(piece.done for piece in pieces)
    assert (last.done, last.message.content, last.eval_count) == (True, "", 12)


def test_a_prompt_with_and_without_the_template(client: Any, server: Running) -> None:
    got = client.generate(prompt="hi", system="Be brief.", **GREEDY)
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, *HI]
    expected = server.model.generate(messages, temperature=0, max_tokens=12)
    assert got.response == expected.text
    raw = client.generate(prompt="hi", raw=True, **GREEDY)
    assert raw.response == server.model.generate("hi", raw=True, temperature=0, max_tokens=12).text
    pieces = list(client.generate(prompt="hi", raw=True, stream=True, **GREEDY))
    assert "".join(piece.response for piece in pieces) == raw.response
    begun = [*HI, {"role": "assistant", "content": "Well"}]
    prefixed: list[Any] = [*HI, {**begun[1], "prefix": True}]
    expected = server.model.generate(prefixed, temperature=0, max_tokens=12)
    assert client.chat(messages=begun, **GREEDY).message.content == expected.text


def test_answers_that_follow_a_schema(client: Any) -> None:
    pytest.importorskip("llguidance", reason="needs the structured extra")
    options = {"temperature": 0, "num_predict": 300}
    got = client.chat(model="tiny", messages=HI, format=COLOUR, options=options)
    assert json.loads(got.message.content)["colour"] in ("red", "blue")
    assert got.done_reason == "stop"
    some = client.generate(model="tiny", prompt="hi", format="json", options={"num_predict": 9})
    assert some.response.lstrip()[0] == "{"


def test_minus_one_is_no_seed() -> None:
    for seed, options in ((-1, {}), (3, {"seed": 3})):
        fields = {"model": "m", "messages": HI, "truncate": False, "options": {"seed": seed}}
        call = chat_call(check_fields("OLLAMA_CHAT", fields))
        assert call is not None
        assert call.options == options


def test_num_ctx_bounds_conversation_and_answer(client: Any, server: Running) -> None:
    messages = [*HI, {"role": "assistant", "content": "a" * 60}, *HI]
    options = {"temperature": 0, "num_predict": 200}
    alone = client.chat(model="tiny", messages=HI, options={**options, "num_predict": 1})
    whole = client.chat(model="tiny", messages=messages, options={**options, "num_ctx": 400})
    cut = client.chat(model="tiny", messages=messages, options={**options, "num_ctx": 64})
    assert whole.prompt_eval_count > cut.prompt_eval_count == alone.prompt_eval_count
    assert cut.prompt_eval_count + cut.eval_count <= 64
    # A prompt that alone is longer is read, as there is room for it.
    long = client.chat(model="tiny", messages=HI, options={**options, "num_ctx": 4})
    assert long.prompt_eval_count == alone.prompt_eval_count
    server.notes.clear()
    server.service._noted.clear()
    for _ in range(2):
        client.chat(model="tiny", messages=HI, options={**options, "num_ctx": 1 << 20})
    assert sum("--ctx 1048576" in note for note in server.notes) == 1


def test_tools_and_their_results() -> None:
    messages: list[Any] = [
        *HI,
        {
            "role": "assistant",
            "thinking": "Hm.",
            "tool_calls": [
                {"function": {"name": "look", "arguments": {}}},
                {"function": {"name": "paint", "arguments": {"colour": "red"}}},
            ],
        },
        {"role": "tool", "content": "done", "tool_name": "paint"},
        {"role": "tool", "content": "seen", "tool_name": "look"},
    ]
    fields = {"messages": messages, "tools": TOOLS, **GREEDY}
    call = chat_call(check_fields("OLLAMA_CHAT", fields))
    assert call is not None
    (prompt,) = call.prompts
    assert prompt["tools"] == TOOLS
    _, said, painted, seen = prompt["prompt"]
    look, paint = said["tool_calls"]
    assert paint["function"] == {"name": "paint", "arguments": '{"colour": "red"}'}
    assert (painted["tool_call_id"], seen["tool_call_id"]) == (paint["id"], look["id"])
    assert said["reasoning_content"] == "Hm."


def test_a_call_of_a_tool(client: Any, monkeypatch: pytest.MonkeyPatch, server: Running) -> None:
    pytest.importorskip("llguidance", reason="needs the structured extra")
    # Ollama's clients cannot ask for a call, which a random model would not make by itself.
    monkeypatch.setitem(server.model.defaults, "tool_choice", "required")
    options = {"temperature": 0, "num_predict": 300}
    fields: dict[str, Any] = {"model": "tiny", "messages": HI, "tools": TOOLS, "options": options}
    (call,) = client.chat(**fields).message.tool_calls
    assert call.function.name == "paint"
    assert call.function.arguments["colour"] in ("red", "blue")
    *_, piece, last = client.chat(stream=True, **fields)
    assert piece.message.tool_calls[0].function == call.function
    assert (last.done, last.done_reason) == (True, "stop")


def test_thinking_is_apart(thinker: Running) -> None:
    client = ollama.Client(host=thinker.url)
    fields: dict[str, Any] = {"model": "thinker", "messages": HI, "options": {"num_predict": 20}}
    got = client.chat(think="low", **fields)
    assert got.message.thinking
    assert not got.message.content
    assert not client.chat(think=False, **fields).message.thinking
    pieces = list(client.chat(think=True, stream=True, **fields))
    assert "".join(piece.message.thinking or "" for piece in pieces) == got.message.thinking
    client._client.close()


def test_embeddings(client: Any, server: Running) -> None:
    expected = server.model.embed(["hi", "ho"])
    got = client.embed(model="tiny", input=["hi", "ho"])
    assert [pytest.approx(row.tolist()) for row in expected] == [list(r) for r in got.embeddings]
    assert got.prompt_eval_count == 4
    one = client.embeddings(model="tiny", prompt="hi")
    assert list(one.embedding) == pytest.approx(expected[0].tolist())
    assert client.embed(model="tiny", input="x" * 600).prompt_eval_count == server.model.info.ctx
    with pytest.raises(ollama.ResponseError, match="context"):
        client.embed(model="tiny", input="x" * 600, truncate=False)


def test_what_there_is(client: Any, server: Running) -> None:
    (listed,) = client.list().models
    assert (listed.model, listed.details.family) == ("tiny", "LlamaForCausalLM")
    (runs,) = client.ps().models
    assert (runs.name, runs.context_length) == ("tiny", server.model.info.ctx)
    shown = client.show("tiny")
    assert "completion" in shown.capabilities
    assert shown.modelinfo["general.parameter_count"] > 0
    assert "<|im_start|>" in shown.template
    assert server.request("GET", "/")[:2] == (200, "localrt is running")
    assert server.request("GET", "/api/version")[1]["version"]
    body = json.dumps([client.list().model_dump(mode="json"), shown.model_dump(mode="json")])
    assert str(server.model.info.path) not in body


def test_loading_alone_and_how_long_it_stays(client: Any) -> None:
    assert client.generate(model="tiny", keep_alive="10m").done_reason == "load"
    assert client.chat(model="tiny", keep_alive=0).done_reason == "unload"
    assert [keep_alive_s(given) for given in (None, 5, "5m", "-1", "-1m")] == [
        *(None, 5, 300, -1, -60)
    ]
    with pytest.raises(ollama.ResponseError, match="keep_alive"):
        client.generate(model="tiny", keep_alive="soon")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": [{"role": "robot", "content": "a"}]}, "role"),
        ({"think": True}, "does not think"),
    ],
)
def test_errors_have_ollamas_form(client: Any, fields: Any, words: str) -> None:
    with pytest.raises(ollama.ResponseError, match=words):
        client.chat(**{"messages": HI, **GREEDY, **fields})


def test_models_are_pulled_where_that_is_allowed(
    client: Any, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ollama.ResponseError, match="--allow-pull"):
        client.pull("org/name")
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

    monkeypatch.setattr(models, "resolve", resolve)
    with serving(server.model, name="tiny", allow_pull=True) as running:
        puller = ollama.Client(host=running.url)
        assert puller.pull("org/name").status == "success"
        steps = list(puller.pull("org/name", stream=True))
        assert [step.status for step in (steps[0], steps[-1])] == ["pulling manifest", "success"]
        assert [(step.completed, step.total) for step in steps[1:-1]] == [
            (0, 10),
            (5, 10),
            (10, 10),
        ]
        with pytest.raises(ollama.ResponseError, match="no such model"):
            list(puller.pull("org/none", stream=True))
        with pytest.raises(ollama.ResponseError, match="no model of the hub"):
            puller.pull("/etc/passwd")
        endless = puller.pull("org/endless", stream=True)
        next(endless)
        endless.close()
        assert cancelled.wait(10)
        puller._client.close()


def test_downloads_take_turns_and_leave_room_for_answers(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on, begun = threading.Event(), list[str]()

    def resolve(name: str, **_: Any) -> ResolvedModel:
        begun.append(name)
        going_on.wait(60)
        return ResolvedModel(name, Path("m.gguf"), None, "hub")

    monkeypatch.setattr(models, "resolve", resolve)
    with (
        serving(server.model, name="tiny", allow_pull=True) as running,
        ThreadPoolExecutor() as pool,
    ):
        body = {"model": "org/name", "stream": False}
        pulls = [pool.submit(running.request, "POST", "/api/pull", body) for _ in range(6)]
        try:
            wait_for(lambda: len(begun) == 1)
            assert running.chat(max_tokens=1)[0] == 200
            assert len(begun) == 1
        finally:
            going_on.set()
        assert [pull.result(60)[0] for pull in pulls] == [200] * 6
    assert len(begun) == 6


@needs_kernels
async def test_several_at_once_say_what_each_says_alone(server: Running) -> None:
    client = ollama.AsyncClient(host=server.url)

    async def ask(text: str) -> str:
        messages = [{"role": "user", "content": text}]
        stream = await client.chat(messages=messages, stream=True, **GREEDY)
        return "".join([piece.message.content async for piece in stream])

    texts = ["hi", "why?", "Name three rivers, " * 5]
    alone = [await ask(text) for text in texts]
    assert await asyncio.gather(*map(ask, texts)) == alone
    await client._client.aclose()


@pytest.mark.usefixtures("slow")
def test_a_stream_that_is_left_is_cancelled(client: Any, server: Running) -> None:
    stream = client.chat(model="tiny", messages=HI, stream=True, options={"num_predict": 400})
    next(stream)
    stream.close()
    wait_for(server.idle)
