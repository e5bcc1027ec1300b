"""CUDA graphs of short passes: a decode step costs one launch instead of hundreds.

A pass over one sequence with a number of rows seen before (1 in decoding, K in verifying a tree) is
recorded with static inputs and replayed from then on. A recording belongs to one cache as it is
allocated; growth makes a new one. It knows a ``forward`` and the steps under it, not models. Off a
GPU, "replaying" runs the pass again on the static inputs, so that tests cover the rest.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localrt.quant.ops.cuda.kernels.products import MOST_ROWS
from localrt.quant.ops.cuda.stream import CudaPass, Logits, Numbers, Recording
from localrt.quant.ops.protocol import Batch, Forward, KVCache, Span
from localrt.quant.ops.torch.kv import TorchKVCache

__all__ = ["DecodeGraph", "GraphedForward", "RecordedOps", "record"]

_KEPT = 8


class RecordedOps(Protocol):
    """What recording asks of ``CudaOps``."""

    recording: Recording | None  # set while a pass is recorded

    @property
    def device(self) -> str:
        """``"cuda:0"``."""

    def scope(self) -> AbstractContextManager[None]:
        """Held around a pass."""

    def tree(self, mask: npt.NDArray[np.bool_]) -> Tensor:
        """A span's mask as the kernels read it."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a recording is valid for, beside its cache."""

    cache: int  # its id
    allocated: int
    rows: int
    wanted: tuple[int, ...]
    masked: bool


@dataclass(slots=True)
class _Seen:
    """A shape that came once, and its recording from the second time on."""

    cache: weakref.ref[TorchKVCache]
    graph: DecodeGraph | None = None


class GraphedForward:
    """A decoder's ``forward`` that records what comes twice, and replays it."""

    def __init__(self, ops: RecordedOps, forward: Forward) -> None:
        self._ops = ops
        self._forward = forward
        self._seen: OrderedDict[_Shape, _Seen] = OrderedDict()
        # Graphs run one at a time and leave nothing behind: they can share their scratch memory.
        self._pool = torch.cuda.graph_pool_handle() if ops.device != "cpu" else None

    def __call__(
        self,
        batch: Batch,
        *,
        rows: Sequence[int] | None = None,
        check: Callable[[], None] | None = None,
    ) -> Logits:
        """See ``Decoder.forward``."""
        shape = self._shape(batch, rows)
        if shape is None:
            return self._forward(batch, rows=rows, check=check)
        seen = self._seen.get(shape)
        if seen is None or seen.cache() is not batch.spans[0].cache:
            self._note(shape, batch.spans[0].cache)
            return self._forward(batch, rows=rows, check=check)
        if check is not None:
            check()
        self._seen.move_to_end(shape)
        if seen.graph is None:
            seen.graph = DecodeGraph(self._ops, self._forward, batch, shape.wanted, pool=self._pool)
        return seen.graph.run(batch)

    def _note(self, shape: _Shape, cache: KVCache) -> None:
        """Remember a new shape; forget recordings of caches that are gone or have grown."""
        assert isinstance(cache, TorchKVCache)
        for other, seen in list(self._seen.items()):
            grown = other.cache == shape.cache and other.allocated != shape.allocated
            if grown or seen.cache() is None:
                del self._seen[other]
        self._seen[shape] = _Seen(weakref.ref(cache))
        self._seen.move_to_end(shape)
        while len(self._seen) > _KEPT:
            self._seen.popitem(last=False)

    def _shape(self, batch: Batch, rows: Sequence[int] | None) -> _Shape | None:
        """None: the pass is not worth recording."""
        if len(batch.spans) != 1 or len(batch.tokens) > MOST_ROWS:
            return None
        if rows is not None and not rows:
            return None
        (span,) = batch.spans
        cache = span.cache
        if not isinstance(cache, TorchKVCache):
            return None
        with self._ops.scope():
            cache.reserve(cache.length + span.rows)
        wanted = tuple(range(span.rows)) if rows is None else tuple(rows)
        return _Shape(id(cache), cache.allocated, span.rows, wanted, span.mask is not None)


def record(body: Callable[[], None], pool: Any) -> Callable[[], None]:
    """What replays the kernels that ``body`` starts; ``pool`` has their scratch memory.

    Meanwhile other threads may allocate, copy and pin: recording looks at its own thread's calls.
    """
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        body()
    replay: Callable[[], None] = graph.replay
    return replay


class DecodeGraph:
    """One recorded pass. ``run`` replays it for other tokens at the sequence's next places."""

    def __init__(
        self,
        ops: RecordedOps,
        forward: Forward,
        batch: Batch,
        wanted: Sequence[int],
        *,
        pool: Any = None,
    ) -> None:
        (span,) = batch.spans
        self._ops = ops
        self._rows = span.rows
        self._wanted = list(wanted)
        with ops.scope():
            device = torch.device(ops.device)
            pinned = device.type == "cuda"
            self._numbers = Numbers(span.rows, 1, pinned=pinned)
            self._static = torch.zeros_like(self._numbers.staged, device=device)
            tokens, positions, held = self._numbers.split(self._static)
            tree = None if span.mask is None else ops.tree(span.mask)
            whole = self._wanted == list(range(span.rows))
            index = None if whole else torch.tensor(self._wanted, device=device)
            assert isinstance(span.cache, TorchKVCache)
            limit = (span.cache.allocated,)
            step = CudaPass(tokens, positions, held, batch.spans, (tree,), limit)
            self._recording = Recording(step, index)
            self._stage(batch)
            body = self._once(forward, batch)
            body()  # compiles what is left to compile, which recording must not do
            self._replay = body
            if pinned:
                self._replay = record(body, pool)
                step.spans = ()  # the cache is not this recording's to keep alive
            logits = self._logits()
            self._host = torch.empty(logits.shape, dtype=torch.float32, pin_memory=pinned)

    def run(self, batch: Batch) -> Logits:
        """The pass for ``batch``, whose shape is the recorded one's: logits on the host."""
        with self._ops.scope():
            self._stage(batch)
            self._replay()
            self._host.copy_(self._logits(), non_blocking=True)
            if self._host.is_pinned():
                torch.cuda.current_stream().synchronize()
        batch.spans[0].cache.advance(self._rows)
        logits: Logits = self._host.numpy().copy()
        return logits

    def _stage(self, batch: Batch) -> None:
        (span,) = batch.spans
        self._numbers.fill(batch.tokens, batch.positions, [span.cache.length])
        self._static.copy_(self._numbers.staged, non_blocking=True)
        (tree,) = self._recording.step.trees
        if tree is not None:
            assert span.mask is not None
            tree.copy_(torch.from_numpy(np.ascontiguousarray(span.mask, np.int8)))

    def _once(self, forward: Forward, batch: Batch) -> Callable[[], None]:
        """The pass as recorded: its steps read the static inputs, and the cache counts nothing."""
        cache = batch.spans[0].cache
        static = Batch(batch.tokens, batch.positions, (Span(cache, self._rows),))

        def body() -> None:
            length = cache.length
            self._recording.step.tables.clear()
            self._ops.recording = self._recording
            try:
                forward(static, rows=self._wanted)
            finally:
                self._ops.recording = None
                cache.trim(length)

        return body

    def _logits(self) -> Tensor:
        assert self._recording.logits is not None, "the pass has left its logits"
        return self._recording.logits
