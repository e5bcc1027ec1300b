"""Models that share a GPU on the driver: what does not fit leaves for RAM, and comes back."""

from __future__ import annotations

import gc
import shutil
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

import localrt
from localrt.models.checkpoints import open_checkpoint
from localrt.offload.account import SPARE_VRAM_NBYTES
from localrt.offload.device.cuda import CudaGpu
from localrt.offload.reading.files import StoreFiles
from localrt.quantize.quantize import Recipe, quantize_model
from localrt.server import pool as pooling
from localrt.server.options import ServeOptions
from localrt.server.pool import LocalFile, ModelPool
from tests.conftest import write_byte_tokenizer, write_tiny_model
from tests.driver.inside.conftest import Kernels
from tests.driver.standin import Driver
from tests.inside import engine_of
from tests.models.tiny import SIZES, save_tiny
from tests.offload.placed import needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("given_rates")]

GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}
TEXT = "Count from one to twenty."


@pytest.fixture(scope="module", params=["llama", "mixture"])
def store(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "llama":
        write_tiny_model(folder)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(SIZES, "vocab_size", write_byte_tokenizer(folder))
            save_tiny("qwen3-moe", folder)
    with closing(open_checkpoint(folder)) as source:
        recipe = Recipe("int4-g32", method="rtn")
        return quantize_model(
            source, tmp_path_factory.mktemp("s") / "store", recipe, threads=1
        ).path


class Shared:
    """A pool of two models on one GPU, with room for the weights of both, or of one at a time."""

    def __init__(self, store: Path, driver: Driver, patch: pytest.MonkeyPatch, *, both: bool):
        self.store, self.loaded, self.said = store, list[str](), list[str]()
        with localrt.load(store, device="cuda", draft="off", ctx=256) as whole:
            self.alone = whole.generate(TEXT, **GREEDY).token_ids
        with localrt.load(store, device="cuda", draft="off", ctx=256, shrinkable=True) as one:
            assert one.generate(TEXT, **GREEDY).token_ids == self.alone
            use = one.gpu_use
        del whole, one
        assert use is not None
        assert use.leavable > 0 == use.missing
        self.total, self.nbytes = 3 * use.used, use.leavable
        if not both:
            driver.set(memory=SPARE_VRAM_NBYTES + self.total)
            for name in ("_RESERVE", "_BESIDE_ON_GPU"):
                patch.setattr(pooling, name, 1 << 30)  # everybody wants all of it
        files = [LocalFile(name, name, self.nbytes) for name in "ab"]
        self.pool = ModelPool(self.load, lambda: files, ServeOptions(), on_change=self.said.append)

    def load(
        self, name: str, shrinkable: bool, cancel: threading.Event, on_gpu: int
    ) -> localrt.Model:
        self.loaded.append(name)
        gc.collect()  # what closed models have left
        return localrt.load(self.store, device="cuda", draft="off", ctx=256, shrinkable=shrinkable)

    @property
    def gpus(self) -> list[Any]:
        """The lane of each model's GPU."""
        return [engine_of(one.model).weights.gpu for one in self.pool.at_work()]

    async def ask(self, name: str) -> tuple[int, ...]:
        self.pool._slot(name).contested = True  # as once it has been unloaded for the other
        async with self.pool.using(name) as served:
            use = served.model.gpu_use
            assert use is not None
            assert (use.leavable, use.missing) == (self.nbytes, 0)
            tokens: tuple[int, ...] = (await served.live.agenerate(TEXT, **GREEDY)).token_ids
            return tokens


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many bytes are read of stores."""
    counted, read_into = Counter[str](), StoreFiles.read_into

    def noted(files: StoreFiles, name: str, offset: int, out: Any) -> None:
        counted[name] += out.nbytes
        read_into(files, name, offset, out)

    monkeypatch.setattr(StoreFiles, "read_into", noted)
    return counted


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What all models have taken of the GPU together, whenever one takes more."""
    gpus, seen, reserve = WeakSet[CudaGpu](), list[int](), CudaGpu.set_reserved

    def noted(gpu: CudaGpu, nbytes: int) -> None:
        reserve(gpu, nbytes)
        gpus.add(gpu)
        seen.append(sum(each.used + each.reserved for each in gpus if each.used))

    monkeypatch.setattr(CudaGpu, "set_reserved", noted)
    return seen


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("both", [True, False], ids=["both", "one"])
async def test_by_turns(
    gpu: Kernels,
    driver: Driver,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    reads: Counter[str],
    peaks: list[int],
    both: bool,
) -> None:
    """Each answers as it does alone. Nothing is loaded or read again, and the GPU is never full."""
    shared = Shared(store, driver, monkeypatch, both=both)
    with closing(shared.pool):
        for name in "abab":
            assert await shared.ask(name) == shared.alone
        for counted in (reads, peaks, shared.said):
            counted.clear()
        links = [one.gpu.link_bytes for one in shared.gpus]
        for name in "ababab":
            assert await shared.ask(name) == shared.alone
        copied = [
            one.gpu.link_bytes - before for one, before in zip(shared.gpus, links, strict=True)
        ]
        assert copied == [0, 0] if both else [3 * shared.nbytes] * 2
        assert shared.loaded == ["a", "b"]
        assert not reads
        assert max(peaks) <= (8 << 30 if both else shared.total)
        left = [text for text in shared.said if "of GPU memory, and keeps the rest" in text]
        assert len(left) == (0 if both else 6)


@pytest.mark.usefixtures("measured")
async def test_vanished_file(
    gpu: Kernels, driver: Driver, store: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model that has left the GPU needs none to return."""
    copied = shutil.copytree(store, tmp_path / "copied")
    shared = Shared(store, driver, monkeypatch, both=False)
    with closing(shared.pool):
        shared.store = copied
        await shared.ask("b")
        shared.store = store
        assert await shared.ask("a") == shared.alone
        shutil.rmtree(copied)
        for name in "baba":
            assert await shared.ask(name) == shared.alone
