"""Decode steps as a list of calls: most of Python's time between the kernels is saved.

The first pass of one row over one sequence is recorded as it runs: the kernels' calls with
arguments of their own, and the sums between them. Later ones set token, position and cache, and run
the list. Passes that do anything else, such as experts, recurrent layers or adapters, are not
recorded. A recording is used only if it repeats its own pass bit for bit. Weights must stay where
they are. It knows a ``forward``, not models.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from localrt.quant.cpu.abi import (
    ACTIVATIONS,
    STEP_KINDS,
    AttentionArgs,
    HeadArgs,
    SharedLayer,
    SpanArgs,
    Step,
)
from localrt.quant.cpu.kv import NativeKVCache
from localrt.quant.cpu.passes import RopeTables
from localrt.quant.cpu.weights import NativeExpertTable, locate
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.arrays import Features, large_floats
from localrt.quant.ops.experts import ExpertSpec, HostShare
from localrt.quant.ops.protocol import Batch, Check, Forward


class Tape:
    """The steps of a pass, by parts that end with a sum. It stands in for the ``library``.

    ``broken``: the pass does something that cannot be repeated. ``kept`` and ``tables`` keep alive
    what steps read and write. ``layers`` says after how many steps each layer begins, ``stream`` is
    the residual stream.
    """

    def __init__(self) -> None:
        self.library: Any = None
        self.steps: list[Step] = []
        self.ends: list[int] = []  # of parts
        self.kept: list[object] = []
        self.tables: RopeTables = {}
        self.attention: list[tuple[AttentionArgs, SpanArgs]] = []
        self.heads: list[HeadArgs] = []
        self.layers: dict[int, int] = {}
        self.stream: Floats | None = None
        self.broken = False

    def __getattr__(self, name: str) -> Callable[..., object]:
        """A function of the library, which records its calls."""
        function: Callable[..., object] = getattr(self.library, name)
        kind = STEP_KINDS.get(name)
        if kind is None:
            self.broken = True
            return function

        def call(handle: int, args: ctypes.Structure, *more: object) -> object:
            step = Step(kind=kind)
            if more:  # rows of an embedding
                self.kept.append(args)
                step.args = ctypes.addressof(args)
                step.y, step.count, step.scale, step.x = more
            else:
                step.args = ctypes.addressof(self._own(args))
            self.steps.append(step)
            return function(handle, args, *more)

        return call

    def add(self, x: Floats, y: Floats, scale: float, total: float) -> None:
        """A sum of a part's result and the residual stream: the part's end."""
        step = Step(kind=STEP_KINDS["add"], count=x.size, scale=scale, total=total)
        step.x, step.y = locate(x), locate(y)
        self.kept += [x, y]
        self.broken |= self.stream is not None and self.stream is not x
        self.stream = x
        self.steps.append(step)
        self.ends.append(len(self.steps))

    def _own(self, args: ctypes.Structure) -> ctypes.Structure:
        """A copy of arguments that other passes fill in their way."""
        copy = type(args).from_buffer_copy(args)
        self.kept.append(copy)
        if isinstance(copy, AttentionArgs):
            span = SpanArgs.from_address(copy.spans)  # of the only sequence
            self.attention.append((copy, SpanArgs.from_buffer_copy(span)))
        elif isinstance(copy, HeadArgs):
            self.heads.append(copy)
        return copy


@dataclass(frozen=True, slots=True, eq=False)
class _Layers(Features):
    """Notes on a tape where each layer begins."""

    tape: Tape

    def of(self, layer: int) -> Floats | None:
        tape = self.tape
        tape.layers[layer] = len(tape.steps)
        if len(tape.steps) not in tape.ends:
            tape.ends.append(len(tape.steps))
        return Features.of(self, layer)


class Recording:
    """A pass of one row that can be repeated on other tokens and caches."""

    def __init__(self, tape: Tape, batch: Batch, run: Callable[[object, int], None]) -> None:
        self._kept, self._tables, self._run = tape.kept, tape.tables, run
        self._steps = (Step * len(tape.steps))(*tape.steps)
        self._layers, self._stream = tape.layers, tape.stream
        starts, ends = [0, *tape.ends], [*tape.ends, len(tape.steps)]
        self._parts = [
            (Step.from_buffer(self._steps, start * ctypes.sizeof(Step)), end - start, end)
            for start, end in zip(starts, ends, strict=True)
        ]
        self._token, self._position = batch.tokens, batch.positions
        (self._head,) = tape.heads
        self._wanted = np.zeros(1, np.int64)
        self._head.wanted = self._wanted.ctypes.data
        spans = (SpanArgs * len(tape.attention))(*(span for _, span in tape.attention))
        memory = np.frombuffer(memoryview(spans), np.uint8).reshape(len(spans), -1)
        for (args, _), span in zip(tape.attention, spans, strict=True):
            args.spans = ctypes.addressof(span)
        self._places = memory.view(np.int64)[:, SpanArgs.data.offset // 8]
        self._held = memory.view(np.int32)[:, SpanArgs.held.offset // 4]
        self._base, _ = _cache(batch).layer_ready(0)

    def run(
        self, batch: Batch, check: Check | None = None, features: Features | None = None
    ) -> Floats:
        """The logits (1, V); the cache counts nothing."""
        cache = _cache(batch)
        base, _ = cache.layer_ready(0)
        self._token[:], self._position[:] = batch.tokens, batch.positions
        self._held[:] = cache.length
        self._places += base - self._base
        self._base = base
        for (_, back), (rope, cos, sin) in self._tables.items():
            cos.values[:], sin.values[:] = rope.turns(self._position - back)
        logits = large_floats((1, self._head.weight.rows))
        self._head.logits = logits.ctypes.data
        if check is None and features is None:
            self._run(self._steps, len(self._steps))
            return logits
        wanted = {} if features is None else {self._layers[each]: each for each in features.layers}
        for first, count, end in self._parts:
            if check is not None:
                check()
            self._run(first, count)
            if features is not None and end in wanted:
                out = features.of(wanted[end])
                assert out is not None, "it is listed"
                out[:] = self._stream
        return logits


class Recorder(Protocol):
    """What a replay needs of an ``Ops``."""

    def follow_limits(self) -> None: ...

    def begin_adapters(self, batch: Batch) -> None: ...

    def recording(self, tape: Tape) -> AbstractContextManager[None]: ...

    def run_steps(self, first: object, count: int) -> None: ...


class ReplayedForward:
    """A decoder's ``forward`` whose decode steps are recorded once, and replayed."""

    def __init__(self, ops: Recorder, forward: Forward) -> None:
        self._ops, self._forward = ops, forward
        self._recording: Recording | None = None
        self._records = True  # nothing is known to stand against it

    def __call__(
        self,
        batch: Batch,
        *,
        rows: Sequence[int] | None = None,
        check: Check | None = None,
        features: Features | None = None,
    ) -> Floats:
        if not self._fits(batch, rows):
            return self._forward(batch, rows=rows, check=check, features=features)
        if self._recording is None:
            return self._record(batch, check, features)
        cache = _cache(batch)
        cache.reserve(cache.length + 1)
        self._ops.follow_limits()
        self._ops.begin_adapters(batch)
        logits = self._recording.run(batch, check, features)
        cache.advance(1)
        return logits

    def _fits(self, batch: Batch, rows: Sequence[int] | None) -> bool:
        """Whether it is a decode step that may be recorded or replayed."""
        if (
            not (self._records and batch.plain)
            or len(batch.tokens) != 1
            or (rows is not None and not len(rows))
        ):
            return False
        cache, mask = batch.spans[0].cache, batch.spans[0].mask
        # Other caches move their blocks as a pass goes on.
        return mask is None and not cache.mix and type(cache) is NativeKVCache

    def _record(self, batch: Batch, check: Check | None, features: Features | None) -> Floats:
        """Run a pass and record it; the recording is used if it repeats the pass."""
        own = Batch(batch.tokens.copy(), batch.positions.copy(), batch.spans)
        tape, cache = Tape(), _cache(batch)
        with self._ops.recording(tape):
            layers, rows = () if features is None else features.layers, _rows_of(features)
            logits = self._forward(own, check=check, features=_Layers(layers, rows, tape))
        self._records = not tape.broken and len(tape.heads) == 1
        if not self._records:
            return logits
        recording = Recording(tape, own, self._ops.run_steps)
        cache.trim(cache.length - 1)
        again = recording.run(own)
        if not np.array_equal(again.view(np.int32), logits.view(np.int32)):
            self._records = False
            return self._forward(own, check=check, features=features)
        self._recording = recording
        cache.advance(1)
        return logits


