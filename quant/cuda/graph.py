"""CUDA graphs of short passes: a decode step costs a few launches instead of hundreds.

``Capture`` records the kernels that a function launches. The host works between two graphs, where
the function cuts, and beside them. A pass is recorded with static inputs when its numbers of
sequences and rows (1 in decoding, K in verifying a tree) occur again, and is replayed from then on:
whole, or segment by segment if only some of its layers are on the GPU. Whole passes are padded to
one of a few numbers of rows. Recordings serve all caches: the addresses of their blocks are inputs
too. This module knows a ``forward`` and the steps under it, not models.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import numpy as np

from localrt.common.errors import LocalrtError, MemoryBudgetError
from localrt.quant.cuda.driver import Cuda, Graph, device_of
from localrt.quant.cuda.hybrid_exchange import HybridExchange
from localrt.quant.cuda.kv import BlockedCache, SpanNumbers, widest_mask
from localrt.quant.cuda.products import MOST_ROWS
from localrt.quant.cuda.recurrent import SequenceTable
from localrt.quant.cuda.routing import CudaRouting
from localrt.quant.cuda.steps import BestLogits
from localrt.quant.cuda.stream import (
    Beside,
    Between,
    CudaPass,
    Cut,
    Logits,
    Numbers,
    Recording,
    Stream,
)
from localrt.quant.cuda.tensor import INT64, UINT8, Tensor, empty, zeros
from localrt.quant.ops.arrays import Features
from localrt.quant.ops.experts import ExpertTable, Routing
from localrt.quant.ops.hybrid_cache import HybridCache, begin_states, kv_of, states_of
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from localrt.quant.ops.protocol import RECORDED_PARTS, Batch, Check, Forward, Span

_MOST_NBYTES = 32 << 20  # upper bound of the driver's memory for graphs recorded together


class Capture:
    """Captures one GPU's graphs. They run one at a time and keep no results in scratch memory, so
    they share a stream and that memory.
    """

    def __init__(self, device: Cuda) -> None:
        self.device, self.stream = device, device.new_stream(self)
        self.pool = device.new_pool()
        self._graphs: WeakSet[Graph] = WeakSet()
        self._executable_nbytes = self._recorded = 0

    def end(self) -> Graph:
        """Return the graph recorded since the device's ``begin_graph``."""
        graph = self.device.end_graph()
        self._graphs.add(graph)
        self._recorded += 1
        return graph

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure the GPU memory that the driver allocates for graphs recorded in this context."""
        (free, _), taken = self.device.memory(), self.device.allocated_nbytes
        yield
        (now, _), ours = self.device.memory(), self.device.allocated_nbytes - taken
        # The rest was allocated by another process.
        self._executable_nbytes += min(max(0, free - now - ours), _MOST_NBYTES)

    @property
    def nbytes(self) -> int:
        """Bytes of the graphs: their scratch, and the driver's memory for each."""
        if not self._graphs:  # the memory of earlier graphs has been freed
            self.pool.trim()
        mean = self._executable_nbytes // max(1, self._recorded)
        return self.pool.nbytes + len(self._graphs) * mean


class Replay(Protocol):
    """Starts the recorded graphs."""

    def __call__(self, check: Check | None = None) -> None: ...


def record(
    body: Callable[[Cut], None],
    capture: Capture,
    beside: Beside | None = None,
    launched: Callable[[], Between] | None = None,
) -> Replay:
    """Record the kernels that ``body`` starts, as one graph, or as several where it cuts; return a
    function that replays them.

    ``body`` leaves the host's work beside a graph in ``beside``. ``launched`` is called at the end
    of each graph, for what to call in a replay when the graph has been launched. Other threads may
    allocate, copy and pin meanwhile: only this thread's calls are recorded.
    """
    beside = {} if beside is None else beside
    with capture.measured():
        try:
            return _record(body, capture, beside, launched)
        except MemoryBudgetError:
            capture.device.trim()  # waits for the GPU, which is not allowed while recording
            return _record(body, capture, beside, launched)


