"""Drafts beside a target on a GPU: placed by plan, within budgets, never seen in the tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.common.errors import MemoryBudgetError, OptionError
from localrt.common.settings import Settings
from localrt.drafts import placement
from localrt.drafts.model_draft import DraftPlace
from localrt.loading.gpu import OpenGpu
from localrt.loading.options import LoadOptions
from localrt.offload.account import CUDA_CONTEXT_NBYTES, ROUNDED_VRAM_NBYTES
from localrt.offload.device.gpu import Clock, Gpu
from localrt.planning.machine import parse_gpu
from localrt.quant.cpu.ops import NativeOps
from tests.conftest import needs_kernels

pytestmark = [
    needs_kernels,
    pytest.mark.usefixtures("given_rates"),
]

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


def test_small_gpu(place: Place) -> None:
    found = place(SMALL)
    assert found.line.startswith("draft draft: the draft is in RAM")
    assert found.target is not None
    assert found.draft is not None
    assert (found.target.device, found.draft.device) == ("cuda", "cpu")


def test_no_draft(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "draft_nbytes", lambda *_: 10**15)
    found = place(SMALL)
    assert found.target is found.draft is None
    assert re.match(
        r"draft draft is not used: the draft needs 1000 TB, and \S+ \S+ of RAM", found.note
    )


def test_bad_input(folders: tuple[Path, Path]) -> None:
    with pytest.raises(
        OptionError, match=r"must be auto, cpu or cuda, is 'virtual:8GB'.*plan MODEL --gpu"
    ):
        localrt.load(folders[0], device="virtual:8GB", draft=str(folders[1]))
    with pytest.raises(localrt.LocalrtError, match="nowhere"):
        localrt.load(folders[0], device="cpu", draft="/nowhere/at/all")
    with pytest.raises(MemoryBudgetError):
        localrt.load(folders[0], device="cpu", draft=str(folders[1]), ram="1MB")
