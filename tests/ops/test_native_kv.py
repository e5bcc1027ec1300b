"""The KV cache's formats: attention against float64, on what a cache makes of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats import FORMATS, PackedTensor
from localrt.quant.ops.attention import AttentionSpec, AttentionWeights, Rope
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.kv_formats import KV_FORMATS, CacheFormat, block_nbytes
from localrt.quant.ops.protocol import Batch, Span
from tests.conftest import needs_kernels
from tests.models.tiny import relative_error
from tests.ops.layers import tree_mask
from tests.ops.test_native_matmul import ISAS

pytestmark = needs_kernels

Doubles = npt.NDArray[np.float64]

HIDDEN = 64
# Largest error over the largest output, against exact keys and values. The reference that knows
# the format is met much closer, but for numbers at a rounding's edge, one in a hundred at most.
BOUNDS: dict[CacheFormat, float] = {"bf16": 0.01, "int8": 0.02, "int4": 0.15}
SAME = 6e-5


def usual_error(ours: Doubles, expected: Doubles) -> float:
    """Which 99 of 100 numbers stay below, over the largest."""
    return float(np.quantile(np.abs(ours - expected), 0.99) / np.abs(expected).max())


def floats(rows: int, cols: int, values: Doubles) -> PackedTensor:
    data = np.ascontiguousarray(values, np.float32).view(np.uint8)
    return PackedTensor("w", FORMATS["f32"], (rows, cols), data, 1.0)


@dataclass
class Layer:
    """One attention layer with float32 weights, whose output projection is the identity."""

    spec: AttentionSpec
    qkv: Doubles
    bias: Doubles | None
    sinks: Doubles | None = None

    @classmethod
    def random(cls, spec: AttentionSpec, *, bias: float = 0.0, seed: int = 0) -> Layer:
        rng = np.random.default_rng(seed)
        rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
        qkv = rng.standard_normal((rows, HIDDEN)).astype(np.float32) / np.sqrt(HIDDEN)
        sinks = np.linspace(-2, 9, spec.heads) if spec.sinks else None  # to far above scores
        if not bias:
            return cls(spec, qkv.astype(np.float64), None, sinks)
        values = rng.standard_normal(rows)
        keys = slice(spec.heads * spec.head_dim, (spec.heads + spec.kv_heads) * spec.head_dim)
        values[keys] *= bias
        return cls(
            spec, qkv.astype(np.float64), values.astype(np.float32).astype(np.float64), sinks
        )

    def run(self, ops: NativeOps, x: npt.NDArray[np.float32], step: object) -> Doubles:
        width = self.spec.heads * self.spec.head_dim
        bias = None if self.bias is None else ops.vector(self.bias.astype(np.float32))
        weights = AttentionWeights(
            norm=ops.vector(np.ones(HIDDEN, np.float32)),
            qkv=ops.weight(self.qkv.shape, [floats(*self.qkv.shape, self.qkv)]),
            out=ops.weight((width, width), [floats(width, width, np.eye(width))]),
            qkv_bias=bias,
            sinks=None if self.sinks is None else ops.vector(self.sinks.astype(np.float32)),
        )
        q = ops.norm_qkv_rope_append(x, weights, self.spec, step, 0)  # type: ignore[arg-type]
        return ops.attention_output(q, weights, self.spec, step, 0).astype(np.float64)  # type: ignore[arg-type]

    def expected(
        self,
        x: npt.NDArray[np.float32],
        positions: npt.NDArray[np.int64],
        seen: npt.NDArray[np.bool_],
        kv_format: CacheFormat | None,
    ) -> Doubles:
        """Of the last rows, which see ``seen`` (rows, all); exact keys where no format is named."""
        spec, size = self.spec, self.spec.head_dim
        normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + spec.eps)
        bare = (normed @ self.qkv.T).reshape(len(x), -1, size)
        offset = 0 if self.bias is None else self.bias.reshape(-1, size)
        q, k, v = np.split(bare + offset, [spec.heads, spec.heads + spec.kv_heads], axis=1)
        own = positions[-len(seen) :]
        q, k = turned(q[-len(seen) :], own, spec.rope), turned(k, positions, spec.rope)
        if kv_format is not None:
            # Quantized keys leave the bias out, which is added back after.
            apart = np.zeros_like(k)
            if self.bias is not None and kv_format != "bf16":
                apart += self.bias.reshape(-1, size)[spec.heads : spec.heads + spec.kv_heads]
                apart = turned(apart, positions, spec.rope)
            k = cached(k - apart, kv_format, bits=6) + apart
            v = cached(v, kv_format, bits=4)
        per = spec.heads // spec.kv_heads
        q, k, v = (part.swapaxes(0, 1) for part in (q, k, v))  # (heads, rows, head_dim)
        scores = q @ np.repeat(k, per, axis=0).swapaxes(1, 2) * spec.scale
        if spec.softcap:
            scores = np.tanh(scores / spec.softcap) * spec.softcap
        if spec.window:
            seen = seen & (own[:, None] - positions < spec.window)
        scores = np.where(seen, scores, -np.inf)
        if self.sinks is not None:  # one more score, whose share goes to no value
            own = np.broadcast_to(self.sinks[:, None, None], (*scores.shape[:2], 1))
            scores = np.concatenate([scores, own], -1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = (weights / weights.sum(-1, keepdims=True))[..., : len(positions)]
        joined = weights @ np.repeat(v, per, axis=0)
        return joined.swapaxes(0, 1).reshape(len(seen), -1)


def turned(x: Doubles, positions: npt.NDArray[np.int64], rope: Rope | None) -> Doubles:
    if rope is None:
        return x
    angles = positions[:, None, None] * np.asarray(rope.inv_freq, np.float32).astype(np.float64)
    cos, sin, half = np.cos(angles) * rope.scale, np.sin(angles) * rope.scale, len(rope.inv_freq)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def rounded(x: Doubles) -> Doubles:
    """To bf16."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.int64)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return (bits << 16).astype(np.uint32).view(np.float32).astype(np.float64)


