"""Adapters by their hub ids, from the fake hub."""

from __future__ import annotations

import pytest

from localrt.common.errors import ModelNotFoundError, OfflineError, UnsupportedModelError
from localrt.common.settings import Settings
from localrt.hub import resolve, resolve_adapter
from localrt.hub.files import ADAPTER_FILES
from tests.hub.server import FakeHub

FILES = {
    "README.md": b"# lora",
    "adapter_config.json": b'{"peft_type": "LORA"}',
    "adapter_model.safetensors": b"low ranks" * 1000,
    "optimizer.pt": b"pickle" * 1000,
}


def test_an_adapter_is_downloaded_once(hub: FakeHub, settings: Settings) -> None:
    hub.add("org/lora", FILES)
    with pytest.raises(OfflineError, match="org/lora"):
        resolve_adapter("org/lora", settings=settings, offline=True)
    folder = resolve_adapter("org/lora", settings=settings)
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found == {name: FILES[name] for name in ADAPTER_FILES}
    asked = len(hub.requests)
    assert resolve_adapter("org/lora", settings=settings) == folder
    assert resolve_adapter("org/lora", settings=settings, offline=True) == folder
    assert len(hub.requests) == asked


def test_a_model_is_no_adapter(settings: Settings) -> None:
    with pytest.raises(ModelNotFoundError, match=r"org/tiny is no adapter: it has no adapter_conf"):
        resolve_adapter("org/tiny", settings=settings)


def test_an_adapter_is_no_model(hub: FakeHub, settings: Settings) -> None:
    hub.add("org/lora", FILES)
    with pytest.raises(UnsupportedModelError, match="org/lora is an adapter: open the model"):
        resolve("org/lora", settings=settings)
