"""A pass as arguments of the compiled kernels: caches, masks, rotary tables, layers' arguments.

Arguments are made once for both steps of a layer. It calls no kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from localrt.quant.cpu.abi import (
    ACTIVATIONS,
    CACHE_FORMATS,
    RECURRENT_KINDS,
    AttentionArgs,
    IndexArgs,
    LatentArgs,
    MlpArgs,
    RecurrentArgs,
    SpanArgs,
    Stack,
    StateSpanArgs,
)
from localrt.quant.cpu.kv import NativeKVCache
from localrt.quant.cpu.weights import NativeVector, fill_args, kept_args
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.attention import (
    AttentionSpec,
    AttentionWeights,
    IndexSpec,
    IndexWeights,
    LatentSpec,
    LatentWeights,
    Rope,
)
from localrt.quant.ops.hybrid_cache import begin_states, kv_of
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from localrt.quant.ops.mathematics import turns
from localrt.quant.ops.protocol import Batch, MlpSpec, MlpWeights, Span
from localrt.quant.ops.recurrent import RecurrentSpec, RecurrentWeights
from localrt.quant.ops.states import StatePass

RopeTables: TypeAlias = dict[tuple[int, int], tuple[Rope, NativeVector, NativeVector]]
"""Cosines and sines, by the rope's id and how many tokens earlier: hashing a rope is slow."""


@dataclass(slots=True)
class NativePass:
    """A batch, and what all layers share of it: masks, rotary tables, arguments made once."""

    batch: Batch
    rows: int
    positions: int  # their addresses
    reach: int  # a bound on all positions of the pass and its caches
    attention: AttentionArgs | None = None  # of the layer between its two steps
    latent: LatentArgs | None = None
    spans: list[tuple[SpanArgs, NativeKVCache]] = field(default_factory=list)  # side by side
    masks: list[npt.NDArray[np.uint8] | None] = field(default_factory=list)
    tables: RopeTables = field(default_factory=dict)
    states: list[StatePass] = field(default_factory=list)  # of recurrent layers
    state_spans: npt.NDArray[np.void] | None = None  # (layers, sequences) of ``StateSpanArgs``
    in_cache: npt.NDArray[np.int64] | None = None  # rows' places in their caches
    place_turns: RopeTables = field(default_factory=dict)  # see place_tables

    def span_args(self, layer: int) -> int:
        """The address of every sequence's cache of a layer, and of what its rows see.

        It is valid until the next call.
        """
        if not self.spans:
            caches = [kv_of(span, NativeKVCache) for span in self.batch.spans]
            spans = map(_span_args, self.batch.spans, caches, self.masks)
            self.spans = list(zip((SpanArgs * len(caches))(*spans), caches, strict=True))
        for span, cache in self.spans:
            span.data, span.stride = cache.layer_ready(layer)
        return ctypes.addressof(self.spans[0][0])

    def put_rows(
        self, args: AttentionArgs | IndexArgs | LatentArgs, rope: Rope | None, layer: int
    ) -> None:
        """Set the rows' turns, and the caches of their sequences."""
        args.cos, args.sin = self.rope_tables(rope)
        args.spans, args.span_count = self.span_args(layer), len(self.batch.spans)
        args.rows = self.rows

    def layer_done(self, layer: int) -> None:
        """The layer's keys and values have been written and read."""
        for span, cache in self.spans:
            cache.layer_done(layer, span.rows)

    def state_args(self, layer: int) -> int:
        """The address of every sequence's memory of a recurrent layer, and of its rows."""
        if self.state_spans is None:
            self.states = begin_states(self.batch.spans)
            layers = len(self.states[0].source.layout.specs)
            self.state_spans = np.zeros((layers, len(self.states)), np.dtype(StateSpanArgs))
            fill_states(self.state_spans, self.batch.spans, self.states)
        return int(self.state_spans[layer].ctypes.data)

    def rope_tables(self, rope: Rope | None, back: int = 0) -> tuple[int, int] | tuple[None, None]:
        """Addresses of the pass's cosines and sines, each (R, rotary / 2).

        They are for positions ``back`` tokens earlier.
        """
        if rope is None:
            return None, None
        tables = self.tables.get((id(rope), back))
        if tables is None:
            batch = self.batch
            axes = None if batch.axes is None else batch.axes - back
            cos, sin = map(NativeVector, rope.turns(batch.positions - back, axes))
            tables = self.tables[id(rope), back] = rope, cos, sin
        return tables[1].address, tables[2].address

    def place_tables(self, rope: Rope) -> tuple[int, int] | tuple[None, None]:
        """The same for rows' places in their caches, where any row's position is another."""
        batch = self.batch
        if self.in_cache is None:
            self.in_cache = np.concatenate(list(map(_places_in_cache, batch.spans)))
        if batch.axes is None and np.array_equal(self.in_cache, batch.positions):
            return None, None
        tables = self.place_turns.get((id(rope), 0))
        if tables is None:
            cos, sin = map(NativeVector, rope.turns(self.in_cache))
            tables = self.place_turns[id(rope), 0] = rope, cos, sin
        return tables[1].address, tables[2].address


