"""transformers as a peer: on the CPU, and what Accelerate and bitsandbytes are told for a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from localrt.bench import transformers_engine
from localrt.bench.engines import Launch, load_engine
from localrt.bench.transformers_engine import load_transformers
from localrt.common.errors import UnsupportedModelError


@pytest.mark.parametrize("settings", [{}, {"device": "auto", "gpu_memory": 10**9}])
def test_on_the_cpu(tiny_folder: Path, settings: dict[str, Any]) -> None:
    """Accelerate leaves all in RAM where there is no GPU, and the engine says so."""
    launch = Launch(engine="transformers", path=str(tiny_folder), ctx=64, settings=settings)
    engine = load_engine(launch)
    assert (engine.info["device"], engine.info["format"]) == ("cpu", "bf16")
    assert engine.info["parameters"] > 0
    firsts: list[int] = []
    metrics = engine.generate(engine.encode("hello"), 4, lambda: firsts.append(1))
    assert len(firsts) == 1
    assert (metrics.prompt_tokens, metrics.completion_tokens) == (len(engine.encode("hello")), 4)
    assert metrics.peak_vram_bytes is None
    assert (metrics.decode_tok_s or 0) > 0


@pytest.mark.parametrize(
    ("settings", "most", "device"),
    [
        ({}, None, "cpu"),
        ({"device": "auto"}, {0: 90, "cpu": 270}, "cuda"),
        ({"device": "cuda", "gpu_memory": 5, "ram": 7}, {0: 5, "cpu": 7}, "cuda"),
        ({"device": "cuda:1", "gpu_memory": 5}, {1: 5, "cpu": 270}, "cuda"),
        ({"device": "auto", "ram": 7, "nf4": True}, {0: 90, "cpu": 7}, "cuda"),
    ],
)
def test_what_accelerate_is_told(
    settings: dict[str, Any],
    most: dict[Any, int] | None,
    device: str,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: dict[str, Any] = {}
    plain = transformers.AutoModelForCausalLM.from_pretrained

    def from_pretrained(place: Path, **options: Any) -> Any:
        told.update(options)
        model = plain(place, dtype=options["dtype"])
        if "device_map" in options:
            model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
        return model

    free = {0: 100, 1: 200, "cpu": 300}
    monkeypatch.setattr(transformers_engine, "get_max_memory", lambda: free)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    engine = load_transformers(tiny_folder, **settings)
    assert engine.info["device"] == device
    assert told.get("device_map") == (None if device == "cpu" else "auto")
    assert told.get("max_memory") == most
    assert engine.info["format"] == ("nf4" if "nf4" in settings else "bf16")
    if "nf4" in settings:
        assert told["quantization_config"].bnb_4bit_quant_type == "nf4"
        assert told["quantization_config"].llm_int8_enable_fp32_cpu_offload


def test_no_room_is_one_line(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(place: Path, **options: Any) -> Any:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nand much more")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(
        UnsupportedModelError, match=r"CUDA out of memory. Tried to allocate 2 GiB$"
    ):
        load_transformers(tiny_folder, device="cuda")
