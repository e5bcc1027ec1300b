"""Attention sinks: a logit per head that takes its share of the softmax, on every path."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from localrt.quant.cpu.abi import find_library
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats import unpack
from localrt.quant.ops.kv import KV_FORMATS, CacheFormat
from localrt.quant.ops.protocol import AttentionSpec, AttentionWeights, Batch, Span
from tests.ops.packed import random_tensor
from tests.ops.test_native_matmul import ISAS

pytestmark = pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")

HEADS, GROUPS, WIDTH = 4, 2, 32
HIDDEN = HEADS * WIDTH
SPEC = AttentionSpec(
    heads=HEADS, kv_heads=GROUPS, head_dim=WIDTH, scale=0.3, eps=1e-6, rope=None, sinks=True
)
SINKS = np.array([-2.0, 0.5, 3.0, 9.0], np.float32)
PROJECTION = random_tensor("f32", (HEADS + 2 * GROUPS) * WIDTH, HIDDEN, seed=1)
PROJECTION.data.view(np.float32)[:] *= 0.06


class Layer:
    """One attention layer whose output projection changes nothing."""

    def __init__(
        self, ops: NativeOps, sinks: np.ndarray | None, spec: AttentionSpec = SPEC
    ) -> None:
        identity = random_tensor("f32", HIDDEN, HIDDEN)
        identity.data.view(np.float32)[:] = np.eye(HIDDEN, dtype=np.float32)
        self.ops, self.spec = ops, spec
        self.weights = AttentionWeights(
            norm=ops.vector(np.ones(HIDDEN, np.float32)),
            qkv=ops.weight(PROJECTION.shape, [PROJECTION]),
            out=ops.weight((HIDDEN, HIDDEN), [identity]),
            sinks=None if sinks is None else ops.vector(sinks),
        )
        self.cache = ops.kv_cache([spec], 4096)

    def extend(self, x: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """(rows, H, E)."""
        rows, held = len(x), self.cache.length
        positions = np.arange(held, held + rows)
        step = self.ops.begin(
            Batch(np.zeros(rows, np.int64), positions, (Span(self.cache, rows, mask),))
        )
        q = self.ops.norm_qkv_rope_append(x.copy(), self.weights, self.spec, step, 0)
        out = self.ops.attention_output(q, self.weights, self.spec, step, 0)
        self.cache.advance(rows)
        return out.reshape(rows, HEADS, WIDTH).copy()


def rows_of(count: int) -> np.ndarray:
    return np.random.default_rng(4).standard_normal((count, HIDDEN)).astype(np.float32)


def reference(x: np.ndarray, window: int | None) -> np.ndarray:
    """Causal attention with sinks, float64: (rows, H, E)."""
    wide = x.astype(np.float64)
    wide = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-6)
    heads = (wide @ unpack(PROJECTION).astype(np.float64).T).reshape(len(x), -1, WIDTH)
    q, k, v = np.split(heads.swapaxes(0, 1), [HEADS, HEADS + GROUPS])  # (heads, rows, E)
    k, v = (np.repeat(part, HEADS // GROUPS, axis=0) for part in (k, v))
    scores = q @ k.swapaxes(1, 2) * SPEC.scale
    i, j = np.indices(scores.shape[1:])
    hidden = (j > i) if window is None else (j > i) | (j <= i - window)
    scores = np.where(hidden, -np.inf, scores)
    peak = np.maximum(scores.max(-1), SINKS[:, None])[..., None]
    exps = np.exp(scores - peak)
    total = exps.sum(-1, keepdims=True) + np.exp(SINKS[:, None, None] - peak)
    return (exps / total @ v).swapaxes(0, 1)


BOUNDS = {"bf16": 0.01, "int8": 0.02, "int4": 0.12}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("window", [None, 100])
def test_sinks_take_their_share(window: int | None, kv: CacheFormat, isa: str) -> None:
    count = 600 if isa == ISAS[0] else 300
    x, spec = rows_of(count), replace(SPEC, window=window)
    wanted = reference(x, window)
    results = []
    for threads, chunk in ((1, count), (2, 64), (2, count)):
        layer = Layer(NativeOps(threads=threads, isa=isa, kv_format=kv), SINKS, spec)
        parts = [layer.extend(x[at : at + chunk]) for at in range(0, count - 1, chunk)]
        if chunk < count:  # the last row alone, over the whole cache
            layer.cache.trim(count - 1)
            parts[-1] = np.concatenate([parts[-1][:-1], layer.extend(x[count - 1 :])])
        results.append(np.concatenate(parts))
    assert np.abs(results[0] - wanted).max() < BOUNDS[kv] * np.abs(wanted).max()
    for result in results[1:]:
        assert np.array_equal(result, results[0])


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_a_sink_far_below_changes_nothing(kv: CacheFormat) -> None:
    x = rows_of(300)
    far = np.full(HEADS, -1e4, np.float32)
    results = [Layer(NativeOps(threads=2, kv_format=kv), s).extend(x) for s in (None, far)]
    assert np.array_equal(*results)


def test_a_sink_far_above_takes_everything() -> None:
    out = Layer(NativeOps(threads=1), np.full(HEADS, 1e4, np.float32)).extend(rows_of(20))
    assert np.array_equal(out, np.zeros_like(out))


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_rows_of_a_tree_have_sinks_too(kv: CacheFormat) -> None:
    ops = NativeOps(threads=2, kv_format=kv)
    x, parents = rows_of(305), [-1, 0, 0, 2, 1]
    mask = np.eye(5, dtype=bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    tree = Layer(ops, SINKS)
    tree.extend(x[:300])
    found = tree.extend(x[300:], mask)
    for path in ([0], [0, 1], [0, 2, 3], [0, 1, 4]):
        alone = Layer(ops, SINKS)
        alone.extend(x[:300])
        branch = alone.extend(x[[300 + node for node in path]])
        assert np.array_equal(branch[-1], found[path[-1]])
