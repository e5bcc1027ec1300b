"""Decode steps as a list of calls: most of Python's time between the kernels is saved.

The first pass of one row over one sequence is recorded as it runs: the kernels' calls with
arguments of their own, and the sums between them. Later ones set token, position and cache, and run
the list. Passes that compute in Python, too, are not recorded. A recording is used once it has
given the bits of a pass on another token. Weights must stay where they are. It knows a ``forward``,
not models.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from localrt.quant.cpu.abi import (
    ACTIVATIONS,
    STEP_KINDS,
    AttentionArgs,
    HeadArgs,
    LatentArgs,
    RecurrentArgs,
    SharedLayer,
    SpanArgs,
    Step,
)
from localrt.quant.cpu.kv import NativeKVCache
from localrt.quant.cpu.passes import NativePass, fill_states
from localrt.quant.cpu.weights import NativeExpertTable, locate
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.arrays import Features, large_floats
from localrt.quant.ops.experts import ExpertSpec, HostShare
from localrt.quant.ops.hybrid_cache import HybridCache, begin_states, kv_of
from localrt.quant.ops.protocol import Batch, Check, Forward, Span

# Arguments that are memory of a pass; other addresses are those of weights, which stay.
_OF_PASS = (
    *("x", "y", "q", "out", "positions", "near_turns", "normed", "experts", "scores", "weights"),
    *("slots", "chosen", "shared"),
)
_GROUPS = 8  # of steps, between which a replay may be cancelled


class Tape:
    """The steps of a pass of one row. It stands in for the ``library``.

    ``broken``: the pass does something that cannot be repeated. ``arrays``, by their addresses, are
    all that its steps read and write; ``kept`` are their arguments. ``layers`` says after how many
    steps each layer begins, ``stream`` is the residual stream.
    """

    def __init__(self, batch: Batch) -> None:
        self.library: Any = None
        self.batch = batch
        self.step: NativePass | None = None
        self.steps: list[Step] = []
        self.kept: list[object] = []
        self.arrays: dict[int, npt.NDArray[Any]] = {}
        self.attention: list[tuple[AttentionArgs | LatentArgs, SpanArgs]] = []
        self.recurrent: list[int] = []  # how many steps there are before and with each
        self.heads: list[HeadArgs] = []
        self.layers: dict[int, int] = {}
        self.stream: Floats | None = None
        self.broken = False
        self.note(batch.tokens)
        self.note(batch.positions)

    def __getattr__(self, name: str) -> Callable[..., object]:
        """A function of the library, which records its calls."""
        function: Callable[..., object] = getattr(self.library, name)
        kind = STEP_KINDS.get(name)
        if kind is None:
            self.broken = True
            return function

        def call(handle: int, args: ctypes.Structure, *more: Any) -> object:
            step = Step(kind=kind)
            if more:  # rows of an embedding
                step.y, step.count, step.scale, step.x = more
                self.stream = self.arrays.get(step.x)
                self.kept.append(args)
                step.args = ctypes.addressof(args)
            else:
                step.args = ctypes.addressof(self._own(args))
            self._put(step)
            return function(handle, args, *more)

        return call

    def note(self, array: npt.NDArray[Any]) -> None:
        """Memory that steps may read and write."""
        self.arrays[locate(array)] = array

    def add(self, x: Floats, y: Floats, scale: float, total: float) -> None:
        """A sum of two rows."""
        step = Step(kind=STEP_KINDS["add"], count=x.size, scale=scale, total=total)
        step.x, step.y = locate(x), locate(y)
        self._put(step)

    def _put(self, step: Step) -> None:
        self._check(step)
        self.steps.append(step)

    def _check(self, args: ctypes.Structure) -> None:
        """Only memory that is noted can be repeated: Python computes what is in other arrays."""
        for name in _OF_PASS:
            at: int | None = getattr(args, name, None)
            if at is not None and at not in self.arrays:
                inside = (0 < at - start < a.nbytes for start, a in self.arrays.items())
                self.broken |= not any(inside)

    def _own(self, args: ctypes.Structure) -> ctypes.Structure:
        """A copy of arguments that other passes fill in their way."""
        copy = type(args).from_buffer_copy(args)
        self._check(copy)
        self.kept.append(copy)
        if isinstance(copy, AttentionArgs | LatentArgs):
            span = SpanArgs.from_address(copy.spans)  # of the only sequence
            self.attention.append((copy, SpanArgs.from_buffer_copy(span)))
        elif isinstance(copy, RecurrentArgs):
            self.recurrent.append(len(self.steps) + 1)
        elif isinstance(copy, HeadArgs):
            self.heads.append(copy)
        return copy


@dataclass(frozen=True, slots=True, eq=False)
class _Layers(Features):
    """Notes on a tape where each layer begins."""

    tape: Tape

    def of(self, layer: int) -> Floats | None:
        self.tape.layers[layer] = len(self.tape.steps)
        return Features.of(self, layer)


class Recording:
    """A pass of one row that can be repeated on other tokens and caches."""

    def __init__(self, tape: Tape, run: Callable[[object, int, int], None]) -> None:
        assert tape.step is not None, "a pass has been recorded"
        self._kept, self._run = (tape.kept, tape.arrays), run
        self._tables, self._states = tape.step.tables, tape.step.state_spans
        self._recurrent = tape.recurrent
        self._steps = (Step * len(tape.steps))(*tape.steps)
        self._layers, self._stream = tape.layers, tape.stream
        self._tokens, self._positions = tape.batch.tokens, tape.batch.positions
        (self._head,) = tape.heads
        self._wanted = np.zeros(1, np.int64)
        self._head.wanted = self._wanted.ctypes.data
        spans = b"".join(bytes(span) for _, span in tape.attention)
        self._spans = np.frombuffer(bytearray(spans), np.dtype(SpanArgs))
        for at, (args, _) in enumerate(tape.attention):
            args.spans = locate(self._spans) + at * self._spans.itemsize
        self._places = self._spans["data"] - np.uint64(self._base(tape.batch.spans[0]))

    @property
    def token(self) -> int:
        """That of the latest pass."""
        return int(self._tokens[0])

    def _base(self, span: Span) -> int:
        return kv_of(span, NativeKVCache).layer_ready(0)[0] if len(self._spans) else 0

    def run(
        self, batch: Batch, check: Check | None = None, features: Features | None = None
    ) -> Floats | None:
        """The logits (1, V); the cache counts nothing. None: a router has given NaN."""
        (span,) = batch.spans
        self._tokens[:], self._positions[:] = batch.tokens, batch.positions
        self._spans["held"] = span.cache.length
        self._spans["data"] = self._places + np.uint64(self._base(span))
        for (_, back), (rope, cos, sin) in self._tables.items():
            cos.values[:], sin.values[:] = rope.turns(self._positions - back)
        states = begin_states(batch.spans) if self._states is not None else []
        if self._states is not None:
            fill_states(self._states, batch.spans, states)
        logits = large_floats((1, self._head.weight.rows))
        self._head.logits = logits.ctypes.data
        count, done = len(self._steps), ctypes.c_int()
        wanted = {} if features is None else {self._layers[each]: each for each in features.layers}
        groups = 1 if check is None else _GROUPS
        try:
            for end in sorted({*wanted, *(count * n // groups for n in range(1, groups + 1))}):
                if check is not None:
                    check()
                self._run(self._steps, end, ctypes.addressof(done))
                if done.value < end:
                    return None
                if features is not None and end in wanted:
                    out = features.of(wanted[end])
                    assert out is not None, "it is listed"
                    out[:] = self._stream
        finally:
            for each in states:
                each.target.positions[: bisect_right(self._recurrent, done.value)] = each.fold
        return logits


class Recorder(Protocol):
    """What a replay needs of an ``Ops``."""

    def follow_limits(self) -> None: ...

    def begin_adapters(self, batch: Batch) -> None: ...

    def recording(self, tape: Tape) -> AbstractContextManager[None]: ...

    def run_steps(self, steps: object, end: int, done: int) -> None: ...


class ReplayedForward:
    """A decoder's ``forward`` whose decode steps are recorded once, and replayed."""

    def __init__(self, ops: Recorder, forward: Forward) -> None:
        self._ops, self._forward = ops, forward
        self._recording: Recording | None = None
        self._proven = False  # it has given the bits of another pass
        self._records = True  # nothing is known to stand against it

    def __call__(
        self,
        batch: Batch,
        *,
        rows: Sequence[int] | None = None,
        check: Check | None = None,
        features: Features | None = None,
    ) -> Floats:
        compute = partial(self._forward, batch, rows=rows, check=check, features=features)
        if not self._fits(batch, rows):
            return compute()
        if self._recording is None:
            return self._record(batch, check, features)
        if not self._proven:
            return self._prove(self._recording, batch, compute)
        logits = self._replay(self._recording, batch, check, features)
        if logits is None:  # it says what is wrong
            return compute()
        batch.spans[0].cache.advance(1)
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
        kv = cache.kv if isinstance(cache, HybridCache) else cache
        # Other caches move their blocks as a pass goes on.
        return mask is None and not cache.mix and type(kv) is NativeKVCache

    def _record(self, batch: Batch, check: Check | None, features: Features | None) -> Floats:
        """Run a pass and record it."""
        own = Batch(batch.tokens.copy(), batch.positions.copy(), batch.spans)
        tape = Tape(own)
        with self._ops.recording(tape):
            wanted = features or Features((), np.empty((1, 0), np.float32))
            noting = _Layers(wanted.layers, wanted.rows, tape)
            logits = self._forward(own, check=check, features=noting)
        self._records = not tape.broken and len(tape.heads) == 1
        if self._records:
            self._recording = Recording(tape, self._ops.run_steps)
        return logits

    def _prove(self, recording: Recording, batch: Batch, compute: Callable[[], Floats]) -> Floats:
        """Run a pass on another token, and replay it; the bits must be the same."""
        logits = compute()
        if batch.tokens[0] == recording.token:
            return logits
        cache = batch.spans[0].cache
        cache.trim(cache.length - 1)
        again = self._replay(recording, batch)
        self._proven = again is not None and again.tobytes() == logits.tobytes()
        if self._proven:
            cache.advance(1)
            return logits
        self._records, self._recording = False, None
        return compute()

    def _replay(
        self,
        recording: Recording,
        batch: Batch,
        check: Check | None = None,
        features: Features | None = None,
    ) -> Floats | None:
        cache = batch.spans[0].cache
        cache.reserve(cache.length + 1)
        self._ops.follow_limits()
        self._ops.begin_adapters(batch)
        return recording.run(batch, check, features)


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
