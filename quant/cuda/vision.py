"""The steps of vision encoders on a GPU, by our kernels, on rows that ``put`` has copied there.

Rows are float32. Inputs of products are rounded to bf16 (to 8 bits for packed matrices), as are
queries, keys, values and cuBLAS's results. Results are deterministic. Attention uses the decoder's
kernels: each segment is a KV cache in which rows attend to all others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from localrt.quant.cuda import cublas
from localrt.quant.cuda.attention import attend, rope_append, takes_heads
from localrt.quant.cuda.driver import device_of
from localrt.quant.cuda.kv import LayerPlace, SpanTable, one_span
from localrt.quant.cuda.launch import arguments, launch, pointers, prefers_int8
from localrt.quant.cuda.linear import linear
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.products import GATES, OUT
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.steps import converted, move_rows, norm
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32, UINT8, Tensor, empty, upload
from localrt.quant.cuda.weight import CudaWeight
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from localrt.quant.ops.vision import Heads, PatchLayout, Rows, VisionActivation, VisionSteps

_THREADS = 256
_ROWS = 4096  # rows of a product at once, to limit intermediate results

_LayerNorm = arguments("layer_norm.cu", "LayerNorm")
_Activate = arguments("activate.cu", "Activate")


class CudaVision(VisionSteps):
    """See ``VisionSteps``. Rows on the host are computed there, except their products."""

    on_gpu = True

    def __init__(self, ops: CudaOps) -> None:
        super().__init__(ops)
        self._device = device_of(ops.device)
        self._rotations: tuple[Floats, Tensor, Tensor] | None = None
        # If the decoder's products are int8, no budget includes cuBLAS's workspace.
        self._ours = prefers_int8(self._device)

    def put(self, x: Floats) -> Tensor:
        return upload(np.ascontiguousarray(x, np.float32), self._device)

    def get(self, x: Rows) -> Floats:
        return x.to_host() if isinstance(x, Tensor) else x

    def end(self) -> None:
        self._rotations = None
        self._device.trim()
        if not self._ours and self._device.is_gpu:
            cublas.trim()

    def linear(
        self,
        x: Rows,
        weight: CudaWeight,
        bias: Tensor | None = None,
        activation: VisionActivation | None = None,
    ) -> Rows:
        if not isinstance(x, Tensor):
            with self.ops.scope():
                return self.get(self.linear(self.put(x), weight, bias, activation))
        kind = FLOAT32 if activation is None else BFLOAT16
        out = empty(len(x), weight.shape[0], dtype=kind, device=self._device)
        for first in range(0, len(x), _ROWS):
            rows, y = converted(x[first : first + _ROWS], BFLOAT16), out[first : first + _ROWS]
            target = y if activation is None else None
            product = linear(rows, weight, bias, dtype=FLOAT32, out=target, ours=self._ours)
            if activation is not None:
                _activate(product, activation, y)
        return out

    def add(self, x: Rows, y: Rows) -> Rows:
        if not isinstance(x, Tensor):
            return super().add(x, y)
        return move_rows(y, empty(*x.shape, device=self._device).put(x), add=True)

    def clip(self, x: Rows, low: float, high: float) -> Rows:
        if not isinstance(x, Tensor):
            return super().clip(x, low, high)
        x = converted(x, FLOAT32)
        return _activate(x, "clip", empty(*x.shape, device=self._device), low=low, high=high)

    def joined(self, parts: Sequence[Rows]) -> Rows:
        if not isinstance(parts[0], Tensor):
            return super().joined(parts)
        widths = [part.shape[1] for part in parts]
        out, first = empty(len(parts[0]), sum(widths), device=self._device), 0
        for part, width in zip(parts, widths, strict=True):
            move_rows(part, out[:, first : first + width])
            first += width
        return out

    def layer_norm(self, x: Rows, weight: Tensor, bias: Tensor | None, eps: float) -> Rows:
        if not isinstance(x, Tensor):
            return super().layer_norm(x, weight, bias, eps)
        assert x.dtype is FLOAT32
        y = empty(*x.shape, dtype=BFLOAT16, device=self._device)
        args = _LayerNorm(*pointers(x, weight, bias, y), x.shape[1], eps)
        program = Program.of("layer_norm", OUT=OUT[y.dtype])
        launch(self._device, program, (len(x), 1, 1), _THREADS, args)
        return y

    def rms_norm(self, x: Rows, weight: Tensor | None, eps: float) -> Rows:
        if not isinstance(x, Tensor) or weight is None:
            return super().rms_norm(self.get(x), weight, eps)
        return norm(x, weight, eps, out=FLOAT32)

    def gated(self, x: Rows, activation: VisionActivation) -> Rows:
        if not isinstance(x, Tensor):
            return super().gated(x, activation)
        y = empty(len(x), x.shape[1] // 2, dtype=BFLOAT16, device=self._device)
        return _activate(x, activation, y, gated=True)

    def heads(self, qkv: Rows, heads: Heads, layout: PatchLayout) -> Rows:
        if not isinstance(qkv, Tensor):
            return super().heads(qkv, heads, layout)
        if not takes_heads(heads.size) or layout.window > 0:
            return self.put(super().heads(self.get(qkv), heads, layout))
        count, size, shared = heads.count, heads.size, heads.kv_count or heads.count
        cos, sin = self._rotation(layout)
        longest = max(np.diff(layout.ends, prepend=0).tolist())
        # Segments are computed one after another, so they share one cache.
        key_nbytes = 2 * shared * size  # per token
        nbytes = 2 * key_nbytes * BLOCK_TOKENS
        room = empty(-(-longest // BLOCK_TOKENS), nbytes, dtype=UINT8, device=self._device)
        addresses = room.address + nbytes * np.arange(len(room), dtype=np.int64)
        place = LayerPlace(0, key_nbytes * BLOCK_TOKENS, shared, size, size)
        positions = upload(np.arange(longest, dtype=np.int64), self._device)
        q = empty(longest, count, size, dtype=BFLOAT16, device=self._device)
        out = empty(len(qkv), count * size, dtype=BFLOAT16, device=self._device)
        first, tables = 0, dict[int, SpanTable]()
        for end in layout.ends:
            n = end - first
            if n not in tables:
                ahead = n - 1 - np.arange(n, dtype=np.int32)
                tables[n] = one_span(addresses, n, self._device, ahead=ahead)
            rope_append(
                qkv[first:end],
                q[:n],
                tables[n],
                place,
                cos=None if cos is None else cos[first:end],
                sin=None if sin is None else sin[first:end],
                q_norm=heads.q_norm,
                k_norm=heads.k_norm,
                eps=heads.eps,
                axes=heads.axes,
                norm_values=heads.value_norm,
            )
            attend(
                q[:n],
                tables[n],
                place,
                positions[:n],
                scale=heads.scale,
                window=None,
                softcap=None,
                out=out[first:end],
            )
            first = end
        return out

    def _rotation(self, layout: PatchLayout) -> tuple[Tensor | None, Tensor | None]:
        """The picture's cosines and sines on the GPU, shared by all blocks."""
        if layout.cos is None or layout.sin is None:
            return None, None
        if self._rotations is None or self._rotations[0] is not layout.cos:
            self._rotations = layout.cos, self.put(layout.cos), self.put(layout.sin)
        return self._rotations[1:]


def _activate(
    x: Tensor, kind: str, out: Tensor, *, gated: bool = False, low: float = 0.0, high: float = 0.0
) -> Tensor:
    """Apply ``kind`` to x (R, F), or gated (R, 2F), in float32; returns out (R, F)."""
    rows, width = out.shape
    assert x.dtype is FLOAT32
    assert x.is_contiguous
    args = _Activate(*pointers(x, out), width, low, high)
    program = Program.of("activate", ACTIVATION=GATES[kind], GATED=int(gated), OUT=OUT[out.dtype])
    threads = min(_THREADS, -(-width // 32) * 32)
    launch(x.device, program, (rows, -(-width // threads), 1), threads, args)
    return out
