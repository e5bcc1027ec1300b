"""``Ops`` on CUDA through our own kernels: matrices stay packed, and are computed on so.

Passes of up to 64 rows are batch-invariant. Longer ones (prefill) unpack a matrix at a time and use
torch's products; attention is a kernel of its own for them. The residual stream is float32;
what a product reads is bf16. It knows no architecture; the kernels are in ``kernels``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from localrt.quant.formats.packed import Format, PackedTensor
from localrt.quant.formats.tiled import TiledTensor, padded_rows
from localrt.quant.ops.attention import LatentSpec, LatentWeights
from localrt.quant.ops.cuda.caches import cache_nbytes, new_cache
from localrt.quant.ops.cuda.device import FullCard, upload
from localrt.quant.ops.cuda.expert_table import CudaExpertTable
from localrt.quant.ops.cuda.experts import route_rows, run_kinds
from localrt.quant.ops.cuda.graph import GraphedForward, Recordings
from localrt.quant.ops.cuda.kernels.attention import attend, fits_records, rope_append
from localrt.quant.ops.cuda.kernels.kv import CardKvFormat
from localrt.quant.ops.cuda.kernels.latent import attend_latent_rows, latent_append
from localrt.quant.ops.cuda.kernels.products import (
    MOST_ROWS,
    Records,
    empty_records,
)
from localrt.quant.ops.cuda.kernels.routing import combined, put_rows
from localrt.quant.ops.cuda.kernels.rows import unpack_rows
from localrt.quant.ops.cuda.kernels.steps import norm, rotate_blocks
from localrt.quant.ops.cuda.products import gate_up, linear, multiply_heads, reads_records
from localrt.quant.ops.cuda.recurrent import mix_and_project
from localrt.quant.ops.cuda.routing import on_card
from localrt.quant.ops.cuda.stream import CudaPass, Logits, Numbers, Recording, Stream
from localrt.quant.ops.cuda.streams import StreamSteps
from localrt.quant.ops.cuda.weight import CudaWeight, Tile, build_weight, is_packed
from localrt.quant.ops.experts import (
    ExpertSpec,
    ExpertTable,
    ExpertWeights,
    RouterSpec,
    RouterWeights,
    Routing,
)
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.native.ops import fast_tiler
from localrt.quant.ops.protocol import (
    AttentionSpec,
    AttentionWeights,
    Batch,
    Forward,
    LayerSpec,
    MlpSpec,
    MlpWeights,
    RecurrentSpec,
    RecurrentWeights,
    Rope,
    Span,
)
from localrt.quant.ops.torch.attention import visible_keys
from localrt.quant.ops.torch.experts import gated
from localrt.quant.ops.torch.kv import kv_of
from localrt.quant.ops.torch.latent import attend_latents

__all__ = ["CudaOps"]


class CudaOps(StreamSteps):
    """See the ``Ops`` protocol. On ``device="cpu"`` it needs ``launch.emulate``, for tests."""

    name = "cuda"
    compute_format = "packed"

    def __init__(
        self, *, device: str = "cuda", kv_format: CardKvFormat = "bf16", fine: bool = False
    ) -> None:
        self.kv_format: CardKvFormat = kv_format
        self.fine = fine
        self._device = torch.device(device)
        if device == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())
        self.device = str(self._device)
        self._frequencies: dict[Rope, Tensor] = {}
        self._tile: Tile | None = None
        self.recording: Recording | None = None

    def scope(self) -> AbstractContextManager[None]:
        """Inference mode, on this device; quick where it is entered a second time.

        Raises:
            MemoryBudgetError: the device has no memory left for what is computed within.
        """
        entered = torch.is_inference_mode_enabled() and (
            self._device.type != "cuda" or torch.cuda.current_device() == self._device.index
        )
        return FullCard() if entered else self._enter()

    @contextmanager
    def _enter(self) -> Iterator[None]:
        device = nullcontext() if self._device.type != "cuda" else torch.cuda.device(self._device)
        with torch.inference_mode(), device, FullCard():
            yield

    def free_memory(self) -> int | None:
        """What CUDA says is free."""
        if self._device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

    def graphed(self, forward: Forward) -> Forward:
        """``forward`` (a decoder's) with short passes of one sequence recorded as CUDA graphs."""
        return GraphedForward(self, forward)

    def recorder(self) -> Recordings:
        """Runs of steps recorded as CUDA graphs."""
        return Recordings(self)

    # -- weights ---------------------------------------------------------------------------------

    def weight(
        self, shape: tuple[int, int], blocks: Iterable[PackedTensor | TiledTensor]
    ) -> CudaWeight:
        """Tiles, or bf16 where the kernels do not know the format."""
        if self._tile is None:
            self._tile = fast_tiler()
        return build_weight(shape, blocks, self._device, self._tile, fine=self.fine)

    def vector(self, values: npt.NDArray[np.float32]) -> Tensor:
        """A norm weight or bias in float32."""
        return torch.tensor(values, dtype=torch.float32, device=self._device)

    def weight_nbytes(self, shape: tuple[int, int], format: Format) -> int:
        """Packed bytes, rows rounded up to whole tiles; or bf16."""
        if is_packed(format, shape[1]):
            return padded_rows(shape[0]) * format.row_bytes(shape[1])
        return shape[0] * shape[1] * 2

    def kv_nbytes(self, layers: Sequence[LayerSpec], length: int) -> int:
        """See ``caches.py``."""
        return cache_nbytes(layers, length, self.kv_format)

    def kv_cache(self, layers: Sequence[LayerSpec], capacity: int) -> KVCache:
        """An empty cache."""
        return new_cache(layers, capacity, self.kv_format, self._device)

    # -- a pass ----------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> CudaPass:
        """Reserve room in every cache, and copy the batch to the device."""
        if self.recording is not None:
            return self.recording.step
        for span in batch.spans:
            span.cache.reserve(span.cache.length + span.rows)
        held = [span.cache.length for span in batch.spans]
        numbers = Numbers(len(batch.tokens), len(batch.spans))
        numbers.fill(batch.tokens, batch.positions, held)
        trees = [None if s.mask is None else self.tree(s.mask) for s in batch.spans]
        return CudaPass(
            *numbers.split(upload(numbers.staged.numpy(), self._device)),
            batch.spans,
            tuple(trees),
            tuple(h + s.rows for h, s in zip(held, batch.spans, strict=True)),
        )

    def tree(self, mask: npt.NDArray[np.bool_]) -> Tensor:
        """A span's mask as the kernels read it."""
        return upload(np.ascontiguousarray(mask, np.int8), self._device)

    def embed(
        self,
        table: CudaWeight,
        step: CudaPass,
        scale: float = 1.0,
        *,
        tokens: npt.NDArray[np.int64] | None = None,
        each: int = 1,
    ) -> Stream:
        """(R, D)."""
        assert each == 1, "models with rows for each layer compute with torch"
        ids = step.tokens if tokens is None else upload(tokens, self._device)
        (part,) = table.parts
        if isinstance(part, Tensor):
            return Stream(F.embedding(ids, part).float() * scale)
        shape = (ids.shape[0], table.shape[1])
        values = torch.empty(shape, dtype=torch.float32, device=self._device)
        unpack_rows(part, values, index=ids, factor=scale)
        if table.hadamard:  # its own inverse
            values = rotate_blocks(values.bfloat16(), table.hadamard).float()
        return Stream(values)

    def norm_qkv_rope_append(
        self,
        x: Stream,
        weights: AttentionWeights,
        spec: AttentionSpec,
        step: CudaPass,
        layer: int,
    ) -> Tensor:
        """(R, H, E); keys and values are written to the caches."""
        h = self._normed(x, weights.norm, spec.eps, weights.qkv)
        qkv = linear(h, weights.qkv, weights.qkv_bias)
        rows, gates = qkv.shape[0], None
        if spec.has_gates:
            qkv, gates = _without_gates(qkv, spec)
        shape = (rows if gates is None else 2 * rows, spec.heads, spec.head_dim)
        q = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        if gates is not None:
            q[rows:] = gates
        cos, sin = self._rope_tables(spec.rope, step)
        for index, (first, stop, span) in enumerate(_ranges(step.spans)):
            k, v = kv_of(span).view(layer, span.rows)
            rope_append(
                qkv[first:stop],
                q[first:stop],
                k,
                v,
                step.held[index:],
                cos=None if cos is None else cos[first:stop],
                sin=None if sin is None else sin[first:stop],
                q_norm=weights.q_norm,
                k_norm=weights.k_norm,
                eps=spec.eps,
                joint=spec.joint_norms,
                norms_last=spec.norms_last,
                kv_format=self.kv_format,
            )
        if spec.temperature is not None:
            q[:rows] *= step.factors(spec.temperature)
        return q

    def attention_output(
        self,
        q: Tensor,
        weights: AttentionWeights,
        spec: AttentionSpec,
        step: CudaPass,
        layer: int,
    ) -> Tensor:
        """(R, D), float32."""
        q, gates = q.chunk(2) if spec.has_gates else (q, None)
        # Where the product that follows reads records, they are written at once.
        direct = fits_records(spec.heads, spec.value_dim) and reads_records(weights.out, len(q))
        direct = direct and gates is None
        width = spec.heads * spec.value_dim
        fine = weights.out.fine
        records = empty_records(1, len(q), width, self._device, fine=fine) if direct else None
        outputs = []
        for index, (first, stop, span) in enumerate(_ranges(step.spans)):
            k, v = kv_of(span).view(layer, span.rows)
            outputs.append(
                attend(
                    q[first:stop],
                    k,
                    v,
                    step.held[index:],
                    step.positions[first:stop],
                    scale=spec.scale,
                    window=spec.window,
                    softcap=spec.softcap,
                    mask=step.trees[index],
                    longest=step.longest[index],
                    sinks=weights.sinks,
                    kv_format=self.kv_format,
                    records=records,
                    row=first,
                )
            )
        seen = records or (outputs[0] if len(outputs) == 1 else torch.cat(outputs))
        if gates is not None:
            assert isinstance(seen, Tensor), "gated rows are no records yet"
            seen = seen * gates.flatten(1).sigmoid()
        y = linear(seen, weights.out, weights.out_bias, dtype=torch.float32)
        if weights.post_norm is None:
            return y
        return norm(y, weights.post_norm, spec.eps, out=torch.float32)

    def norm_recurrent(
        self,
        x: Stream,
        weights: RecurrentWeights,
        spec: RecurrentSpec,
        step: CudaPass,
        layer: int,
    ) -> Tensor:
        """(R, D), float32."""
        h = self._normed(x, weights.norm, spec.eps, weights.mix)
        y = mix_and_project(h, weights, spec, step, layer)
        if weights.post_norm is None:
            return y
        return norm(y, weights.post_norm, spec.eps, out=torch.float32)

    def norm_latent_append(
        self, x: Stream, weights: LatentWeights, spec: LatentSpec, step: CudaPass, layer: int
    ) -> Tensor:
        """(R, H, P + L); the latents are written to the caches."""
        kind = torch.bfloat16 if weights.query_up is None else torch.float32
        h = self._normed(x, weights.norm, spec.eps, weights.down)
        wide = linear(h, weights.down, dtype=kind)
        q, latents = wide[:, : -spec.head_dim], wide[:, -spec.head_dim :]
        if weights.query_up is not None:
            ranked = norm(q, weights.query_norm, spec.latent_eps, out=torch.bfloat16)
            q = linear(ranked, weights.query_up)
        q = q.view(len(q), spec.heads, -1)  # (R, H, N + P)
        shape = (len(q), spec.heads, spec.head_dim)
        queries = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        absorbed = queries[..., spec.rope_dim :].transpose(0, 1)
        multiply_heads(q[..., : spec.nope].transpose(0, 1), weights.key_up, absorbed)
        cos, sin = self._rope_tables(spec.rope, step)
        assert cos is not None, "latent attention rotates a part of its keys"
        assert sin is not None, "as cos"
        for index, (first, stop, span) in enumerate(_ranges(step.spans)):
            rows = slice(first, stop)
            latent_append(
                q[rows],
                latents[rows],
                queries[rows],
                kv_of(span).view(layer, span.rows)[0][0],
                step.held[index:],
                cos=cos[rows],
                sin=sin[rows],
                norm=weights.latent_norm,
                eps=spec.latent_eps,
                interleaved=spec.interleaved,
            )
        return queries

    def latent_output(
        self, q: Tensor, weights: LatentWeights, spec: LatentSpec, step: CudaPass, layer: int
    ) -> Tensor:
        """(R, D), float32."""
        parts = []
        for index, (first, stop, span) in enumerate(_ranges(step.spans)):
            rows = q[first:stop]
            if span.rows > MOST_ROWS:
                mask = self._mask(index, span, step)
                parts.append(attend_latents(rows, kv_of(span), layer, mask, spec))
                continue
            parts.append(
                attend_latent_rows(
                    rows,
                    kv_of(span).view(layer, span.rows)[0][0],
                    step.held[index:],
                    step.positions[first:stop],
                    rope=spec.rope_dim,
                    scale=spec.scale,
                    mask=step.trees[index],
                    longest=step.longest[index],
                )
            )
        seen = parts[0] if len(parts) == 1 else torch.cat(parts)  # (R, H, L)
        shape = (len(seen), spec.heads, spec.value)
        values = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        multiply_heads(seen.transpose(0, 1), weights.value_up, values.transpose(0, 1))
        return linear(values.flatten(1), weights.out, dtype=torch.float32)

    def norm_gated_mlp(self, x: Stream, weights: MlpWeights, spec: MlpSpec) -> Tensor:
        """(R, D), float32."""
        h = self._normed(x, weights.norm, spec.eps, weights.gate_up)
        inner = gate_up(h, weights.gate_up, spec)
        y = linear(inner, weights.down, dtype=torch.float32)
        if weights.post_norm is None:
            return y
        return norm(y, weights.post_norm, spec.eps, out=torch.float32)

    # -- a mixture of experts --------------------------------------------------------------------

    def expert_table(self, count: int) -> CudaExpertTable:
        """An empty table."""
        return CudaExpertTable(count)

    def norm_route(
        self, x: Stream, weights: RouterWeights, spec: RouterSpec
    ) -> tuple[Tensor, Routing]:
        """The normed rows (R, D), bf16, and their experts; the router sees them in float32."""
        normed = x.normed(weights.norm, spec.eps, torch.float32)
        rows = normed.bfloat16()
        return rows, route_rows(normed, rows, weights, spec)

    def expert_slots(self, normed: Tensor, routing: Routing) -> Tensor:
        """(R * K, D), float32."""
        shape = (normed.shape[0] * routing.used, normed.shape[1])
        return torch.empty(shape, dtype=torch.float32, device=self._device)

    def run_experts(
        self,
        normed: Tensor,
        routing: Routing,
        table: ExpertTable,
        spec: ExpertSpec,
        slots: Tensor,
        experts: Sequence[int] | npt.NDArray[np.int32] | None = None,
    ) -> None:
        """See ``run_kinds``."""
        assert isinstance(table, CudaExpertTable), "tables belong to one implementation"

        def apart(expert: int, rows: Tensor) -> Tensor:
            return self.expert_apart(rows, table[expert], spec)

        run_kinds(normed, routing, table, spec, slots, experts, apart)

    def expert_apart(self, rows: Tensor, weights: ExpertWeights, spec: ExpertSpec) -> Tensor:
        """One expert's results of its rows, (n, D), by products of its own."""
        if weights.gate_up_bias is None and spec.activation != "swiglu_oai":
            inner = gate_up(rows, weights.gate_up, spec)
        else:
            both = linear(rows, weights.gate_up, weights.gate_up_bias, dtype=torch.float32)
            inner = gated(both, spec).bfloat16()
        return linear(inner, weights.down, weights.down_bias, dtype=torch.float32)

    def put_slots(self, slots: Tensor, index: npt.NDArray[np.intp], rows: Any) -> Tensor:
        """In place. Rows of the CPU may come as a residual stream."""
        values = rows if isinstance(rows, Tensor) else rows.settle()
        put_rows(values.float().contiguous(), index, slots)
        return slots

    def combine_experts(self, slots: Tensor, routing: Routing, shared: Tensor | None) -> Tensor:
        """(R, D), float32: summed one k after another."""
        return combined(slots, on_card(routing, self._device).weights_there, shared)

    def latent_rows(self, normed: Tensor, weight: CudaWeight) -> Tensor:
        """(R, L), bf16."""
        return linear(normed, weight)

    def widen_latents(self, rows: Tensor, weight: CudaWeight, shared: Tensor | None) -> Tensor:
        """(R, D), float32."""
        y = linear(rows.bfloat16(), weight, dtype=torch.float32)
        return y if shared is None else y.add_(shared)

    def shared_mlp(
        self, normed: Tensor, weights: MlpWeights, spec: MlpSpec, gate: CudaWeight | None
    ) -> Tensor:
        """(R, D), float32."""
        inner = gate_up(normed, weights.gate_up, spec)
        y = linear(inner, weights.down, dtype=torch.float32)
        if gate is None:
            return y
        return y * linear(normed, gate, dtype=torch.float32).sigmoid()

    # -- sums and logits -------------------------------------------------------------------------

    def add(self, x: Stream, y: Tensor, scale: float = 1.0, total: float = 1.0) -> Stream:
        """The residual sum, made when it is next read."""
        assert total == 1.0, "models that scale their layers compute with torch"
        x.add(y if scale == 1.0 else y * scale)
        return x

    def head(
        self,
        x: Stream,
        rows: npt.NDArray[np.intp],
        norm: Tensor,
        eps: float,
        weight: CudaWeight,
        softcap: float | None = None,
    ) -> Logits:
        """(len(rows), V) float32 on the host; while recording, zeros: the logits stay there."""
        chosen = x
        if self.recording is not None:
            wanted = self.recording.wanted
        elif len(rows) < x.values.shape[0]:
            wanted = upload(rows, self._device)
        else:
            wanted = None
        if wanted is not None:
            chosen = Stream(x.settle()[wanted])
        if not len(rows):
            return np.zeros((0, weight.shape[0]), np.float32)
        h = self._normed(chosen, norm, eps, weight)
        logits = linear(h, weight, dtype=torch.float32)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if self.recording is not None:
            self.recording.logits = logits
            return np.zeros((len(rows), weight.shape[0]), np.float32)
        host: Logits = logits.cpu().numpy()
        return host

    # -- parts -----------------------------------------------------------------------------------

    def _normed(
        self, x: Stream, weight: Tensor | None, eps: float, reader: CudaWeight
    ) -> Tensor | Records:
        """The norm of x (x itself without ``weight``), as the product with ``reader`` reads it."""
        if weight is None:
            return x.settle().bfloat16()
        if reads_records(reader, len(x.values)):
            return x.normed_records(weight, eps, fine=reader.fine)
        return x.normed(weight, eps)

    def _rope_tables(
        self, rope: Rope | None, step: CudaPass
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """cos and sin of the pass, (R, len(inv_freq)) float32, once per pass."""
        if rope is None:
            return None, None
        if rope not in step.tables:
            if rope not in self._frequencies:
                values = torch.tensor(rope.inv_freq, dtype=torch.float32, device=self._device)
                self._frequencies[rope] = values
            angles = step.positions.float()[:, None] * self._frequencies[rope]
            step.tables[rope] = angles.cos() * rope.scale, angles.sin() * rope.scale
        return step.tables[rope]

    def _mask(self, index: int, span: Span, step: CudaPass) -> Tensor | None:
        if index not in step.masks:
            held = span.cache.length
            step.masks[index] = visible_keys(held, span, None, step.positions, index, step.spans)
        return step.masks[index]


def _ranges(spans: Sequence[Span]) -> Iterator[tuple[int, int, Span]]:
    """First row, end, span."""
    first = 0
    for span in spans:
        yield first, first + span.rows, span
        first += span.rows


def _without_gates(qkv: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Queries, keys and values of gated attention, and the gates, (R, H, E) or (R, H, 1)."""
    if spec.head_gates:
        return qkv[:, : -spec.heads].contiguous(), qkv[:, -spec.heads :, None]
    rows, queries = len(qkv), 2 * spec.heads * spec.head_dim
    both = qkv[:, :queries].view(rows, spec.heads, 2, spec.head_dim)
    return torch.cat([both[:, :, 0].flatten(1), qkv[:, queries:]], dim=1), both[:, :, 1]
