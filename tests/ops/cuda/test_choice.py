"""Which implementation a GPU gets, on a machine that says it has one."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from localrt.common.errors import MissingExtraError, OptionError
from localrt.common.extras import install
from localrt.quant import choose
from localrt.quant.cuda import driver as devices
from localrt.quant.cuda import programs
from localrt.quant.cuda.device import Ram
from localrt.quant.cuda.driver import device_of
from localrt.quant.cuda.tensor import upload
from localrt.quant.formats.tiled import tile_tensor
from localrt.quant.ops.attention import AttentionSpec, LatentSpec, Rope
from tests.ops.packed import random_tensor

pytestmark = pytest.mark.skipif(not programs.has_compiler(), reason="needs CUDA's compiler")


class Gpu(Ram):
    """Says that it is a GPU."""

    is_gpu = True
    capability = (7, 5)

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def __str__(self) -> str:
        return f"cuda:{self.index}"


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    gpus = [Gpu(index) for index in range(2)]
    monkeypatch.setattr(devices, "count_gpus", lambda: len(gpus))
    monkeypatch.setattr(devices, "_cuda", gpus.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return gpus


def test_our_kernels_run_packed_weights() -> None:
    ops = choose.make_ops([], device="cuda:1")
    assert (ops.name, ops.device, ops.compute_format) == ("cuda", "cuda:1", "packed")


def test_a_chosen_format_is_torchs() -> None:
    ops = choose.make_ops([], device="cuda", compute_format="bf16")
    assert (ops.name, ops.compute_format) == ("torch", "bf16")


def test_old_gpu(gpus: list[Gpu]) -> None:
    gpus[0].capability = (7, 0)
    assert choose.make_ops([], device="cuda").name != "cuda"


@pytest.mark.parametrize(
    ("size", "name"), [(80, "cuda"), (36, "torch"), (384, "torch"), (512, "cuda")]
)
def test_heads_that_no_kernel_takes_are_torchs(size: int, name: str) -> None:
    spec = AttentionSpec(heads=1, kv_heads=1, head_dim=size, scale=1.0, eps=1e-6, rope=None)
    assert choose.make_ops([spec], device="cuda").name == name


def test_without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "has_compiler", lambda: False)
    ops = choose.make_ops([], device="cuda")
    assert ops.name == "torch"
    why = choose.why_not_our_kernels(ops, [], "cuda")
    assert why.startswith("the GPU computes without localrt's kernels")
    assert why.endswith(f"CUDA's compiler is missing: {install('gpu')}")
    monkeypatch.undo()
    assert choose.why_not_our_kernels(choose.make_ops([]), [], "auto") == ""


def test_latent_attention(monkeypatch: pytest.MonkeyPatch, gpus: list[Gpu]) -> None:
    rope = Rope((1.0,) * 8)
    spec = LatentSpec(
        heads=1, kv_heads=1, head_dim=48, scale=1.0, eps=1e-6, rope=rope, latent=32, nope=32,
        value=32,
    )  # fmt: skip
    assert choose.make_ops([spec], device="cuda").name == "cuda"
    with pytest.raises(OptionError, match="do not take latents of 2048 numbers and 16 rotary ones"):
        choose.make_ops([replace(spec, head_dim=2064, latent=2048)], device="cuda")
    monkeypatch.setattr(programs, "has_compiler", lambda: False)
    monkeypatch.setattr(choose, "_default_device", lambda: "cuda")
    ops = choose.make_ops([spec])
    assert ops.device == "cpu"
    assert "the GPU is not used" in choose.why_not_our_kernels(ops, [spec], "auto")
    with pytest.raises(OptionError, match=r"and CUDA's compiler is missing: .* -m pip install"):
        choose.make_ops([spec], device="cuda")
    gpus[0].capability = (7, 0)
    with pytest.raises(OptionError, match=r"compute capability 7\.5, and this has 7\.0"):
        choose.make_ops([spec], device="cuda")


def test_kv_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(heads=4, kv_heads=2, head_dim=64, scale=1.0, eps=1e-6, rope=None)
    sizes = [
        choose.make_ops([spec], device="cuda", kv_format=kept).kv_nbytes([spec], 256)
        for kept in ("bf16", "int8", "int4")
    ]
    assert sizes == [256 * 2 * 256, 256 * 2 * 136, 256 * 2 * (52 + 36)]
    monkeypatch.setattr(programs, "has_compiler", lambda: False)
    with pytest.raises(OptionError, match="a GPU that ours run on"):
        choose.make_ops([spec], device="cuda", kv_format="int8")


def test_activations_keep_bf16_on_a_gpu_alone() -> None:
    tiles = tile_tensor(random_tensor("q4_0", 16, 32))
    data: Any = upload(tiles.data, device_of("cuda"))
    on_gpu = replace(tiles, data=data)
    for activations, fine in (("bf16", True), ("int8", False), (None, False)):
        ops = choose.make_ops([], device="cuda", activations=activations)
        assert ops.weight((16, 32), [on_gpu]).fine == fine
    with pytest.raises(OptionError, match=r"activations=.bf16. is for a GPU"):
        choose.make_ops([], device="cpu", activations="bf16")


def test_there_is_no_third_gpu() -> None:
    with pytest.raises(OptionError, match="there is no GPU 'cuda:2'"):
        choose.make_ops([], device="cuda:2")


def test_without_a_gpu(gpus: list[Gpu]) -> None:
    gpus.clear()
    for format_ in (None, "bf16"):
        with pytest.raises(OptionError, match=r"there is no NVIDIA GPU for device=.cuda.,"):
            choose.make_ops([], device="cuda", compute_format=format_)


def test_torch_for_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies nothing on a GPU; our kernels need none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose.make_ops([], device="cuda").name == "cuda"
    with pytest.raises(OptionError, match=r"torch finds no CUDA GPU for device=.cuda."):
        choose.make_ops([], device="cuda", compute_format="bf16")


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert choose.make_ops([], device="cuda").name == "cuda"
    with pytest.raises(MissingExtraError, match=r"needs torch on a GPU: .* -m pip install"):
        choose.make_ops([], device="cuda", compute_format="bf16")
