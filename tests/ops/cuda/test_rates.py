"""A GPU's rates: measured once, kept, and only what is missing measured again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from localrt.quant.cuda import measuring
from localrt.quant.cuda.gpu_cache import RATES, GpuCache, GpuRates
from localrt.quant.cuda.measuring import gpu_rates
from localrt.quant.cuda.ops import CudaOps
from tests.planner.models import RATE


def test_kept_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], bool]] = []

    def measure(ops: CudaOps, formats: list[str], *, known: GpuRates | None, **_: object) -> object:
        asked.append((list(formats), known is not None))
        rates = known or RATE
        return replace(rates, products=dict.fromkeys(formats, RATE.products["int4-g32"]))

    monkeypatch.setattr(measuring, "measure_gpu", measure)
    ops, file = CudaOps(device="cpu"), GpuCache(tmp_path, "GPU", ["key"])
    first = gpu_rates(ops, ["int4-g32", "f32"], file=file)
    assert gpu_rates(ops, ["int4-g32"], file=file) == first
    assert asked == [(["int4-g32"], False)]
    assert gpu_rates(ops, ["bf16"], file=file) == first  # nothing to measure
    gpu_rates(ops, ["q4_k"], file=file)
    assert asked[1:] == [(["q4_k"], True)]
    # Rows in 15 bits take longer.
    gpu_rates(CudaOps(device="cpu", fine=True), ["q4_k"], file=file)
    assert asked.pop() == (["q4_k"], False)
    # Another driver's figures, or damaged ones, are as good as none.
    gpu_rates(ops, ["q4_k"], file=GpuCache(tmp_path, "GPU", ["another"]))
    damaged = GpuCache(tmp_path, "GPU", ["key"])
    damaged.write(RATES, {**RATE.to_dict(), "replay_s": 0.0})
    gpu_rates(ops, ["q4_k"], file=damaged)
    assert [known for _, known in asked[2:]] == [False, False]


@pytest.mark.parametrize(
    "change",
    [{"memory_bytes_s": float("inf")}, {"products": {}}, {"products": {"q4_k": [1.0]}}, {"new": 1}],
)
def test_only_what_was_written_is_read(change: dict[str, object]) -> None:
    values = json.loads(json.dumps(RATE.to_dict()))
    assert GpuRates.from_dict(values) == RATE
    assert GpuRates.from_dict({**values, **change}) is None
