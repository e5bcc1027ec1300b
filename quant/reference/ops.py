"""``Ops`` on torch, on any device torch has: simple, and the oracle of the others.

Matrices are unpacked on loading, block by block, to bf16 or float32; a model is never held twice.
It knows packed formats through their float32 reference alone, and no architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from localrt.quant.formats.packed import Format, PackedTensor
from localrt.quant.formats.tiled import TiledTensor
from localrt.quant.methods.rotation import restored_rows
from localrt.quant.ops.adapters import (
    Adapter,
    AdapterTable,
    LowRank,
    adapted_rows,
    head_deltas,
    joined,
)
from localrt.quant.ops.attention import (
    AttentionSpec,
    AttentionWeights,
    IndexSpec,
    IndexWeights,
    LatentSpec,
    LatentWeights,
    Rope,
)
from localrt.quant.ops.experts import (
    ExpertSpec,
    ExpertTable,
    PlainExpertTable,
    RouterSpec,
    RouterWeights,
    Routing,
)
from localrt.quant.ops.hybrid_cache import begin_states, kv_of, split_layers
from localrt.quant.ops.kv import KVCache, grown_capacity
from localrt.quant.ops.protocol import (
    Batch,
    Forward,
    IndexOps,
    LayerSpec,
    MlpSpec,
    MlpWeights,
    ParallelOps,
    Span,
    StreamOps,
    ranges,
)
from localrt.quant.ops.recurrent import RecurrentSpec, RecurrentWeights
from localrt.quant.ops.states import StateLayout, StatePass
from localrt.quant.reference.attention import (
    append,
    attend_latents,
    attend_rows,
    choose_rows,
    grown,
    latent_queries,
    latent_values,
    turned,
    visible_keys,
)
from localrt.quant.reference.experts import combined, gated, route, run_each
from localrt.quant.reference.kv import TorchKVCache, with_states
from localrt.quant.reference.recurrent import mix_rows, widen
from localrt.quant.reference.streams import StreamSteps, rows_of_tokens

STARTS = "localrt_starts"  # of a weight: an attribute that torch lets a tensor have


_SCARCE_NBYTES = 128 << 20


def free_gpu_memory(device: torch.device) -> int | None:
    """Bytes that this process may still take of a GPU, with what torch keeps for it: the driver
    counts that as taken. None if ``device`` is no GPU.
    """
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if free < min(kept, _SCARCE_NBYTES):  # other programs find none: they get what torch keeps
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + kept)


@dataclass(slots=True)
class _Pass:
    tokens: Tensor  # (R,)
    positions: Tensor  # (R,)
    axes: npt.NDArray[np.int64] | None  # (3, R)
    spans: tuple[Span, ...]
    tables: dict[Rope, tuple[Tensor, Tensor]]
    masks: dict[tuple[int, int | None, bool], Tensor | None]
    states: list[StatePass] = field(default_factory=list)


class TorchOps(StreamSteps, StreamOps, IndexOps, ParallelOps):
    """See the ``Ops`` protocol. ``compute_format`` is ``"bf16"`` or ``"f32"``."""

    name = "torch"
    exact_rows = 1
    fresh_passes = 0

    def __init__(
        self, *, compute_format: str = "bf16", device: str = "cpu", threads: int | None = None
    ) -> None:
        if compute_format not in ("bf16", "f32"):
            raise ValueError(f"compute_format must be bf16 or f32, is {compute_format!r}")
        self.compute_format = compute_format
        self._dtype = torch.float32 if compute_format == "f32" else torch.bfloat16
        self._device = torch.device(device)
        self.device = str(self._device)
        self.adapters: AdapterTable[LowRank] | None = AdapterTable(dict, joined)
        self._adapted: list[tuple[slice, Adapter[LowRank]]] = []  # rows of the latest pass
        if threads is not None:
            torch.set_num_threads(threads)

    def scope(self) -> AbstractContextManager[object]:
        return torch.inference_mode()

    def free_memory(self) -> int | None:
        return free_gpu_memory(self._device)

    def graphed(self, forward: Forward) -> Forward:
        return forward

    def recorder(self) -> None:
        """Nothing is recorded."""

    # -- weights ---------------------------------------------------------------------------------

    def weight(
        self, shape: tuple[int, int], blocks: Iterable[PackedTensor | TiledTensor]
    ) -> Tensor:
        """Unpack row blocks into one matrix of the compute dtype; a rotation is undone."""
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        row = 0
        starts: dict[str, int] = {}  # where each tensor's rows begin, for adapters
        for block in blocks:
            starts.setdefault(block.name, row)
            for values in restored_rows(block):
                out[row : row + len(values)] = torch.from_numpy(values).to(self._device)
                row += len(values)
        if row != shape[0]:
            raise ValueError(f"blocks hold {row} rows, the matrix has {shape[0]}")
        setattr(out, STARTS, starts)
        return out

    def vector(self, values: npt.NDArray[np.float32]) -> Tensor:
        """A norm weight or bias in the compute dtype."""
        return torch.tensor(values, dtype=self._dtype, device=self._device)

    def weight_nbytes(self, shape: tuple[int, int], format: Format) -> int:
        """Bytes of an unpacked matrix."""
        return shape[0] * shape[1] * self._dtype.itemsize

    def in_place(self, format: Format, columns: int) -> bool:
        return False

    def kv_nbytes(self, layers: Sequence[LayerSpec], length: int) -> int:
        attending, states = split_layers(layers)
        row = sum(spec.cached_heads * (spec.head_dim + spec.value_dim) for spec in attending)
        in_states = StateLayout(states).sequence_nbytes(length)
        return in_states + row * grown_capacity(length) * self._dtype.itemsize

    def kv_cache(self, layers: Sequence[LayerSpec], capacity: int) -> KVCache:
        attending, states = split_layers(layers)
        shapes = [(spec.cached_heads, spec.head_dim, spec.value_dim) for spec in attending]
        kv = TorchKVCache(shapes, capacity, self._dtype, self._device)
        return with_states(kv, states, self._device)

    # -- a pass ----------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> _Pass:
        for span in batch.spans:
            span.cache.reserve(span.cache.length + span.rows)
        self.begin_adapters(batch)
        tokens = torch.from_numpy(batch.tokens).to(self._device)
        positions = torch.from_numpy(batch.positions).to(self._device)
        return _Pass(tokens, positions, batch.axes, batch.spans, {}, {})

    def embed(
        self,
        table: Tensor,
        step: _Pass,
        scale: float = 1.0,
        *,
        tokens: npt.NDArray[np.int64] | None = None,
        each: int = 1,
    ) -> Tensor:
        ids = step.tokens if tokens is None else torch.from_numpy(tokens).to(self._device)
        x = F.embedding(ids if each == 1 else rows_of_tokens(ids, each, len(table)), table)
        # Gemma rounds the factor to the compute dtype before multiplying.
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype, device=x.device)

    def begin_adapters(self, batch: Batch) -> None:
        self._adapted = [] if self.adapters is None else adapted_rows(self.adapters, batch.mixes)

    def adapt_tokens(self, x: Tensor, step: _Pass, scale: float) -> Tensor:
        for part, adapter in self._adapted:
            if (low := adapter.embedding) is not None:
                a, b = self._tensor(low.a), self._tensor(low.b)
                x[part] += (a[:, step.tokens[part]].T @ b.T) * scale
        return x

    def norm_qkv_rope_append(
        self, x: Tensor, weights: AttentionWeights, spec: AttentionSpec, step: _Pass, layer: int
    ) -> Tensor:
        heads, groups, size = spec.heads, spec.kv_heads, spec.head_dim
        qkv = self.linear(self._norm(x, weights.norm, spec.eps), weights.qkv, weights.qkv_bias)
        gates = None
        if spec.last_gates:
            gates = qkv[:, -spec.last_gates :].reshape(len(qkv), heads, -1).expand(-1, -1, size)
            qkv = qkv[:, : -spec.last_gates]
        qkv = qkv.reshape(len(qkv), -1, size)  # (R, heads, E)
        q = qkv[:, :heads]
        if spec.gated:
            q, gates = qkv[:, 0 : 2 * heads : 2], qkv[:, 1 : 2 * heads : 2]
            qkv = qkv[:, heads:]
        q = grown(self._norm_and_turn(q, weights.q_norm, spec, step), spec, step.positions)
        if spec.reads is not None:
            return q
        k, v = qkv[:, heads : heads + groups], qkv[:, -groups:]
        k = self._norm_and_turn(k, weights.k_norm, spec, step)
        if weights.v_norm is not None:
            v = self._norm(v, weights.v_norm, spec.eps)
        append(k, v, step.spans, layer)
        return q if gates is None else torch.cat([q, gates])

    def choose_tokens(
        self, x: Tensor, weights: IndexWeights, spec: IndexSpec, step: _Pass, layer: int
    ) -> list[Tensor]:
        """Of each sequence (rows, held + rows), True where a row sees a token."""
        qk = self.linear(x, weights.qk).view(len(x), -1, spec.head_dim)
        q = self._norm_and_turn(qk[:, :-1], weights.q_norm, spec, step)

        def finish(mean: Tensor, position: int) -> Tensor:
            normed = self._norm(mean, weights.k_norm, spec.eps)[None, None]
            if spec.rope is None:
                return normed[0, 0]
            at = torch.tensor([[position]], device=self._device)
            return turned(normed, *self._turns(spec.rope, at))[0, 0]

        chosen = []
        for first, stop, span in ranges(step.spans):
            part = slice(first, stop)
            places = step.positions[part]
            chosen.append(choose_rows(q[part], qk[part, -1], spec, span, places, layer, finish))
        return chosen

    def attention_output(
        self,
        q: Tensor,
        weights: AttentionWeights,
        spec: AttentionSpec,
        step: _Pass,
        layer: int,
    ) -> Tensor:
        masks = [self._mask(index, span, spec, step) for index, span in enumerate(step.spans)]
        return self.chosen_output(q, weights, spec, step, layer, masks)

    def chosen_output(
        self,
        q: Tensor,
        weights: AttentionWeights,
        spec: AttentionSpec,
        step: _Pass,
        layer: int,
        chosen: Sequence[Tensor | None],
    ) -> Tensor:
        outputs = []
        q, gates = q.chunk(2) if spec.has_gates else (q, None)
        for (first, stop, span), mask in zip(ranges(step.spans), chosen, strict=True):
            rows, cache = q[first:stop], kv_of(span, TorchKVCache)
            outputs.append(attend_rows(rows, cache, layer, mask, spec, weights.sinks))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if gates is not None:
            gates = gates.flatten(1)
            joined = joined * (F.softplus(gates) if spec.softplus else gates.sigmoid())
        y = self.linear(joined, weights.out, weights.out_bias)
        return y if weights.post_norm is None else self._norm(y, weights.post_norm, spec.result_eps)

    def norm_latent_append(
        self, x: Tensor, weights: LatentWeights, spec: LatentSpec, step: _Pass, layer: int
    ) -> Tensor:
        """(R, H, E), with gates (R, H, E + 1); the latents are written to the caches."""
        assert spec.rope is not None, "latent attention rotates a part of its keys"
        q, rows = latent_queries(self, x, weights, spec, self._rope_tables(spec.rope, step))
        append(rows, rows[..., :0], step.spans, layer)
        return grown(q, spec, step.positions)

    def latent_output(
        self, q: Tensor, weights: LatentWeights, spec: LatentSpec, step: _Pass, layer: int
    ) -> Tensor:
        seen = []
        for index, (first, stop, span) in enumerate(ranges(step.spans)):
            mask = self._mask(index, span, spec, step)
            latents = kv_of(span, TorchKVCache).view(layer, span.rows)[0][0]
            queries = q[first:stop, :, : spec.head_dim]
            seen.append(attend_latents(queries, latents, mask, spec))
        values = latent_values(torch.cat(seen), weights, spec)
        if spec.head_gates:
            gates = q[:, :, spec.head_dim :].sigmoid()
            values = (values.view(len(q), spec.heads, -1) * gates).flatten(1)
        return self.linear(values, weights.out)

    def norm_recurrent(
        self, x: Tensor, weights: RecurrentWeights, spec: RecurrentSpec, step: _Pass, layer: int
    ) -> Tensor:
        if not step.states:
            step.states = begin_states(step.spans)
        mixed = self.linear(self._norm(x, weights.norm, spec.eps), weights.mix, weights.mix_bias)
        if weights.mix_scale is not None:
            mixed = mixed * weights.mix_scale
        mixed = widen(mixed, weights, spec, self.linear)
        seen = mix_rows(mixed.float(), weights, spec, step.spans, step.states, layer)
        y = self.linear(seen.to(self._dtype), weights.out, weights.out_bias)
        return y if weights.post_norm is None else self._norm(y, weights.post_norm, spec.eps)

    def norm_gated_mlp(self, x: Tensor, weights: MlpWeights, spec: MlpSpec) -> Tensor:
        y = self._gated_mlp(self._norm(x, weights.norm, spec.eps), weights, spec)
        return y if weights.post_norm is None else self._norm(y, weights.post_norm, spec.result_eps)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, weight, eps)

    def norm_sum(self, y: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        return self._norm(y if more is None else self.add(y, more), weight, eps)

    def given_rows(self, values: npt.NDArray[np.float32]) -> Tensor:
        return torch.tensor(values, dtype=self._dtype, device=self._device)

    def joined_norms(
        self, x: Tensor, y: Tensor, norms: tuple[Tensor | None, Tensor | None], eps: float
    ) -> Tensor:
        parts = zip((x, y), norms, strict=True)
        return torch.cat([r if n is None else self._norm(r, n, eps) for r, n in parts], -1)

    def projected(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.linear(x, weight)

    def add(self, x: Tensor, y: Tensor, scale: float = 1.0, total: float = 1.0) -> Tensor:
        """Residual sum in place of ``x``."""
        x.add_(y, alpha=scale)
        return x if total == 1.0 else x.mul_(total)

    def head(
        self,
        x: Tensor,
        rows: npt.NDArray[np.intp],
        norm: Tensor | None,
        eps: float,
        weight: Tensor,
        softcap: float | None = None,
        first_row: int = 0,
    ) -> npt.NDArray[np.float32]:
        if len(rows) < x.shape[0]:
            x = x[torch.from_numpy(rows).to(self._device)]
        normed = self._norm(x, norm, eps)
        logits = self.linear(normed, weight).float()
        if any(adapter.head for _, adapter in self._adapted):
            inputs, changed = normed.float().cpu().numpy(), logits.cpu().numpy()
            place = {row: at for at, row in enumerate(rows.tolist())}
            head_deltas(self._adapted, rows, lambda row: inputs[place[row]], first_row, changed)
            logits = torch.from_numpy(changed).to(self._device)
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        host: npt.NDArray[np.float32] = logits.cpu().numpy()
        return host

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """The one matrix product that every step goes through, so that calibration can watch it."""
        if not self._adapted:
            return F.linear(x, weight, bias)
        y = F.linear(x, weight)
        for name, start in getattr(weight, STARTS, {}).items():
            for part, adapter in self._adapted:
                if (low := adapter.matrices.get(name)) is not None:
                    own = y[part, start : start + len(low.b)]
                    if low.factors is not None:
                        own *= self._tensor(low.factors)
                    own += x[part] @ self._tensor(low.a).T @ self._tensor(low.b).T
        return y if bias is None else y + bias

    def _tensor(self, values: npt.NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values).to(self._device, self._dtype)

    # -- a mixture of experts --------------------------------------------------------------------

    def expert_table(self, count: int) -> PlainExpertTable:
        return PlainExpertTable(count)

    def norm_route(
        self, x: Tensor, weights: RouterWeights, spec: RouterSpec
    ) -> tuple[Tensor, Routing]:
        normed = self._norm(x, weights.norm, spec.eps)
        bias = None if weights.gate_bias is None else weights.gate_bias.float()
        seen = normed
        if weights.gate_norm is not None:
            seen = self._norm(x, weights.gate_norm, spec.eps)
        logits = F.linear(seen.float(), weights.gate.float(), bias)
        return normed, route(logits, weights.choice_bias, spec, weights.expert_scale)

    def expert_slots(self, normed: Tensor, routing: Routing) -> Tensor:
        return normed.new_empty(normed.shape[0] * routing.used, normed.shape[1])

    def run_experts(
        self,
        normed: Tensor,
        routing: Routing,
        table: ExpertTable,
        spec: ExpertSpec,
        slots: Tensor,
        experts: Sequence[int] | npt.NDArray[np.int32] | None = None,
    ) -> None:
        """One expert after another."""
        assert isinstance(table, PlainExpertTable), "tables belong to one implementation"

        def compute(expert: int, rows: Tensor) -> Tensor:
            weights = table[expert]
            hidden = gated(self.linear(rows, weights.gate_up, weights.gate_up_bias), spec)
            return self.linear(hidden, weights.down, weights.down_bias)

        run_each(normed, routing, slots, experts, compute)

    def put_slots(self, slots: Tensor, index: npt.NDArray[np.intp], rows: Any) -> Tensor:
        """In place. Rows of the CPU may come as a residual stream."""
        values = rows if isinstance(rows, Tensor) else rows.settle()
        slots[torch.from_numpy(index).to(self._device)] = values.to(slots.dtype)
        return slots

    def weigh_rows(self, normed: Tensor, routing: Routing) -> Tensor:
        return normed * torch.from_numpy(routing.weights).to(normed)

    def combine_experts(
        self, slots: Tensor, routing: Routing, shared: Tensor | None, *, weighted: bool = True
    ) -> Tensor:
        return combined(slots, routing, shared, weighted=weighted)

    def latent_rows(self, normed: Tensor, weight: Tensor) -> Tensor:
        return self.linear(normed, weight)

    def widen_latents(self, rows: Tensor, weight: Tensor, shared: Tensor | None) -> Tensor:
        y = self.linear(rows, weight)
        return y if shared is None else y + shared

    def shared_mlp(
        self, normed: Tensor, weights: MlpWeights, spec: MlpSpec, gate: Tensor | None
    ) -> Tensor:
        y = self._gated_mlp(normed, weights, spec)
        return y if gate is None else y * self.linear(normed, gate).sigmoid()

    # -- parts -----------------------------------------------------------------------------------

    def _gated_mlp(self, normed: Tensor, weights: MlpWeights, spec: MlpSpec) -> Tensor:
        wide = self.linear(normed, weights.gate_up)
        return self.linear(gated(wide, spec), weights.down)

    def _norm_and_turn(
        self, x: Tensor, weight: Tensor | None, spec: AttentionSpec, step: _Pass
    ) -> Tensor:
        """Queries or keys (R, heads, E) with the norms and rotation that a layer has."""
        if not spec.norms_last:
            x = self._norm_heads(x, weight, spec)
        if spec.rope is not None:
            x = turned(x, *self._rope_tables(spec.rope, step))
        return self._norm_heads(x, weight, spec) if spec.norms_last else x

    def _norm_heads(self, x: Tensor, weight: Tensor | None, spec: AttentionSpec) -> Tensor:
        """Norms of queries or keys (R, heads, E): each head's, or one over all."""
        if not spec.joint_norms:
            return self._norm(x, weight, spec.eps)
        return self._norm(x.reshape(x.shape[0], -1), weight, spec.eps).view(x.shape)

    def _norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        return x if weight is None else F.rms_norm(x, (x.shape[-1],), weight, eps)

    def _rope_tables(self, rope: Rope, step: _Pass) -> tuple[Tensor, Tensor]:
        """cos and sin of the pass, (R, 1, len(inv_freq)), computed once per pass in float32."""
        if rope not in step.tables:
            places = step.positions[:, None]
            if step.axes is not None and rope.sections:
                places = torch.tensor(step.axes[list(rope.sections)].T, device=self._device)
            step.tables[rope] = self._turns(rope, places)
        return step.tables[rope]

    def _turns(self, rope: Rope, places: Tensor) -> tuple[Tensor, Tensor]:
        """Of places (R, 1) or (R, len(inv_freq))."""
        inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=self._device)
        angles = places.float()[:, None] * inv_freq
        cos, sin = angles.cos() * rope.scale, angles.sin() * rope.scale
        return cos.to(self._dtype), sin.to(self._dtype)

    def _mask(self, index: int, span: Span, spec: AttentionSpec, step: _Pass) -> Tensor | None:
        """(rows, held + rows), True where seen; None when every key is seen."""
        key = (index, spec.window, spec.chunked)
        if key not in step.masks:
            step.masks[key] = visible_keys(span, spec, self._device)
        return step.masks[key]