def _rows_of(features: Features | None) -> Floats:
    return np.empty((1, 0), np.float32) if features is None else features.rows


def _cache(batch: Batch) -> NativeKVCache:
    (span,) = batch.spans
    assert isinstance(span.cache, NativeKVCache), "other caches are not recorded"
    return span.cache


_PATIENCE_US = 50_000  # after so long, Python looks what is wrong


class NativeSharedLayers:
    """See ``SharedLayers``."""

    def __init__(
        self,
        library: Any,
        handle: Any,
        layers: Sequence[tuple[HostShare, NativeExpertTable, ExpertSpec]],
    ) -> None:
        self._library, self._handle = library, handle
        self._args = (SharedLayer * len(layers))()
        self._busy = ctypes.c_double()
        self._kept: list[object] = [layers]  # what the arguments point to
        self._present: list[npt.NDArray[np.bool_] | None] = [None] * len(layers)
        for args, (share, table, spec) in zip(self._args, layers, strict=True):
            assert table.takes(spec), "the experts have a gate, or none"
            routing = share.routing
            asked = np.zeros(table.args.count, np.int32)
            self._kept.append(asked)
            experts = args.experts
            experts.x, experts.slots = locate(share.rows), locate(share.host_slots)
            experts.table, experts.count = table.args.table, table.args.count
            experts.chosen, experts.used = locate(routing.experts), routing.used
            experts.rows, experts.stride = routing.experts.shape
            experts.activation, experts.limit = ACTIVATIONS[spec.activation], spec.limit
            args.asked = locate(asked)
            for name, word in share.words._asdict().items():
                setattr(args, name, locate(word))

    @property
    def busy_s(self) -> float:
        return self._busy.value

    def present(self, layer: int, mask: npt.NDArray[np.bool_]) -> None:
        if mask is not self._present[layer]:
            self._present[layer] = mask
            self._args[layer].present = locate(mask)

    def run(self, first: int) -> int:
        count = len(self._args)
        busy = ctypes.addressof(self._busy)
        return int(
            self._library.lrt_share_layers(
                self._handle, self._args[0], first, count, _PATIENCE_US, busy
            )
        )
