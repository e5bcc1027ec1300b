"""What clients send and look for, as tables: the next report of a client is one more row."""

from __future__ import annotations

import http.client
import json
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.server import generating
from localrt.server.errors import ApiError
from localrt.server.guard import Paths
from localrt.server.models import meant
from localrt.server.options import ServeOptions
from localrt.server.pool import LocalFile, ModelPool
from localrt.service.live import LiveModel
from tests.server.conftest import Running, serving
from tests.server.dialects import BODIES, SIGNS, events_in
from tests.waits import wait_for

LONG = "x" * 600  # tokens, where 512 fit
ROUTES = (
    *("/", "/health", "/api/tags", "/v1/models", "/v1/models/{name:path}", "/v1/chat/completions"),
)


# -- names of models -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/api/chat"])
def test_any_model_name_is_echoed(server: Running, path: str) -> None:
    fields = {"max_tokens": 4, **BODIES[path], "model": "openai/gpt-5-mini"}
    status, body, _ = server.request("POST", path, fields)
    assert (status, body["model"]) == (200, "openai/gpt-5-mini")
    status, text, _ = server.request("POST", path, {**fields, "stream": True})
    assert status == 200
    assert set(re.findall(r'"model":"([^"]*)"', text)) == {"openai/gpt-5-mini"}


def test_strict_models(model: localrt.Model) -> None:
    with serving(model, name="tiny", strict_models=True) as running:
        for path in (*BODIES, "/v1/embeddings"):
            fields = {"max_tokens": 4, "input": "hi", **BODIES.get(path, {})}
            status, body, _ = running.request("POST", path, {**fields, "model": "gpt-5"})
            assert status == 404
            assert "'gpt-5' is not here: this server runs 'tiny'" in json.dumps(body)
            assert running.request("POST", path, {**fields, "model": "org/Tiny"})[0] == 200


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("qwen3", "qwen3"),
        ("unsloth/qwen3:latest", "qwen3"),
        ("Gemma:q4_k_m", "google/Gemma:Q4_K_M"),
        ("other/gemma", None),  # another publisher's
        ("phi", None),  # two
        ("QWEN3", "qwen3"),
        ("org/model:q8_0", "org/Model:Q8_0"),
        ("org/model", None),  # two
        ("/etc/passwd", None),
    ],
)
def test_name_that_is_meant(name: str, found: str | None) -> None:
    names = ["qwen3", "google/Gemma:Q4_K_M", "a/phi", "b/phi", "org/Model:Q4_K_M", "org/Model:Q8_0"]
    assert meant(name, names) == found


@pytest.mark.parametrize(
    ("names", "options", "asked", "found"),
    [
        ({"a": (), "b": ("*",)}, {}, "gpt-5", "b"),
        ({"a": (), "b": ("fast",)}, {}, "Fast", "b"),
        ({"a": (), "b": ("*",)}, {"strict_models": True}, "gpt-5", None),
        ({"a": (), "b": ()}, {}, "gpt-5", None),
        ({"a": ()}, {}, "gpt-5", "a"),
    ],
)
def test_alias_of_any_name(
    names: dict[str, tuple[str, ...]], options: dict[str, Any], asked: str, found: str | None
) -> None:
    files = [LocalFile(name, name, 1, aliases=aliases) for name, aliases in names.items()]
    pool = ModelPool(_no_load, lambda: files, ServeOptions(**options))
    if found is None:
        with pytest.raises(ApiError, match="not here"):
            pool.find(asked)
    else:
        assert pool.find(asked).name == found
    with pytest.raises(ApiError, match="not here"):
        pool.find("gpt-5", exact=True)


def _no_load(*_: Any) -> localrt.Model:
    raise AssertionError("nothing is loaded")


