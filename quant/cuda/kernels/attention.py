"""Attention of new rows over a KV cache, and the step before it that fills the cache.

Up to 64 rows are split over runs of 256 keys, which are joined in order: a row's result is the same
to the bit for any number of rows. More rows (prompts) are one kernel, which takes all keys in turn.
Lengths come from device memory: a recorded CUDA graph stays valid as the cache fills.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from localrt.quant.cuda.kernels.kv import CardKvFormat, numbers, turned_block
from localrt.quant.cuda.kernels.launch import launch
from localrt.quant.cuda.kernels.products import MOST_ROWS, Records
from localrt.quant.cuda.kernels.programs import Program
from localrt.quant.cuda.kernels.runs import RUN, row_nbytes, rows_together
from localrt.quant.cuda.kernels.steps import rotate_blocks

_THREADS = 128
_TILE = 16  # query rows of a warp


class Attention(Structure):
    """What the kernels of attention read: ``Attention`` in quant/cuda/src/attention.cuh."""

    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("held", c_void_p),
        ("positions", c_void_p),
        ("tree", c_void_p),
        ("sinks", c_void_p),
        ("out", c_void_p),
        ("partial", c_void_p),
        ("stats", c_void_p),
        ("k_group", c_int64),
        ("v_group", c_int64),
        ("run_stride", c_int64),
        ("n", c_int),
        ("first", c_int),
        ("rows", c_int),
        ("heads", c_int),
        ("per", c_int),
        ("window", c_int),
        ("runs", c_int),
        ("scale", c_float),
        ("softcap", c_float),
        ("out_stride", c_int),
    )


class _RopeAppend(Structure):
    _fields_ = (
        ("qkv", c_void_p),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("held", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("k_group", c_int64),
        ("v_group", c_int64),
        ("row_stride", c_int),
        ("step", c_int),
        ("keys_at", c_int),
        ("heads", c_int),
        ("groups", c_int),
        ("half", c_int),
        ("joint", c_int),
        ("last", c_int),
        ("eps", c_float),
    )


def takes_heads(size: int) -> bool:
    """Whether the kernels attend with heads of ``size`` numbers."""
    return size % 8 == 0 and size <= 256


def rope_append(
    qkv: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    held: Tensor,
    *,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    joint: bool = False,
    norms_last: bool = False,
    gated: bool = False,
    kv_format: CardKvFormat = "bf16",
) -> None:
    """Per-head norms and rotary on qkv (n, (H + 2G) * E), bf16; q goes to q (n, H, E), k and v
    behind the ``held`` tokens (one int64 on the device) of the caches (G, allocated, E).

    cos and sin (n, rotary / 2) are float32; None is no rotary. ``joint`` norms go over all heads at
    once: their weights are (H * E,) and (G * E,). ``norms_last`` come behind the rotation. Where it
    is ``gated``, each head's query in qkv is followed by as many numbers that are left alone. A
    quantized cache has rows of bytes, and queries against it are rotated.
    """
    n, heads, size = q.shape
    groups = k_cache.shape[0]
    step = 2 * size if gated else size
    args = _RopeAppend(
        qkv.data_ptr(),
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        held.data_ptr(),
        _pointer(cos),
        _pointer(sin),
        _pointer(q_norm),
        _pointer(k_norm),
        _bytes_of_group(k_cache),
        _bytes_of_group(v_cache),
        qkv.stride(0),
        step,
        heads * step,
        heads,
        groups,
        0 if cos is None else cos.shape[1],
        joint,
        norms_last,
        eps,
    )
    blocks = -(-(heads + 2 * groups) // (_THREADS // 32))
    launch(q.device, rope_program(size, kv_format), (blocks, n, 1), _THREADS, args)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    mask: Tensor | None,
    longest: int,
    sinks: Tensor | None = None,
    kv_format: CardKvFormat = "bf16",
    records: Records | None = None,
    row: int = 0,
) -> Tensor:
    """q (n, H, E) over keys and values (G, allocated, E): (n, H * E), bf16.

    Few rows may go to ``records`` instead, from ``row`` on, if ``fits_records``; what is returned
    then holds nothing.

    The cache has ``held`` tokens (one int64 on the device), at positions 0 to held - 1, and behind
    them the n new rows, at ``positions`` (n,) int64. ``mask`` (n, n) int8 says which new row sees
    which; None is causal. ``longest`` bounds held + n; the grid is cut for it. ``sinks`` (H,) are
    float32.
    """
    n, heads, size = q.shape
    groups, value = k.shape[0], v.shape[2] if kv_format == "bf16" else size
    per = heads // groups
    split = n <= MOST_ROWS
    turned = turned_block(kv_format, value)
    runs = -(-longest // RUN) if split else 1
    out = torch.empty(0 if records else n, heads * value, dtype=torch.bfloat16, device=q.device)
    target = records.data[0, row * records.count // records.rows :] if records else out
    chunk, partial, stats = n, None, None
    if split:
        chunk, partial, stats = partial_results(n, runs, heads, value, q.device)
    for first in range(0, n, chunk):
        rows = min(chunk, n - first)
        args = Attention(
            q=q.data_ptr(),
            k=k.data_ptr(),
            v=v.data_ptr(),
            held=held.data_ptr(),
            positions=positions.data_ptr(),
            tree=_pointer(mask),
            sinks=_pointer(sinks),
            out=target.data_ptr(),
            partial=_pointer(partial),
            stats=_pointer(stats),
            k_group=_bytes_of_group(k),
            v_group=_bytes_of_group(v),
            run_stride=chunk * heads * value,
            n=n,
            first=first,
            rows=rows,
            heads=heads,
            per=per,
            window=window or 0,
            runs=runs,
            scale=scale,
            softcap=softcap or 0.0,
            out_stride=records.stride if records else 0,
        )
        tiles = -(-rows * per // _TILE)
        program = attention_program(size, value, kv_format, split=split)
        if not split:
            grid = (-(-tiles // (_THREADS // 32)), groups, 1)
            launch(q.device, program, grid, _THREADS, args)
            continue
        launch(q.device, program, (runs, groups, tiles), _THREADS, args)
        threads = -(-value // 32) * 32
        fine = records is not None and records.fine
        program = join_program(value, kv_format, records=records is not None, fine=fine)
        launch(q.device, program, (rows * heads, 1, 1), threads, args)
    return out if split or turned == 1 else rotate_blocks(out, turned)


def partial_results(
    n: int, runs: int, heads: int, value: int, device: torch.device
) -> tuple[int, Tensor, Tensor]:
    """Room for what rows see of each run of keys, of so many of the n rows at once that it stays
    small: how many, their sums (runs, rows * H, value), and (2, runs, rows * H) to join them by.
    """
    rows = rows_together(n, row_nbytes(runs, heads, value))
    sums = torch.empty(runs, rows * heads, value, dtype=torch.float32, device=device)
    return rows, sums, torch.empty(2, runs, rows * heads, dtype=torch.float32, device=device)


def fits_records(heads: int, value: int) -> bool:
    """Whether the results of so many heads are whole records, each head in whole steps."""
    return value % 32 == 0 and heads * value % 64 == 0


@cache
def attention_program(
    size: int, value: int, kv_format: CardKvFormat = "bf16", *, split: bool
) -> Program:
    """The variant for keys of ``size`` numbers and values of ``value``."""
    return Program.of(
        "attention",
        KEYS=numbers(kv_format, size)[0],
        VALUES=numbers(kv_format, value)[1],
        SPLIT=int(split),
        BLOCKS=3 if max(size, value) <= 64 else 2,  # of a processor at once
    )


@cache
def join_program(
    value: int, kv_format: CardKvFormat = "bf16", *, records: bool = False, fine: bool = False
) -> Program:
    """What joins the runs of values of so many numbers."""
    return Program.of(
        "attention_join",
        VALUES=numbers(kv_format, value)[1],
        TURNED=turned_block(kv_format, value),
        RECORDS=int(records),
        FINE=int(fine),
    )


@cache
def rope_program(size: int, kv_format: CardKvFormat = "bf16") -> Program:
    """The step before, for heads of ``size`` numbers."""
    return Program.of(
        "rope_append", KEYS=numbers(kv_format, size)[0], VALUES=numbers(kv_format, size)[1]
    )


def _bytes_of_group(cache: Tensor) -> int:
    return cache.stride(0) * cache.element_size()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
