"""A mixture's own steps on a card: its router, the choice of experts, and the sum of their results.

A row's bits depend on that row alone. The products with experts are in ``grouped.py``.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int, c_void_p

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localrt.quant.cuda.kernels.launch import launch
from localrt.quant.cuda.kernels.products import OUT
from localrt.quant.cuda.kernels.programs import Program
from localrt.quant.ops.experts import RouterSpec

MOST_EXPERTS = 1024
"""Of a layer."""

_THREADS = 256
_MOST_PLACES = 960
_SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax-chosen": 2}


class _Router(Structure):
    _fields_ = (
        ("x", c_void_p),
        ("gate", c_void_p),
        ("y", c_void_p),
        ("experts", c_int),
        ("width", c_int),
        ("y_stride", c_int),
    )


class _Put(Structure):
    _fields_ = (
        ("rows", c_void_p),
        ("y", c_void_p),
        ("width", c_int),
        ("places", c_int * _MOST_PLACES),
    )


class _Combine(Structure):
    _fields_ = (
        ("slots", c_void_p),
        ("weights", c_void_p),
        ("shared", c_void_p),
        ("y", c_void_p),
        ("used", c_int),
        ("width", c_int),
    )


class _Choose(Structure):
    _fields_ = (
        ("logits", c_void_p),
        ("gate_bias", c_void_p),
        ("choice_bias", c_void_p),
        ("chosen", c_void_p),
        ("scores", c_void_p),
        ("weights", c_void_p),
        ("experts", c_int),
        ("used", c_int),
        ("ranked", c_int),
        ("scoring", c_int),
        ("normalize", c_int),
        ("groups", c_int),
        ("used_groups", c_int),
        ("group_top", c_int),
        ("scale", c_float),
    )


def router_logits(x: Tensor, gate: Tensor, out: Tensor) -> None:
    """out (R, E) = x (R, D), float32, times the rows of gate (E, D), bf16 or float32."""
    rows, width = x.shape
    args = _Router(
        x.data_ptr(), gate.data_ptr(), out.data_ptr(), gate.shape[0], width, out.stride(0)
    )
    program = Program.of("router", GATE_IN=OUT[gate.dtype])
    launch(x.device, program, (-(-gate.shape[0] // 8), rows, 1), _THREADS, args)


def choose(
    logits: Tensor, gate_bias: Tensor | None, choice_bias: Tensor | None, spec: RouterSpec
) -> Tensor:
    """The experts of rows by logits (R, E), float32, to which ``gate_bias`` (E,) is added.

    Returns int32: experts (R, W), then scores (R, W) and weights (R, K), both float32. A row whose
    logits are not all finite has weights that are not. Experts are ``MOST_EXPERTS`` at most.
    """
    rows, count = logits.shape
    assert count <= MOST_EXPERTS, "each has a thread of a block"
    plane = rows * spec.ranked
    results = torch.empty(2 * plane + rows * spec.used, dtype=torch.int32, device=logits.device)
    address = results.data_ptr()
    args = _Choose(
        logits.data_ptr(),
        None if gate_bias is None else gate_bias.data_ptr(),
        None if choice_bias is None else choice_bias.data_ptr(),
        address,
        address + 4 * plane,
        address + 8 * plane,
        count,
        spec.used,
        spec.ranked,
        _SCORINGS[spec.scoring],
        spec.normalize,
        spec.groups,
        spec.used_groups,
        min(spec.group_top, count // spec.groups),
        spec.scale,
    )
    launch(logits.device, _CHOOSE, (rows, 1, 1), -(-count // 32) * 32, args)
    return results


def put_rows(rows: Tensor, places: npt.NDArray[np.intp], out: Tensor) -> None:
    """Rows (n, D) to the ``places`` (n,) of ``out``, all float32 and contiguous."""
    width = out.shape[1]
    for first in range(0, len(places), _MOST_PLACES):
        some = places[first : first + _MOST_PLACES]
        args = _Put(rows.data_ptr() + 4 * width * first, out.data_ptr(), width)
        np.ctypeslib.as_array(args.places)[: len(some)] = some
        launch(out.device, _PUT, (-(-width // _THREADS), len(some), 1), _THREADS, args)


def combined(slots: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
    """Slots (R * K, D) times weights (R, K), summed in the order of k, plus shared (R, D)."""
    rows, used = weights.shape
    width = slots.shape[1]
    y = torch.empty(rows, width, dtype=torch.float32, device=slots.device)
    args = _Combine(
        slots.data_ptr(),
        weights.data_ptr(),
        None if shared is None else shared.data_ptr(),
        y.data_ptr(),
        used,
        width,
    )
    launch(y.device, _COMBINE, (-(-width // _THREADS), rows, 1), _THREADS, args)
    return y


_CHOOSE = Program.of("choose")
_COMBINE = Program.of("combine")
_PUT = Program.of("put")
