"""Drafts beside a target on a GPU that is not there: planned, and with kernels on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.common.errors import OptionError
from localrt.common.settings import Settings
from localrt.drafts import loading, placement
from localrt.drafts.model_draft import DraftPlace
from localrt.loading import gpu, native
from localrt.loading.gpu import OpenGpu
from localrt.loading.options import LoadOptions
from localrt.offload.account import CUDA_CONTEXT_NBYTES, ROUNDED_VRAM_NBYTES
from localrt.offload.device.gpu import Clock, Gpu
from localrt.planning.machine import parse_gpu
from localrt.quant.cpu.ops import NativeOps
from tests.conftest import needs_kernels

pytest.importorskip("torch")

from localrt.quant import choose
from localrt.quant.cuda.device import emulate
from localrt.quant.cuda.ops import CudaOps
from tests.inside import core_of
from tests.ops.cuda.emulator import Emulator

pytestmark = [needs_kernels, pytest.mark.usefixtures("given_rates")]

LARGE, SMALL = "200MB", "1600kB"


Place = Callable[..., DraftPlace]


@pytest.fixture
def place(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Place:
    """Plans the two models for a GPU of a size; nothing runs on it."""

    def planned(size: str, **options: Any) -> DraftPlace:
        gpu = parse_gpu(f"virtual:{size}@12GB/s,256GB/s,20TFLOPS")
        ops, clock = NativeOps(threads=1), Clock()
        opened = OpenGpu(
            host_ops=ops,
            clock=clock,
            gpu=Gpu(clock, ops, name="GPU", capacity=gpu.vram_bytes),
            capacity=gpu.vram_bytes,
            profile=gpu.profile,
            link_bytes_s=gpu.link_bytes_s,
        )
        monkeypatch.setattr(placement, "_open_gpu", lambda *args: opened)
        found = placement.place_draft(
            *folders,
            "draft",
            LoadOptions(device="cuda", ctx=128, **options),
            Settings.from_environment(),
        )
        assert found is not None
        return found

    return planned


def test_both_on_the_gpu(place: Place) -> None:
    found = place(LARGE)
    assert found.line == "draft draft: both models fit on the GPU"
    assert found.target is not None
    assert found.draft is not None
    assert (found.target.device, found.draft.device) == ("cuda", "cuda")
    assert found.alone.device == "cuda"
    vram = found.draft.gpu_memory  # its part is not the target's
    assert isinstance(vram, int)
    assert found.cache_room
    beside = CUDA_CONTEXT_NBYTES + ROUNDED_VRAM_NBYTES
    assert found.target.gpu_memory == 200_000_000 - vram + beside


def test_bad_input(folders: tuple[Path, Path]) -> None:
    with pytest.raises(
        OptionError, match=r"must be auto, cpu or cuda, is 'virtual:8GB'.*plan MODEL --gpu"
    ):
        localrt.load(folders[0], device="virtual:8GB", draft=str(folders[1]))
    with pytest.raises(localrt.LocalrtError, match="nowhere"):
        localrt.load(folders[0], device="cpu", draft="/nowhere/at/all")


VRAM = 2 << 30
OPTIONS: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.0}


class GpuOps(CudaOps):
    """The kernels of a GPU with ``VRAM`` bytes that are free."""

    def __init__(self) -> None:
        super().__init__(device="cpu")

    def free_memory(self) -> int:
        return VRAM


@pytest.fixture
def kernels() -> Iterator[None]:
    """Run on the CPU."""
    before = emulate(Emulator())
    yield
    emulate(before)


@pytest.fixture
def folder(folders: tuple[Path, Path]) -> Path:
    """One model, which is its own draft."""
    return folders[0]


@pytest.fixture
def devices(kernels: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The devices that were asked for, in order."""
    asked: list[str] = []
    make_ops = choose.make_ops

    def made(attention: Any, *, device: str = "auto", **options: Any) -> Any:
        asked.append(device)
        if device.startswith("cuda"):
            return GpuOps()
        return make_ops(attention, device=device, **options)

    for module in (choose, native, loading, placement):
        monkeypatch.setattr(module, "make_ops", made)
    monkeypatch.setattr(gpu, "_rates", lambda *_, **__: None)  # there is none to measure
    return asked


@pytest.mark.slow
def test_load(folder: Path, devices: list[str]) -> None:
    with localrt.load(folder, device="cuda", draft="off", ctx=64) as model:
        plain = model.generate("ab", **OPTIONS)
    devices.clear()
    with localrt.load(folder, device="cuda", draft=str(folder), ctx=64, gpu_memory="1GB") as model:
        assert model.info.notes[-1].endswith("both models fit on the GPU")
        drafts: Any = core_of(model).drafts
        ((draft, _),) = drafts._drafts.values()
        assert draft._parts.engine.decoder.ops.name == "cuda"
        assert draft._parts.ctx == 64 + 128
        ours = model.generate("ab", tree_budget=3, tree_depth=2, **OPTIONS)
        assert ours.token_ids == plain.token_ids
        assert str(ours.metrics.speculation).startswith("speculation: model")
        assert (ours.metrics.accepted_per_pass or 0) > 1.5  # it is the target itself
    assert devices[0] == "cuda"
