"""KV caches of idle conversations on the driver: they leave a full GPU for RAM or the disk."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.models.checkpoints import open_checkpoint
from localrt.quantize.quantize import Recipe, quantize_model
from tests.conftest import write_byte_tokenizer
from tests.driver.inside.conftest import Kernels
from tests.inside import core_of, engine_of
from tests.models.tiny import CONFIGS, MIXTURES, random_model
from tests.offload.placed import needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("given_rates", "measured")]

GREEDY: dict[str, Any] = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
QUESTIONS = ["What is the sea made of? " * 11, "Name four trees. " * 4]
MODELS = [
    pytest.param("llama", {}, id="bf16"),
    pytest.param("llama", {"kv_format": "int8"}, id="int8"),
    pytest.param("llama", {"kv_format": "int4", "shrinkable": True}, id="placed"),
    pytest.param("qwen3.5", {}, id="states"),
    pytest.param("qwen3.5", {"kv_format": "int8", "shrinkable": True}, id="states-placed"),
    pytest.param("qwen3-moe", {"shrinkable": True}, id="mixture"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALRT_KV_DISK", "1GB")
    return tmp_path


def packed(folder: Path, name: str) -> Path:
    """A store of a random model."""
    config = (CONFIGS | MIXTURES)[name]()
    (folder / "model").mkdir()
    config.vocab_size = write_byte_tokenizer(folder / "model")
    config.max_position_embeddings = 2048
    random_model(config).save_pretrained(folder / "model")
    with closing(open_checkpoint(folder / "model")) as source:
        recipe = Recipe("int4-g32", method="rtn")
        return quantize_model(source, folder / "store", recipe, threads=1).path


def on_disk(folder: Path) -> bool:
    return any(path.is_file() for path in (folder / "cache" / "kv").rglob("*"))


@pytest.mark.parametrize(("name", "options"), MODELS)
def test_full_gpu(
    gpu: Kernels,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
) -> None:
    """Conversations that take turns push each other out. They go on as if they had stayed, and read
    only what is new.
    """
    store = packed(folder, name)
    monkeypatch.setattr("localrt.engine.batch.schedule._WORTH_SAVING_S", 0.0)

    def talk(room: str) -> list[tuple[tuple[int, ...], int]]:
        said, texts = [], list(QUESTIONS)
        if room != "gpu":
            monkeypatch.setattr("localrt.service.live.kv_room", lambda engine: 0)
        with (
            localrt.load(store, device="cuda", draft="off", ctx=1024, **options) as model,
            model.live() as live,
        ):
            if room == "disk":
                core_of(model).saver._prompts._room = lambda: 0
            memory, parked = engine_of(model).weights.memory, list[int]()
            for turn in range(4):
                spare, before = memory.spare, live.stats().parked_bytes
                answer = live.generate(texts[turn % 2], **GREEDY)
                said.append((answer.token_ids, answer.metrics.cached_tokens))
                texts[turn % 2] += answer.text + f" And {turn}?"
                parked.append(live.stats().parked_bytes)
                if memory.streams and turn > 1:
                    assert memory.spare + parked[-1] == spare + before
            assert (min(parked[1:]) > 0) is (max(parked) > 0) is (room == "ram")
            assert on_disk(folder) is (room == "disk")
        assert on_disk(folder) is (room != "gpu")  # what was in RAM too, for the next time
        shutil.rmtree(folder / "cache" / "kv", ignore_errors=True)
        return said

    stayed = talk("gpu")
    assert all(cached > 60 for _, cached in stayed[2:])
    assert talk("ram") == stayed
    assert talk("disk") == stayed