# -- paths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("//v1/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/models/", "/v1/models"),
        ("/models/org/name", "/v1/models/org/name"),
        ("/v1/api/tags", "/api/tags"),
        ("/v1/health", "/health"),
        ("//", "/"),
        ("/nothing", "/nothing"),
    ],
)
def test_paths_that_base_urls_make(given: str, found: str) -> None:
    assert Paths(ROUTES).meant(given) == found


def test_paths_of_keys_and_log(model: localrt.Model) -> None:
    with serving(model, name="tiny", api_key="k") as running:
        key = {"Authorization": "Bearer k"}
        for path in ("//v1/models", "/v1/v1/models/", "/models"):
            assert running.request("GET", path)[0] == 401
            status, body, _ = running.request("GET", path, headers=key)
            assert (status, body["object"]) == (200, "list")
            wait_for(lambda path=path: path in [line.path for line in running.log])
        assert running.request("GET", "/v1/health/")[0] == 200


# -- compressed bodies -----------------------------------------------------------------------------


def test_compressed_bodies(server: Running) -> None:
    headers = {"Content-Encoding": "gzip"}
    status, answer, _ = server.request("POST", "/v1/completions", b"...", headers)
    assert (status, "without compression" in answer["error"]["message"]) == (415, True)


# -- headers ---------------------------------------------------------------------------------------


def test_every_answer_has_a_request_id(server: Running) -> None:
    path = "/v1/nothing"
    _, _, found = server.request("GET", path)
    assert re.fullmatch("req_[0-9a-f]{32}", found["x-request-id"])
    assert found["request-id"] == found["x-request-id"]
    wait_for(lambda: found["x-request-id"] in [line.request_id for line in server.log])
    _, _, own = server.request("GET", path, headers={"X-Request-Id": "trace-7"})
    assert own["x-request-id"] == "trace-7"
    _, _, odd = server.request("GET", path, headers={"X-Request-Id": "a b\t<" + "c" * 200})
    assert odd["x-request-id"].startswith("req_")


# -- what there is, and how much it reads ----------------------------------------------------------


@pytest.fixture(scope="module")
def small(tiny_folder: Path) -> Iterator[Running]:
    """A server for a model with less context than it was made for."""
    with localrt.load(tiny_folder, ctx=256) as model, serving(model, name="tiny") as running:
        yield running


@pytest.mark.parametrize(
    ("method", "path", "where"),
    [
        ("GET", "/v1/models", ["data", 0, "max_model_len"]),
        ("GET", "/v1/models/tiny", ["meta", "n_ctx"]),
        ("GET", "/props?model=any", ["default_generation_settings", "n_ctx"]),
        ("POST", "/api/show", ["model_info", "LlamaForCausalLM.context_length"]),
        ("POST", "/tokenize", ["max_model_len"]),
    ],
)
def test_served_context(small: Running, method: str, path: str, where: list[Any]) -> None:
    body = {"model": "tiny", "prompt": "a"} if method == "POST" else None
    status, found, _ = small.request(method, path, body)
    assert status == 200
    for name in where:
        found = found[name]
    assert found == 256


def test_what_show_and_props_say(server: Running) -> None:
    _, shown, _ = server.request("POST", "/api/show", {"model": "gpt-5"})
    assert re.search(r"^num_ctx +512$", shown["parameters"], re.MULTILINE)
    _, props, _ = server.request("GET", "/props")
    assert (props["model_alias"], props["total_slots"]) == ("tiny", 16)
    assert "<|im_start|>" in props["chat_template"]


# -- a context that overflows ----------------------------------------------------------------------

OPENAI = r"This model's maximum context length is 512 tokens\. However, the request has \d+ tokens"
ANTHROPIC = r"prompt is too long: \d+ tokens > 512 maximum"
OVERFLOWS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, OPENAI),
    ("/v1/completions", {"prompt": LONG, "echo": True}, OPENAI),
    ("/v1/embeddings", {"input": LONG}, OPENAI),
    ("/v1/responses", {"input": LONG}, OPENAI),
    ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": LONG}]}, ANTHROPIC),
    ("/api/chat", {"messages": [{"role": "user", "content": LONG}], "truncate": False}, OPENAI),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields", "words"), OVERFLOWS)
