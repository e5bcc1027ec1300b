"""Paged attention on a GPU, ordinary and latent (MLA): appends a pass's rows, and attends.

No card has run launches of several sequences yet, nor trees over earlier passes.

For up to 64 rows, keys are split into runs of 256, whose results are joined in order: a row's
result is bit-identical for any number of rows. Runs in which rows of a tree see different keys are
computed row by row, as in a chain. More rows (prompts) are one kernel that loops over all keys.
Lengths are in device memory, so a recorded graph stays valid as the cache fills.
``quant/ops/kv_formats.py`` and ``kv.cuh`` define the layout; a token's bytes of one head are
adjacent. Unlike on the CPU, quantized keys keep the bias of their projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure
from functools import cache

import numpy as np

from localrt.quant.cuda.device import Device
from localrt.quant.cuda.kv import BlockedCache, LayerPlace, SpanTable, most_tiles
from localrt.quant.cuda.launch import arguments, declarations, launch, pointers
from localrt.quant.cuda.linear import linear, multiply_heads, normed_for, reads_records
from localrt.quant.cuda.products import MOST_ROWS, OUT, Records, empty_records
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.steps import norm, norm_gate, rotary, rotate_blocks
from localrt.quant.cuda.stream import CudaPass, Stream
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32, UINT8, Dtype, Tensor, empty, upload, zeros
from localrt.quant.ops.attention import (
    RUN,
    AttentionSpec,
    AttentionTemperature,
    AttentionWeights,
    LatentSpec,
    LatentWeights,
    Rope,
    rows_together,
    run_nbytes,
)
from localrt.quant.ops.hybrid_cache import HybridCache, split_layers
from localrt.quant.ops.kv import KVCache, grown_capacity
from localrt.quant.ops.kv_formats import KvFormat, head_nbytes
from localrt.quant.ops.protocol import LayerSpec
from localrt.quant.ops.states import StateCache, StateLayout

_MAX_ROTATION = 128


def row_nbytes(kv_format: KvFormat, size: int) -> tuple[int, int]:
    """Bytes of a key and of a value of ``size`` elements with their scales, in whole words."""
    key, value = head_nbytes(kv_format, size)
    return -(-key // 4) * 4, -(-value // 4) * 4


def numbers(kv_format: KvFormat, size: int) -> tuple[str, str]:
    """The C++ types of keys and of values' elements."""
    if kv_format == "int4":
        return f"SmallNumbers<{size}, true>", f"SmallNumbers<{size}, false>"
    name = f"{kv_format.capitalize()}Numbers<{size}>"
    return name, name


def rotation_block(kv_format: KvFormat, size: int) -> int:
    """The size of Hadamard rotations; 1 is none."""
    return 1 if kv_format == "bf16" else min(_MAX_ROTATION, size & -size)


_THREADS = 128  # of the kernels before attention
_TILE = 16  # query rows of a warp
_WIDE = 256  # the most elements of a head that shared memory holds many queries of


@declarations("attention.cuh").struct("Attention")
class Attention(Structure):
    """The arguments of the attention kernels."""


_RopeAppend = arguments("rope_append.cu", "RopeAppend")


def takes_heads(size: int) -> bool:
    """Whether the kernels support heads of ``size`` elements."""
    return (size % 8 == 0 and size <= _WIDE) or size == 2 * _WIDE


