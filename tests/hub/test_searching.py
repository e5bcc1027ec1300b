"""Asking the hub what there is: words in, names and sizes out; every refusal is one line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from localrt.common.errors import HubError, ModelNotFoundError, OfflineError
from localrt.common.settings import Settings
from localrt.hub.known_models import find_known
from localrt.hub.searching import list_variants, search_models
from tests.hub.server import FakeHub

MODELS: list[dict[str, Any]] = [
    {
        "id": "org/chat-GGUF",
        "downloads": 900,
        "likes": 7,
        "tags": ["gguf", "en"],
        "gated": False,
        "lastModified": "2026-02-17T10:00:00.000Z",
    },
    {"id": "org/pictures", "downloads": 800, "likes": 1, "tags": ["diffusers"], "gated": False},
    {"id": "org/chat", "downloads": 9, "tags": ["safetensors"], "gated": "manual", "likes": 0},
]


@contextmanager
def search_server(answer: bytes, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def test_models_by_words(settings: Settings) -> None:
    with search_server(json.dumps(MODELS).encode()) as (endpoint, asked):
        found = search_models("chat ", settings=replace(settings, hub_endpoint=endpoint))
    assert [model.name for model in found] == ["org/chat-GGUF", "org/chat"]
    assert found[0].kinds == ("gguf",)
    assert found[0].downloads == 900
    assert not found[0].gated
    assert found[0].updated == "2026-02-17"
    assert found[1].gated
    assert len(asked) == 1
    assert "search=chat" in asked[0]


def test_short_name(settings: Settings) -> None:
    with search_server(b"[]") as (endpoint, asked):
        search_models(" qwen3:30b", settings=replace(settings, hub_endpoint=endpoint))
    known = find_known("qwen3:30b")
    assert known is not None
    assert parse_qs(urlsplit(asked[0]).query)["search"] == [known.repo]


@pytest.mark.parametrize(("answer", "status"), [(b"<html>log in</html>", 200), (b"{}", 503)])
def test_a_strange_hub_is_one_line(settings: Settings, answer: bytes, status: int) -> None:
    with (
        search_server(answer, status) as (endpoint, _),
        pytest.raises(HubError) as raised,
    ):
        search_models("chat", settings=replace(settings, hub_endpoint=endpoint))
    assert "\n" not in str(raised.value)


def test_no_network_is_asked_offline(settings: Settings) -> None:
    with search_server(b"[]") as (endpoint, asked):
        offline = replace(settings, hub_endpoint=endpoint, offline=True)
        with pytest.raises(OfflineError):
            search_models("chat", settings=offline)
        with pytest.raises(OfflineError):
            list_variants("org/chat", settings=offline)
    assert not asked


def test_variants_with_sizes(hub: FakeHub, settings: Settings) -> None:
    found = list_variants("org/quants", settings=settings)
    assert [variant.label for variant in found] == sorted(
        (v.label for v in found), key=lambda label: next(v.bytes for v in found if v.label == label)
    )
    names = {variant.label: variant.name for variant in found}
    assert names["Q4_K_M"] == "org/quants:Q4_K_M"
    assert all(variant.bytes > 0 for variant in found)
    (whole,) = list_variants("org/tiny", settings=settings)
    assert whole.name == "org/tiny"
    assert whole.label == "safetensors"


def test_a_repository_that_is_not_there(hub: FakeHub, settings: Settings) -> None:
    with pytest.raises(ModelNotFoundError):
        list_variants("org/nothing", settings=settings)