def fill_states(
    table: npt.NDArray[np.void], spans: Sequence[Span], passes: Sequence[StatePass]
) -> None:
    """Set ``table`` (layers, sequences) of ``StateSpanArgs`` to the memory that a pass begins with.

    All layers at once: numpy takes as long for one of them.
    """
    for column, span, states in zip(table.T, spans, passes, strict=True):
        source, target, layout = states.source, states.target, states.source.layout
        state, row = (4 * np.array(starts[:-1]) for starts in (layout.states, layout.rows))
        column["from"] = source.states.ctypes.data + state
        column["to"] = target.states.ctypes.data + state
        column["rows_from"] = source.rows.ctypes.data + source.ring * row
        column["rows_to"] = target.rows.ctypes.data + target.ring * row
        column["parents"] = _address(states.parents) or 0
        column["ring_from"], column["ring_to"] = source.ring, target.ring
        column["position"], column["fold"] = source.positions, states.fold
        column["held"], column["rows"] = span.cache.length, span.rows
        column["extra"] = states.extra


def attention_args(
    weights: AttentionWeights,
    spec: AttentionSpec,
    step: NativePass,
    layer: int,
    turns: Turns | None,
) -> AttentionArgs:
    """Of both steps: the second finds them in the pass. ``turns`` if keys lack their bias."""
    args = step.attention = kept_args(weights.qkv, weights, spec, _attention_args)
    if turns is not None and spec.rope is not None:
        args.near_turns, args.far_turns = turns.addresses(step.reach)
        args.place_cos, args.place_sin = step.place_tables(spec.rope)
    step.put_rows(args, spec.rope, layer)
    args.positions, args.out = step.positions, None
    return args


def _attention_args(weights: AttentionWeights, spec: AttentionSpec) -> AttentionArgs:
    return fill_args(AttentionArgs, weights, spec, proj=weights.out.stack, rotary=spec.rope_dim)


def gate_args(weights: MlpWeights, spec: MlpSpec) -> MlpArgs:
    """Constant arguments of an MLP's step up to what down multiplies."""
    args = mlp_args(weights, spec)
    args.down = Stack()
    return args


def mlp_args(weights: MlpWeights, spec: MlpSpec) -> MlpArgs:
    """Constant arguments of an MLP's only step."""
    activation = ACTIVATIONS[spec.activation]
    return fill_args(MlpArgs, weights, spec, activation=activation, curve=spec.curve)


def index_args(weights: IndexWeights, spec: IndexSpec, step: NativePass, layer: int) -> IndexArgs:
    """Arguments of an indexer's only step."""
    args = kept_args(weights.qk, weights, spec, _index_args)
    step.put_rows(args, spec.rope, layer)
    args.block_cos, args.block_sin = step.rope_tables(spec.rope, spec.block - 1)
    return args


