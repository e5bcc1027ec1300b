"""Devices: views and pools of memory, which implementation a GPU gets, and its measured rates."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localrt import system
from localrt.common.errors import MissingExtraError, OptionError
from localrt.common.extras import install
from localrt.quant import choose
from localrt.quant.cuda import driver as devices
from localrt.quant.cuda import measuring, programs
from localrt.quant.cuda.device import Ram
from localrt.quant.cuda.driver import device_of
from localrt.quant.cuda.gpu_cache import RATES, GpuCache, GpuRates
from localrt.quant.cuda.measuring import gpu_rates
from localrt.quant.cuda.memory import Pool, PoolBlock
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.tensor import upload
from localrt.quant.formats.tiled import tile_tensor
from localrt.quant.ops.attention import AttentionSpec, LatentSpec, Rope
from tests.ops.packed import random_tensor
from tests.planner.models import RATE


class Slabs:
    """Memory that knows what is out."""

    def __init__(self) -> None:
        self.next, self.out = 1 << 20, dict[int, int]()

    def alloc(self, nbytes: int) -> int:
        at = self.next
        self.next += nbytes
        self.out[at] = nbytes
        return at

    def free(self, address: int) -> None:
        del self.out[address]


@given(st.lists(st.tuples(st.integers(0, 40 << 20), st.integers(0, 7)), max_size=60))
def test_pools(steps: list[tuple[int, int]]) -> None:
    """Blocks lie in slabs, apart; what is given back is taken again; empty slabs go."""
    slabs = Slabs()
    pool, blocks = Pool(slabs.alloc, slabs.free), dict[int, PoolBlock]()
    for nbytes, slot in steps:
        if slot in blocks and nbytes % 2:
            del blocks[slot]
        else:
            blocks[slot] = pool.take(nbytes)
        spans = sorted((block.address, block.address + block.nbytes) for block in blocks.values())
        assert all(one[1] <= other[0] for one, other in pairwise(spans))
        for first, stop in spans:
            assert first % 256 == 0
            assert any(at <= first and stop <= at + size for at, size in slabs.out.items())
        assert pool.nbytes == sum(slabs.out.values())
    del blocks
    assert pool.unused_nbytes == pool.nbytes
    pool.trim()
    assert not slabs.out


def test_pools_that_make_room_for_each_other() -> None:
    """Two threads find a device full, one in each of its pools: neither waits for the other."""

    class Full(Ram):
        """It has room once it is trimmed, for which each thread gives the other time to come."""

        meet = threading.Barrier(2)

        def alloc(self, nbytes: int) -> int:
            with suppress(threading.BrokenBarrierError):
                self.meet.wait(0.2)
            self.trim()
            return super().alloc(nbytes)

    device = Full()
    threads = [
        threading.Thread(target=pool.take, args=(1000,), daemon=True)
        for pool in (device.persistent, device.scratch)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


# -- which implementation a GPU gets ---------------------------------------------------------------

needs_compiler = pytest.mark.skipif(not programs.has_compiler(), reason="needs CUDA's compiler")


class Gpu(Ram):
    """Says that it is a GPU."""

    is_gpu = True
    capability = (7, 5)

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def __str__(self) -> str:
        return f"cuda:{self.index}"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """Two that our kernels run on."""
    gpus = [Gpu(index) for index in range(2)]
    monkeypatch.setattr(devices, "count_gpus", lambda: len(gpus))
    monkeypatch.setattr(devices, "_cuda", gpus.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return gpus


def heads_of(size: int, **options: Any) -> AttentionSpec:
    sizes = {"heads": 1, "kv_heads": 1, "head_dim": size, **options}
    return AttentionSpec(scale=1.0, eps=1e-6, rope=None, **sizes)


LATENT = LatentSpec(
    heads=1, kv_heads=1, head_dim=48, scale=1.0, eps=1e-6, rope=Rope((1.0,) * 8), latent=32,
    nope=32, value=32,
)  # fmt: skip


@needs_compiler
@pytest.mark.parametrize(
    ("specs", "options", "found"),
    [
        ([], {"device": "cuda:1"}, {"device": "cuda:1", "compute_format": "packed"}),
        ([], {"compute_format": "bf16"}, {"name": "torch", "compute_format": "bf16"}),
        ([heads_of(80)], {}, {"name": "cuda"}),
        ([heads_of(36)], {}, {"name": "torch"}),
        ([heads_of(384)], {}, {"name": "torch"}),
        ([heads_of(512)], {}, {"name": "cuda"}),
        ([LATENT], {}, {"name": "cuda"}),
    ],
    ids=["packed", "a chosen format is torch's", "80", "36", "384", "512", "latents"],
)
def test_choice(
    gpus: list[Gpu], specs: list[Any], options: dict[str, Any], found: dict[str, str]
) -> None:
    ops = choose.make_ops(specs, **{"device": "cuda", **options})
    assert {name: getattr(ops, name) for name in found} == found


@needs_compiler
def test_old_gpus_and_no_compiler(gpus: list[Gpu], monkeypatch: pytest.MonkeyPatch) -> None:
    gpus[0].capability = (7, 0)
    assert choose.make_ops([], device="cuda").name != "cuda"
    with pytest.raises(OptionError, match=r"compute capability 7\.5, and this has 7\.0"):
        choose.make_ops([LATENT], device="cuda")
    gpus[0].capability = (7, 5)
    with pytest.raises(OptionError, match="do not take latents of 2048 numbers and 16 rotary ones"):
        choose.make_ops([replace(LATENT, head_dim=2064, latent=2048)], device="cuda")
    monkeypatch.setattr(programs, "has_compiler", lambda: False)
    ops = choose.make_ops([], device="cuda")
    assert ops.name == "torch"
    why = choose.why_not_our_kernels(ops, [], "cuda")
    assert why.startswith("the GPU computes without localrt's kernels")
    assert why.endswith(f"CUDA's compiler is missing: {install('gpu')}")
    monkeypatch.setattr(system, "has_nvidia_driver", lambda: True)
    ops = choose.make_ops([LATENT])
    assert ops.device == "cpu"
    assert "the GPU is not used" in choose.why_not_our_kernels(ops, [LATENT], "auto")
    with pytest.raises(OptionError, match=r"and CUDA's compiler is missing: .* -m pip install"):
        choose.make_ops([LATENT], device="cuda")
    with pytest.raises(OptionError, match="a GPU that ours run on"):
        choose.make_ops([heads_of(64)], device="cuda", kv_format="int8")


@needs_compiler
def test_activations_keep_bf16_on_a_gpu_alone(gpus: list[Gpu]) -> None:
    tiles = tile_tensor(random_tensor("q4_0", 16, 32))
    data: Any = upload(tiles.data, device_of("cuda"))
    on_gpu = replace(tiles, data=data)
    for activations, fine in (("bf16", True), ("int8", False), (None, False)):
        ops = choose.make_ops([], device="cuda", activations=activations)
        assert ops.weight((16, 32), [on_gpu]).fine == fine
    with pytest.raises(OptionError, match=r"activations=.bf16. is for a GPU"):
        choose.make_ops([], device="cpu", activations="bf16")


@needs_compiler
def test_gpus_that_are_not_there(gpus: list[Gpu]) -> None:
    with pytest.raises(OptionError, match="there is no GPU 'cuda:2'"):
        choose.make_ops([], device="cuda:2")
    gpus.clear()
    for format_ in (None, "bf16"):
        with pytest.raises(OptionError, match=r"there is no NVIDIA GPU for device=.cuda.,"):
            choose.make_ops([], device="cuda", compute_format=format_)


@needs_compiler
def test_torch_that_does_not_help(gpus: list[Gpu], monkeypatch: pytest.MonkeyPatch) -> None:
    """For the CPU alone it multiplies nothing on a GPU, or it is missing; our kernels need none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose.make_ops([], device="cuda").name == "cuda"
    with pytest.raises(OptionError, match=r"torch finds .* device=.cuda.: use device=.cpu.$"):
        choose.make_ops([], device="cuda", compute_format="bf16")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert choose.make_ops([], device="cuda").name == "cuda"
    with pytest.raises(MissingExtraError, match=r"needs torch on a GPU: .* -m pip install"):
        choose.make_ops([], device="cuda", compute_format="bf16")


# -- rates -----------------------------------------------------------------------------------------


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