def _ignore_check(replay: Callable[[], None], check: Check | None) -> None:
    replay()


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Pause garbage collection while capturing: freeing a torch tensor records an event, which
    aborts the capture.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _record(
    body: Callable[[Cut], None],
    capture: Capture,
    beside: Beside,
    launched: Callable[[], Between] | None,
) -> Replay:
    steps: list[Between] = []
    device = capture.device

    def end() -> None:
        replay = capture.end().replay
        works = [make(layers) for make, layers in beside.items()]
        beside.clear()
        steps.extend(work.begin for work in works)
        steps.append(partial(_ignore_check, replay))
        if launched is not None:
            steps.append(launched())
        steps.extend(works)

    def cut(between: Between) -> None:
        end()
        steps.append(between)
        device.begin_graph()

    with device.record_on(capture.stream, capture.pool), _no_garbage():
        device.begin_graph()
        try:
            body(cut)
        except BaseException:
            with suppress(LocalrtError):  # the recording is abandoned anyway
                device.end_graph()
            raise
        end()

    def replay(check: Check | None = None) -> None:
        for step in steps:
            step(check)

    return replay


_MAX_RECORDED = 8  # shapes of passes with recordings
_MAX_SHAPES = 64
# Whole passes are padded to these rows: products compute eight at once, attention sixteen.
_ROWS = (1, 4, 8, 16, 32, 48, MOST_ROWS)
_COLUMNS = 64  # fewest columns of a tree mask
_WAITING = 8  # rows not yet in a state are rounded up to this: fewer shapes
_IDLE = 64  # passes after which an unused shape may be replaced


class RecordedOps(Protocol):
    """The part of ``CudaOps`` that recording needs."""

    recording: Recording | None  # set while a pass is recorded

    @property
    def device(self) -> str:
        """``"cuda:0"``."""

    @property
    def capture(self) -> Capture:
        """The capture of the GPU."""

    def scope(self) -> AbstractContextManager[None]:
        """The context of a pass."""

    def begin(self, batch: Batch) -> CudaPass: ...

    def recorded_adapters(self, batch: Batch) -> int | None:
        """Begin the adapters of a pass; returns what its recordings depend on, None if they cannot
        be recorded.
        """


class _Shape(NamedTuple):
    """The shape of passes, for which a recording is valid."""

    spans: int  # places for sequences
    blocks: int  # most blocks of a cache
    rows: int
    each: int  # most rows of a sequence, where layers are recurrent
    logit_rows: int  # rows of the head; 0 is all
    columns: int  # of the tree mask; 0 is none
    waiting: int  # most rows not yet in a recurrent layer's state
    adapters: int  # their kind; 0 is none
    features: tuple[int, ...]  # the layers before which they are copied
    hidden: int  # their width
    target_width: int  # of the target's features; 0 is none


@dataclass(slots=True)
class _ShapeEntry:
    """A shape of passes; it has recordings from the second pass on."""

    static: StaticPass | None = None
    used: int = 0  # number of the last pass of this shape


