"""A draft on a CUDA GPU beside its target: with a GPU that is not there.

Its kernels run on the CPU, its memory is this machine's, and its size is made up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import localrt
from localrt.drafts import loading, placement
from localrt.engine.native.engine import NativeEngine
from localrt.loading import gpu, native
from localrt.loading.options import LoadOptions
from localrt.offload import account
from tests.conftest import needs_kernels

pytest.importorskip("torch")

from localrt.quant import choose
from localrt.quant.cuda.device import emulate
from localrt.quant.cuda.ops import CudaOps
from tests.inside import core_of
from tests.ops.cuda.emulator import Emulator

pytestmark = [
    needs_kernels,
    pytest.mark.usefixtures("given_rates"),
]

VRAM = 2 << 30
OPTIONS: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.0}


class GpuOps(CudaOps):
    """The kernels of a GPU with ``VRAM`` bytes that are free."""

    def __init__(self) -> None:
        super().__init__(device="cpu")

    def free_memory(self) -> int:
        return VRAM


@pytest.fixture(autouse=True)
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
def devices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
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


def test_no_room(folder: Path, devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(account, "_OTHER_SCRATCH_NBYTES", 3 << 30)
    target: list[Any] = []

    def load(path: Path, options: Any, *more: Any, **others: Any) -> Any:
        target.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "load_model", load)
    with pytest.raises(KeyboardInterrupt):
        localrt.load(folder, device="cuda", draft=str(folder), ctx=64)
    assert target[0].device == "cpu"  # the draft, which is loaded first


def test_draft_fails(folder: Path, devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that others took since it was planned."""

    def full(*_: Any, **__: Any) -> Any:
        raise localrt.MemoryBudgetError("it needs 1 GB and 0 B of GPU memory are left")

    monkeypatch.setattr(loading, "load_draft", full)
    loaded: list[Any] = []

    def load(path: Path, options: Any, *more: Any, **others: Any) -> Any:
        loaded.append(options)
        return load_model(path, replace(options, device="cpu"), *more, **others)

    load_model = loading.load_model
    monkeypatch.setattr(loading, "load_model", load)
    with localrt.load(folder, device="cuda", draft=str(folder), ctx=64) as model:
        assert "is not used: it needs 1 GB and 0 B" in model.info.notes[-1]
    assert [options.device for options in loaded] == ["cuda"]  # as without a draft


@pytest.mark.parametrize(("budget", "left"), [(None, 900), (1000, 1000 - 300 - 100), (50, 1)])
def test_budget_without_plan(
    budget: int | None, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU that torch computes on."""
    monkeypatch.setattr(loading, "draft_growth_nbytes", lambda kv: kv)
    engine = MagicMock(spec=NativeEngine)
    engine.free_memory.return_value, engine.kv_nbytes.return_value = 1000, 100
    engine.info = SimpleNamespace(weight_bytes=300)
    parts: Any = SimpleNamespace(engine=engine, ctx=64)
    options = LoadOptions(device="cuda", gpu_memory=budget)
    assert loading._beside_draft(parts, options) == replace(options, gpu_memory=left)
