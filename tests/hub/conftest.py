"""The fake hub with a few repositories, and settings that point at it and at empty folders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrt.common.settings import Settings
from tests.hub.server import OLD_COMMIT, FakeHub, start

WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
NEWER = WEIGHTS[::-1]


def gguf(label: str) -> bytes:
    return b"GGUF" + label.encode() * 1000


TINY = {
    ".gitattributes": b"*.safetensors filter=lfs",
    "README.md": b"# tiny",
    "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
    "generation_config.json": b"{}",
    "model-00001-of-00002.safetensors": WEIGHTS,
    "model-00002-of-00002.safetensors": WEIGHTS[::3],
    "model.safetensors.index.json": json.dumps(
        {
            "weight_map": {
                "a": "model-00001-of-00002.safetensors",
                "b": "model-00002-of-00002.safetensors",
            }
        }
    ).encode(),
    "consolidated.safetensors": WEIGHTS,
    "onnx/model.onnx": b"onnx" * 1000,
    "original/params.json": b"{}",
    "pytorch_model.bin": b"pickle" * 1000,
    "tokenizer.json": b'{"model": {}}',
    "tokenizer.model": b"sentencepiece",
}

QUANTS = {
    "README.md": b"# quants",
    "tiny-Q4_K_M.gguf": gguf("Q4_K_M"),
    "tiny-Q8_0.gguf": gguf("Q8_0"),
    "tiny-f16-00001-of-00002.gguf": gguf("first"),
    "tiny-f16-00002-of-00002.gguf": gguf("second"),
}

SEEING = {
    "seer-Q4_K_M.gguf": gguf("Q4_K_M"),
    "seer-Q8_0.gguf": gguf("Q8_0"),
    "mmproj-seer-Q8_0.gguf": gguf("small"),
    "mmproj-seer-bf16.gguf": gguf("projector"),
    "other/mmproj-seer-bf16.gguf": gguf("another"),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import close_session, constants

    # The library read the environment when it was imported; a developer's must not decide a test.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    hub = FakeHub()
    hub.add("org/tiny", TINY)
    hub.add("org/tiny", {**TINY, "config.json": b'{"old": true}'}, revision=OLD_COMMIT)
    hub.add("org/quants", QUANTS)
    hub.add("org/seeing", SEEING)
    hub.add("org/pickles", {"pytorch_model.bin": b"pickle" * 1000})
    server = start(hub)
    yield hub
    close_session()
    server.shutdown()
    server.server_close()


@pytest.fixture
def settings(tmp_path: Path, hub: FakeHub) -> Settings:
    return settings_at(tmp_path, hub.endpoint)


def settings_at(folder: Path, endpoint: str) -> Settings:
    return Settings(
        hub_endpoint=endpoint,
        hub_cache=folder / "hf" / "hub",
        hub_token_file=None,
        offline=False,
        cache_dir=folder / "cache",
        data_dir=folder / "data" / "localrt",
        config_dir=folder / "config" / "localrt",
    )
