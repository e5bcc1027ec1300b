"""Asking the hub what there is: words in, names and sizes out; every refusal is one line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from localrt.common.errors import HubError, ModelNotFoundError, OfflineError
from localrt.common.settings import Settings
from localrt.hub.names import find_known
from localrt.hub.searching import FoundModel, list_variants, search_models
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
    {
        "id": "org/chat-pictures",
        "downloads": 800,
        "likes": 1,
        "tags": ["diffusers"],
        "gated": False,
    },
    {"id": "org/chat", "downloads": 9, "tags": ["safetensors"], "gated": "manual", "likes": 0},
]


def test_models_by_words(hub: FakeHub, settings: Settings) -> None:
    hub.published = MODELS
    found = search_models("chat ", settings=settings)
    assert [model.name for model in found] == ["org/chat-GGUF", "org/chat"]
    assert found[0] == FoundModel("org/chat-GGUF", 900, 7, ("gguf",), False, "2026-02-17")
    assert found[1].gated
    assert hub.searches == ["chat"]


def test_short_name(hub: FakeHub, settings: Settings) -> None:
    search_models(" qwen3:30b", settings=settings)
    known = find_known("qwen3:30b")
    assert known is not None
    assert hub.searches == [known.repo]


@pytest.mark.parametrize("fault", [{"html": True}, {"busy": True}])
def test_a_strange_hub_is_one_line(
    fault: dict[str, bool], hub: FakeHub, settings: Settings
) -> None:
    for name, value in fault.items():
        setattr(hub, name, value)
    with pytest.raises(HubError) as raised:
        search_models("chat", settings=settings)
    assert "\n" not in str(raised.value)


def test_no_network_is_asked_offline(hub: FakeHub, settings: Settings) -> None:
    offline = replace(settings, offline=True)
    with pytest.raises(OfflineError):
        search_models("chat", settings=offline)
    with pytest.raises(OfflineError):
        list_variants("org/chat", settings=offline)
    assert hub.requests == []


def test_variants_with_sizes(hub: FakeHub, settings: Settings) -> None:
    found = [(each.label, each.name) for each in list_variants("org/quants", settings=settings)]
    assert found == [(label, f"org/quants:{label}") for label in ("Q8_0", "Q4_K_M", "F16")]
    (whole,) = list_variants("org/tiny", settings=settings)
    assert whole.name == "org/tiny"
    assert whole.label == "safetensors"


def test_a_repository_that_is_not_there(hub: FakeHub, settings: Settings) -> None:
    with pytest.raises(ModelNotFoundError):
        list_variants("org/nothing", settings=settings)
