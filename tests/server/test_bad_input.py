"""What a server refuses, and how: OpenAI's error shape, a field's name, never a traceback."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from localrt.common import files
from localrt.common.errors import LocalrtError, MemoryBudgetError, OptionError
from localrt.common.option_names import option
from localrt.server.app import ROUTES
from localrt.server.bodies import parse_json
from localrt.server.errors import ApiError, api_error
from localrt.server.options import ServeOptions, is_loopback
from localrt.server.running import open_socket
from tests.server.conftest import Running, serving
from tests.server.dialects import BODIES
from tests.waits import wait_for


def refused(answer: tuple[int, Any, dict[str, str]], status: int, *words: str) -> Any:
    got, body, _ = answer
    assert got == status, body
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    for word in words:
        assert word in error["message"]
    return error


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"
OLLAMA, GENERATE = "/api/chat", "/api/generate"
GAP = {"input_prefix": "a", "input_suffix": "b"}
FUNCTIONS = [{"type": "function", "function": {"name": name}} for name in "fg"]
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "c", "schema": {"type": "colour"}}}
# path, fields, the one that is named (if the dialect's errors do), and words of the message
WRONG: list[tuple[str, Any, str | None, str]] = [
    (CHAT, {"messages": []}, "messages", "messages must not be empty"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0]", "must have role"),
    (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role", "must be"),
    (CHAT, {"temperature": -1}, "temperature", "must be at least 0"),
    (CHAT, {"max_tokens": 2.5}, "max_tokens", "must be a whole number"),
    (
        CHAT,
        {"chat_template_kwargs": {"thinking": "no"}},
        "chat_template_kwargs.thinking",
        "must be",
    ),
    (CHAT, {"chat_template_kwargs": {"thinking": True}}, None, "this model does not think:"),
    (CHAT, {"logit_bias": {"x": 1}}, "logit_bias", "logit_bias"),
    (CHAT, {"stream": "yes"}, "stream", "stream must be true or false"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", "there are none"),
    (
        CHAT,
        {"tool_choice": {"type": "function", "function": {"name": "h"}}, "tools": FUNCTIONS},
        "tool_choice",
        "'h', which is not in tools",
    ),
    (CHAT, {"grammar": "root ::= a"}, "grammar", "line 1, rule 'root': there is no rule 'a'"),
    (CHAT, {"response_format": BAD_SCHEMA}, "response_format", "colour"),
    *[
        (CHAT, {"response_format": {"type": "json_schema", **form}}, "response_format", "schema")
        for form in ({}, {"json_schema": {}})
    ],
    (RESPONSES, {"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format", "sche"),
    *[
        (COMPLETION, {"prompt": "a", **fields}, param, words)
        for fields, param, words in [
            ({"response_format": "json"}, "response_format", "must be an object"),
            ({"json_schema": "{"}, "response_format", "is not JSON"),
            ({"regex": "("}, None, "regex cannot be used"),
            ({"grammar": "start: /a/"}, "grammar", "grammar"),
            ({"format": "xml"}, "format", '"json", or a JSON schema'),
            (
                {"regex": "a", "json_schema": {}},
                "regex",
                "json_schema and regex cannot be combined",
            ),
        ]
    ],
    (CHAT, [], None, "the body must be an object"),
    (COMPLETION, {"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias", "99999"),
    (COMPLETION, {"prompt": 7}, "prompt", "must be a text"),
    (COMPLETION, {"prompt": [1 << 30], "max_tokens": 0, "echo": True}, None, "token ids"),
    (COMPLETION, {"prompt": "", "max_tokens": 0}, None, "empty"),
    (COMPLETION, {"prompt": "a", "suffix": "b"}, "suffix", "no tokens to fill in the middle"),
    (COMPLETION, {"prompt": "a", "n": 1, "best_of": 4}, "best_of", "ask for n answers"),
    (EMBEDDINGS, {"input": [10**6]}, None, "token ids"),
    (EMBEDDINGS, {"input": "a", "dimensions": 129}, "dimensions", "must be at most 128"),
    (RESPONSES, {"conversation": "conv_1"}, "conversation", "previous_response_id"),
    (RESPONSES, {"input": []}, "input", "nothing to answer"),
    (MESSAGES, {"messages": [{"role": "user", "content": []}]}, None, "have no content"),
    (OLLAMA, {"messages": [{"role": "robot", "content": "a"}]}, None, "messages[0].role must be"),
    (
        OLLAMA,
        {"messages": [{"role": "user", "content": "a", "images": [3]}]},
        None,
        "messages[0].images[0] must be a text",
    ),
    (GENERATE, {"keep_alive": "soon"}, None, "keep_alive"),
    ("/infill", GAP, "suffix", "no tokens to fill in the middle"),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}, None, "no reranker"),
]


@pytest.mark.parametrize(("path", "fields", "param", "words"), WRONG)
def test_wrong_fields(
    server: Running, path: str, fields: Any, param: str | None, words: str
) -> None:
    if isinstance(fields, dict):
        fields = {**BODIES.get(path, {}), **fields}
    answer = server.request("POST", path, fields)
    status, body, _ = answer
    if path.startswith("/api/"):
        assert (status, "\n" in body["error"], words in body["error"]) == (400, False, True), body
        return
    if path == MESSAGES:
        assert (status, body["type"], {*body["error"]}) == (400, "error", {"type", "message"})
        assert words in body["error"]["message"]
    else:
        assert refused(answer, 400, words)["param"] == param
    assert body["error"]["type"] == "invalid_request_error"


def test_errors_of_the_library() -> None:
    for kind, status in ((MemoryBudgetError, 503), (OptionError, 400), (LocalrtError, 500)):
        assert api_error(kind("no")).status == status


def test_error_spelling() -> None:
    """Files are told without their folders, and what is the server's to choose as its flag."""
    for text, told in (
        ("/home/jane/a.gguf: damaged; see /b/c.gguf", "a.gguf: damaged; see c.gguf"),
        ("'/home/Jane Doe/my models/a b.gguf' is damaged", "'a b.gguf' is damaged"),
        ("~/models/a.gguf or C:\\models\\b.gguf", "a.gguf or b.gguf"),
        ("org/name of https://example.org/a/b as text/plain", None),
        ("one / two or three/four", None),
    ):
        assert str(api_error(LocalrtError(text))) == (told or text)
    error = OptionError(f"raise {option('ctx', 512)}, or lower {option('max_tokens')}")
    assert str(api_error(error)) == "raise --ctx 512, or lower max_tokens"