def _index_args(weights: IndexWeights, spec: IndexSpec) -> IndexArgs:
    return fill_args(IndexArgs, weights, spec, rotary=spec.rope_dim)


def latent_args(
    weights: LatentWeights, spec: LatentSpec, step: NativePass, layer: int
) -> LatentArgs:
    """Of both steps: the second finds them in the pass."""
    args = step.latent = kept_args(weights.down, weights, spec, _latent_args)
    step.put_rows(args, spec.rope, layer)
    args.out = None
    return args


def _latent_args(weights: LatentWeights, spec: LatentSpec) -> LatentArgs:
    return fill_args(LatentArgs, weights, spec, proj=weights.out.stack, rotary=spec.rope_dim)


def recurrent_args(
    weights: RecurrentWeights, spec: RecurrentSpec, step: NativePass, layer: int
) -> RecurrentArgs:
    """Arguments of a recurrent layer's only step; constant ones are made once."""
    args = kept_args(weights.mix, weights, spec, _recurrent_args)
    args.spans, args.rows = step.state_args(layer), step.rows
    args.span_count = len(step.states)
    return args


def _recurrent_args(weights: RecurrentWeights, spec: RecurrentSpec) -> RecurrentArgs:
    return fill_args(
        RecurrentArgs,
        weights,
        spec,
        conv=weights.taps.address,
        proj=weights.out.stack,
        kind=RECURRENT_KINDS[spec.kind],
        norm_width=0 if weights.out_norm is None else weights.out_norm.values.size,
        gate_sigmoid=spec.gate == "sigmoid",
        norm_eps=spec.norm_eps or spec.eps,
        least_step=spec.time_steps[0],
        most_step=spec.time_steps[1],
    )


def _span_args(span: Span, cache: NativeKVCache, mask: npt.NDArray[np.uint8] | None) -> SpanArgs:
    """Without what differs from layer to layer."""
    return SpanArgs(
        mask=_address(mask),
        ahead=_address(span.ahead),
        windows_only=span.windows_only,
        format=CACHE_FORMATS[cache.kv_format],
        held=cache.length,
        rows=span.rows,
        extra=0 if span.mask is None else span.mask.shape[1] - span.rows,
    )


def _places_in_cache(span: Span) -> npt.NDArray[np.int64]:
    """The cache position of each row; a tree's row has the one that it would have if its path were
    decoded alone.
    """
    held = span.cache.length
    if span.mask is None:
        return np.arange(held, held + span.rows)
    return np.asarray(held + span.rows - span.mask.shape[1] + span.mask.sum(1) - 1)


def _address(array: npt.NDArray[np.generic] | None) -> int | None:
    return None if array is None else array.ctypes.data


class Turns:
    """Cosines and sines by which attention adds the bias that quantized keys leave out.

    See ``KeyBias`` in ``quant/cpu/csrc/kv.h``: a position is a block of 256 and a place in it, and
    the angle of the one is turned by that of the other. As many positions as were asked for.
    """

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        places = self._angles(np.arange(BLOCK_TOKENS), 1.0)  # (256, pairs, 2)
        tiles = places.reshape(BLOCK_TOKENS // 16, 16, *places.shape[1:])
        self._near = np.ascontiguousarray(tiles.transpose(0, 2, 3, 1))  # (16, pairs, 2, 16)
        self._far: Floats = np.empty((0, *places.shape[1:]), np.float32)

    def addresses(self, positions: int) -> tuple[int, int]:
        """Addresses of the tables of places and of blocks; the latter reach ``positions``.

        They are valid until more positions are requested.
        """
        blocks = -(-positions // BLOCK_TOKENS)
        if blocks > len(self._far):
            self._far = self._angles(BLOCK_TOKENS * np.arange(2 * blocks), self._rope.scale)
        return self._near.ctypes.data, self._far.ctypes.data

    def _angles(self, positions: npt.NDArray[np.int64], scale: float) -> Floats:
        angles = positions[:, None] * np.asarray(self._rope.inv_freq, np.float64)
        return np.stack(turns(angles), axis=-1) * np.float32(scale)