def rotated(x: Doubles) -> Doubles:
    """Times the Hadamard matrix, in blocks of the largest power of two that divides the width."""
    size = x.shape[-1]
    block = min(size & -size, 128)
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.kron(matrix, [[1.0, 1.0], [1.0, -1.0]]) / np.sqrt(2)
    return (x.reshape(*x.shape[:-1], -1, block) @ matrix).reshape(x.shape)


def cached(x: Doubles, kv_format: CacheFormat, *, bits: int) -> Doubles:
    """What a cache makes of the last axis; ``bits`` are those of an int4 code."""
    if kv_format == "bf16":
        return rounded(x)
    x = rotated(x)
    if kv_format == "int8":
        scale = np.maximum(np.abs(x).max(-1, keepdims=True) / 127, 1e-30)
        return rotated(np.rint(x / scale) * scale)
    parts, zero = [], (2**bits - 1) / 2
    for start in range(0, x.shape[-1], 32):
        part = x[..., start : start + 32]
        scale = np.maximum(rounded(np.abs(part).max(-1, keepdims=True) / zero), 1e-30)
        parts.append((np.clip(np.rint(part / scale + zero), 0, 2 * zero) - zero) * scale)
    return rotated(np.concatenate(parts, -1))


def spec_of(
    size: int = 64, *, heads: int = 4, groups: int = 2, rotary: int | None = None, **options: Any
) -> AttentionSpec:
    half = (size if rotary is None else rotary) // 2
    rope = Rope(tuple(10000.0 ** -(n / half) for n in range(half)), 1.25) if half else None
    return AttentionSpec(
        heads=heads,
        kv_heads=groups,
        head_dim=size,
        scale=size**-0.5,
        eps=1e-6,
        rope=rope,
        **options,
    )


SPECS = {
    "plain": spec_of(),
    "small heads": spec_of(16),
    "half a chunk left over": spec_of(80, heads=6),
    "seven to a group": spec_of(32, heads=14),
    "window": spec_of(window=50),
    "softcap": spec_of(softcap=2.0),
    "partly rotary": spec_of(64, rotary=32),
    "no rotary": spec_of(32, rotary=0),
    "heads of seven times sixteen": spec_of(112, heads=2, groups=1),
    "large heads": spec_of(256, heads=2, groups=1),
    "sinks": spec_of(32, sinks=True),
    "sinks and a window": spec_of(32, window=100, sinks=True),
}


