"""A server of a tiny model, and a home without keys."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.client.model import connect
from localrt.engine.types import Chunk
from localrt.service.arguments import joined
from tests.fake_endpoint import Fake
from tests.server.conftest import Running, serving, tiny_folder

__all__ = ["tiny_folder"]  # a fixture

KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Iterator[localrt.Model]:
    with localrt.load(tiny_folder, draft="off") as loaded:
        loaded.defaults["max_tokens"] = 12  # of requests that say nothing
        yield loaded


@pytest.fixture(scope="module")
def server(model: localrt.Model) -> Iterator[Running]:
    with serving(model, name="tiny") as running:
        yield running


def answer(running: Fake, text: str = "hi", **options: Any) -> Chunk:
    with connect(running.url) as remote:
        return joined(remote.chat().stream(text, **options))
