"""Which cut of a product is taken: measured once, kept, within its time; by rule elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from localrt.common.errors import LocalrtError
from localrt.quant.cuda import launch as timing
from localrt.quant.cuda import products
from localrt.quant.cuda.gpu_file import GpuFile, kept_of
from localrt.quant.cuda.launch import noting
from localrt.quant.cuda.products import product, quantize
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.variants import (
    CUTS,
    Case,
    Cut,
    Variants,
    best_cut,
    candidates,
)
from tests.ops.cuda.emulator import Emulator
from tests.ops.cuda.test_products import inputs, matrix

PROCESSORS = 24
CASE = Case.of("q4_0", 1, 64, 4096)
OTHER = Case.of("q4_0", 1, 128, 4096, gate=True)


class FakeGpu:
    """Takes as long as ``cost`` says for what it is asked to launch, which it notes."""

    def __init__(self, cost: Callable[[Cut], float] = lambda cut: cut.parts) -> None:
        self.cost = cost
        self.launched: list[Cut] = []
        self.recording = False
        self.now = 0.0

    def launch(self, cut: Cut) -> None:
        self.launched.append(cut)

    def ready(self) -> bool:
        return not self.recording

    def seconds(self, launch: Callable[[], object]) -> float:
        launch()
        self.now += 0.5
        return self.cost(self.launched[-1])

    def variants(self, file: GpuFile | None = None, budget_s: float = 1e9) -> Variants:
        return Variants(
            PROCESSORS, stopwatch=self, file=file, budget_s=budget_s, now=lambda: self.now
        )


def kept(folder: Path, key: Sequence[str] = ("driver", "compiler", "sources")) -> GpuFile:
    return GpuFile(folder, "RTX 4060", key)


def test_quickest_cut() -> None:
    gpu = FakeGpu(lambda cut: 1.0 if cut == Cut(1, 1, 4) else 2.0)
    found = gpu.variants()
    assert best_cut(CASE, PROCESSORS) != Cut(1, 1, 4)
    assert found.cut(CASE, gpu.launch) == Cut(1, 1, 4)
    count = len(gpu.launched)
    assert count <= 1 + 6
    assert found.cut(CASE, gpu.launch) == Cut(1, 1, 4)
    assert len(gpu.launched) == count


def test_noted_candidates() -> None:
    """Kernels are compiled before the first pass."""
    gpu, programs = FakeGpu(), dict[Program, None]()
    found, matrix_ = gpu.variants(), matrix("q4_0", 64, 256)
    with noting(programs):
        assert found.cut(CASE, gpu.launch) == best_cut(CASE, PROCESSORS)
        product(quantize(inputs(1, 256)), matrix_, torch.empty(1, 64), cut=Cut(1, 1))
    assert gpu.launched == list(candidates(CASE, PROCESSORS))
    assert gpu.now == 0.0
    assert [program.name for program in programs] == ["quantize", "linear"]
    found.cut(CASE, gpu.launch)
    assert gpu.now > 0.0


def test_one_candidate_is_not_timed() -> None:
    case, gpu = Case.of("q4_k", 1, 2048, 4096), FakeGpu()
    assert list(candidates(case, PROCESSORS)) == [gpu.variants().cut(case, gpu.launch)]
    assert not gpu.launched


def test_what_is_hardly_quicker_is_not_taken() -> None:
    rule = best_cut(CASE, PROCESSORS)
    gpu = FakeGpu(lambda cut: 1.0 if cut == rule else 0.98)
    assert gpu.variants().cut(CASE, gpu.launch) == rule
    gpu = FakeGpu(lambda cut: 1.0 if cut == rule else 0.9 + 0.01 * cut.parts)
    found = gpu.variants()
    assert found.cut(CASE, gpu.launch) != rule
    assert found.measured[CASE].gain == pytest.approx(1 / 0.91)


def test_rising_clocks() -> None:
    gpu = FakeGpu()
    gpu.cost = lambda cut: 10.0 - gpu.now  # whatever is launched
    found = gpu.variants()
    assert found.cut(CASE, gpu.launch) == best_cut(CASE, PROCESSORS)
    assert found.measured[CASE].gain == 1.0


def test_another_process_reads_what_was_measured(tmp_path: Path) -> None:
    gpu = FakeGpu(lambda cut: 1 / cut.parts)
    first = gpu.variants(kept(tmp_path))
    cuts = [first.cut(case, gpu.launch) for case in (CASE, OTHER)]
    gpu.launched.clear()
    again = gpu.variants(kept(tmp_path))
    assert [again.cut(case, gpu.launch) for case in (CASE, OTHER)] == cuts
    assert not gpu.launched
    # A driver, a compiler or kernels that are new are measured anew.
    gpu.variants(kept(tmp_path, ["driver", "compiler", "newer sources"])).cut(CASE, gpu.launch)
    assert gpu.launched
    assert len(kept_of(tmp_path, "RTX 4060")[CUTS]["cases"]) == 1


@pytest.mark.parametrize(
    "damage",
    [
        lambda cases: "nonsense",
        lambda cases: [{**cases[0], "parts": 3}],
        lambda cases: [{**cases[0], "rows": "many"}, 7, {}],
    ],
)
def test_damaged_file(tmp_path: Path, damage: Callable[[list[dict[str, object]]], object]) -> None:
    gpu = FakeGpu()
    wanted = gpu.variants(kept(tmp_path)).cut(CASE, gpu.launch)
    path = tmp_path / "cards.json"
    values = json.loads(path.read_text())
    values["RTX 4060"][CUTS]["cases"] = damage(values["RTX 4060"][CUTS]["cases"])
    for text in (json.dumps(values), "[]", "{"):
        path.write_text(text)
        gpu.launched.clear()
        assert gpu.variants(kept(tmp_path)).cut(CASE, gpu.launch) == wanted
        assert gpu.launched


def test_measuring_ends_with_its_time(tmp_path: Path) -> None:
    gpu = FakeGpu(lambda cut: 1 / cut.parts)
    found = gpu.variants(kept(tmp_path), budget_s=0.6)
    found.cut(CASE, gpu.launch)  # takes longer than there was
    gpu.launched.clear()
    assert found.cut(OTHER, gpu.launch) == best_cut(OTHER, PROCESSORS)
    assert not gpu.launched
    # A model that is loaded has its own time, and the next process goes on with what was left.
    third = Case.of("q4_0", 1, 32, 4096)
    with noting({}):
        found.cut(third, gpu.launch)
    assert found.cut(third, gpu.launch) != best_cut(third, PROCESSORS)
    gpu.launched.clear()
    gpu.variants(kept(tmp_path), budget_s=0.6).cut(OTHER, gpu.launch)
    assert gpu.launched


def test_recording() -> None:
    gpu = FakeGpu(lambda cut: 1 / cut.parts)
    found = gpu.variants()
    gpu.recording = True
    assert found.cut(CASE, gpu.launch) == best_cut(CASE, PROCESSORS)
    assert not gpu.launched
    gpu.recording = False
    assert found.cut(CASE, gpu.launch).parts == 4


def test_refused_kernel(tmp_path: Path) -> None:
    rule = best_cut(CASE, PROCESSORS)

    def refused(cut: Cut) -> float:
        if cut not in (rule, Cut(1, 1, 2)):
            raise LocalrtError("too many resources requested for launch")
        return 2.0 if cut == rule else 1.0

    def full(cut: Cut) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    gpu = FakeGpu(refused)
    assert gpu.variants().cut(CASE, gpu.launch) == Cut(1, 1, 2)
    gpu = FakeGpu(full)
    assert gpu.variants(kept(tmp_path)).cut(CASE, gpu.launch) == rule
    assert not kept_of(tmp_path, "RTX 4060")


def test_candidates() -> None:
    for rows in (1, 3, 8, 16, 33, 64, 128, 2048):
        for tiles in (1, 32, 256, 5000):
            for name in ("q4_0", "q4_k", "nvfp4"):
                case = Case.of(name, rows, tiles, 4096)
                cuts = list(candidates(case, PROCESSORS))
                assert len(set(cuts)) == len(cuts) <= 10
                assert cuts[0] == best_cut(case, PROCESSORS)
                # Counters of blocks that share columns, and rows of records that a warp loads.
                for cut in cuts:
                    blocks = -(-tiles // 2) * -(-min(rows, 2048) // (8 * cut.groups))
                    assert cut.parts == 1 or blocks <= 4096
                    assert cut.groups <= cuts[0].groups


def test_same_products(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = matrix("q4_0", 40, 512), quantize(inputs(11, 512))
    out = torch.empty(11, 40)
    product(x, weight, out)
    wanted = out.numpy().copy()
    gpu = FakeGpu(lambda cut: cut.parts)
    found = gpu.variants()
    seen: list[np.ndarray] = []
    seconds = gpu.seconds

    def noted(launch: Callable[[], object]) -> float:
        out.fill_(float("nan"))
        gpu.launched.append(Cut(0, 0))
        seconds(launch)
        seen.append(out.numpy().copy())
        return float(len(seen))

    monkeypatch.setattr(gpu, "seconds", noted)
    monkeypatch.setattr(products, "variants", lambda device: found)
    emulator.launches.clear()
    product(x, weight, out)
    assert len(seen) >= 4
    assert all(np.array_equal(each, wanted) for each in seen)
    assert np.array_equal(out.numpy(), wanted)
    count = len(emulator.launches)
    product(x, weight, out)
    assert len(emulator.launches) == count + 1


def test_stopwatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The calls of CUDA, here of a stand-in: what is launched takes from 7 to 3 milliseconds."""
    done: list[str] = []
    marks = iter([0.0, 7.0, 0.0, 6.0, 0.0, 5.0, 0.0, 4.0, 0.0, 3.0])

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = next(marks)

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at)

    stream = SimpleNamespace(synchronize=lambda: done.append("awake"))
    properties = SimpleNamespace(L2_cache_size=24 << 20)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(timing, "_WAKING_S", 1e-3)
    monkeypatch.setattr(
        torch.Tensor, "zero_", lambda self: done.append(f"write {self.nbytes >> 20} MB")
    )
    watch = timing.CudaStopwatch(torch.device("cpu"))
    assert watch.seconds(lambda: done.append("launch")) == 5e-3
    assert done[:3] == ["launch", "write 48 MB", "awake"]
    assert done[-6:] == ["write 48 MB"] * 4 + ["launch", "wait"]
    assert done.count("launch") == 6
