"""``Ops`` on the CPU through our own compiled kernels, on numpy buffers; torch is not needed.

Weights stay packed (``weights.py``). What the kernels do is in ``quant/cpu/csrc``; this file
allocates, fills their structs and calls them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.common.cores import default_threads
from localrt.common.errors import MissingExtraError, OptionError
from localrt.quant.cpu.abi import (
    ACTIVATIONS,
    VISION_STEPS,
    CombineArgs,
    HeadArgs,
    NormArgs,
    SearchArgs,
    VisionArgs,
    find_library,
    load_library,
)
from localrt.quant.cpu.adapters import NativeAdapters, PackedLowRank
from localrt.quant.cpu.kv import KVMaker, NativeKVCache, cache_format, map_floats, token_nbytes
from localrt.quant.cpu.passes import (
    NativePass,
    Turns,
    attention_args,
    gate_args,
    index_args,
    latent_args,
    mlp_args,
    recurrent_args,
)
from localrt.quant.cpu.replay import NativeSharedLayers, ReplayedForward, Tape
from localrt.quant.cpu.streams import StreamSteps
from localrt.quant.cpu.weights import (
    NativeExpertTable,
    NativeVector,
    NativeWeight,
    Tiler,
    address_of,
    build_weight,
    kept_args,
    locate,
    route_args,
)
from localrt.quant.formats.packed import Floats, Format, PackedTensor
from localrt.quant.formats.tiled import TiledTensor, padded_rows, tile_tensor
from localrt.quant.methods.rotation import widened_format
from localrt.quant.ops.adapters import AdapterTable, head_deltas
from localrt.quant.ops.arrays import Regions, large_floats
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
    HostShare,
    RouterSpec,
    RouterWeights,
    Routing,
)
from localrt.quant.ops.hybrid_cache import HybridCache, split_layers, states_of
from localrt.quant.ops.kv import KVCache, grown_capacity
from localrt.quant.ops.kv_formats import CacheFormat
from localrt.quant.ops.protocol import (
    Batch,
    Forward,
    IndexOps,
    LayerSpec,
    MlpSpec,
    MlpWeights,
    ParallelOps,
    StreamOps,
)
from localrt.quant.ops.recurrent import RecurrentSpec, RecurrentWeights
from localrt.quant.ops.states import StateCache, StateLayout
from localrt.quant.ops.streams import rows_of_tokens

_RECHECK = 1.0  # seconds between two looks at the limits of this process
_PLACES = 8  # arrays whose addresses are remembered


class NativeOps(StreamSteps, StreamOps, IndexOps, ParallelOps):
    """See the ``Ops`` protocol. ``isa`` forces a code path (``"portable"``, ``"avx2"``, ...).

    ``kv_format`` ``"int8"`` halves the KV cache and the reading of a long one, ``"int4"`` takes a
    third; both are ``approximate``. ``kv_maker`` replaces caches in RAM by its own. Without
    ``threads``, their number follows the limits of this process while it runs.
    """

    name = "native"
    device = "cpu"
    compute_format = "packed"
    exact_rows = sys.maxsize
    fresh_passes = 0

    def __init__(
        self, *, threads: int | None = None, isa: str = "", kv_format: CacheFormat = "bf16"
    ) -> None:
        path = find_library()
        if path is None:
            raise MissingExtraError(
                "the compiled kernels are missing: install a C++ compiler, then localrt again"
            )
        self._api: Any = load_library(path)
        self._tape: Tape | None = None
        self._follows, self._checked = threads is None, time.monotonic()
        self.threads = threads or default_threads()
        self._handle = self._api.lrt_create(self.threads, isa.encode())
        if not self._handle:
            if isa:
                raise OptionError(f"this processor, or localrt here, has no {isa!r} kernels")
            raise MissingExtraError(
                "the kernels were compiled for another processor: install localrt again"
            )
        self.kv_format: CacheFormat = kv_format
        self.kv_maker: KVMaker | None = None
        self._turns: dict[Rope, Turns] = {}
        self._spare: dict[tuple[int, ...], Floats] = {}
        self._places: dict[int, tuple[Floats, int]] = {}  # by an array's id
        self._slots: Floats | None = None  # the array released last
        self._adapters = NativeAdapters(self._api, self._handle)
        self._tiler = Tiler(self._api, self._handle, self._adapters.sites)
        self.isa: str = self._api.lrt_isa(self._handle).decode()

    def begin_region(self) -> None:
        """Weights from now on share no ``Regions`` with those before."""
        self._tiler.memory = Regions()

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._api.lrt_destroy(self._handle)
            self._handle = None

    @property
    def adapters(self) -> AdapterTable[PackedLowRank]:
        return self._adapters.table

    def scope(self) -> AbstractContextManager[object]:
        return nullcontext()

    def free_memory(self) -> int | None:
        return None

    def follow_limits(self) -> None:
        """Between two steps: if no number of threads was named, take as many as the limits of this
        process allow now.
        """
        if not self._follows or self._tape is not None:
            return
        now = time.monotonic()
        if now - self._checked >= _RECHECK:
            self._checked = now
            self.threads = self._api.lrt_resize(self._handle, default_threads())

    def graphed(self, forward: Forward) -> Forward:
        """``forward``, whose decode steps are replayed."""
        return ReplayedForward(self, forward)

    @contextmanager
    def recording(self, tape: Tape) -> Iterator[None]:
        """Passes record their calls on ``tape`` inside this context."""
        tape.library = library = self._api
        self._api = self._tape = tape
        try:
            yield
        finally:
            self._api, self._tape = library, None

    def run_steps(self, steps: object, end: int, done: int) -> None:
        """Run recorded steps up to ``end``; the number at ``done`` counts them. One may fail."""
        self._api.lrt_run(self._handle, steps, end, done)

    def recorder(self) -> None:
        """Nothing is recorded."""

    # -- weights ---------------------------------------------------------------------------------

    def weight(
        self, shape: tuple[int, int], blocks: Iterable[PackedTensor | TiledTensor]
    ) -> NativeWeight:
        """See ``build_weight``: rows are tiled as they come, tiles are used as they are."""
        return build_weight(self._tiler, shape, blocks)

    def tile(self, tensor: PackedTensor, *, hadamard: int = 0) -> TiledTensor:
        """A whole matrix in tiles: what ``tile_tensor`` gives, sooner."""
        return self._tiler.tile(tensor, hadamard=hadamard)

    def vector(self, values: npt.NDArray[np.float32]) -> NativeVector:
        return NativeVector(np.ascontiguousarray(values, np.float32))

    def weight_nbytes(self, shape: tuple[int, int], format: Format) -> int:
        """Packed bytes, rows rounded up to whole tiles."""
        return padded_rows(shape[0]) * widened_format(format).row_bytes(shape[1])

    def in_place(self, format: Format, columns: int) -> bool:
        return widened_format(format) == format

    def kv_nbytes(self, layers: Sequence[LayerSpec], length: int) -> int:
        attending, states = split_layers(layers)
        kv_format = cache_format(attending, self.kv_format)
        in_states = StateLayout(states).sequence_nbytes(length)
        if self.kv_maker is not None and self.kv_maker.specs == attending:
            return in_states + self.kv_maker.cache_nbytes(attending, length, kv_format)
        shapes = [(spec.cached_heads, spec.head_dim) for spec in attending]
        return in_states + token_nbytes(shapes, kv_format) * grown_capacity(length)

    def kv_cache(self, layers: Sequence[LayerSpec], capacity: int) -> KVCache:
        attending, states = split_layers(layers)
        kv_format = cache_format(attending, self.kv_format)
        cache: NativeKVCache
        if self.kv_maker is not None and self.kv_maker.specs == attending:
            cache = self.kv_maker.cache(attending, capacity, kv_format)
        else:
            shapes = [(spec.cached_heads, spec.head_dim) for spec in attending]
            cache = NativeKVCache(shapes, capacity, kv_format)
        return HybridCache(cache, StateCache(states, capacity, map_floats)) if states else cache

    # -- a pass ----------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> NativePass:
        self.follow_limits()
        # Arrays for other row counts would pile up.
        self._spare = {s: a for s, a in self._spare.items() if s[0] == len(batch.tokens)}
        reach = max(int(batch.positions.max()) + 1, *(s.cache.length + s.rows for s in batch.spans))
        step = NativePass(batch, len(batch.tokens), locate(batch.positions), reach)
        for span in batch.spans:
            span.cache.reserve(span.cache.length + span.rows)
            mask = None if span.mask is None else np.ascontiguousarray(span.mask, np.uint8)
            step.masks.append(mask)
        self.begin_adapters(batch)
        if self._tape is not None:
            self._tape.step = step
        return step

    def embed(
        self,
        table: NativeWeight,
        step: NativePass,
        scale: float = 1.0,
        *,
        tokens: npt.NDArray[np.int64] | None = None,
        each: int = 1,
    ) -> Floats:
        assert len(table.tensors) == 1, "an embedding is one matrix"
        rows = np.ascontiguousarray(step.batch.tokens if tokens is None else tokens)
        if each > 1:
            rows = rows_of_tokens(rows, each, table.stack.rows)
        out = self._array(len(rows), table.stack.cols)
        self._api.lrt_read_rows(
            self._handle, table.parts, locate(rows), len(rows), scale, self._locate(out)
        )
        return out

    def begin_adapters(self, batch: Batch) -> None:
        self._adapters.begin(batch)

    def adapt_tokens(self, x: Floats, step: NativePass, scale: float) -> Floats:
        for part, adapter in self._adapters.of_rows:
            if (low := adapter.embedding) is not None:
                x[part] += (low.a[:, step.batch.tokens[part]].T @ low.b.T) * np.float32(scale)
        return x

    def norm_qkv_rope_append(
        self,
        x: Floats,
        weights: AttentionWeights,
        spec: AttentionSpec,
        step: NativePass,
        layer: int,
    ) -> Floats:
        q = self._array(step.rows * (2 if spec.has_gates else 1), spec.heads * spec.head_dim)
        turns = self._turns_of(weights, spec)
        args = attention_args(weights, spec, step, layer, turns)
        args.x, args.q = self._locate(x), self._locate(q)
        self._api.lrt_norm_qkv_rope_append(self._handle, args)
        self._grow(q[: step.rows], spec, step)
        return q

    def _grow(self, q: Floats, spec: AttentionSpec, step: NativePass) -> None:
        """Multiply q by the temperature's factors, which depend on positions, in place."""
        if spec.temperature is None:
            return
        if self._tape is not None:
            self._tape.broken = True
        q *= spec.temperature.factors(step.batch.positions)[:, None]

    def choose_tokens(
        self,
        x: Floats,
        weights: IndexWeights,
        spec: IndexSpec,
        step: NativePass,
        layer: int,
    ) -> npt.NDArray[np.int32]:
        """(R, 1 + most): of each row how many tokens it sees, and where they lie in its cache."""
        chosen = np.empty((step.rows, 1 + spec.most_tokens), np.int32)
        args = index_args(weights, spec, step, layer)
        args.x, args.chosen = locate(x), locate(chosen)
        self._api.lrt_choose_tokens(self._handle, args)
        step.layer_done(layer)
        return chosen

    def attention_output(
        self,
        q: Floats,
        weights: AttentionWeights,
        spec: AttentionSpec,
        step: NativePass,
        layer: int,
    ) -> Floats:
        return self.chosen_output(q, weights, spec, step, layer, None)

    def chosen_output(
        self,
        q: Floats,
        weights: AttentionWeights,
        spec: AttentionSpec,
        step: NativePass,
        layer: int,
        chosen: npt.NDArray[np.int32] | None,
    ) -> Floats:
        out = self._array(step.rows, weights.out.stack.rows)
        args = step.attention
        assert args is not None, "both steps of a layer come one after the other"
        if chosen is not None:
            assert weights.qkv_bias is None, "keys that leave out their bias are seen in order"
            args.chosen, args.most_chosen = locate(chosen), chosen.shape[1] - 1
        args.q, args.out = self._locate(q), self._locate(out)
        self._api.lrt_attention_output(self._handle, args)
        args.chosen, step.attention = None, None
        if spec.reads is None:
            step.layer_done(layer)
        self._spare[q.shape] = q
        return out

    def norm_latent_append(
        self, x: Floats, weights: LatentWeights, spec: LatentSpec, step: NativePass, layer: int
    ) -> Floats:
        """(R, H (N + P)): as projected, rotary parts turned; the latents are written to caches.

        Gates (R, H) follow.
        """
        q = self._array(step.rows, spec.query_rows + spec.gate_rows)
        args = latent_args(weights, spec, step, layer)
        args.x, args.q = self._locate(x), self._locate(q)
        self._api.lrt_norm_latent_append(self._handle, args)
        self._grow(q, spec, step)
        return q

    def latent_output(
        self, q: Floats, weights: LatentWeights, spec: LatentSpec, step: NativePass, layer: int
    ) -> Floats:
        out = self._array(step.rows, weights.out.stack.rows)
        args = step.latent
        assert args is not None, "both steps of a layer come one after the other"
        args.q, args.out = self._locate(q), self._locate(out)
        self._api.lrt_latent_output(self._handle, args)
        step.layer_done(layer)
        self._spare[q.shape] = q
        return out

    def norm_recurrent(
        self,
        x: Floats,
        weights: RecurrentWeights,
        spec: RecurrentSpec,
        step: NativePass,
        layer: int,
    ) -> Floats:
        out = self._array(step.rows, weights.out.stack.rows)
        args = recurrent_args(weights, spec, step, layer)
        args.x, args.out = self._locate(x), self._locate(out)
        self._api.lrt_recurrent(self._handle, args)
        for span in step.batch.spans:
            states_of(span.cache).layer_done(layer)
        return out

    def norm_gated_mlp(self, x: Floats, weights: MlpWeights, spec: MlpSpec) -> Floats:
        return self.shared_mlp(x, weights, spec, None)

    def norm_gate_rows(self, x: Floats, weights: MlpWeights, spec: MlpSpec) -> Floats:
        rows = weights.gate_up.stack.rows // (2 if spec.gated else 1)
        out = np.empty((len(x), rows), np.float32)
        args = kept_args(weights.gate_up, weights, spec, gate_args)
        args.x, args.out, args.rows = self._locate(x), locate(out), len(x)
        self._api.lrt_norm_gated_mlp(self._handle, args)
        return out

    def norm(self, x: Floats, weight: NativeVector, eps: float) -> Floats:
        self._api.lrt_norm_rows(self._handle, NormArgs(locate(x), weight.address, *x.shape, eps))
        return x

    def norm_sum(self, y: Floats, more: Floats | None, weight: NativeVector, eps: float) -> Floats:
        return self.norm(y if more is None else self.add(y, more), weight, eps)

    # -- a draft head, which reads another model's features ----------------------------------------

    def given_rows(self, values: Floats) -> Floats:
        """A copy: residual sums are in place."""
        return np.array(values, np.float32, order="C")

    def joined_norms(
        self,
        x: Floats,
        y: Floats,
        norms: tuple[NativeVector | None, NativeVector | None],
        eps: float,
    ) -> Floats:
        parts = [np.array(rows) for rows in (x, y)]
        for rows, norm in zip(parts, norms, strict=True):
            if norm is not None:
                self.norm(rows, norm, eps)
        return np.concatenate(parts, axis=1)

    def projected(self, x: Floats, weight: NativeWeight) -> Floats:
        return self.linear(x, weight)

    # -- a mixture of experts --------------------------------------------------------------------

    def expert_table(self, count: int) -> NativeExpertTable:
        return NativeExpertTable(count)

    def norm_route(
        self, x: Floats, weights: RouterWeights, spec: RouterSpec
    ) -> tuple[Floats, Routing]:
        rows, hidden = x.shape
        args = kept_args(weights.gate, weights, spec, route_args)
        ranked, used = args.ranked, args.used
        normed = self._array(rows, hidden)
        # One array behind all three results: asking where an array lies costs as much as making it.
        results = self._array(rows, 2 * ranked + used).reshape(-1)
        address, plane = locate(results), rows * ranked
        args.x, args.normed = locate(x), locate(normed)
        args.experts, args.scores = address, address + 4 * plane
        args.weights, args.rows = address + 8 * plane, rows
        self._api.lrt_norm_route(self._handle, args)
        return normed, Routing(
            results[:plane].view(np.int32).reshape(rows, ranked),
            results[plane : 2 * plane].reshape(rows, ranked),
            results[2 * plane :].reshape(rows, used),
        )

    def expert_slots(self, normed: Floats, routing: Routing) -> Floats:
        """(R * K, D): the array released last, if it fits."""
        shape = (routing.weights.size, normed.shape[1])
        spare, self._slots = self._slots, None
        slots = spare if spare is not None and spare.shape == shape else np.empty(shape, np.float32)
        if self._tape is not None:
            self._tape.note(slots)
        return slots

    def run_experts(
        self,
        normed: Floats,
        routing: Routing,
        table: ExpertTable,
        spec: ExpertSpec,
        slots: Floats,
        experts: Sequence[int] | npt.NDArray[np.int32] | None = None,
    ) -> None:
        """All of ``experts`` in one call.

        Raises:
            ValueError: one of them is not in the table; nothing is computed then.
        """
        assert isinstance(table, NativeExpertTable), "tables belong to one implementation"
        assert table.takes(spec), "the experts have a gate, or none"
        self.follow_limits()  # a pass may begin on a GPU
        args = table.args
        chosen = np.ascontiguousarray(routing.experts, np.int32)
        args.rows, args.stride = chosen.shape
        args.used = routing.used
        if slots.shape != (args.rows * args.used, normed.shape[1]):
            raise ValueError(f"slots are {slots.shape}, of {args.rows} rows with {args.used} each")
        args.x, args.slots, args.chosen = locate(normed), locate(slots), locate(chosen)
        args.activation, args.limit = ACTIVATIONS[spec.activation], spec.limit
        args.asked, args.asked_count = None, 0
        if experts is not None:
            asked = np.ascontiguousarray(experts, np.int32)
            if not asked.size:
                return
            args.asked, args.asked_count = locate(asked), asked.size
        missing = self._api.lrt_run_experts(self._handle, args)
        if missing >= 0:
            raise ValueError(f"expert {missing} is asked for, but is not in the table")

    def shared_layers(
        self, layers: Sequence[tuple[HostShare, NativeExpertTable, ExpertSpec]]
    ) -> NativeSharedLayers:
        return NativeSharedLayers(self._api, self._handle, layers)

    def put_slots(self, slots: Floats, index: npt.NDArray[np.intp], rows: Floats) -> Floats:
        slots[index] = rows
        return slots

    def weigh_rows(self, normed: Floats, routing: Routing) -> Floats:
        return normed * routing.weights

    def combine_experts(
        self, slots: Floats, routing: Routing, shared: Floats | None, *, weighted: bool = True
    ) -> Floats:
        weights = np.ascontiguousarray(routing.weights, np.float32)
        weights = weights if weighted else np.ones_like(weights)
        out = self._array(len(weights), slots.shape[1]) if shared is None else shared
        args = CombineArgs(locate(slots), locate(weights), out=locate(out), cols=slots.shape[1])
        args.rows, args.used = weights.shape
        args.shared = None if shared is None else args.out
        self._api.lrt_combine_experts(self._handle, args)
        self._slots = slots
        return out

    def latent_rows(self, normed: Floats, weight: NativeWeight) -> Floats:
        return self.linear(normed, weight, self._array(len(normed), weight.stack.rows))

    def widen_latents(self, rows: Floats, weight: NativeWeight, shared: Floats | None) -> Floats:
        out = self.linear(rows, weight, self._array(len(rows), weight.stack.rows))
        self._spare[rows.shape] = rows
        return out if shared is None else self.add(out, shared)

    def shared_mlp(
        self, normed: Floats, weights: MlpWeights, spec: MlpSpec, gate: NativeWeight | None
    ) -> Floats:
        self.follow_limits()  # a pass may begin on a GPU
        out = self._array(normed.shape[0], weights.down.stack.rows)
        args = kept_args(weights.gate_up if gate is None else gate, weights, spec, mlp_args)
        if gate is not None:
            args.row_gate = gate.stack
        args.x, args.out, args.rows = self._locate(normed), self._locate(out), normed.shape[0]
        self._api.lrt_norm_gated_mlp(self._handle, args)
        return out

    # -- sums and logits -------------------------------------------------------------------------

    def add(self, x: Floats, y: Floats, scale: float = 1.0, total: float = 1.0) -> Floats:
        """Residual sum in place of ``x``."""
        if self._tape is not None:
            self._tape.add(x, y, scale, total)
        if scale != 1.0:
            y *= np.float32(scale)
        x += y
        if total != 1.0:
            x *= np.float32(total)
        self._spare[y.shape] = y
        return x

    def head(
        self,
        x: Floats,
        rows: npt.NDArray[np.intp],
        norm: NativeVector | None,
        eps: float,
        weight: NativeWeight,
        softcap: float | None = None,
        first_row: int = 0,
    ) -> Floats:
        adapted = any(adapter.head for _, adapter in self._adapters.of_rows)
        logits = large_floats((len(rows), weight.stack.rows))
        wanted = np.ascontiguousarray(rows, np.int64)
        args = HeadArgs(
            x=self._locate(x),
            wanted=locate(wanted),
            logits=locate(logits),
            norm=address_of(norm),
            weight=weight.stack,
            count=len(rows),
            eps=eps,
            softcap=0.0 if adapted else softcap or 0.0,
        )
        self._api.lrt_head(self._handle, args)
        if adapted:

            def normed(row: int) -> Floats:
                scale = np.sqrt(np.square(x[row]).mean() + np.float32(eps))
                inputs: Floats = x[row] if norm is None else x[row] / scale * norm.values
                return inputs

            head_deltas(self._adapters.of_rows, rows, normed, first_row, logits)
            if softcap:
                np.tanh(logits / np.float32(softcap), out=logits)
                logits *= np.float32(softcap)
        return logits

    def linear(self, x: Floats, weight: NativeWeight, out: Floats | None = None) -> Floats:
        """x (R, K) times the weight's rows: (R, out)."""
        x = np.ascontiguousarray(x, np.float32)
        if out is None:
            out = np.empty((x.shape[0], weight.stack.rows), np.float32)
        self._api.lrt_linear(self._handle, weight.stack, x.ctypes.data, x.shape[0], out.ctypes.data)
        return out

    def run_vision(self, step: str, args: VisionArgs) -> None:
        """Run a step of a vision encoder, one of ``VISION_STEPS``."""
        self.follow_limits()
        self._api.lrt_vision(self._handle, VISION_STEPS[step], args)

    def search_scales(self, args: SearchArgs) -> None:
        self.follow_limits()
        self._api.lrt_search_scales(self._handle, args)

    def meetings(self) -> int:
        """How often all threads have met."""
        return int(self._api.lrt_meetings(self._handle))

    def read_all(self, data: npt.NDArray[np.uint8]) -> None:
        """Read every byte once, on all threads."""
        self._api.lrt_read_all(self._handle, data.ctypes.data, data.nbytes)

    # -- parts -----------------------------------------------------------------------------------

    def _turns_of(self, weights: AttentionWeights, spec: AttentionSpec) -> Turns | None:
        """The rotations for the keys' bias, if they have one and are kept without it."""
        kept = self.kv_format == "bf16" or weights.k_norm is not None
        if kept or weights.qkv_bias is None or spec.rope is None:
            return None
        if spec.rope not in self._turns:
            self._turns[spec.rope] = Turns(spec.rope)
        return self._turns[spec.rope]

    def _array(self, rows: int, cols: int) -> Floats:
        """An array that the last pass released, or a new one: fresh pages cost more than a row."""
        spare = self._spare.pop((rows, cols), None)
        array = np.empty((rows, cols), np.float32) if spare is None else spare
        if self._tape is not None:
            self._tape.note(array)
        return array

    def _locate(self, array: Floats) -> int:
        """``locate``, remembered for the few arrays that passes of one row use in turn."""
        kept = self._places.get(id(array))
        if kept is not None:
            return kept[1]
        address = locate(array)
        if len(array) == 1:
            if len(self._places) == _PLACES:
                self._places.clear()
            self._places[id(array)] = array, address
        return address


def fast_tiler() -> Callable[[PackedTensor], TiledTensor]:
    """A tiler with the compiled kernels if they are installed, else numpy; results are the same."""
    try:
        return NativeOps().tile
    except MissingExtraError:
        return tile_tensor
