"""Latent attention (DeepSeek) on a GPU: appends a pass's rows to the caches, and attends.

A cached row is the rotary key that all heads share, followed by the latent, which is both key and
value. Runs of 128 keys are joined in order: a row's result is bit-identical for any number of rows,
prefill included.
"""

from __future__ import annotations

from functools import cache

from localrt.quant.cuda.attention import Attention, Rotations, numbers, partial_results, tree_runs
from localrt.quant.cuda.kv import LayerPlace, SpanTable, most_tiles
from localrt.quant.cuda.launch import arguments, launch, pointers
from localrt.quant.cuda.linear import linear, multiply_heads, normed_for
from localrt.quant.cuda.products import OUT
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.steps import norm
from localrt.quant.cuda.stream import CudaPass, Stream
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32, Dtype, Tensor, empty
from localrt.quant.cuda.weight import LatentWeights
from localrt.quant.ops.attention import AttentionTemperature, LatentSpec

_RUN = 128  # keys per block; results' bits depend on it
_THREADS = 128
_TILE = 16  # query rows per block
_MOST_COLUMNS = 608  # latents in whole spans of 64 that fit in shared memory

_LatentAppend = arguments("latent_append.cu", "LatentAppend")


def takes_latents(rope: int, latent: int) -> bool:
    """Whether the kernels support cached rows of ``rope`` + ``latent`` elements."""
    whole = rope % 8 == 0 and latent % 8 == 0
    return whole and rope + -(-latent // 64) * 64 <= _MOST_COLUMNS


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
    runs = -(-spans.longest // _RUN)
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
            grid = (tree_runs(spans.columns, runs, _RUN), rows * -(-heads // _TILE), 1)
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
        "attention_join", VALUES=numbers("bf16", latent)[1], TURNED=1, RECORDS=0, RUN_KEYS=_RUN
    )
    return Program.of("latent", ROPE=rope, LATENT=latent, RUN_KEYS=_RUN, TREE=int(tree)), join


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