class Recordings:
    """See ``Recorder``. A shape is recorded when it occurs twice, and only a few shapes are: if
    many alternate, as with trees of all sizes, repeated recording would cost more than it saves.
    """

    def __init__(self, ops: RecordedOps) -> None:
        self._ops = ops
        self._shapes: OrderedDict[_Shape, _ShapeEntry] = OrderedDict()
        self._passes = 0
        self.most_new = RECORDED_PARTS
        self.while_waiting: Callable[[], None] | None = None
        self._new_parts = 0  # parts recorded in the running pass

    def begin(self, batch: Batch, logit_rows: Sequence[int]) -> CudaPass:
        self._new_parts = 0
        with self._ops.scope():
            static = self.of(batch, self.shape(batch, logit_rows))
            return self._ops.begin(batch) if static is None else static.fill(batch, logit_rows)

    @property
    def nbytes(self) -> int:
        return self._ops.capture.nbytes

    def takes(self, step: CudaPass | None, key: object, parts: int) -> bool:
        if not isinstance(step, StaticStep):
            return False
        if not step.static.has(key):
            if self._new_parts and self._new_parts + parts > self.most_new:
                return False  # a later pass will record it
            self._new_parts += parts
        return True

    def run(
        self,
        step: CudaPass,
        x: Stream,
        key: object,
        body: Callable[[CudaPass, Stream], Stream],
        check: Check | None = None,
    ) -> Logits | None:
        assert isinstance(step, StaticStep), "it takes the pass"
        static, before = step.static, x.settle()
        values = static.values(before)

        def settled(step: CudaPass) -> None:
            after = body(step, Stream(values)).settle()
            assert after is values, "steps add to the stream where it is"

        found = static.run(key, step, settled, before, check)
        x.values = values
        if found.logits is None:
            return None
        if self.while_waiting is not None:
            self.while_waiting()
        if step.best_only and found.best is not None:
            return found.best.rows()
        return found.logits.to_host()

    def forget(self, key: object | None = None) -> None:
        if key is None:
            self._shapes.clear()
        for entry in self._shapes.values():
            if entry.static is not None:
                entry.static.forget(key)

    def share(self, rows: Tensor, routing: Routing, table: ExpertTable) -> HybridExchange | None:
        recording = self._ops.recording
        if recording is None:
            return None
        assert isinstance(routing, CudaRouting), "the choice is made on the GPU"
        return HybridExchange(recording, rows, routing, table)

    def of(self, batch: Batch, shape: _Shape | None) -> StaticPass | None:
        """The recordings for passes of this shape; None if it is new or not recorded."""
        self._passes += 1
        if shape is None:
            return None
        entry = self._shapes.get(shape)
        if entry is None:
            device_of(self._ops.device).fresh_passes += 1
            self._shapes[shape] = _ShapeEntry()
            if len(self._shapes) > _MAX_SHAPES:
                self._shapes.popitem(last=False)
            return None
        self._shapes.move_to_end(shape)
        entry.used = self._passes
        if entry.static is None and self._has_room():
            entry.static = StaticPass(self._ops, batch, shape)
        return entry.static

    def _has_room(self) -> bool:
        """Whether one more shape may be recorded."""
        recorded = [entry for entry in self._shapes.values() if entry.static is not None]
        if len(recorded) < _MAX_RECORDED:
            return True
        oldest = min(recorded, key=lambda entry: entry.used)
        idle = self._passes - oldest.used > _IDLE
        if idle:
            oldest.static = None
        return idle

    def shape(
        self,
        batch: Batch,
        logit_rows: Sequence[int] | None,
        features: Features | None = None,
        target_features: Logits | None = None,
        *,
        whole: bool = False,
    ) -> _Shape | None:
        """The shape of a pass, padded if it is ``whole``; None if recording it does not pay."""
        spans, count = batch.spans, len(batch.tokens)
        if not batch.plain or count > MOST_ROWS:
            return None
        if logit_rows is not None and not len(logit_rows):
            return None
        if any(span.cache.length + span.rows > span.cache.capacity for span in spans):
            return None
        adapters = self._ops.recorded_adapters(batch)
        if adapters is None:
            return None
        places, rows, each, waiting = 1 << (len(spans) - 1).bit_length(), count, 0, 0
        if isinstance(spans[0].cache, HybridCache):
            most = max(states_of(span.cache).waiting for span in spans)
            waiting = max(_WAITING, 1 << (most - 1).bit_length())
            places, each = len(spans), max(span.rows for span in spans)
        elif whole:
            rows = next(most for most in _ROWS if most >= count)
            places += rows > 1  # one for the rows that are left
        for span in spans:
            span.cache.reserve(span.cache.length + span.rows)
        every = logit_rows is None or [*logit_rows] == [*range(count)]
        columns = widest_mask(spans)
        if columns:
            columns = max(_COLUMNS, 1 << (columns - 1).bit_length())
        layers = () if features is None else features.layers
        return _Shape(
            places,
            max(kv_of(span, BlockedCache).room for span in spans),
            rows,
            each,
            0 if logit_rows is None or every else len(logit_rows),
            columns,
            waiting,
            adapters,
            layers,
            0 if features is None else features.rows.shape[1] // len(layers),
            0 if target_features is None else target_features.shape[1],
        )


