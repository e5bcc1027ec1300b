"""Short names: what they stand for, and that each can be planned for from its published config."""

from __future__ import annotations

import pytest

from localrt.hub.names import (
    KNOWN_MODELS,
    HubRef,
    KnownModel,
    close_names,
    find_known,
    parse_hub_ref,
)
from localrt.planning.models import shape_from_config

_BY_SHAPE = {model.shape: model for model in KNOWN_MODELS}


@pytest.mark.parametrize("model", _BY_SHAPE.values(), ids=_BY_SHAPE)
def test_a_config_has_the_parameters_of_its_model(model: KnownModel) -> None:
    shape = shape_from_config(model.config(), name=model.name, format="f32")
    assert shape.nbytes / 4e9 == pytest.approx(model.parameters, rel=0.03)


def test_each_name_stands_for_one_repository_and_says_where_that_was_found() -> None:
    assert len({model.name for model in KNOWN_MODELS}) == len(KNOWN_MODELS)
    for model in KNOWN_MODELS:
        assert parse_hub_ref(model.repo) == HubRef(model.repo)
        assert model.page.startswith("https://")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("llama3.2:1b", "llama3.2:1b"),
        ("Llama3.2:1B", "llama3.2:1b"),
        ("llama3.2", "llama3.2:3b"),
        ("gemma4:latest", "gemma4:e4b"),
        ("llama3.2:7b", None),
        ("org/name", None),
    ],
)
def test_a_family_alone_is_its_first_model(name: str, found: str | None) -> None:
    model = find_known(name)
    assert (model.name if model else None) == found


def test_near_misses_are_known() -> None:
    assert close_names("lama3.2")[0] == "llama3.2"
    assert close_names("qwen3.5:9")[0] == "qwen3.5:9b"
    assert close_names("my-chat", ["my-chats"]) == ["my-chats"]
    assert close_names("chat", ["ollama:me/chat:latest"])[0] == "ollama:me/chat:latest"
    assert close_names("zzz") == []
