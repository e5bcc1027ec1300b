"""A GPU's rates: measured once, kept, and only what is missing measured again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from localrt.quant.cpu.abi import find_library
from localrt.quant.cuda import measuring
from localrt.quant.cuda.gpu_cache import RATES, ROWS, GpuCache, GpuRates
from localrt.quant.cuda.measuring import gpu_rates, measure_gpu
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.programs import Program
from tests.ops.cuda.emulator import Emulator
from tests.planner.models import RATE


class Small(measuring.Size):
    shape = (64, 256)
    copied = 1 << 16
    read = 1 << 16
    copies = 2
    launches = 2


class Watch:
    """Says that everything takes a second; what is launched runs once."""

    def ready(self) -> bool:
        return True

    def seconds(self, launch: Callable[[], object]) -> float:
        launch()
        return 1.0


def test_a_gpu_is_measured(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: set[Program] = set()
    monkeypatch.setattr(emulator, "prepare", compiled.add)
    ops, steps = CudaOps(device="cpu"), list[tuple[int, int]]()
    rates = measure_gpu(
        ops, ["q4_0", "bf16"], stopwatch=Watch(), size=Small, on_step=lambda *s: steps.append(s)
    )
    assert rates.products == {"q4_0": (1 / (64 * 256),) * len(ROWS)}
    assert rates.memory_bytes_s == 2 * Small.copied
    assert rates.replay_s == 1 / Small.launches
    assert rates.to_gpu_bytes_s > 0
    assert 0 < rates.busy_cpu <= 1
    assert (rates.busy_cpu < 1 or rates.busy_link < 1) or find_library() is None
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert {program for program in emulator.launches if program.name == "linear"} <= compiled
    # Of a GPU that is known, nothing but a new format.
    emulator.launches.clear()
    more = measure_gpu(ops, ["q8_0"], known=RATE, stopwatch=Watch(), size=Small)
    assert more.products.keys() == {"int4-g32", "q8_0"}
    assert replace(more, products=RATE.products) == RATE


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
