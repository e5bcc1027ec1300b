"""The speeds of ``benchmarks.gpu``: what is timed, and what a tiny model's rows have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import facts, model, timing
from benchmarks.gpu.kernels import random_rows
from localrt.quant.cuda import cuda_memory
from localrt.quant.cuda.driver import Cuda, device_of
from localrt.quant.cuda.products import quantize
from tests.driver.inside.conftest import Kernels
from tests.offload.placed import needs_kernels

MIB = 1 << 20
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


@pytest.fixture
def device(gpu: Kernels) -> Iterator[Cuda]:
    found: Cuda = device_of("cuda:0")
    yield found
    timing._capture.cache_clear()  # which keeps the GPU


def test_launches_are_timed_in_a_graph(device: Cuda, gpu: Kernels) -> None:
    rows = [random_rows(2, 64) for _ in range(3)]
    launches = [lambda x=x: quantize(x) for x in rows]
    gpu.launches.clear()
    assert timing.launch_seconds(launches) >= 0
    graph = ["record", *["quantize"] * 3, *["replay"] * (timing.RUNS + 2)]
    assert gpu.launches == [*["quantize"] * 2, *graph]


def test_facts(device: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_COPIED", 8 * MIB)
    monkeypatch.setattr(facts, "_PIECES", (2 * MIB, 8 * MIB))
    monkeypatch.setattr(timing, "_COPIED", 8 * MIB)
    for name in ("_LAUNCHES", "_RUNS"):
        monkeypatch.setattr(facts, name, 3)
    before = device.allocated_nbytes
    assert timing.copy_bandwidth() > 0
    assert device.allocated_nbytes == before
    (_, copied), (_, copies), (_, waits) = facts.facts()
    assert copied["copied_gb_s"] > 0
    assert copies.keys() == {"gb_s_2_mb", "gb_s_8_mb"}
    assert len(waits) == 7


@needs_kernels
@pytest.mark.usefixtures("given_rates")
def test_a_model(device: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_PROMPTS": (4, 6), "_TOKENS": 3, "_FILLER": 1000}.items():
        monkeypatch.setattr(model, name, value)
    monkeypatch.setattr(cuda_memory, "_SAMPLE", MIB)
    monkeypatch.setattr(model, "config_of", lambda _: TINY)
    monkeypatch.delitem(model.WAYS, "from the SSD")  # so small, all is kept
    for name in ("LOCALRT_CACHE", "XDG_DATA_HOME", "LOCALRT_OFFLINE"):
        monkeypatch.setenv(name, "")  # which are put back
    rows = dict(model.model("14B"))
    assert list(rows) == ["14B, within 8 GB", "14B, at 12 GB/s", "14B, resident"]
    for row in rows.values():
        assert row["decode_tok_s"] > 0, row
        assert "failed" not in row


def test_slower_link(device: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent besides changes no copy."""
    monkeypatch.setattr(cuda_memory, "_SAMPLE", MIB)
    monkeypatch.setattr(model, "_FILLER", 1000)
    with model.throttled(1.0):
        copies = cuda_memory.CudaCopies(most_pinned=64 * MIB)
    assert type(copies) is not cuda_memory.CudaCopies, "only meanwhile"
    copies._times = 2.5  # type: ignore[attr-defined]
    source, out = copies.host_buffer(4096), copies.alloc(4096)
    source[:] = np.arange(4096, dtype=np.uint16).view(np.uint8)[:4096]
    copied: list[int] = []
    plain = Cuda.copy_in

    def noted(self: Cuda, to: int, values: np.ndarray, stream: object = None) -> None:
        copied.append(values.nbytes)
        plain(self, to, values, stream)

    monkeypatch.setattr(Cuda, "copy_in", noted)
    copies.copy_in(source, out, None)
    assert copied == [4096, *[1000] * 10, 240]
    np.testing.assert_array_equal(out.to_host(), source)
    copies.free(out)
    copies.close()