class GraphedForward:
    """A decoder's ``forward`` that records passes seen twice, and replays them."""

    def __init__(self, ops: RecordedOps, forward: Forward) -> None:
        self._ops, self._device = ops, device_of(ops.device)
        self._forward = forward
        self._recordings = Recordings(ops)
        self._host = np.empty(0, np.float32)  # the logits of a pass, in pinned RAM

    def __call__(
        self,
        batch: Batch,
        *,
        rows: Sequence[int] | None = None,
        check: Callable[[], None] | None = None,
        features: Features | None = None,
        target_features: Logits | None = None,
    ) -> Logits:
        with self._ops.scope():
            shape = self._recordings.shape(batch, rows, features, target_features, whole=True)
            static = self._recordings.of(batch, shape)
            if static is None:
                more = {} if target_features is None else {"target_features": target_features}
                return self._forward(batch, rows=rows, check=check, features=features, **more)
            if check is not None:
                check()
            step, count = static.fill(batch, rows), len(batch.tokens)
            if target_features is not None:
                static.target_features[:count], static.target_features[count:] = (
                    target_features,
                    target_features[-1],
                )
            found = static.run("pass", step, partial(static.whole, self._forward))
            wanted = count if rows is None else len(rows)
            host = self._to_host(found, wanted, best_only=step.best_only)
        if features is not None:
            for layer, values in zip(features.layers, static.features.rows, strict=True):
                out = features.of(layer)
                assert out is not None, "it is listed"
                out[:] = values[:count]
        for span in batch.spans:
            span.cache.advance(span.rows)
        return host

    def _to_host(self, found: Recording, rows: int, *, best_only: bool) -> Logits:
        """Wait for the pass to end; copy its first rows, or the best of them, by pinned RAM."""
        if best_only and found.best is not None:
            return found.best.rows(rows)
        logits = found.logits
        assert logits is not None, "the pass has left its logits"
        size = rows * logits.shape[1]
        if self._host.size < size:
            self._host = self._device.pinned((logits.size,), np.float32)
        host = self._host[:size]
        self._device.copy_out(host, logits.address)
        self._device.synchronize()
        return host.reshape(rows, -1).copy()


def _skip(between: Between) -> None:
    """A ``Cut`` for a run that only warms up."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A recording and the function that replays it."""

    replay: Replay
    recording: Recording


@dataclass(slots=True, kw_only=True)
class StaticStep(CudaPass):
    """A pass whose inputs are ``static``."""

    static: StaticPass
    best_only: bool = False  # see ``Batch``


@dataclass(frozen=True, slots=True, eq=False)
class _StaticFeatures(Features):
    """Features as ``rows`` (layers, R, D)."""

    def of(self, layer: int) -> Logits | None:
        return self.rows[self.layers.index(layer)] if layer in self.layers else None