def rope_append(
    qkv: Tensor,
    q: Tensor,
    spans: SpanTable,
    place: LayerPlace,
    *,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    joint: bool = False,
    norms_last: bool = False,
    gates: Tensor | None = None,
    last_gates: int = 0,
    positions: Tensor | None = None,
    temperature: AttentionTemperature | None = None,
    axes: int = 1,
    norm_values: bool = False,
    keys_as_values: bool = False,
    queries_only: bool = False,
    kv_format: KvFormat = "bf16",
) -> None:
    """Per-head norms and rotary on qkv (n, (H + 2G) * E), bf16 or float32; q goes to q (n, H, E), k
    and v are appended to the caches of ``spans``. ``place`` is the layer's place in their blocks.

    cos and sin (n, rotary / 2) are float32; None is no rotary. ``joint`` norms span all heads: the
    weights are (H * E,) and (G * E,). ``norms_last`` are applied after the rotation. ``gates`` (n,
    H, E) receive the elements after each head's query in qkv; or the ``last_gates`` at the end of
    the row, one for each head or for each of its elements. ``temperature`` scales queries with
    ``positions`` (n,), int64. Each of ``axes`` rotates an equal part of a head. With
    ``norm_values``, values are normed too, without weights. With ``keys_as_values``, qkv
    (n, (H + G) * E) has none of their own; with ``queries_only``, it is (n, H * E), and nothing is
    appended. A quantized cache holds bytes; queries for it get the Hadamard rotation.
    """
    n, heads, size = q.shape
    groups = 0 if queries_only else place.heads
    step = size if gates is None or last_gates else 2 * size
    values_at = heads * step + (0 if keys_as_values else groups * size)
    growing = None if temperature is None else positions
    args = _RopeAppend(
        *pointers(qkv, q, gates, spans.numbers, cos, sin, q_norm, k_norm, growing),
        place.keys_at,
        place.values_at,
        qkv.strides[0],
        step,
        heads * step,
        values_at,
        heads,
        groups,
        0 if cos is None else cos.shape[1],
        joint,
        norms_last,
        spans.count,
        values_at + groups * size if last_gates else size,
        last_gates // heads or step,
        1 if temperature is None else temperature.length,
        0 if temperature is None else temperature.offset,
        eps,
        0.0 if temperature is None else temperature.beta,
    )
    grid = (-(-(heads + 2 * groups) // (_THREADS // 32)), n, 1)
    program = rope_program(size, kv_format, qkv.dtype, axes, norm_values=norm_values)
    launch(q.device, program, grid, _THREADS, args)


def attend(
    q: Tensor,
    spans: SpanTable,
    place: LayerPlace,
    positions: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    chunked: bool = False,
    kv_format: KvFormat = "bf16",
    out: Tensor | None = None,
    records: Records | None = None,
) -> Tensor:
    """q (n, H, E) over each row's keys and values: (n, H * E), bf16, in ``out`` if given. ``spans``
    and ``place`` are as for ``rope_append``.

    Few rows may go to ``records`` instead, if ``fits_records``; the returned tensor is then empty.

    New rows are at ``positions`` (n,), int64, the tokens before them at 0 and on. ``sinks`` (H,)
    are float32. ``chunked`` windows begin at multiples of their size.
    """
    n, heads, size = q.shape
    groups, value = place.heads, place.value if kv_format == "bf16" else size
    per, rotation = heads // groups, rotation_block(kv_format, value)
    if out is None:
        out = empty(0 if records else n, heads * value, dtype=BFLOAT16, device=q.device)
    target, stride = (records.data, records.stride) if records else (out, 0)
    fine = records is not None and records.fine
    for part in spans.parts:
        split, stop = not part.long or max(size, value) > _WIDE, part.first + part.rows
        runs, chunk, partial, stats = 1, part.rows, None, None
        if split:
            runs, most = -(-spans.longest // RUN), min(part.rows, MOST_ROWS)
            chunk, partial, stats = partial_results(most, runs, heads, value, q.device)
        warps = _warps(size, value, split=split)
        for first in range(part.first, stop, chunk):
            rows = min(chunk, stop - first)
            args = Attention(
                *pointers(q, part.records, positions, sinks, target, partial, stats),
                k_at=place.keys_at,
                v_at=place.values_at,
                run_stride=chunk * heads * value,
                count=part.count,
                first=first,
                rows=rows,
                heads=heads,
                per=per,
                window=window or 0,
                runs=runs,
                scale=scale,
                softcap=softcap or 0.0,
                out_stride=stride,
                chunked=chunked,
            )
            tiles = most_tiles(rows * per, _TILE * (1 if split else warps), part.count)
            program = attention_program(size, value, kv_format, split=split, chunked=chunked)
            blocks = groups * _shares(value, kv_format)
            grid = (runs, blocks, tiles) if split else (tiles, groups, 1)
            launch(q.device, program, grid, 32 * warps, args)
            if split and spans.columns:
                program = attention_program(
                    size, value, kv_format, split=True, tree=True, chunked=chunked
                )
                grid = (tree_runs(spans.columns, runs, RUN), blocks, rows * -(-per // _TILE))
                launch(q.device, program, grid, 32 * warps, args)
            if split:
                threads = -(-value // 32) * 32
                program = join_program(value, kv_format, records=records is not None, fine=fine)
                launch(q.device, program, (rows * heads, 1, 1), threads, args)
        if not split and rotation > 1:
            turned = out[part.first : stop]
            rotate_blocks(turned, rotation, out=turned)
    return out


def partial_results(
    n: int, runs: int, heads: int, value: int, device: Device
) -> tuple[int, Tensor, Tensor]:
    """Memory for the partial results of each run of keys, limited to as many of the n rows as keep
    it small: their number, sums (runs, rows * H, value), and statistics (2, runs, rows * H) to join
    them.
    """
    rows = rows_together(n, run_nbytes(runs, heads, value))
    sums = empty(runs, rows * heads, value, dtype=FLOAT32, device=device)
    return rows, sums, empty(2, runs, rows * heads, dtype=FLOAT32, device=device)


def tree_runs(columns: int, runs: int, run: int) -> int:
    """The most runs of ``run`` keys in which ``columns`` tokens lie, of ``runs`` in all."""
    return min(runs, (columns - 2) // run + 2)


def fits_records(heads: int, value: int) -> bool:
    """Whether the results of ``heads`` are whole records, with whole steps per head."""
    return value % 32 == 0 and heads * value % 64 == 0


@cache
def attention_program(
    size: int,
    value: int,
    kv_format: KvFormat = "bf16",
    *,
    split: bool,
    tree: bool = False,
    chunked: bool = False,
) -> Program:
    """The variant for keys of ``size`` elements and values of ``value``."""
    return Program.of(
        "attention",
        KEYS=numbers(kv_format, size)[0],
        VALUES=numbers(kv_format, value)[1],
        SPLIT=int(split),
        TREE=int(tree),
        IN_CHUNKS=int(chunked),
        WARPS=_warps(size, value, split=split),
        BLOCKS=_blocks(size, value, kv_format) if split and not tree else 2,  # per processor
    )


def _blocks(size: int, value: int, kv_format: KvFormat) -> int:
    """Blocks per processor that the register file allows."""
    return 3 if max(size, value) <= (64 if kv_format == "int4" else 128) else 2


def _shares(value: int, kv_format: KvFormat) -> int:
    """Blocks that divide values among them: ``SHARES`` of attention.cuh."""
    return 1 if value <= _WIDE else value // (_WIDE // 2 if kv_format == "int4" else _WIDE)


def _warps(size: int, value: int, *, split: bool) -> int:
    """Warps per block. A prompt's queries are in shared memory beside keys and values, so large
    heads get fewer.
    """
    return 4 if split or max(size, value) > 128 else 8


@cache
def join_program(
    value: int, kv_format: KvFormat = "bf16", *, records: bool = False, fine: bool = False
) -> Program:
    """The kernel that joins the runs of keys."""
    return Program.of(
        "attention_join",
        VALUES=numbers(kv_format, value)[1],
        TURNED=rotation_block(kv_format, value),
        RECORDS=int(records),
        FINE=int(fine),
    )


@cache
def rope_program(
    size: int,
    kv_format: KvFormat = "bf16",
    dtype: Dtype = BFLOAT16,
    axes: int = 1,
    *,
    norm_values: bool = False,
) -> Program:
    """The kernel before attention, for heads of ``size`` numbers."""
    keys, values = numbers(kv_format, size)
    return Program.of(
        "rope_append",
        KEYS=keys,
        VALUES=values,
        IN=OUT[dtype],
        AXES=axes,
        NORM_VALUES=int(norm_values),
    )


class Rotations:
    """The rotary tables of a device's passes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._frequencies: dict[Rope, Tensor] = {}

    def of(self, rope: Rope | None, step: CudaPass) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """cos and sin of the pass, (R, len(inv_freq)) float32, once per pass."""
        if rope is None:
            return None, None
        if rope not in step.tables and step.axes is not None and rope.sections:
            # The host computes them where images have positions of their own.
            cos, sin = rope.turns(step.axes[0], step.axes)
            step.tables[rope] = upload(cos, self._device), upload(sin, self._device)
        elif rope not in step.tables:
            if rope not in self._frequencies:
                values = np.array(rope.inv_freq, np.float32)
                self._frequencies[rope] = upload(values, self._device, pool=self._device.persistent)
            step.tables[rope] = rotary(step.positions, self._frequencies[rope], rope.scale)
        return step.tables[rope]


class AttentionSteps:
    """A part of ``CudaOps``."""

    kv_format: KvFormat
    _rotations: Rotations

    def norm_qkv_rope_append(
        self,
        x: Stream,
        weights: AttentionWeights,
        spec: AttentionSpec,
        step: CudaPass,
        layer: int,
    ) -> Tensor:
        h = normed_for(x, weights.norm, spec.eps, weights.qkv)
        qkv = linear(h, weights.qkv, weights.qkv_bias)
        rows = len(qkv)
        shape = (2 * rows if spec.has_gates else rows, spec.heads, spec.head_dim)
        q = empty(*shape, dtype=BFLOAT16, device=x.values.device)
        gates = q[rows:] if spec.has_gates else None
        cos, sin = self._rotations.of(spec.rope, step)
        rope_append(
            qkv,
            q[:rows],
            step.table,
            step.place(layer),
            cos=cos,
            sin=sin,
            q_norm=weights.q_norm,
            k_norm=weights.k_norm,
            eps=spec.eps,
            joint=spec.joint_norms,
            norms_last=spec.norms_last,
            gates=gates,
            last_gates=spec.last_gates,
            positions=step.positions,
            temperature=spec.temperature,
            norm_values=weights.v_norm is not None,
            keys_as_values=spec.keys_as_values,
            queries_only=spec.reads is not None,
            kv_format=self.kv_format,
        )
        return q

    def attention_output(
        self,
        q: Tensor,
        weights: AttentionWeights,
        spec: AttentionSpec,
        step: CudaPass,
        layer: int,
    ) -> Tensor:
        rows = len(q) // 2 if spec.has_gates else len(q)
        q, gates = q[:rows], q[rows:] if spec.has_gates else None
        # If the next product reads records, they are written directly.
        direct = fits_records(spec.heads, spec.value_dim) and reads_records(weights.out, len(q))
        width, fine = spec.heads * spec.value_dim, weights.out.fine
        records = empty_records(1, len(q), width, q.device, fine=fine) if direct else None
        # The kernel for prompts writes no records.
        few = not any(part.long for part in step.table.parts)
        attended = records if gates is None and few else None
        seen = empty(0 if attended else len(q), width, dtype=BFLOAT16, device=q.device)
        attend(
            q,
            step.table,
            step.place(layer),
            step.positions,
            scale=spec.scale,
            window=spec.window,
            chunked=spec.chunked,
            softcap=spec.softcap,
            sinks=weights.sinks,
            kv_format=self.kv_format,
            out=seen,
            records=attended,
        )
        if gates is not None:
            kind = "softplus" if spec.softplus else "sigmoid"
            seen = norm_gate(seen, gates.view(rows, -1), gate=kind, records=records)
            attended = records
        y = linear(attended or seen, weights.out, weights.out_bias, dtype=FLOAT32)
        if weights.post_norm is None:
            return y
        return norm(y, weights.post_norm, spec.result_eps, out=FLOAT32)


def cache_nbytes(layers: Sequence[LayerSpec], length: int, kv_format: KvFormat) -> int:
    """Bytes of keys, values and states once grown to ``length`` tokens."""
    attending, states = split_layers(layers)
    shapes, dtype = _kept(attending, kv_format)
    row = sum(groups * sum(widths) for groups, *widths in shapes)
    in_states = StateLayout(states).sequence_nbytes(length)
    return in_states + row * grown_capacity(length) * dtype.itemsize


def new_cache(
    layers: Sequence[LayerSpec], capacity: int, kv_format: KvFormat, device: Device
) -> KVCache:
    """An empty cache."""
    attending, states = split_layers(layers)
    shapes, dtype = _kept(attending, kv_format)
    kv = BlockedCache(shapes, capacity, dtype, device)

    def alloc(count: int) -> Tensor:
        return zeros(count, device=device, pool=device.persistent)

    return HybridCache(kv, StateCache(states, kv.capacity, alloc)) if states else kv


def _kept(
    layers: Sequence[AttentionSpec], kv_format: KvFormat
) -> tuple[list[tuple[int, int, int]], Dtype]:
    """Per layer: KV heads, and the elements that a key and a value take; and the elements' type."""
    latent = any(isinstance(spec, LatentSpec) for spec in layers)
    if latent or kv_format == "bf16":
        shapes = [(spec.cached_heads, spec.head_dim, spec.value_dim) for spec in layers]
        return shapes, BFLOAT16
    return [(spec.cached_heads, *row_nbytes(kv_format, spec.head_dim)) for spec in layers], UINT8


_LATENT_KEYS = 128  # keys per block; results' bits depend on it
_MOST_LATENT_COLUMNS = 608  # latents in whole spans of 64 that fit in shared memory

_LatentAppend = arguments("latent_append.cu", "LatentAppend")


def takes_latents(rope: int, latent: int) -> bool:
    """Whether the kernels support cached rows of ``rope`` + ``latent`` elements."""
    whole = rope % 8 == 0 and latent % 8 == 0
    return whole and rope + -(-latent // 64) * 64 <= _MOST_LATENT_COLUMNS


def latent_append(
    q: Tensor,
    wide: Tensor,
    queries: Tensor,
    spans: SpanTable,
    place: LayerPlace,
    *,
    cos: Tensor,
    sin: Tensor,
    norm: Tensor,
    eps: float,
    interleaved: bool,
    positions: Tensor | None = None,
    temperature: AttentionTemperature | None = None,
) -> None:
    """Apply RoPE to each head's last P columns of q (n, H, N + P); they become the first P columns
    of queries (n, H, P + L).

    ``wide`` (n, L + P) are latents and rotary keys. Latents are normed, keys rotated, and both
    appended to the caches of ``spans``, keys first. ``place`` is the layer's place in their blocks.
    cos and sin are (n, P / 2), norm (L,), all float32; q and wide are bf16 or float32, the rest
    bf16. ``temperature`` scales queries with ``positions`` (n,), int64.
    """
    n, heads, width = q.shape
    half = cos.shape[1]
    args = _LatentAppend(
        *pointers(q, wide, queries, spans.numbers, cos, sin, norm),
        *pointers(None if temperature is None else positions),
        place.keys_at,
        q.strides[0],
        wide.strides[0],
        heads,
        width,
        half,
        wide.shape[1] - 2 * half,
        interleaved,
        spans.count,
        1 if temperature is None else temperature.length,
        0 if temperature is None else temperature.offset,
        eps,
        0.0 if temperature is None else temperature.beta,
    )
    grid = (-(-(heads + 1) // (_THREADS // 32)), n, 1)
    launch(q.device, append_program(q.dtype, wide.dtype), grid, _THREADS, args)


def attend_latent_rows(
    q: Tensor,
    spans: SpanTable,
    place: LayerPlace,
    positions: Tensor,
    out: Tensor,
    *,
    rope: int,
    scale: float,
) -> None:
    """Attention of q (n, H, P + L) to each row's cached rows (P + L), where P is ``rope``: out (n,
    H, L).

    All are bf16; ``spans`` and ``place`` are as for ``latent_append``. New rows are at
    ``positions`` (n,), int64.
    """
    n, heads, width = q.shape
    latent = width - rope
    runs = -(-spans.longest // _LATENT_KEYS)
    chunk, partial, stats = partial_results(n, runs, heads, latent, q.device)
    attention, join = latent_programs(rope, latent)
    tree, _ = latent_programs(rope, latent, tree=True)
    for first in range(0, n, chunk):
        rows = min(chunk, n - first)
        args = Attention(
            *pointers(q, spans.numbers, positions, None, out, partial, stats),
            k_at=place.keys_at,
            run_stride=chunk * heads * latent,
            count=spans.count,
            first=first,
            rows=rows,
            heads=heads,
            per=heads,
            runs=runs,
            scale=scale,
        )
        tiles = most_tiles(rows * heads, _TILE, spans.count)
        launch(q.device, attention, (runs, tiles, 1), _THREADS, args)
        if spans.columns:
            grid = (tree_runs(spans.columns, runs, _LATENT_KEYS), rows * -(-heads // _TILE), 1)
            launch(q.device, tree, grid, _THREADS, args)
        launch(q.device, join, (rows * heads, 1, 1), -(-latent // 32) * 32, args)


@cache
def append_program(q: Dtype, wide: Dtype) -> Program:
    """The kernel before attention, for queries and latents of these types."""
    return Program.of("latent_append", Q_IN=OUT[q], WIDE_IN=OUT[wide])


@cache
def latent_programs(rope: int, latent: int, *, tree: bool = False) -> tuple[Program, Program]:
    """The attention kernels for cached rows of ``rope`` + ``latent`` elements: one computes runs,
    one joins them.
    """
    join = Program.of(
        "attention_join",
        VALUES=numbers("bf16", latent)[1],
        TURNED=1,
        RECORDS=0,
        RUN_KEYS=_LATENT_KEYS,
    )
    values = Program.of("latent", ROPE=rope, LATENT=latent, RUN_KEYS=_LATENT_KEYS, TREE=int(tree))
    return values, join


class LatentSteps:
    """A part of ``CudaOps``."""

    _rotations: Rotations

    def norm_latent_append(
        self, x: Stream, weights: LatentWeights, spec: LatentSpec, step: CudaPass, layer: int
    ) -> Tensor:
        """(R, H, P + L); the latents are written to the caches."""
        kind = BFLOAT16 if weights.query_up is None else FLOAT32
        h = normed_for(x, weights.norm, spec.eps, weights.down)
        wide = linear(h, weights.down, dtype=kind)
        q, latents = wide[:, : -spec.head_dim], wide[:, -spec.head_dim :]
        if weights.query_up is not None:
            assert weights.query_norm is not None, "it is between both projections"
            ranked = norm(q, weights.query_norm, spec.latent_eps, out=BFLOAT16)
            q = linear(ranked, weights.query_up)
        q = q.view(len(q), spec.heads, -1)  # (R, H, N + P)
        shape = (len(q), spec.heads, spec.head_dim)
        queries = empty(*shape, dtype=BFLOAT16, device=q.device)
        absorbed = queries[:, :, spec.rope_dim :].transpose(0, 1)
        multiply_heads(q[:, :, : spec.nope].transpose(0, 1), weights.key_up, absorbed)
        cos, sin = self._rotations.of(spec.rope, step)
        assert cos is not None, "latent attention rotates a part of its keys"
        assert sin is not None, "as cos"
        latent_append(
            q,
            latents,
            queries,
            step.table,
            step.place(layer),
            cos=cos,
            sin=sin,
            norm=weights.latent_norm,
            eps=spec.latent_eps,
            interleaved=spec.interleaved,
            positions=step.positions,
            temperature=spec.temperature,
        )
        return queries

    def latent_output(
        self, q: Tensor, weights: LatentWeights, spec: LatentSpec, step: CudaPass, layer: int
    ) -> Tensor:
        shape = (len(q), spec.heads, spec.latent)
        seen = empty(*shape, dtype=BFLOAT16, device=q.device)
        place, rope = step.place(layer), spec.rope_dim
        attend_latent_rows(q, step.table, place, step.positions, seen, rope=rope, scale=spec.scale)
        shape = (len(q), spec.heads, spec.value)
        values = empty(*shape, dtype=BFLOAT16, device=q.device)
        multiply_heads(seen.transpose(0, 1), weights.value_up, values.transpose(0, 1))
        return linear(values.view(len(q), -1), weights.out, dtype=FLOAT32)
