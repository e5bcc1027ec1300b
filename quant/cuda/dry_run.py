"""``CudaOps`` that launch nothing, to find which kernels a model's passes will need.

Weights take no memory and results have no values; kernels are chosen by the same code as in a real
pass. It knows no models: the caller runs the steps (``localrt/loading/kernels.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from localrt.quant.cuda.experts import (
    CudaExpertTable,
    plan_slots,
    rows_at_once,
    run_alone,
    run_kind,
)
from localrt.quant.cuda.formats import is_packed
from localrt.quant.cuda.launch import noting
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.products import MOST_ROWS, TiledMatrix
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.steps import BEST_LOGITS
from localrt.quant.cuda.stream import Stream
from localrt.quant.cuda.tensor import BFLOAT16, INT32, UINT8, Tensor, empty, nothing
from localrt.quant.cuda.weight import CudaWeight, ExpertTable, RouterWeights
from localrt.quant.formats.packed import PackedTensor
from localrt.quant.formats.tiled import TILE_ROWS, TiledTensor, padded_rows
from localrt.quant.ops.experts import ExpertSpec, RouterSpec, Routing

_LONGEST = 2048  # rows of a prompt's pass


class DryRunOps(CudaOps):
    """See ``CudaOps``. ``programs`` are the kernels its steps would have launched, in order.

    Passes of ``lengths`` rows launch every kernel that passes of any length do.
    """

    lengths = (1, 4, 8, 16, 32, MOST_ROWS, MOST_ROWS + 1)

    def __init__(self, ops: CudaOps) -> None:
        super().__init__(device=ops.device, kv_format=ops.kv_format, fine=ops.fine)
        self.programs: dict[Program, None] = {BEST_LOGITS: None}  # passes are not recorded here

    @contextmanager
    def scope(self) -> Iterator[None]:
        with super().scope(), noting(self.programs):
            yield

    def prepare(self, program: Program) -> None:
        """Compile a program for this GPU, or load it from disk. Any thread may call it.

        Raises:
            LocalrtError: it does not compile.
        """
        self._device.prepare(program)

    def stream(self, rows: int, width: int) -> Stream:
        """Placeholder activations, (rows, width)."""
        return Stream(empty(rows, width, device=self._device))

    def weight(
        self, shape: tuple[int, int], blocks: Iterable[PackedTensor | TiledTensor]
    ) -> CudaWeight:
        """The parts that ``build_weight`` would create, without memory."""
        parts: list[TiledMatrix | Tensor] = []
        hadamard = 0
        for block in blocks:
            rows, columns = block.shape[0], block.shape[1]
            hadamard = block.hadamard if isinstance(block, TiledTensor) else 0
            last = parts[-1] if parts else None
            if not is_packed(block.format, columns):
                if isinstance(last, Tensor):
                    rows += len(last)
                    parts.pop()
                parts.append(nothing(rows, columns, dtype=BFLOAT16, device=self._device))
                continue
            name = block.format.name
            same = isinstance(last, TiledMatrix) and last.format == name
            if same and last is not None and last.shape[0] % TILE_ROWS == 0:
                rows += last.shape[0]
                parts.pop()
            nbytes = padded_rows(rows) * block.format.row_bytes(columns)
            data = nothing(nbytes, dtype=UINT8, device=self._device)
            parts.append(TiledMatrix(name, (rows, columns), data))
        return CudaWeight(shape, tuple(parts), hadamard, self.fine)

    def norm_route(
        self, x: Stream, weights: RouterWeights, spec: RouterSpec
    ) -> tuple[Tensor, Routing]:
        """See ``CudaOps``; chooses experts in order."""
        normed, _ = super().norm_route(x, weights, spec)
        rows = len(normed)
        experts = np.arange(rows * spec.ranked, dtype=np.int32).reshape(rows, -1) % spec.count
        ones = np.ones((rows, spec.used), np.float32)
        return normed, Routing(experts, np.zeros(experts.shape, np.float32), ones)

    def run_experts(
        self,
        normed: Tensor,
        routing: Routing,
        table: ExpertTable,
        spec: ExpertSpec,
        slots: Tensor,
        experts: Sequence[int] | npt.NDArray[np.int32] | None = None,
    ) -> None:
        """See ``CudaOps``: launches every kind, for any number of slots."""
        assert isinstance(table, CudaExpertTable), "tables belong to one implementation"
        count, rows = len(table.kind_of), len(normed)
        sizes = {rows_at_once(n, routing.used, count) for n in range(1, _LONGEST)}
        for expert in (table.kind_of < 0).nonzero()[0].tolist():
            compute_alone = partial(self.expert_alone, weights=table[expert], spec=spec)
            run_alone(normed, np.arange(rows) * routing.used, routing.used, slots, compute_alone)
        chosen = nothing(rows, routing.used, dtype=INT32, device=self._device)
        for number, kind in enumerate(table.kinds):
            entries = table.entries(self._device)
            plan = plan_slots(chosen, entries, number + 1, table.kind_of == number)
            for size in sizes:
                run_kind(normed, replace(plan, size=size), entries, kind, spec, slots)