class StaticPass:
    """The recordings of one shape of passes, and their inputs at fixed addresses.

    ``features`` and ``target_features`` are in pinned RAM.
    """

    def __init__(self, ops: RecordedOps, batch: Batch, shape: _Shape) -> None:
        self._ops, self._shape = ops, shape
        self._device = device = device_of(ops.device)
        spans = SpanNumbers(shape.spans, shape.rows, shape.blocks, shape.columns)
        spans.fill(batch.spans)
        self._numbers = Numbers(spans, shape.logit_rows)
        count, pool = len(self._numbers.staged), device.persistent
        self._inputs = zeros(count, dtype=INT64, device=device, pool=pool)
        self._parts, logit_rows = self._numbers.split(self._inputs, shape.blocks * BLOCK_TOKENS)
        self._index = logit_rows if shape.logit_rows else None
        # Counts the tokens of passes that are recorded: they come into the caches by replays.
        self._counter = BlockedCache((), shape.rows, UINT8, device)
        self._counter.reserve(shape.rows)
        self.target_features = device.pinned((shape.rows, shape.target_width), np.float32)
        rows = device.pinned((len(shape.features), shape.rows, shape.hidden), np.float32)
        self.features = _StaticFeatures(shape.features, rows)
        self._table: SequenceTable | None = None
        if shape.each:
            layers = len(states_of(batch.spans[0].cache).layout.specs)
            sizes = shape.spans, shape.rows, shape.each, shape.waiting
            self._table = SequenceTable(*sizes, layers=layers, nodes=shape.spans * shape.columns)
        self._sequences: Tensor | None = None  # the table's copy
        self._step: CudaPass | None = None  # the pass that is replayed
        self._values: Tensor | None = None
        self._runs: dict[object, _Run] = {}
        self._shared: dict[object, Any] = {}

    def fill(self, batch: Batch, logit_rows: Sequence[int] | None) -> StaticStep:
        """Begin a pass of ``batch``, which has this shape."""
        index = logit_rows if logit_rows is not None and self._index is not None else ()
        self._numbers.fill(batch.tokens, batch.positions, batch.spans, index)
        self._inputs.put(self._numbers.staged)
        step = StaticStep(*self._parts, batch.spans, static=self, best_only=batch.best_only)
        if self._table is not None:
            self._table.fill(batch.spans, begin_states(batch.spans))
            step.sequences = self._table.split(self._upload(self._table))
        return step

    def _upload(self, table: SequenceTable, *, dry: bool = False) -> Tensor:
        self._sequences = table.upload(self._device, self._sequences, dry=dry)
        return self._sequences

    def values(self, like: Tensor) -> Tensor:
        """The residual stream's values at their fixed address."""
        if self._values is None:
            self._values = empty(*like.shape, device=self._device, pool=self._device.persistent)
        return self._values

    def has(self, key: object) -> bool:
        """Whether ``key`` is recorded."""
        return key in self._runs

    def forget(self, key: object) -> None:
        """Drop the recording of ``key``, if any."""
        self._runs.pop(key, None)

    def run(
        self,
        key: object,
        step: StaticStep,
        body: Callable[[CudaPass], None],
        x: Tensor | None = None,
        check: Check | None = None,
    ) -> Recording:
        """Replay ``body`` for the pass ``step``; record it first if ``key`` is new. The host's work
        between graphs may call ``check``.

        ``x`` is first copied to the residual stream. Returns the recording, whose logits, if any,
        are valid until the next run.
        """
        run = self._runs.get(key)
        if run is not None and step.best_only and run.recording.best is None:
            run.recording.stale |= run.recording.logits is not None
        if run is None or run.recording.stale:
            # The body runs once before it is recorded, and changes x.
            copy = None if x is None else empty(*x.shape, device=self._device).put(x)
            self._load(x)
            run = self._runs[key] = self._record(step, body)
            x = copy
        self._load(x)
        self._step = step
        try:
            run.replay(check)
        finally:
            self._step = None  # so that it keeps no cache alive
        return run.recording

    def whole(self, forward: Forward, step: CudaPass) -> None:
        """The body of a whole pass: ``forward``, without counting its tokens in the caches."""
        shape, numbers = self._shape, np.zeros(self._shape.rows, np.int64)
        batch = Batch(numbers, numbers, (Span(self._counter, shape.rows),))
        features = self.features if shape.features else None
        more = {"target_features": self.target_features} if shape.target_width else {}
        try:
            forward(batch, rows=range(shape.logit_rows or shape.rows), features=features, **more)
        finally:
            self._counter.trim(0)

    def _launched(self, recorded: CudaPass) -> Between:
        """What notes, in a replay, that a graph computes the recurrent layers of ``recorded``."""
        layers, recorded.mixed = recorded.mixed, set()

        def note(check: Check | None) -> None:
            assert self._step is not None, "it replays a pass"
            for layer in layers:
                self._step.layer_done(layer)

        return note

    def _load(self, x: Tensor | None) -> None:
        if x is not None:
            values = self.values(x)
            if x is not values:
                values.put(x)

    def _record(self, step: StaticStep, body: Callable[[CudaPass], None]) -> _Run:
        self._device.fresh_passes += 1
        fresh = replace(step, tables={}, mixed=set())
        recording = Recording(fresh, self._index, self._shared, _skip)

        def once(cut: Cut) -> None:
            recording.step.tables.clear()
            recording.step.mixed.clear()
            recording.beside.clear()
            recording.cut = cut
            self._ops.recording = recording
            try:
                body(recording.step)
                if step.best_only and recording.logits is not None:
                    recording.best = recording.best or BestLogits(recording.logits)
                    recording.best.find(recording.logits)
            finally:
                self._ops.recording = None

        if self._table is not None:
            self._upload(self._table, dry=True)
        once(_skip)  # compiles missing kernels: not allowed while recording
        if self._table is not None:
            self._upload(self._table)
        replay = record(once, self._ops.capture, recording.beside, partial(self._launched, fresh))
        recording.step.spans = ()  # so that it keeps no cache alive
        if recording.logits is not None:
            # Copied at once: another graph may write to the same memory.
            recording.logits = replace(recording.logits, block=None)
        return _Run(replay, recording)
