"""Whether somebody waits for the tokens of a request: interactive or background work."""

from __future__ import annotations

from typing import Any

import pytest

from localrt.server.infill import fim_call, infill_call
from localrt.service.live import LiveModel
from tests.server.conftest import Running

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
TEXT = ("/v1/completions", {"prompt": "hi"})
PAIR = ("/v1/completions", {"prompt": ["a", "b"]})
INFILL = ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 0})


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
    ("path", "body", "headers", "expected"),
    [
        (*CHAT, {}, "interactive"),
        (*TEXT, {}, "interactive"),
        (*PAIR, {}, "background"),
        (CHAT[0], {**CHAT[1], "service_tier": "flex"}, {}, "background"),
        (CHAT[0], {**CHAT[1], "service_tier": "auto"}, {}, "interactive"),
        ("/v1/responses", {"input": "hi", "service_tier": "flex"}, {}, "background"),
        ("/v1/responses", {"input": "hi"}, {}, "interactive"),
        (*CHAT, {"X-Localrt-Class": "background"}, "background"),
        (*PAIR, {"X-Localrt-Class": "interactive"}, "interactive"),
    ],
)
def test_class(
    server: Running,
    classes: list[str],
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    expected: str,
) -> None:
    field = "max_output_tokens" if "responses" in path else "max_tokens"
    status, found, _ = server.request("POST", path, {**body, field: 2}, headers)
    assert status == 200, found
    assert {*classes} == {expected}


def test_gaps_are_waited_for() -> None:
    assert infill_call(INFILL[1]).request_class == "interactive"
    assert fim_call({"prompt": "a", "suffix": "b"}).request_class == "interactive"


def test_unknown_class(server: Running) -> None:
    path, body = CHAT
    status, found, _ = server.request("POST", path, body, {"X-Localrt-Class": "urgent"})
    assert status == 400
    assert "one of interactive, background" in found["error"]["message"]
