"""``localrt chat --endpoint``: the server's models can be chosen in the app."""

from __future__ import annotations

from typing import Any

import pytest

from localrt.cli import main
from tests.fake_endpoint import fake, listed


def test_models_of_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[str, Any] = {}

    def run_chat(load: Any, **arguments: Any) -> int:
        opened.update(arguments)
        return 0

    monkeypatch.setattr("localrt.tui.run_chat", run_chat)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with fake(lambda asked, connection: listed("a", "b", max_model_len=4096)) as server:
        assert main(["chat", "--endpoint", f"{server.url}/v1"]) == 0
        assert opened["list_models"]() == [("a", "context 4,096"), ("b", "context 4,096")]
        model = opened["load_by_name"]("b", lambda progress: None)
        assert (model.name, model.info.engine) == ("b", "remote")
        model.close()
