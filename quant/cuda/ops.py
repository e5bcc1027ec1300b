"""``Ops`` on CUDA by our own kernels, which compute on packed matrices.

Passes of up to 64 rows, of trees too, are batch-invariant. Longer ones (prefill) use another
attention kernel, and data-center GPUs unpack matrices for cuBLAS. The residual stream is float32,
inputs of products are bf16. This module knows no architecture.

Models with layers that have no kernel here (``quant/choose.py``) compute with torch on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.quant.cpu.ops import fast_tiler
from localrt.quant.cuda.adapters import CudaAdapters, CudaLowRank
from localrt.quant.cuda.attention import (
    AttentionSteps,
    LatentSteps,
    Rotations,
    cache_nbytes,
    new_cache,
)
from localrt.quant.cuda.driver import device_of
from localrt.quant.cuda.experts import CudaExpertTable, route_rows, run_kinds
from localrt.quant.cuda.formats import is_packed
from localrt.quant.cuda.graph import Capture, GraphedForward, Recordings
from localrt.quant.cuda.kv import BlockedCache, SpanNumbers, widest_mask
from localrt.quant.cuda.linear import Handover, gate_up, linear, normed_for, split_mlp
from localrt.quant.cuda.products import MOST_ROWS, unpack_rows
from localrt.quant.cuda.recurrent import RecurrentSteps
from localrt.quant.cuda.routing import combined, on_gpu, put_rows
from localrt.quant.cuda.steps import (
    converted,
    gate,
    move_rows,
    norm,
    norm_in_place,
    rotate_blocks,
    token_rows,
)
from localrt.quant.cuda.stream import (
    CudaPass,
    Logits,
    Numbers,
    Recording,
    Stream,
)
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32, Tensor, empty, upload
from localrt.quant.cuda.weight import (
    CudaWeight,
    Tile,
    build_weight,
)
from localrt.quant.formats.packed import Format, PackedTensor
from localrt.quant.formats.tiled import TiledTensor, padded_rows
from localrt.quant.ops.adapters import AdapterTable, head_deltas
from localrt.quant.ops.experts import (
    ExpertSpec,
    ExpertTable,
    ExpertWeights,
    RouterSpec,
    RouterWeights,
    Routing,
)
from localrt.quant.ops.hybrid_cache import kv_of
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.kv_formats import KvFormat
from localrt.quant.ops.protocol import Batch, Forward, HostRows, LayerSpec, MlpSpec, MlpWeights
from localrt.quant.ops.streams import InputGateSpec, InputGateWeights, InputProjection


class CudaOps(AttentionSteps, LatentSteps, RecurrentSteps):
    """See the ``Ops`` protocol. On ``device="cpu"`` it needs ``launch.emulate``, for tests."""

    name = "cuda"
    compute_format = "packed"
    exact_rows = MOST_ROWS

    def __init__(
        self, *, device: str = "cuda", kv_format: KvFormat = "bf16", fine: bool = False
    ) -> None:
        self.kv_format: KvFormat = kv_format
        self.fine = fine
        self._device = device_of(device)
        self.device = str(self._device)
        self._rotations = Rotations(self._device)
        self._adapters = CudaAdapters(self._device)
        self._tile: Tile | None = None
        self.recording: Recording | None = None
        self._handovers: dict[tuple[int, int, int], Handover] = {}

    @property
    def fresh_passes(self) -> int:
        return int(self._device.fresh_passes)

    @property
    def adapters(self) -> AdapterTable[CudaLowRank]:
        return self._adapters.table

    def scope(self) -> AbstractContextManager[None]:
        """Make this device current: other users of CUDA may have changed it."""
        self._device.enter()
        return nullcontext()

    @cached_property
    def capture(self) -> Capture:
        return Capture(self._device)

    def free_memory(self) -> int | None:
        return self._device.free_nbytes if self._device.is_gpu else None

    def graphed(self, forward: Forward) -> Forward:
        """``forward`` (a decoder's) with short passes recorded as CUDA graphs."""
        return GraphedForward(self, forward) if self._device.is_gpu else forward

    def recorder(self) -> Recordings | None:
        """Records runs of steps as CUDA graphs."""
        return Recordings(self) if self._device.is_gpu else None

    # -- weights ---------------------------------------------------------------------------------

    def weight(
        self, shape: tuple[int, int], blocks: Iterable[PackedTensor | TiledTensor]
    ) -> CudaWeight:
        """Tiles, or bf16 where the kernels do not know the format."""
        if self._tile is None:
            self._tile = fast_tiler()
        return build_weight(
            shape, blocks, self._device, self._tile, fine=self.fine, adapters=self._adapters
        )

    def vector(self, values: npt.NDArray[np.float32]) -> Tensor:
        """A norm weight or bias in float32."""
        return upload(np.asarray(values, np.float32), self._device, pool=self._device.persistent)

    def weight_nbytes(self, shape: tuple[int, int], format: Format) -> int:
        """Packed bytes, rows rounded up to whole tiles; or bf16."""
        if is_packed(format, shape[1]):
            return padded_rows(shape[0]) * format.row_bytes(shape[1])
        return shape[0] * shape[1] * 2

    def in_place(self, format: Format, columns: int) -> bool:
        return is_packed(format, columns)

    def kv_nbytes(self, layers: Sequence[LayerSpec], length: int) -> int:
        return cache_nbytes(layers, length, self.kv_format)

    def kv_cache(self, layers: Sequence[LayerSpec], capacity: int) -> KVCache:
        return new_cache(layers, capacity, self.kv_format, self._device)

    # -- a pass ----------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> CudaPass:
        """Reserve room in every cache, and copy the batch to the device."""
        if self.recording is not None:
            return self.recording.step
        self.begin_adapters(batch)
        for span in batch.spans:
            span.cache.reserve(span.cache.length + span.rows)
        spans, longest = batch.spans, max(each.cache.length + each.rows for each in batch.spans)
        room = max(len(kv_of(span, BlockedCache).addresses) for span in spans)
        ahead = any(span.ahead is not None for span in spans)
        count, rows, columns = len(spans), len(batch.tokens), widest_mask(spans)
        numbers = Numbers(SpanNumbers(count, rows, room, columns, ahead=ahead))
        numbers.fill(batch.tokens, batch.positions, spans)
        parts, _ = numbers.split(upload(numbers.staged, self._device), longest)
        return CudaPass(*parts, spans, batch.axes)

    def recorded_adapters(self, batch: Batch) -> int | None:
        """See ``CudaAdapters.recorded_kind``; begins the pass's adapters."""
        return self._adapters.recorded_kind(batch)

    def embed(
        self,
        table: CudaWeight,
        step: CudaPass,
        scale: float = 1.0,
        *,
        tokens: npt.NDArray[np.int64] | None = None,
        each: int = 1,
    ) -> Stream:
        (part,) = table.parts
        ids = step.tokens if tokens is None else upload(tokens, self._device)
        if each > 1:
            ids = token_rows(ids, each, table.shape[0])
        kind = BFLOAT16 if table.hadamard else FLOAT32
        values = empty(ids.shape[0], table.shape[1], dtype=kind, device=self._device)
        if isinstance(part, Tensor):
            return Stream(move_rows(part, values, index=ids, scale=scale))
        unpack_rows(part, values, index=ids, factor=scale)
        if table.hadamard:  # its own inverse
            values = rotate_blocks(values, table.hadamard, out=values)
        return Stream(converted(values, FLOAT32))

    def begin_adapters(self, batch: Batch) -> None:
        self._adapters.begin(batch)

    def adapt_tokens(self, x: Stream, step: CudaPass, scale: float) -> Stream:
        changes = [(p, low) for p, each in self._adapters.of_rows if (low := each.embedding)]
        if changes:  # computed on the host
            added = np.zeros(x.values.shape, np.float32)
            for part, low in changes:
                seen = low.a[:, self._adapters.tokens[part]]
                added[part] = (seen.T @ low.b.T) * np.float32(scale)
            x.add(upload(added, self._device))
        return x

    def norm_gated_mlp(self, x: Stream, weights: MlpWeights, spec: MlpSpec) -> Tensor:
        h = normed_for(x, weights.norm, spec.eps, weights.gate_up)
        inner = gate_up(h, weights.gate_up, spec)
        return _post_normed(linear(inner, weights.down, dtype=FLOAT32), weights, spec)

    def norm_split_mlp(
        self, x: Stream, pieces: Sequence[MlpWeights], spec: MlpSpec, host: HostRows | None
    ) -> Tensor:
        y = split_mlp(x, pieces, spec, host, self.recording, self._handovers)
        return _post_normed(y, pieces[0], spec)

    # -- layers' own inputs ----------------------------------------------------------------------

    def project_inputs(self, x: Stream, rows: Stream, weights: InputProjection) -> Stream:
        projected = self.projected(x, weights.matrix).values
        normed = norm(projected.view(-1, weights.width), weights.norm, weights.eps, out=FLOAT32)
        inputs = rows.settle().view(*projected.shape)
        return Stream(move_rows(normed.view(*projected.shape), inputs, add=True))

    def gate_inputs(
        self, x: Stream, inputs: Stream, weights: InputGateWeights, spec: InputGateSpec
    ) -> Tensor:
        first = spec.layer * spec.width
        gates = self.projected(x, weights.gate).values
        own = inputs.values[:, first : first + spec.width]
        y = linear(gate(gates, spec.activation, up=own), weights.out, dtype=FLOAT32)
        return norm(y, weights.post_norm, spec.eps, out=FLOAT32)

    # -- draft heads, which read another model's features ----------------------------------------

    def given_rows(self, values: Logits) -> Stream:
        x = empty(*values.shape, device=self._device)
        if self.recording is None:
            return Stream(x.put(values))
        self._device.copy_in(x.address, values)  # pinned: every replay copies them again
        return Stream(x)

    def norm(self, x: Stream, weight: Tensor, eps: float) -> Stream:
        pending, x.pending = x.pending, None
        norm_in_place(x.values, weight, eps, pending)
        return x

    def norm_sum(self, y: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        return norm_in_place(y, weight, eps, more)

    def joined_norms(
        self, x: Stream, y: Stream, norms: tuple[Tensor | None, Tensor | None], eps: float
    ) -> Stream:
        parts = zip((x, y), norms, strict=True)
        rows = [_normed(r, n, eps) for r, n in parts]
        first, second = rows
        shape = len(first), first.shape[1] + second.shape[1]
        joined = empty(*shape, dtype=FLOAT32, device=self._device)
        move_rows(first, joined[:, : first.shape[1]])
        move_rows(second, joined[:, first.shape[1] :])
        return Stream(joined)

    def projected(self, x: Stream, weight: CudaWeight) -> Stream:
        rows = converted(x.settle(), BFLOAT16)
        return Stream(linear(rows, weight, dtype=FLOAT32))

    # -- a mixture of experts --------------------------------------------------------------------

    def expert_table(self, count: int) -> CudaExpertTable:
        return CudaExpertTable(count)

    def norm_route(
        self, x: Stream, weights: RouterWeights, spec: RouterSpec
    ) -> tuple[Tensor, Routing]:
        """The normed rows (R, D), bf16, and their experts; the router sees them in float32."""
        normed = _normed(x, weights.norm, spec.eps)
        rows = converted(normed, BFLOAT16)
        if weights.gate_norm is None:
            return rows, route_rows(normed, rows, weights, spec)
        seen = _normed(x, weights.gate_norm, spec.eps)
        return rows, route_rows(seen, converted(seen, BFLOAT16), weights, spec)

    def expert_slots(self, normed: Tensor, routing: Routing) -> Tensor:
        shape = (normed.shape[0] * routing.used, normed.shape[1])
        return empty(*shape, dtype=FLOAT32, device=self._device)

    def run_experts(
        self,
        normed: Tensor,
        routing: Routing,
        table: ExpertTable,
        spec: ExpertSpec,
        slots: Tensor,
        experts: Sequence[int] | npt.NDArray[np.int32] | None = None,
    ) -> None:
        assert isinstance(table, CudaExpertTable), "tables belong to one implementation"

        def compute_alone(expert: int, rows: Tensor) -> Tensor:
            return self.expert_alone(rows, table[expert], spec)

        run_kinds(normed, routing, table, spec, slots, experts, compute_alone)

    def expert_alone(self, rows: Tensor, weights: ExpertWeights, spec: ExpertSpec) -> Tensor:
        """One expert's results (n, D), by separate products."""
        inner = gate_up(rows, weights.gate_up, spec, weights.gate_up_bias)
        return linear(inner, weights.down, weights.down_bias, dtype=FLOAT32)

    def put_slots(self, slots: Tensor, index: npt.NDArray[np.intp], rows: Any) -> Tensor:
        """Write in place; rows from the CPU may be a residual stream."""
        values = rows if isinstance(rows, Tensor) else rows.settle()
        put_rows(converted(values, FLOAT32), index, slots)
        return slots

    def weigh_rows(self, normed: Tensor, routing: Routing) -> Tensor:
        rows = empty(*normed.shape, dtype=normed.dtype, device=self._device)
        return move_rows(normed, rows, factors=on_gpu(routing, self._device).weights_on_gpu)

    def combine_experts(
        self, slots: Tensor, routing: Routing, shared: Tensor | None, *, weighted: bool = True
    ) -> Tensor:
        """(R, D), float32, summed in order of k."""
        weights = on_gpu(routing, self._device).weights_on_gpu if weighted else None
        return combined(slots, weights, shared, routing.used)

    def latent_rows(self, normed: Tensor, weight: CudaWeight) -> Tensor:
        """(R, L), bf16."""
        return linear(normed, weight)

    def widen_latents(self, rows: Tensor, weight: CudaWeight, shared: Tensor | None) -> Tensor:
        y = linear(converted(rows, BFLOAT16), weight, dtype=FLOAT32)
        return y if shared is None else move_rows(shared, y, add=True)

    def shared_mlp(
        self, normed: Tensor, weights: MlpWeights, spec: MlpSpec, gate: CudaWeight | None
    ) -> Tensor:
        inner = gate_up(normed, weights.gate_up, spec)
        y = linear(inner, weights.down, dtype=FLOAT32)
        if gate is None:
            return y
        return move_rows(y, y, gates=linear(normed, gate, dtype=FLOAT32))

    # -- sums and logits -------------------------------------------------------------------------

    def add(self, x: Stream, y: Tensor, scale: float = 1.0, total: float = 1.0) -> Stream:
        """Add to the residual stream the next time it is read."""
        x.add(y, scale, total)
        return x

    def head(
        self,
        x: Stream,
        rows: npt.NDArray[np.intp],
        norm: Tensor | None,
        eps: float,
        weight: CudaWeight,
        softcap: float | None = None,
        first_row: int = 0,
    ) -> Logits:
        """(len(rows), V) float32 on the host; zeros while recording, when the logits stay on the
        GPU.
        """
        if not len(rows):
            return np.zeros((0, weight.shape[0]), np.float32)
        chosen = x
        if self.recording is not None:
            logit_rows = self.recording.logit_rows
        elif len(rows) < x.values.shape[0]:
            logit_rows = upload(rows, self._device)
        else:
            logit_rows = None
        if logit_rows is not None:
            shape = len(logit_rows), x.values.shape[1]
            some = empty(*shape, dtype=FLOAT32, device=self._device)
            chosen = Stream(move_rows(x.settle(), some, index=logit_rows))
        normed: Tensor | None = None
        if any(adapter.head for _, adapter in self._adapters.of_rows):
            normed = _normed(chosen, norm, eps)
        h = normed_for(chosen, norm, eps, weight)
        logits = linear(h, weight, dtype=FLOAT32)
        if normed is not None:
            inputs, changed = normed.to_host(), logits.to_host()
            place = {row: at for at, row in enumerate(rows.tolist())}
            of_rows = self._adapters.of_rows
            head_deltas(of_rows, rows, lambda row: inputs[place[row]], first_row, changed)
            logits = upload(changed, self._device)
        if softcap is not None:
            move_rows(logits, logits, softcap=softcap)
        if self.recording is not None:
            self.recording.logits = logits
            return np.zeros((len(rows), weight.shape[0]), np.float32)
        return logits.to_host()


def _normed(x: Stream, weight: Tensor | None, eps: float) -> Tensor:
    """The norm of x in float32, or x itself."""
    return x.settle() if weight is None else x.normed(weight, eps, FLOAT32)


def _post_normed(y: Tensor, weights: MlpWeights, spec: MlpSpec) -> Tensor:
    if weights.post_norm is None:
        return y
    return norm(y, weights.post_norm, spec.result_eps, out=FLOAT32)
