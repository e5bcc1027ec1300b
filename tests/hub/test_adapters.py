"""Adapters by their hub ids, from the fake hub."""

from __future__ import annotations

import pytest

from localrt.errors import ModelNotFoundError, OfflineError
from localrt.hub import resolve_adapter
from localrt.settings import Settings
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
    assert found == {name: FILES[name] for name in FILES if name.startswith("adapter_")}
    asked = len(hub.requests)
    assert resolve_adapter("org/lora", settings=settings) == folder
    assert resolve_adapter("org/lora", settings=settings, offline=True) == folder
    assert len(hub.requests) == asked


def test_a_model_is_no_adapter(settings: Settings) -> None:
    with pytest.raises(ModelNotFoundError, match=r"org/tiny is no adapter: it has no adapter_conf"):
        resolve_adapter("org/tiny", settings=settings)
