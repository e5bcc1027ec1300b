"""``Ops`` on the CPU through our own compiled kernels, on numpy buffers; torch is not needed.

Weights stay packed (``native_weights.py``). What the kernels do is in ``quant/csrc``; this file
allocates, fills their structs and calls them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from localrt.errors import MissingExtraError, OptionError
from localrt.quant.formats.packed import Format, PackedTensor
from localrt.quant.formats.tiled import TiledTensor, padded_rows
from localrt.quant.ops.aligned import large_floats
from localrt.quant.ops.kv_growth import grown_capacity
from localrt.quant.ops.latent import LatentSpec, LatentWeights
from localrt.quant.ops.native.abi import (
    AttentionArgs,
    HeadArgs,
    SpanArgs,
    find_library,
    load_library,
)
from localrt.quant.ops.native.kv import (
    KV_FORMATS,
    LATENT_FORMATS,
    KVFormat,
    KVMaker,
    NativeKVCache,
    token_nbytes,
)
from localrt.quant.ops.native.latent import LatentArgs, cache_format
from localrt.quant.ops.native.mlp import NativeMlps
from localrt.quant.ops.native.turns import Turns
from localrt.quant.ops.native.weights import (
    NativeVector,
    NativeWeight,
    Tiler,
    address_of,
    build_weight,
)
from localrt.quant.ops.protocol import (
    AttentionSpec,
    AttentionWeights,
    Batch,
    Rope,
    Span,
)

if TYPE_CHECKING:
    from localrt.quant.formats.codec import Codec

__all__ = ["NativeOps", "NativeWeight"]

Floats = npt.NDArray[np.float32]

_CACHE_FORMATS = (*KV_FORMATS, *LATENT_FORMATS.values())  # as the kernels number them


@dataclass(slots=True)
class _Pass:
    batch: Batch
    rows: int
    positions: int  # where they lie
    reach: int  # all positions of the pass and its caches are below
    attention: dict[int, AttentionArgs] = field(default_factory=dict)  # of each layer
    latent: dict[int, LatentArgs] = field(default_factory=dict)
    masks: list[npt.NDArray[np.uint8] | None] = field(default_factory=list)
    tables: dict[Rope, tuple[NativeVector, NativeVector]] = field(default_factory=dict)


class NativeOps(NativeMlps):
    """See the ``Ops`` protocol. ``isa`` forces a code path (``"portable"``, ``"avx2"``, ...).

    ``kv_format`` ``"int8"`` halves the KV cache and the reading of a long one, ``"int4"`` takes a
    third; both are ``approximate``. ``kv_maker`` replaces caches in RAM by its own.
    """

    name = "native"
    device = "cpu"
    compute_format = "packed"

    def __init__(
        self, *, threads: int | None = None, isa: str = "", kv_format: KVFormat = "bf16"
    ) -> None:
        path = find_library()
        if path is None:
            raise MissingExtraError(
                "the compiled kernels are missing: install a C++ compiler, then localrt again"
            )
        self._api = load_library(path)
        self._handle = self._api.lrt_create(threads or _usable_cores(), isa.encode())
        if not self._handle:
            raise OptionError(f"this processor cannot run the {isa!r} kernels")
        self._kv_format: KVFormat = kv_format
        self.kv_maker: KVMaker | None = None
        self._turns: dict[Rope, Turns] = {}
        self._spare: dict[tuple[int, ...], Floats] = {}
        self._tiler = Tiler(self._api, self._handle)
        self.isa: str = self._api.lrt_isa(self._handle).decode()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._api.lrt_destroy(self._handle)
            self._handle = None

    def scope(self) -> AbstractContextManager[Any]:
        """Nothing to hold."""
        return nullcontext()

    def free_memory(self) -> int | None:
        """It computes in RAM."""
        return None

    # -- weights ---------------------------------------------------------------------------------

    def weight(
        self, shape: tuple[int, int], blocks: Iterable[PackedTensor | TiledTensor]
    ) -> NativeWeight:
        """See ``build_weight``: rows are tiled as they come, tiles are used as they are."""
        return build_weight(self._tiler, shape, blocks)

    def tile(self, tensor: PackedTensor, *, hadamard: int = 0) -> TiledTensor:
        """A whole matrix in tiles: what ``tile_tensor`` gives, sooner."""
        return self._tiler.tile(tensor, hadamard=hadamard)

    def best_scales(self, codec: Codec, groups: Floats) -> Floats:
        """Scales of groups (n, block) with the least rounding error: see ``methods/search.py``."""
        from localrt.quant.ops.native.scales import NativeSearch  # quantizers: not at start-up

        return NativeSearch(self._api, self._handle)(codec, groups)

    def vector(self, values: npt.NDArray[np.float32]) -> NativeVector:
        """A norm weight or bias."""
        return NativeVector(np.ascontiguousarray(values, np.float32))

    def weight_nbytes(self, shape: tuple[int, int], format: Format) -> int:
        """Packed bytes, rows rounded up to whole tiles."""
        return padded_rows(shape[0]) * format.row_bytes(shape[1])

    def kv_nbytes(self, layers: Sequence[AttentionSpec], length: int) -> int:
        """Bytes of keys and values once grown to ``length`` tokens."""
        kv_format = cache_format(layers, self._kv_format)
        if self.kv_maker is not None:
            return self.kv_maker.cache_nbytes(layers, length, kv_format)
        shapes = [(spec.kv_heads, spec.head_dim) for spec in layers]
        return token_nbytes(shapes, kv_format) * grown_capacity(length)

    def kv_cache(self, layers: Sequence[AttentionSpec], capacity: int) -> NativeKVCache:
        """An empty cache."""
        kv_format = cache_format(layers, self._kv_format)
        if self.kv_maker is not None:
            return self.kv_maker.cache(layers, capacity, kv_format)
        shapes = [(spec.kv_heads, spec.head_dim) for spec in layers]
        return NativeKVCache(shapes, capacity, kv_format)

    # -- a pass ----------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> _Pass:
        """Reserve room in every cache."""
        # Arrays of other numbers of rows would pile up.
        self._spare = {s: a for s, a in self._spare.items() if s[0] == len(batch.tokens)}
        reach = max(int(batch.positions.max()) + 1, *(s.cache.length + s.rows for s in batch.spans))
        step = _Pass(batch, len(batch.tokens), batch.positions.ctypes.data, reach)
        for span in batch.spans:
            span.cache.reserve(span.cache.length + span.rows)
            mask = None if span.mask is None else np.ascontiguousarray(span.mask, np.uint8)
            step.masks.append(mask)
        return step

    def embed(
        self,
        table: NativeWeight,
        step: _Pass,
        scale: float = 1.0,
        *,
        tokens: npt.NDArray[np.int64] | None = None,
    ) -> Floats:
        """(R, D)."""
        out = np.empty((step.rows, table.stack.cols), np.float32)
        tokens = np.ascontiguousarray(step.batch.tokens if tokens is None else tokens)
        assert len(table.tensors) == 1, "an embedding is one matrix"
        self._api.lrt_read_rows(
            self._handle, table.parts, tokens.ctypes.data, step.rows, scale, out.ctypes.data
        )
        return out

    def norm_qkv_rope_append(
        self, x: Floats, weights: AttentionWeights, spec: AttentionSpec, step: _Pass, layer: int
    ) -> Floats:
        """(R, H, E), already scaled; keys and values are written to the caches."""
        q = self._array(step.rows, spec.heads * spec.head_dim)
        args = self._attention_args(weights, spec, step, layer)
        args.x, args.q = x.ctypes.data, q.ctypes.data
        self._api.lrt_norm_qkv_rope_append(self._handle, args)
        return q

    def attention_output(
        self, q: Floats, weights: AttentionWeights, spec: AttentionSpec, step: _Pass, layer: int
    ) -> Floats:
        """(R, D)."""
        out = self._array(step.rows, weights.out.stack.rows)
        args = step.attention[layer]
        args.q, args.out = q.ctypes.data, out.ctypes.data
        self._api.lrt_attention_output(self._handle, args)
        for span in step.batch.spans:
            _native_cache(span).layer_done(layer, span.rows)
        self._spare[q.shape] = q
        return out

    def norm_latent_append(
        self, x: Floats, weights: LatentWeights, spec: LatentSpec, step: _Pass, layer: int
    ) -> Floats:
        """(R, H (N + P)): as projected, rotary parts turned; the latents are written to caches."""
        q = self._array(step.rows, spec.query_rows)
        args = self._latent_args(weights, spec, step, layer)
        args.x, args.q = x.ctypes.data, q.ctypes.data
        self._api.lrt_norm_latent_append(self._handle, ctypes.byref(args))
        return q

    def latent_output(
        self, q: Floats, weights: LatentWeights, spec: LatentSpec, step: _Pass, layer: int
    ) -> Floats:
        """(R, D)."""
        out = self._array(step.rows, weights.out.stack.rows)
        args = step.latent[layer]
        args.q, args.out = q.ctypes.data, out.ctypes.data
        self._api.lrt_latent_output(self._handle, ctypes.byref(args))
        for span in step.batch.spans:
            _native_cache(span).layer_done(layer, span.rows)
        self._spare[q.shape] = q
        return out

    def add(self, x: Floats, y: Floats, scale: float = 1.0) -> Floats:
        """Residual sum in place of ``x``."""
        if scale != 1.0:
            y *= np.float32(scale)
        x += y
        self._spare[y.shape] = y
        return x

    def head(
        self,
        x: Floats,
        rows: npt.NDArray[np.intp],
        norm: NativeVector,
        eps: float,
        weight: NativeWeight,
        softcap: float | None = None,
    ) -> Floats:
        """(len(rows), V)."""
        logits = large_floats((len(rows), weight.stack.rows))
        wanted = np.ascontiguousarray(rows, np.int64)
        args = HeadArgs(
            x=x.ctypes.data,
            wanted=wanted.ctypes.data,
            logits=logits.ctypes.data,
            norm=norm.address,
            weight=weight.stack,
            count=len(rows),
            eps=eps,
            softcap=softcap or 0.0,
        )
        self._api.lrt_head(self._handle, args)
        return logits

    def linear(self, x: Floats, weight: NativeWeight, out: Floats | None = None) -> Floats:
        """x (R, K) times the weight's rows: (R, out). For tests and benchmarks."""
        x = np.ascontiguousarray(x, np.float32)
        if out is None:
            out = np.empty((x.shape[0], weight.stack.rows), np.float32)
        self._api.lrt_linear(self._handle, weight.stack, x.ctypes.data, x.shape[0], out.ctypes.data)
        return out

    def multiply(self, rounds: int) -> float:
        """Int8 products from registers on all threads; the operations done, two a product."""
        operations: float = self._api.lrt_multiply_peak(self._handle, rounds)
        return operations

    def read_all(self, data: npt.NDArray[np.uint8]) -> None:
        """Read every byte once, on all threads."""
        self._api.lrt_read_all(self._handle, data.ctypes.data, data.nbytes)

    # -- parts -----------------------------------------------------------------------------------

    def _attention_args(
        self, weights: AttentionWeights, spec: AttentionSpec, step: _Pass, layer: int
    ) -> AttentionArgs:
        """Of both steps: the second finds them in the pass."""
        cos, sin = self._rope_tables(spec.rope, step)
        near, far = self._bias_tables(weights, spec, step)
        spans = self._spans(step, layer)
        args = step.attention[layer] = AttentionArgs(
            norm=address_of(weights.norm),
            qkv_bias=address_of(weights.qkv_bias),
            q_norm=address_of(weights.q_norm),
            k_norm=address_of(weights.k_norm),
            out_bias=address_of(weights.out_bias),
            post_norm=address_of(weights.post_norm),
            sinks=address_of(weights.sinks),
            cos=cos,
            sin=sin,
            near_turns=near,
            far_turns=far,
            positions=step.positions,
            spans=spans,
            qkv=weights.qkv.stack,
            proj=weights.out.stack,
            rows=step.rows,
            span_count=len(spans),
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            rotary=2 * len(spec.rope.inv_freq) if spec.rope else 0,
            window=spec.window or 0,
            joint_norms=spec.joint_norms,
            eps=spec.eps,
            scale=spec.scale,
            softcap=spec.softcap or 0.0,
        )
        return args

    def _latent_args(
        self, weights: LatentWeights, spec: LatentSpec, step: _Pass, layer: int
    ) -> LatentArgs:
        """Of both steps: the second finds them in the pass."""
        cos, sin = self._rope_tables(spec.rope, step)
        spans = self._spans(step, layer)
        args = step.latent[layer] = LatentArgs(
            norm=address_of(weights.norm),
            query_norm=address_of(weights.query_norm),
            latent_norm=address_of(weights.latent_norm),
            cos=cos,
            sin=sin,
            spans=spans,
            down=weights.down.stack,
            key_up=weights.key_up.stack,
            value_up=weights.value_up.stack,
            proj=weights.out.stack,
            rows=step.rows,
            span_count=len(spans),
            heads=spec.heads,
            rotary=spec.rope_dim,
            latent=spec.latent,
            nope=spec.nope,
            value=spec.value,
            interleaved=spec.interleaved,
            eps=spec.eps,
            latent_eps=spec.latent_eps,
            scale=spec.scale,
        )
        if weights.query_up is not None:
            args.query_up = weights.query_up.stack
        return args

    def _spans(self, step: _Pass, layer: int) -> ctypes.Array[SpanArgs]:
        spans = (SpanArgs * len(step.masks))()
        for index, span in enumerate(step.batch.spans):
            cache = _native_cache(span)
            data, stride = cache.layer_ready(layer)
            spans[index] = SpanArgs(
                data,
                _address(step.masks[index]),
                stride,
                _CACHE_FORMATS.index(cache.kv_format),
                cache.length,
                span.rows,
                0 if span.mask is None else span.mask.shape[1] - span.rows,
            )
        return spans

    def _rope_tables(self, rope: Rope | None, step: _Pass) -> tuple[int, int] | tuple[None, None]:
        """Where the cosines and sines of the pass lie, each (R, rotary / 2)."""
        if rope is None:
            return None, None
        if rope not in step.tables:
            frequencies = np.asarray(rope.inv_freq, np.float32)
            angles = step.batch.positions.astype(np.float32)[:, None] * frequencies
            scale = np.float32(rope.scale)
            step.tables[rope] = (
                NativeVector(np.cos(angles) * scale),
                NativeVector(np.sin(angles) * scale),
            )
        cos, sin = step.tables[rope]
        return cos.address, sin.address

    def _bias_tables(
        self, weights: AttentionWeights, spec: AttentionSpec, step: _Pass
    ) -> tuple[int, int] | tuple[None, None]:
        """Where ``Turns`` lie, if the keys are kept without a bias that they have."""
        kept = self._kv_format == "bf16" or weights.k_norm is not None
        if kept or weights.qkv_bias is None or spec.rope is None:
            return None, None
        if spec.rope not in self._turns:
            self._turns[spec.rope] = Turns(spec.rope)
        return self._turns[spec.rope].addresses(step.reach)


def _native_cache(span: Span) -> NativeKVCache:
    cache = span.cache
    assert isinstance(cache, NativeKVCache), "caches belong to one implementation"
    return cache


def _address(array: npt.NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
