"""What requests are for: interactive, completion or background, and within how long they begin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import localrt
from localrt.server.infill import fim_call, infill_call
from localrt.server.options import ServeOptions
from localrt.service.live import LiveModel
from tests.server.conftest import Running, serving

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
TEXT = ("/v1/completions", {"prompt": "hi"})
INFILL = ("/infill", {"input_prefix": "a", "input_suffix": "b", "n_predict": 0})


@pytest.fixture(scope="module")
def keyed(model: localrt.Model) -> Iterator[Running]:
    keys = {"night": "background", "tab": "completion"}
    with serving(model, name="tiny", api_key="k", class_keys=keys) as running:
        yield running


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
        ("/v1/completions", {"prompt": ["a", "b"]}, {}, "background"),
        (CHAT[0], {**CHAT[1], "service_tier": "flex"}, {}, "background"),
        (CHAT[0], {**CHAT[1], "service_tier": "auto"}, {}, "interactive"),
        ("/v1/responses", {"input": "hi", "service_tier": "flex"}, {}, "background"),
        ("/v1/responses", {"input": "hi"}, {}, "interactive"),
        (*CHAT, {"X-Localrt-Class": "background"}, "background"),
        (*TEXT, {"X-Localrt-Class": "completion"}, "completion"),
        (*CHAT, {"Authorization": "Bearer night"}, "background"),
        (*CHAT, {"x-api-key": "tab"}, "completion"),
        (*CHAT, {"x-api-key": "tab", "X-Localrt-Class": "interactive"}, "interactive"),
    ],
)
def test_class(
    keyed: Running,
    classes: list[str],
    path: str,
    body: dict[str, Any],
    headers: dict[str, str],
    expected: str,
) -> None:
    key = {} if {"Authorization", "x-api-key"} & {*headers} else {"x-api-key": "k"}
    field = "max_output_tokens" if "responses" in path else "max_tokens"
    status, found, _ = keyed.request("POST", path, {**body, field: 2}, {**key, **headers})
    assert status == 200, found
    assert {*classes} == {expected}


def test_gaps_are_completions() -> None:
    assert infill_call(INFILL[1]).request_class == "completion"
    assert fim_call({"prompt": "a", "suffix": "b"}).request_class == "completion"


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        ({"X-Localrt-Class": "urgent"}, 400, "one of interactive, completion, background"),
        ({"X-Localrt-Deadline": "soon"}, 400, "seconds above 0"),
        ({"X-Localrt-Deadline": "-1"}, 400, "seconds above 0"),
        ({"X-Localrt-Deadline": "nan"}, 400, "seconds above 0"),
        ({"X-Localrt-Deadline": "1e-9"}, 503, "the first token would come in about"),
        ({"X-Localrt-Deadline": "600"}, 200, ""),
        ({"x-api-key": "wrong"}, 401, "missing or wrong"),
    ],
)
def test_terms(keyed: Running, headers: dict[str, str], status: int, words: str) -> None:
    path, body = CHAT
    found = keyed.request("POST", path, {**body, "max_tokens": 2}, {"x-api-key": "k", **headers})
    assert found[0] == status, found
    if words:
        assert words in found[1]["error"]["message"]
    if status == 503:
        assert found[1]["error"]["code"] == "too_late"
        assert int(found[2]["retry-after"]) >= 1


@pytest.mark.parametrize("keys", [{"": "background"}, {"k": "urgent"}, {"schlüssel": "background"}])
def test_bad_class_keys(keys: dict[str, str]) -> None:
    with pytest.raises(localrt.OptionError, match="class_key"):
        ServeOptions(class_keys=keys)
