"""The steps of vision encoders by the compiled kernels, on all threads (``csrc/vision.h``).

Packed matrices take activations in int8, float matrices in float32. With AMX, attention and all
matrices except float32 ones are multiplied in bf16 and summed in float32; with AVX-512's bf16
products, attention and 16-bit matrices are. A row's bits do not depend on other rows or on threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localrt.quant.cpu.abi import VISION_ACTIVATIONS, VisionArgs
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cpu.weights import NativeVector, NativeWeight, address_of, locate
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.arrays import large_floats
from localrt.quant.ops.vision import VisionActivation, VisionSteps

_WIDEST_HEAD = 256  # MAX_VISION_HEAD in csrc/vision.h


class NativeVision(VisionSteps):
    """See ``VisionSteps``."""

    def __init__(self, ops: NativeOps) -> None:
        super().__init__(ops)
        self._native = ops

    def begin_unit(self) -> None:
        self._native.begin_region()

    def linear(
        self,
        x: Floats,
        weight: NativeWeight,
        bias: NativeVector | None = None,
        activation: VisionActivation | None = None,
    ) -> Floats:
        x, out = _dense(x), large_floats((len(x), weight.stack.rows))
        args = VisionArgs(x=locate(x), out=locate(out), rows=len(x), bias=address_of(bias))
        args.matrix, args.activation = weight.stack, VISION_ACTIVATIONS[activation or "none"]
        self._native.run_vision("linear", args)
        return out

    def add(self, x: Floats, y: Floats) -> Floats:
        x, y, out = _dense(x), _dense(y), large_floats(x.shape)
        args = VisionArgs(x=locate(x), y=locate(y), out=locate(out))
        args.rows, args.size = x.shape
        self._native.run_vision("add", args)
        return out

    def layer_norm(
        self, x: Floats, weight: NativeVector, bias: NativeVector | None, eps: float
    ) -> Floats:
        args = VisionArgs(weight=weight.address, bias=address_of(bias), eps=eps)
        return self._run_by_head("norm", x, args)

    def rms_norm(self, x: Floats, weight: NativeVector | None, eps: float) -> Floats:
        return self._run_by_head("norm", x, VisionArgs(weight=address_of(weight), eps=eps, rms=1))

    def gated(self, x: Floats, activation: VisionActivation) -> Floats:
        x, out = _dense(x), large_floats((len(x), x.shape[-1] // 2))
        args = VisionArgs(x=locate(x), out=locate(out), rows=len(x), size=out.shape[1])
        args.activation = VISION_ACTIVATIONS[activation]
        self._native.run_vision("gate", args)
        return out

    def rotate(self, x: Floats, cos: Floats, sin: Floats) -> Floats:
        cos, sin = _dense(cos), _dense(sin)
        return self._run_by_head("rotate", x, VisionArgs(y=locate(cos), z=locate(sin)))

    def attention(
        self, q: Floats, k: Floats, v: Floats, scale: float, ends: Sequence[int], window: int = 0
    ) -> Floats:
        if q.shape[-1] > _WIDEST_HEAD:
            return super().attention(q, k, v, scale, ends, window)
        q, k, v = (_with_heads(each) for each in (q, k, v))
        segments = np.array(ends, np.int32)
        args = VisionArgs(y=locate(k), z=locate(v), ends=locate(segments), scale=scale)
        args.segments, args.window = len(segments), window
        args.strides[1], args.strides[2] = k.strides[0] // 4, v.strides[0] // 4
        return self._run_by_head("attention", q, args).reshape(len(q), -1)

    def _run_by_head(self, step: str, x: Floats, args: VisionArgs) -> Floats:
        """Run a step over the last axis of x (R, E) or (R, H, E)."""
        x, out = _with_heads(x), large_floats(x.shape)
        args.x, args.out, args.strides[0] = locate(x), locate(out), x.strides[0] // 4
        args.rows, args.size = len(x), x.shape[-1]
        args.heads = x.size // max(len(x), 1) // x.shape[-1]
        self._native.run_vision(step, args)
        return out


def _dense(x: Floats) -> Floats:
    return np.ascontiguousarray(x, np.float32)


def _with_heads(x: Floats) -> Floats:
    """Rows in float32 of any stride, each of them contiguous."""
    scattered = x.strides[1:] != np.empty((1, *x.shape[1:]), np.float32).strides[1:]
    return _dense(x) if x.dtype != np.float32 or scattered or x.strides[0] % 4 else x
