"""Latent attention of 1 to 64 new rows (DeepSeek) over one cached row, and the step before it.

A cached row is the rotary key that all heads share, and the latent behind it, which is key and
value at once. Runs of 128 keys are joined in order: a row's result is the same to the bit for any
number of rows. It knows tensors; projections are its caller's.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from localrt.quant.cuda.kernels.attention import Attention, partial_results
from localrt.quant.cuda.kernels.kv import numbers
from localrt.quant.cuda.kernels.launch import launch
from localrt.quant.cuda.kernels.products import OUT
from localrt.quant.cuda.kernels.programs import Program

_RUN = 128  # keys of a block: part of what a result's bits depend on
_THREADS = 128
_TILE = 16  # query rows of a block
_MOST_COLUMNS = 608  # latents in whole spans of 64: what shared memory has room for


class _LatentAppend(Structure):
    _fields_ = (
        ("q", c_void_p),
        ("wide", c_void_p),
        ("queries", c_void_p),
        ("cache", c_void_p),
        ("held", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("norm", c_void_p),
        ("q_stride", c_int64),
        ("wide_stride", c_int64),
        ("heads", c_int),
        ("width", c_int),
        ("half", c_int),
        ("latent", c_int),
        ("interleaved", c_int),
        ("eps", c_float),
    )


def takes_latents(rope: int, latent: int) -> bool:
    """Whether the kernels attend to cached rows of ``rope`` + ``latent`` numbers."""
    whole = rope % 8 == 0 and latent % 8 == 0
    return whole and rope + -(-latent // 64) * 64 <= _MOST_COLUMNS


def latent_append(
    q: Tensor,
    wide: Tensor,
    queries: Tensor,
    cache: Tensor,
    held: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    norm: Tensor,
    eps: float,
    interleaved: bool,
) -> None:
    """Rotary on each head's last P columns of q (n, H, N + P): the first of queries (n, H, P + L).

    ``wide`` (n, L + P) are latents and keys: normed and rotated, they go behind the ``held`` rows
    (one int64 on the device) of cache (allocated, P + L), the rotary part first. cos and sin are
    (n, P / 2), norm (L,), all float32; q and wide are bf16 or float32, the rest bf16.
    """
    n, heads, width = q.shape
    half = cos.shape[1]
    args = _LatentAppend(
        q.data_ptr(),
        wide.data_ptr(),
        queries.data_ptr(),
        cache.data_ptr(),
        held.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        norm.data_ptr(),
        q.stride(0),
        wide.stride(0),
        heads,
        width,
        half,
        wide.shape[1] - 2 * half,
        interleaved,
        eps,
    )
    grid = (-(-(heads + 1) // (_THREADS // 32)), n, 1)
    launch(q.device, append_program(q.dtype, wide.dtype), grid, _THREADS, args)


def attend_latent_rows(
    q: Tensor,
    cache: Tensor,
    held: Tensor,
    positions: Tensor,
    *,
    rope: int,
    scale: float,
    mask: Tensor | None,
    longest: int,
) -> Tensor:
    """q (n, H, P + L) over cache (allocated, P + L), P being ``rope``: what is seen, (n, H, L).

    All are bf16. ``held`` (one int64 on the device) tokens lie in the cache, and behind them the n
    new rows, at ``positions`` (n,) int64. ``mask`` (n, n) int8 says which new row sees which; None
    is causal. ``longest`` bounds held + n.
    """
    n, heads, width = q.shape
    latent = width - rope
    runs = -(-longest // _RUN)
    out = torch.empty(n, heads, latent, dtype=torch.bfloat16, device=q.device)
    chunk, partial, stats = partial_results(n, runs, heads, latent, q.device)
    attention, join = latent_programs(rope, latent)
    for first in range(0, n, chunk):
        rows = min(chunk, n - first)
        args = Attention(
            q=q.data_ptr(),
            k=cache.data_ptr(),
            held=held.data_ptr(),
            positions=positions.data_ptr(),
            tree=None if mask is None else mask.data_ptr(),
            out=out.data_ptr(),
            partial=partial.data_ptr(),
            stats=stats.data_ptr(),
            run_stride=chunk * heads * latent,
            n=n,
            first=first,
            rows=rows,
            heads=heads,
            per=heads,
            runs=runs,
            scale=scale,
        )
        launch(q.device, attention, (runs, -(-rows * heads // _TILE), 1), _THREADS, args)
        launch(q.device, join, (rows * heads, 1, 1), -(-latent // 32) * 32, args)
    return out


@cache
def append_program(q: torch.dtype, wide: torch.dtype) -> Program:
    """The step before, for queries and latents of these types."""
    return Program.of("latent_append", Q_IN=OUT[q], WIDE_IN=OUT[wide])


@cache
def latent_programs(rope: int, latent: int) -> tuple[Program, Program]:
    """Attention to cached rows of ``rope`` + ``latent`` numbers, and what joins its runs."""
    join = Program.of(
        "attention_join", VALUES=numbers("bf16", latent)[1], TURNED=1, RECORDS=0, RUN_KEYS=_RUN
    )
    return Program.of("latent", ROPE=rope, LATENT=latent, RUN_KEYS=_RUN), join