def test_overflow_words(
    server: Running, path: str, fields: dict[str, Any], words: str, stream: bool
) -> None:
    body = {"model": "tiny", "max_tokens": 4, **fields, "stream": stream}
    status, found, _ = server.request("POST", path, body)
    assert re.search(words, found if isinstance(found, str) else json.dumps(found))
    if stream and path == "/v1/responses":  # whose streams have begun before that is known
        *_, last = events_in(found)
        assert (status, last["type"]) == (200, "response.failed")
        assert last["response"]["error"]["code"] == "context_length_exceeded"
        return
    assert status == 400
    error = found["error"]
    if words == OPENAI and not path.startswith("/api"):
        assert (error["code"], error["type"]) == (
            "context_length_exceeded",
            "exceed_context_size_error",
        )
        assert error["n_ctx"] == 512 <= error["n_prompt_tokens"]


# -- a model that takes long to load ---------------------------------------------------------------


@pytest.fixture
def loading(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Running, threading.Event]]:
    """A server whose model is loading until an event, and clients who are soon told that it is."""
    go_on = threading.Event()
    monkeypatch.setattr(generating, "_SILENT_S", 0.01)

    def load(name: str, *_: Any) -> localrt.Model:
        assert go_on.wait(60)
        if name == "broken":
            raise localrt.CheckpointError("the file is damaged")
        return localrt.load(tiny_folder, ctx=512)

    files = [LocalFile(name, name, 1 << 20) for name in ("tiny", "broken")]
    with serving(ModelPool(load, lambda: files, ServeOptions())) as running:
        yield running, go_on
        go_on.set()


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/api/chat"])
def test_stream_while_loading(loading: tuple[Running, threading.Event], path: str) -> None:
    running, go_on = loading
    for name in ("tiny", "broken"):
        go_on.clear()
        fields = {**BODIES[path], "stream": True, "max_tokens": 4, "model": name}
        with closing(http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)) as asking:
            asking.request("POST", path, json.dumps(fields))
            answer, text = asking.getresponse(), ""
            assert answer.status == 200
            while text.count(SIGNS[path]) < 3:
                text += answer.read1().decode()
            go_on.set()
            text += answer.read().decode()
        assert ("damaged" in text) == (name == "broken")
        wait_for(lambda: not running.service.open_answers)


def test_disconnect_while_loading(loading: tuple[Running, threading.Event]) -> None:
    running, _ = loading
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    connection.request("POST", "/v1/completions", '{"prompt": "hi", "stream": true}')
    assert connection.getresponse().status == 200
    connection.close()
    wait_for(lambda: not running.service.open_answers)


# -- interactive or background work ----------------------------------------------------------------


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The classes of all answers that were asked for."""
    seen, submit = list[str](), LiveModel.submit

    def spy(self: LiveModel, *args: Any, **options: Any) -> Any:
        seen.append(options["request_class"])
        return submit(self, *args, **options)

    monkeypatch.setattr(LiveModel, "submit", spy)
    return seen


@pytest.mark.parametrize(
    ("path", "fields", "headers", "expected"),
    [
        ("/v1/chat/completions", {}, {}, "interactive"),
        ("/v1/completions", {"prompt": ["a", "b"]}, {}, "background"),
        ("/v1/chat/completions", {"service_tier": "flex"}, {}, "background"),
        (
            "/v1/completions",
            {"prompt": ["a", "b"]},
            {"X-Localrt-Class": "interactive"},
            "interactive",
        ),
    ],
)
def test_class_of_a_request(
    server: Running, classes: list[str], path: str, fields: Any, headers: Any, expected: str
) -> None:
    body = {**BODIES[path], "max_tokens": 2, **fields}
    status, found, _ = server.request("POST", path, body, headers)
    assert status == 200, found
    assert {*classes} == {expected}
