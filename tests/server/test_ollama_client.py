"""Ollama's own Python client against a running server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from localrt.common.progress import Progress
from localrt.hub import ResolvedModel
from localrt.server import ollama_models as models
from localrt.server.errors import ApiError
from localrt.server.ollama import keep_alive_s
from tests.server.conftest import Running, serving
from tests.server.dialects import HI
from tests.waits import wait_for

ollama = pytest.importorskip("ollama")

GREEDY: dict[str, Any] = {"model": "tiny", "options": {"temperature": 0, "num_predict": 12}}


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    made = ollama.Client(host=server.url)
    yield made
    made._client.close()


def test_form_of_a_chat(client: Any) -> None:
    got = client.chat(messages=HI, **GREEDY)
    assert (got.model, got.message.role) == ("tiny", "assistant")
    assert got.total_duration >= got.eval_duration > 0


def test_generate_raw(client: Any, server: Running) -> None:
    got = client.generate(prompt="hi", system="Be brief.", **GREEDY)
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, *HI]
    expected = server.model.generate(messages, temperature=0, max_tokens=12)
    assert got.response == expected.text
    raw = client.generate(prompt="hi", raw=True, **GREEDY)
    assert raw.response == server.model.generate("hi", raw=True, temperature=0, max_tokens=12).text
    pieces = list(client.generate(prompt="hi", raw=True, stream=True, **GREEDY))
    assert "".join(piece.response for piece in pieces) == raw.response


def test_num_ctx(client: Any, server: Running) -> None:
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


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
@pytest.mark.parametrize("stream", [False, True])
def test_tokens_from_a_cache(server: Running, path: str, stream: bool) -> None:
    text = f"{path} {stream} once more"  # no other test's
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "prompt": text}
    body |= {"stream": stream, "options": {"num_predict": 2}}
    for known in (False, True):
        _, got, _ = server.request("POST", path, body)
        last = json.loads(got.splitlines()[-1]) if stream else got
        if known:
            assert 0 < last["prompt_eval_cached_count"] < last["prompt_eval_count"]
        else:
            assert last.get("prompt_eval_cached_count", 1) > 0


def test_embeddings(client: Any, server: Running) -> None:
    assert client.embed(model="tiny", input=["hi", "ho"]).prompt_eval_count == 4
    one = client.embeddings(model="tiny", prompt="hi")
    assert list(one.embedding) == pytest.approx(server.model.embed(["hi"])[0].tolist())
    assert client.embed(model="tiny", input="x" * 600).prompt_eval_count == server.model.info.ctx
    with pytest.raises(ollama.ResponseError, match="context"):
        client.embed(model="tiny", input="x" * 600, truncate=False)
    body = {"model": "tiny", "prompt": "hi", "dimensions": 4}  # unknown there, and so ignored
    assert server.request("POST", "/api/embeddings", body)[0] == 200


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


def test_load_and_keep_alive(client: Any) -> None:
    assert client.generate(model="tiny", keep_alive="10m").done_reason == "load"
    assert client.chat(model="tiny", keep_alive=0).done_reason == "unload"
    assert [keep_alive_s(given) for given in (None, 5, "5m", "-1", "-1m")] == [
        *(None, 5, 300, -1, -60)
    ]


def test_pull(client: Any, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_pulls_take_turns(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
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