@pytest.mark.parametrize("bias", [0.0, pytest.param(60.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", sorted(SPECS))
def test_attention(name: str, kv_format: CacheFormat, bias: float) -> None:
    if bias and (name == "no rotary" or name == "partly rotary"):
        bias = 2.0  # the part that does not turn stays in the keys
    layer, count = Layer.random(SPECS[name], bias=bias), 274
    x = np.random.default_rng(1).standard_normal((count, HIDDEN)).astype(np.float32)
    ops = NativeOps(threads=2, kv_format=kv_format)
    cache = ops.kv_cache([layer.spec], count)
    outputs = []
    for start, stop in pairwise((0, 250, 273, 274)):
        step = ops.begin(Batch.extend([(cache, [0] * (stop - start))]))
        outputs.append(layer.run(ops, x[start:stop], step))
        cache.advance(stop - start)
    ours = np.concatenate(outputs)
    positions = np.arange(count)
    seen = positions[:, None] >= positions
    if name not in ("partly rotary", "no rotary"):
        same = layer.expected(x, positions, seen, kv_format)
        assert usual_error(ours, same) < SAME * (20 if bias and kv_format == "bf16" else 1)
    if not (bias and kv_format == "bf16"):  # whose eight bits are the bias's
        exact = layer.expected(x, positions, seen, None)
        assert relative_error(ours, exact) < BOUNDS[kv_format]


@pytest.mark.parametrize(
    ("kv_format", "sinks", "heads"),
    [*((each, True, 4) for each in KV_FORMATS), ("int8", False, 40)],  # many for a cached head
)
def test_tree(kv_format: CacheFormat, sinks: bool, heads: int) -> None:
    layer, held = Layer.random(spec_of(heads=heads, sinks=sinks), bias=40.0), 250
    parents = [-1, 0, 0, 1, 1, 2, 2, 6, 7, 8, 9, 10]  # one branch crosses a block's end
    count = held + len(parents)
    x = np.random.default_rng(2).standard_normal((count, HIDDEN)).astype(np.float32)
    mask = tree_mask(parents)
    ops = NativeOps(threads=2, kv_format=kv_format)
    cache = ops.kv_cache([layer.spec], count)
    layer.run(ops, x[:held], ops.begin(Batch.extend([(cache, [0] * held)])))
    cache.advance(held)
    positions = np.concatenate([np.arange(held), held - 1 + mask.sum(1)])
    step = ops.begin(
        Batch(
            np.zeros(len(parents), np.int64), positions[held:], (Span(cache, len(parents), mask),)
        )
    )
    ours = layer.run(ops, x[held:], step)
    seen = np.tri(count, dtype=bool)
    seen[held:, held:] = mask
    expected = layer.expected(x, positions, seen, kv_format)[held:]
    assert usual_error(ours, expected) < SAME * (20 if kv_format == "bf16" else 1)


@pytest.mark.parametrize(("isa", "sinks"), [(ISAS[0], False), *((isa, True) for isa in ISAS)])
@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_batch_invariance(isa: str, kv_format: CacheFormat, sinks: bool) -> None:
    """Bit for bit, for 1 to 64 rows at once, across blocks; every code path agrees with float64."""
    layer = Layer.random(spec_of(48, heads=6, sinks=sinks), bias=10.0)
    count = 600 if isa == ISAS[0] and kv_format == "bf16" else 270
    x = np.random.default_rng(3).standard_normal((count, HIDDEN)).astype(np.float32)

    def outputs(threads: int, chunks: list[int]) -> Doubles:
        ops = NativeOps(threads=threads, isa=isa, kv_format=kv_format)
        cache: KVCache = ops.kv_cache([layer.spec], count)
        rows, start = [], 0
        for size in chunks:
            step = ops.begin(Batch.extend([(cache, [0] * size)]))
            rows.append(layer.run(ops, x[start : start + size], step))
            cache.advance(size)
            start += size
        return np.concatenate(rows)

    whole = outputs(2, [count])
    positions = np.arange(count)
    expected = layer.expected(x, positions, positions[:, None] >= positions, kv_format)
    assert usual_error(whole, expected) < SAME * (20 if kv_format == "bf16" else 1)
    some = [1, 2, 3, 5, 8, 13, 21, 34, 64, 63, 7, 4, 6, 1, 1]
    for threads, chunks in ((1, [64] * (count // 64)), (1 + sinks, some), (2, [200, 1, 64])):
        ours = outputs(threads, chunks)
        assert np.array_equal(ours, whole[: len(ours)])


def test_sizes_and_growth() -> None:
    assert block_nbytes(2, 128, "bf16") == 256 * 2 * 2 * 256
    assert block_nbytes(2, 128, "int8") == 256 * 2 * 2 * (128 + 4)
    assert block_nbytes(2, 128, "int4") == 256 * 2 * (96 + 8 + 64 + 8)
    ops = NativeOps(kv_format="int4")
    layers = [spec_of(128)] * 8
    cache = ops.kv_cache(layers, 1 << 20)  # 1.3 GB, of which nothing is resident
    before = resident()
    assert cache.kv_layout == "native 2 int4 8x2x128"  # rotated: files of the first are read again
    assert cache.nbytes == 0
    for length in (1, 256, 257, 5000):
        cache.reserve(length)
        assert cache.nbytes == ops.kv_nbytes(layers, length)
    assert resident() - before < 8 << 20


def resident() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)