def test_byte_order_mark(server: Running) -> None:
    """Editors of Windows, and PowerShell, write one at the beginning of a file."""
    body = b"\xef\xbb\xbf" + json.dumps(BODIES[COMPLETION]).encode()
    assert server.request("POST", COMPLETION, body)[0] == 200


def test_what_is_no_json(server: Running) -> None:
    path = "/v1/chat/completions"
    for body, word in (
        (b"", "empty"),
        (b"{", "line 1"),
        (b"\xff\xfe", "UTF-8"),
        ('{"messages": []}'.encode("utf-16"), "Send JSON in UTF-8"),
        (b'{"messages": NaN}', "NaN"),
        (b"[" * 200_000, "nested"),
    ):
        refused(server.request("POST", path, body), 400, word)


@pytest.mark.parametrize(
    "body", [{"prompt": [[1]] * 500_000}, {"prompt": ['\\",' * 1000, [{}] * 300_000]}]
)
def test_too_many_values(body: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = json.dumps(body).encode()
    monkeypatch.setattr(files.json, "loads", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(ApiError, match="too many values"):
        parse_json(data)


def test_numbers_are_finite() -> None:
    most = sys.float_info.max
    assert parse_json(b'{"a": [1e999, -1e999, 1e308, 0.5]}') == {"a": [most, -most, 1e308, 0.5]}


def test_lone_surrogate(server: Running) -> None:
    body = b'{"prompt": "a\\ud83d b \\ud83d\\ude00", "echo": true, "max_tokens": 1}'
    status, got, _ = server.request("POST", "/v1/completions", body)
    assert status == 200
    assert got["choices"][0]["text"].startswith("a� b \U0001f600")


def test_unknown_fields_and_nulls(server: Running) -> None:
    fields = {
        "metadata": {"a": "b"},
        "user": "me",
        "store": False,
        "temperature": None,
        "stop": None,
        "tools": None,
        "response_format": None,
        "stream_options": None,
        "max_tokens": 2.0,
    }
    status, got, _ = server.chat(**fields)
    assert status == 200
    assert got["usage"]["completion_tokens"] <= 2


def test_paths_and_methods(server: Running) -> None:
    refused(server.request("GET", "/nothing"), 404, "nothing at this path")
    status, body, headers = server.request("GET", "/v1/chat/completions")
    refused((status, body, headers), 405)
    assert headers["allow"] == "POST"


def test_control_characters_in_log(server: Running) -> None:
    server.request("GET", "/v1/x%1b%5b2J%0a%c2%9b%e2%80%ae%7f%c3%a9")
    wait_for(lambda: "x" in server.log[-1].path)
    assert server.log[-1].path == r"/v1/x\x1b[2J\n\x9b\u202e\x7f\xe9"


def test_keys(model: Any) -> None:
    with serving(model, api_key="s3cret") as running:
        wrong = [{"Authorization": key} for key in ("Bearer wrong", "s3cret")]
        for headers in ({}, *wrong, {"x-api-key": "wrong"}):
            status, body, found = running.request("GET", "/v1/models", headers=headers)
            assert refused((status, body, found), 401)["code"] == "invalid_api_key"
            assert found["www-authenticate"] == "Bearer"
            refused(running.request("GET", "/metrics", headers=headers), 401)
            status, body, _ = running.request("POST", MESSAGES, BODIES[MESSAGES], headers)
            assert (status, body["type"]) == (401, "error")
            assert body["error"]["type"] == "authentication_error"
        for right in ({"Authorization": "Bearer s3cret"}, {"x-api-key": "s3cret"}):
            assert running.request("GET", "/v1/models", headers=right)[0] == 200
        assert running.request("GET", "/health")[0] == 200
        assert "s3cret" not in repr(running.service.options)


def test_web_pages(server: Running, model: Any) -> None:
    evil = {"Origin": "https://evil.example"}
    refused(server.request("POST", "/v1/completions", {"prompt": "a"}, evil), 403, "evil.example")
    rebound = {"Host": "evil.example"}
    refused(server.request("GET", "/v1/models", headers=rebound), 403, "evil.example")
    own = {"Origin": server.url}
    assert server.request("GET", "/v1/models", headers=own)[0] == 200
    assert server.request("GET", "/v1/models", headers={"Host": "[::1]:80"})[0] == 200
    with serving(model, origins=("https://app.example",), api_key="k") as running:
        asked = {"Access-Control-Request-Method": "POST"}
        asked |= {"Access-Control-Request-Private-Network": "true"}
        status, _, found = running.request("OPTIONS", COMPLETION, headers={**asked, **evil})
        assert (status, "access-control-allow-origin" in found) == (400, False)
        asked |= {"Origin": "https://app.example"}
        status, _, found = running.request("OPTIONS", COMPLETION, headers=asked)
        assert (status, found["access-control-allow-private-network"]) == (200, "true")
        assert found["access-control-allow-origin"] == "https://app.example"
        refused(running.request("POST", "/v1/completions", {}, evil), 401)
        page = {"Origin": "https://app.example", "Authorization": "Bearer k"}
        status, _, found = running.request("GET", "/v1/models", headers=page)
        assert status == 200
        assert found["access-control-allow-origin"] == "https://app.example"


@pytest.fixture(scope="module")
def with_history(model: Any) -> Iterator[Running]:
    with serving(model, name="tiny", history=":memory:") as running:
        yield running


EVERY = sorted({(one.method, one.path) for one in ROUTES})
ELSEWHERE = [  # what browsers send for a page of another site, by the way in which it asks
    {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}
    for site in ("cross-site", "same-site")
    for mode, dest in (("no-cors", "image"), ("navigate", "iframe"), ("navigate", "document"))
]


def asked(
    running: Running, method: str, path: str, headers: dict[str, str]
) -> tuple[int, Any, dict[str, str]]:
    body = BODIES.get(path, {}) if method == "POST" else None
    return running.request(method, re.sub(r"{\w+}", "1", path), body, headers)


@pytest.mark.parametrize(("method", "path"), EVERY)
def test_pages_of_other_sites(with_history: Running, method: str, path: str) -> None:
    """They learn nothing, not even how long an answer takes. A link may open the chat page."""
    for headers in ELSEWHERE:
        if path == "/" and headers["Sec-Fetch-Dest"] == "document":
            assert asked(with_history, method, path, {**headers, "Accept": "text/html"})[0] == 200
        else:
            status, body, _ = asked(with_history, method, path, headers)
            assert (status, "other sites" in str(body)) == (403, True)
    for site in ("same-origin", "none"):
        answer = asked(with_history, method, path, {"Sec-Fetch-Site": site})
        assert "other sites" not in str(answer[1])
    own = {"Origin": with_history.url, "Sec-Fetch-Site": "cross-site"}  # behind a proxy, say
    assert "other sites" not in str(asked(with_history, method, path, own)[1])


@pytest.mark.parametrize(("method", "path"), EVERY)
def test_answers_are_not_kept_by_browsers(with_history: Running, method: str, path: str) -> None:
    """Those to nobody in particular, and refusals."""
    for headers in ({}, ELSEWHERE[0], {"Host": "evil.example"}):
        _, _, found = asked(with_history, method, path, headers)
        assert (found["cache-control"], found["x-content-type-options"]) == ("no-store", "nosniff")
        assert found["cross-origin-resource-policy"] == "same-origin"


def test_more_answers_are_not_kept(with_history: Running, model: Any) -> None:
    ask = with_history.request
    for method, path, status in (("GET", "/v1/nothing", 404), ("PUT", "/v1/models", 405)):
        got, _, found = ask(method, path)
        assert (got, found["cache-control"]) == (status, "no-store")
    stream = ask("POST", COMPLETION, {**BODIES[COMPLETION], "stream": True})
    assert stream[2]["cache-control"] == "no-store"
    page = ask("GET", "/", headers={"Accept": "text/html"})
    assert page[2]["cache-control"] == "no-cache"  # the same for everybody
    origins = {"*": "cross-origin", "https://app.example": "same-origin"}
    for origin, policy in origins.items():
        with serving(model, origins=(origin,)) as running:
            app = {"Origin": "https://app.example", "Sec-Fetch-Site": "cross-site"}
            status, _, found = running.request("GET", "/v1/models", headers=app)
            assert (status, found["cross-origin-resource-policy"]) == (200, policy)
            assert found["access-control-allow-origin"] == origin


def test_server_options() -> None:
    for wrong in (
        {"port": 70000},
        {"max_running": 0},
        {"drain_s": -1},
        {"api_key": " "},
        {"api_key": "schlüssel"},
        {"host": ""},
    ):
        with pytest.raises(OptionError, match=next(iter(wrong))):
            ServeOptions(**wrong)
    with pytest.raises(LocalrtError, match="cannot listen"):
        open_socket(ServeOptions(host="203.0.113.7"))
    for host, here in (("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)):
        assert is_loopback(host) is here
