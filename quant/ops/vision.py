"""The steps of a vision encoder over the rows of one picture.

Rows are float32 arrays (R, D): numpy's, or on a GPU those that ``put`` returns. ``VisionSteps``
computes products with any ``Ops`` and the rest with numpy, which defines each step; the kernels of
the CPU (``quant/cpu/vision.py``) and of GPUs (``quant/cuda/vision.py``) replace them.

Shapes below: R rows (patches of a picture in the encoder's order), D columns, H heads, E head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from localrt.quant.formats.packed import Floats
from localrt.quant.ops.arrays import Vector, Weight, copy_to_host, vector_to_host
from localrt.quant.ops.protocol import Ops

VisionActivation = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]
_ROWS = 512  # whose scores numpy computes at a time


def activate(x: Floats, activation: VisionActivation) -> Floats:
    """Apply exact GELU, one of its two approximations, or SiLU to every value of ``x``."""
    if activation == "gelu":
        scaled = (x * np.float32(0.7071067811865476)).ravel().tolist()
        erf = np.fromiter(map(math.erf, scaled), x.dtype, x.size).reshape(x.shape)
        out = 0.5 * x * (1 + erf)
    elif activation == "gelu_tanh":
        inner = np.float32(0.7978845608028654) * (x + np.float32(0.044715) * x**3)
        out = 0.5 * x * (1 + np.tanh(inner))
    else:
        slope = np.float32(1.702 if activation == "quick_gelu" else 1.0)
        with np.errstate(over="ignore"):
            out = x / (1 + np.exp(-slope * x))
    return np.asarray(out, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PatchLayout:
    """Segments and positions of a picture's patches: the row at which each segment of attention
    ends, how many rows away a row sees (0: all), and rotary cosines and sines (R, E / 2), if any.
    """

    ends: Sequence[int]
    window: int = 0
    cos: Floats | None = None
    sin: Floats | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Heads:
    """``count`` heads of ``size`` numbers. Queries are multiplied by ``scale``. RMSNorm of queries
    and keys is optional, that of values has no weight. With several ``axes`` of rotary positions,
    each rotates an equal part of a head, the part's first half against its second. ``kv_count``
    heads of keys and values are shared by the queries' heads; 0 means as many.
    """

    count: int
    size: int
    scale: float
    eps: float
    q_norm: Vector | None = None
    k_norm: Vector | None = None
    value_norm: bool = False
    axes: int = 1
    kv_count: int = 0


Rows: TypeAlias = Any  # (R, ...) float32: numpy's array, or what ``put`` returns


class VisionSteps:
    """Every step returns a new array and leaves its inputs unchanged.

    ``on_gpu``: weights and rows are in a GPU's memory.
    """

    on_gpu = False

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def put(self, x: Floats) -> Rows:
        """Copy rows to the device that computes the blocks."""
        return x

    def get(self, x: Rows) -> Floats:
        """Copy rows to the host."""
        rows: Floats = x
        return rows

    def end(self) -> None:
        """Free what the steps cache for a picture, after its last step."""

    def begin_unit(self) -> None:
        """Start a unit of weights, whose memory can be freed before that of earlier units."""

    def linear(
        self,
        x: Floats,
        weight: Weight,
        bias: Vector | None = None,
        activation: VisionActivation | None = None,
    ) -> Floats:
        """x (R, F) times ``weight`` (D, F), plus ``bias`` (D,), then the activation: (R, D)."""
        ops = self.ops
        with ops.scope():
            product = ops.projected(ops.given_rows(np.ascontiguousarray(x, np.float32)), weight)
            columns = product.shape[-1]
            out = np.empty((len(x), columns), np.float32)
            copy_to_host(product, out)
        if bias is not None:
            out += self.values(bias, columns)
        return out if activation is None else activate(out, activation)

    def add(self, x: Floats, y: Floats) -> Floats:
        """The sum of x and y (R, D)."""
        return x + y

    def clip(self, x: Floats, low: float, high: float) -> Floats:
        """Clip every value to ``low`` and ``high``."""
        return np.clip(x, low, high)

    def joined(self, parts: Sequence[Floats]) -> Floats:
        """Concatenate the columns of all parts (R, ...)."""
        return np.concatenate(parts, -1)

    def values(self, vector: Vector, size: int) -> Floats:
        """A vector's values (size,)."""
        out = np.empty(size, np.float32)
        vector_to_host(vector, out)
        return out

    def layer_norm(self, x: Floats, weight: Vector, bias: Vector | None, eps: float) -> Floats:
        """LayerNorm of every row: (R, D)."""
        x = x - x.mean(-1, keepdims=True)
        scale = np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(eps))
        out: Floats = x / scale * self.values(weight, x.shape[-1])
        return out if bias is None else out + self.values(bias, x.shape[-1])

    def rms_norm(self, x: Floats, weight: Vector | None, eps: float) -> Floats:
        """RMSNorm over the last axis, with an optional ``weight``: the shape of ``x``."""
        out: Floats = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(eps))
        return out if weight is None else out * self.values(weight, x.shape[-1])

    def gated(self, x: Floats, activation: VisionActivation) -> Floats:
        """``activation(gate) * up`` of x (R, 2F), whose rows are gate and up: (R, F)."""
        inner = x.shape[-1] // 2
        return activate(x[:, :inner], activation) * x[:, inner:]

    def rotate(self, x: Floats, cos: Floats, sin: Floats) -> Floats:
        """Rotate the halves of x (R, H, E) against each other by ``cos``, ``sin`` (R, E / 2)."""
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        cos, sin = cos[:, None], sin[:, None]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    def heads(self, qkv: Floats, heads: Heads, layout: PatchLayout) -> Floats:
        """Attention of qkv (R, (H + 2 * KV) * E), ordered queries, keys, values: (R, H * E).

        See ``attention``, ``rotate`` and ``rms_norm``.
        """
        shared = heads.kv_count or heads.count
        parts = qkv.reshape(len(qkv), heads.count + 2 * shared, heads.size)
        q, k, v = np.split(parts, (heads.count, heads.count + shared), axis=1)
        if heads.q_norm is not None:
            q = self.rms_norm(q, heads.q_norm, heads.eps)
        if heads.k_norm is not None:
            k = self.rms_norm(k, heads.k_norm, heads.eps)
        if heads.value_norm:
            v = self.rms_norm(v, None, heads.eps)
        if layout.cos is not None and layout.sin is not None:
            q, k = (
                self.rotate(_halved(each, heads.axes), layout.cos, layout.sin) for each in (q, k)
            )
        if shared < heads.count:
            k, v = (np.repeat(each, heads.count // shared, axis=1) for each in (k, v))
        return self.attention(q, k, v, heads.scale, layout.ends, layout.window)

    def attention(
        self, q: Floats, k: Floats, v: Floats, scale: float, ends: Sequence[int], window: int = 0
    ) -> Floats:
        """Bidirectional attention within each segment; segments end before the rows ``ends``, and
        rows see ``window`` rows to both sides, or all if it is 0.

        q, k, v are (R, H, E), and queries are multiplied by ``scale``; returns (R, H * E).
        """
        out, first = np.empty_like(q), 0
        for end in ends:
            seen, places = slice(first, end), np.arange(first, end)
            for begin in range(first, end, _ROWS):
                rows = slice(begin, min(begin + _ROWS, end))
                own = np.arange(begin, rows.stop)[:, None]
                far = np.abs(own - places) > (window or end)
                for head in range(q.shape[1]):
                    scores = (q[rows, head] * np.float32(scale)) @ k[seen, head].T
                    scores[far] = -np.inf
                    scores = np.exp(scores - scores.max(-1, keepdims=True))
                    out[rows, head] = (scores / scores.sum(-1, keepdims=True)) @ v[seen, head]
            first = end
        return out.reshape(len(q), -1)


def _halved(x: Floats, axes: int) -> Floats:
    """Reorder x (R, H, E): the first halves of all axes' parts before the second halves."""
    if axes == 1:
        return x
    return x.reshape(*x.shape[:-1], axes, 2, -1).swapaxes(-3, -2).reshape(x.shape)
