"""The compiled products and the MLP: exact codes, small errors, the same result in any batch. And
the search for scales: as good as numpy's.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from localrt.common.errors import OptionError
from localrt.quant.cpu.abi import find_library, layout_of
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cpu.scales import NativeSearch
from localrt.quant.formats import CODECS, FORMATS, GROUP_CODECS, Format, PackedTensor, unpack
from localrt.quant.formats.ggml import GGUF_CODECS
from localrt.quant.formats.tiled import TILE_ROWS, tile, tile_tensor, untile
from localrt.quant.methods.rotation import block_hadamard
from localrt.quant.methods.scales import best_scales
from localrt.quant.ops.protocol import MlpSpec, MlpWeights
from tests.conftest import needs_kernels
from tests.ops.oracles import gated
from tests.ops.packed import random_tensor

pytestmark = needs_kernels

NAMES = sorted(name for name, format_ in FORMATS.items() if layout_of(format_) is not None)
PACKED = [name for name in NAMES if not name.startswith(("f32", "f16", "bf16", "e4m3"))]


def usable(isa: str) -> bool:
    try:
        return NativeOps(threads=1, isa=isa).isa == isa
    except OptionError:
        return False


# Best first.
_ISAS = ("amx", "avx512bf16", "avx512", "avxvnni", "avx2", "i8mm", "neon", "portable")
ISAS = [isa for isa in _ISAS if find_library() and usable(isa)]
# Each width, and a scale for every 16, 32 and 256 columns.
SOME = ("f16", "q2_k", "q3_k", "q4_k", "q5_0", "q6_k", "q8_0", "iq4_xs", "nvfp4", "iq3_s", "iq2_xs")
# Every format on the best code path, some on the others.
CASES = [(isa, name) for isa in ISAS for name in (NAMES if isa == ISAS[0] else SOME)]


def quantized(x: np.ndarray) -> np.ndarray:
    """What the kernels make of activations: int8 per 32 columns, in float64."""
    groups = x.reshape(len(x), -1, 32).astype(np.float32)
    peak = np.abs(groups).max(-1, keepdims=True)
    scale = peak / np.float32(127)
    with np.errstate(divide="ignore"):
        inverse = np.where(peak > 0, np.float32(127) / peak, 0).astype(np.float32)
    return (np.rint(groups * inverse) * scale).astype(np.float64).reshape(x.shape)


def computed(tensor: PackedTensor) -> np.ndarray:
    """The weights that the kernels compute with, in float64: levels are rounded to 1/127 (NF4) or
    1/120 (bitsandbytes' FP4).
    """
    values = unpack(tensor).astype(np.float64)
    if tensor.format.name not in ("nf4", "nf4-f32", "fp4-f32"):
        return values
    steps = 120 if tensor.format.name == "fp4-f32" else 127
    blocks = tensor.data.reshape(-1, tensor.format.block_bytes)
    codec = GROUP_CODECS[tensor.format.name]
    codes, scales = codec.split(blocks)
    levels = np.rint(codec.levels.astype(np.float64) * steps) / steps
    return (levels[codes] * scales).reshape(values.shape)


@pytest.mark.parametrize(("isa", "name"), CASES)
def test_products(name: str, isa: str) -> None:
    rows, cols = 75, 768  # a last tile of eleven rows
    tensor = random_tensor(name, rows, cols)
    one, two = NativeOps(threads=1, isa=isa), NativeOps(threads=2, isa=isa)
    weights = [(ops, ops.weight((rows, cols), [tensor])) for ops in (one, two)]
    x = np.random.default_rng(1).standard_normal((64, cols)).astype(np.float32)
    seen = quantized(x) if name in PACKED else x.astype(np.float64)
    expected = seen @ computed(tensor).T
    whole = two.linear(x, weights[1][1])
    assert np.abs(whole - expected).max() / np.abs(expected).max() < 2e-6
    for count in (*range(1, 18), 31, 64):
        for ops, weight in weights:
            assert np.array_equal(ops.linear(x[:count], weight), whole[:count])
    alone = [one.linear(x[row : row + 1], weights[0][1]) for row in range(1, 64, 7)]
    assert np.array_equal(np.concatenate(alone), whole[1::7])


@pytest.mark.parametrize("name", NAMES)
def test_instruction_sets(name: str) -> None:
    """Few rows, and panels, the last of which is short; also of the largest and smallest codes."""
    tensor = random_tensor(name, 48, 768, seed=2, factor=1 + 1e-5)
    x = np.random.default_rng(2).standard_normal((20, 768)).astype(np.float32)
    x[1], x[2], x[3, ::7] = 1, -1, 1e-20
    x[4] = 0
    results = []
    for isa in ISAS:
        ops = NativeOps(threads=1, isa=isa)
        weight = ops.weight((48, 768), [tensor])
        results.append(ops.linear(x, weight))
        np.testing.assert_array_equal(ops.linear(x[:5], weight), results[-1][:5])
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_joined_blocks() -> None:
    """Also of stacked matrices in different formats."""
    ops, tensor = NativeOps(threads=2), random_tensor("q4_0", 50, 256)
    x = np.random.default_rng(6).standard_normal((3, 256)).astype(np.float32)
    whole = ops.linear(x, ops.weight((50, 256), [tensor]))
    cuts = (slice(0, 7), slice(7, 30), slice(30, 50))
    pieces = [tensor.take_rows(np.arange(50)[part]) for part in cuts]
    assert np.array_equal(ops.linear(x, ops.weight((50, 256), pieces)), whole)
    parts = [
        replace(random_tensor(name, rows, 256), name=name)
        for name, rows in (("q4_k", 32), ("q6_k", 20), ("f32", 7))
    ]
    stacked = ops.linear(x, ops.weight((59, 256), parts))
    separate = [ops.linear(x, ops.weight(part.shape, [part])) for part in parts]
    assert np.array_equal(stacked, np.concatenate(separate, axis=1))


def test_what_no_kernel_reads() -> None:
    with pytest.raises(OptionError, match="abacus"):
        NativeOps(isa="abacus")
    ops, format_ = NativeOps(), Format("int3-g32", 32, 14)
    rows = np.zeros((16, format_.row_bytes(256)), np.uint8)
    with pytest.raises(OptionError, match=format_.name):
        ops.weight((16, 256), [PackedTensor("w", format_, (16, 256), rows)])
    with pytest.raises(OptionError, match="multiple of 32"):
        ops.weight((16, 48), [random_tensor("nvfp4", 16, 48)])
    with pytest.raises(ValueError, match="50 rows"):
        ops.weight((51, 256), [random_tensor("q4_0", 50, 256)])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [1e-33, 1e-38, 1e-45])
def test_tiny_activations_are_zeros(size: float, isa: str) -> None:
    """The inverse of their scale would be infinite."""
    ops = NativeOps(threads=1, isa=isa)
    weight = ops.weight((16, 64), [random_tensor("q8_0", 16, 64)])
    x = np.full((2, 64), size, np.float32)
    x[0, ::3] = 0
    assert not ops.linear(x, weight).any()


@pytest.mark.parametrize("name", NAMES)
def test_tiles(name: str) -> None:
    rows = 37
    tensor = random_tensor(name, rows, 512, seed=8)
    specified = tile(tensor)
    back = untile(tile_tensor(tensor))
    assert np.array_equal(back.data, tensor.data)
    assert (back.format, back.shape, back.scale) == (tensor.format, tensor.shape, tensor.scale)
    built = NativeOps(threads=2).weight((rows, 512), [tensor]).tensors[0].data
    assert np.array_equal(built, specified)
    padded = -(-rows // TILE_ROWS) * TILE_ROWS
    assert specified.nbytes == padded * tensor.format.row_bytes(512)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [16, 32, 64, 128])
def test_a_rotated_weight_gets_rotated_inputs(size: int, isa: str) -> None:
    tensor = random_tensor("int8-g32", 40, 256, seed=11)
    x = np.random.default_rng(11).standard_normal((7, 256)).astype(np.float32)
    ops = NativeOps(threads=1, isa=isa)
    rotated = ops.weight((40, 256), [tile_tensor(tensor, hadamard=size)])
    plain = ops.weight((40, 256), [tensor])
    error = ops.linear(x, rotated) - ops.linear(block_hadamard(x, size), plain)
    # A sum that rounds differently may move an activation to the next code.
    assert np.abs(error).max() < 2e-3 * np.abs(ops.linear(x, rotated)).max()
    with pytest.raises(ValueError, match="rotation"):
        ops.weight((80, 256), [tile_tensor(tensor, hadamard=size), tile_tensor(tensor)])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["q6_k", "q4_k", "q5_0", "int8-g32", "q2_k", "mxfp4", "iq2_xs"])
def test_head_precision(name: str, isa: str) -> None:
    tensor = random_tensor(name, 300, 512, seed=14)
    ops = NativeOps(threads=2, isa=isa)
    weight = ops.weight((300, 512), [tensor])
    x = np.random.default_rng(14).standard_normal((70, 512)).astype(np.float32)
    norm = np.linspace(0.5, 2, 512, dtype=np.float32)
    rows = np.arange(70)
    logits = ops.head(x, rows, ops.vector(norm), 1e-6, weight)
    wide = x.astype(np.float64)
    wide = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6) * norm
    expected = wide @ unpack(tensor).astype(np.float64).T
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
    for count in (*range(1, 14), 33):
        some = ops.head(x, rows[:count], ops.vector(norm), 1e-6, weight)
        assert np.array_equal(some, logits[:count])


MLP_HIDDEN, MLP_INNER = 256, 768


def build_mlp(ops: NativeOps, gate: str, up: str, down: str, hadamard: int) -> MlpWeights:
    parts = [replace(random_tensor(up, MLP_INNER, MLP_HIDDEN, 2), name="up")]
    if gate:
        parts.insert(0, replace(random_tensor(gate, MLP_INNER, MLP_HIDDEN, 1), name="gate"))
    last = tile_tensor(random_tensor(down, MLP_HIDDEN, MLP_INNER, 3), hadamard=hadamard)
    return MlpWeights(
        norm=ops.vector(np.ones(MLP_HIDDEN, np.float32)),
        gate_up=ops.weight((len(parts) * MLP_INNER, MLP_HIDDEN), parts),
        down=ops.weight((MLP_HIDDEN, MLP_INNER), [last]),
    )


def mlp_reference(
    x: np.ndarray, gate: str, up: str, down: str, hadamard: int, spec: MlpSpec
) -> np.ndarray:
    """Float64 on the activations that the kernels quantize to."""
    x = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6).astype(np.float32)
    seen = quantized(x)
    g, u = (
        seen @ unpack(random_tensor(name, MLP_INNER, MLP_HIDDEN, seed)).astype(np.float64).T
        for name, seed in ((gate or up, 1), (up, 2))
    )
    product = gated(g, u, spec).astype(np.float32)
    if hadamard:
        product = block_hadamard(product, hadamard)
    last = unpack(random_tensor(down, MLP_HIDDEN, MLP_INNER, 3)).astype(np.float64)
    return quantized(product) @ last.T


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("gate", "up", "down", "hadamard"),
    [
        ("q4_k", "q4_k", "q6_k", 0),  # side by side
        ("int4-g32", "int4-g32", "mxfp4", 32),
        ("q4_k", "q4_k", "q4_k", 64),
        ("nvfp4", "nvfp4", "nvfp4", 128),  # rotations too wide for one task
        ("q4_k", "q5_k", "q4_k", 0),  # layouts that differ
        ("q4_k", "q4_k", "bf16", 0),  # a last matrix that takes floats
        ("", "q4_k", "q6_k", 0),  # without a gate
        ("", "int4-g32", "mxfp4", 32),
    ],
)
def test_every_way_through_the_mlp(gate: str, up: str, down: str, hadamard: int, isa: str) -> None:
    spec = MlpSpec(activation="silu" if gate else "relu2", eps=1e-6, gate_scale=0.7)
    x = np.random.default_rng(0).standard_normal((37, MLP_HIDDEN)).astype(np.float32)
    two, one = NativeOps(threads=2, isa=isa), NativeOps(threads=1, isa=isa)
    weights = build_mlp(two, gate, up, down, hadamard)
    whole = two.norm_gated_mlp(x, weights, spec)
    if down != "bf16":
        expected = mlp_reference(x, gate, up, down, hadamard, spec)
        # The last digit of a product may move an activation to the next code.
        assert np.abs(whole - expected).max() < 5e-3 * np.abs(expected).max()
    weights = build_mlp(one, gate, up, down, hadamard)
    for count in (1, 2, 3, 4, 5, 7, 13, 31):
        assert np.array_equal(one.norm_gated_mlp(x[:count], weights, spec), whole[:count])


# -- the search for scales -------------------------------------------------------------------------


COUNT = 300


@pytest.mark.parametrize(
    ("name", "important"),
    [*((name, False) for name in CODECS), *((name, True) for name in sorted(GGUF_CODECS))],
)
def test_it_finds_what_numpy_finds(name: str, important: bool) -> None:
    """By every instruction set and thread the same."""
    codec, block = CODECS[name], CODECS[name].format.block
    values = np.random.default_rng(7).standard_t(4, (COUNT * 256 // block, block)) * 0.02
    groups, times = values.astype(np.float32), np.ones((), np.float32)
    groups[3] = 0
    given_ = None
    if important:  # of each of 512 columns
        given_ = np.exp(np.random.default_rng(1).normal(size=512)).astype(np.float32)
        times = np.tile((given_ / given_.mean()).reshape(-1, block), (COUNT // 2, 1))
    expected = best_scales(codec, groups, given_)
    found = NativeSearch(NativeOps(threads=2))(codec, groups, given_)
    assert found.shape == expected.shape
    assert (found == expected).all(axis=1).mean() > 0.99

    def missed(scales: np.ndarray) -> float:
        """Squares of errors; for other formats than GGUF's |error|^2.4 over a group's size."""
        errors = codec.decode(codec.encode(groups, scales), scales).astype(np.float64) - groups
        if name in GGUF_CODECS:
            return float((times * np.square(errors)).sum())
        size = np.maximum(np.abs(groups).max(axis=1, keepdims=True), np.finfo(np.float32).tiny)
        return float((np.abs(errors / size) ** 2.4).sum())

    close = 1e-3 if name in GGUF_CODECS else 1e-4
    assert missed(found) == pytest.approx(missed(expected), rel=close)
    for isa, threads in product(ISAS, (1, 2)):
        search = NativeSearch(NativeOps(threads=threads, isa=isa))
        np.testing.assert_array_equal(search(codec, groups, given_), found)
