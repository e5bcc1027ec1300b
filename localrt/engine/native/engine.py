"""The native engine: a decoder of ``localrt.models`` on an ``Ops`` implementation.

It turns tokens into passes: prefill in chunks, one pass at a time, KV bookkeeping per session. It
does not know text, sampling, or where weights came from.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, WeakSet, ref

import numpy as np

from localrt.common.errors import (
    LocalrtError,
    MemoryBudgetError,
    OptionError,
    UnsupportedModelError,
)
from localrt.common.formatting import format_bytes
from localrt.common.option_names import option
from localrt.engine.native.meters import RamForecast, RamMeter, RecentRates
from localrt.engine.native.session import NativeSession, rows_of_pass
from localrt.engine.protocol import Engine, EngineInfo, EngineSession, Forecaster, Logits, Speeds
from localrt.models.decoder import Decoder, FinalNorm
from localrt.models.weight_store import GpuUse, WeightStore
from localrt.offload.account import PREFILL_ROWS
from localrt.offload.memory import ram_budget
from localrt.quant.ops.adapters import Adapter, AdapterTable, LowRank, Mix
from localrt.quant.ops.arrays import AFTER_LAST, Features
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch, Check, Forward, Ops
from localrt.speculative.tree import TokenTree
from localrt.system import return_free_memory

if TYPE_CHECKING:
    from localrt.models.vision.encoder_cache import Take, VisionState
    from localrt.planning.forecast import Forecast

# Rows of logits computed at once if all are wanted: 39 MB at a vocabulary of 151,936.
_LOGIT_ROWS = 64
_ROWS_BESIDE = 64
_LOOK_S = 1.0  # seconds between looks at other programs' memory while weights are streamed
_VISION_NBYTES = 16 << 20  # for decoding pictures, the encoder's steps and some cached rows


class NativeEngine(Engine):
    """See ``Engine``.

    ``pass_rows`` is the most rows of a prefill pass. For a streaming decoder, ``plan`` is its
    placement, and ``forecaster`` forecasts its speed; the first disk rate is ``ssd_bytes_s``.
    ``ram`` forecasts the memory of the process.
    """

    shares_passes = True

    def __init__(
        self,
        decoder: Decoder,
        info: EngineInfo,
        *,
        pass_rows: int = PREFILL_ROWS,
        forecaster: Forecaster | None = None,
        ssd_bytes_s: float = 0.0,
        plan: Forecast | None = None,
        ram: RamForecast | None = None,
    ) -> None:
        self.plan = plan
        self._ram = RamMeter(ram)
        self._decoder: Decoder | None = decoder
        self.weights = decoder.weights
        self.recurrent = decoder.config.recurrent is not None
        self.pass_rows = pass_rows
        self._forecaster = forecaster
        self._taken = 0  # bytes of the RAM budget that are neither weights nor caches
        self._adapters_in_ram: dict[str, int] = {}  # bytes, by key
        self._rates = RecentRates(ssd_bytes_s)
        self._forward: Forward | None = decoder.forward
        # A pass can be captured as a graph only if its placement is fixed beforehand.
        weights = decoder.weights
        if not weights.memory.streams and all(experts.capturable for experts in weights.experts):
            self._forward = decoder.ops.graphed(decoder.forward)
        self.info = info
        self._turn = threading.Lock()
        self._thread: Executor | None = None
        self._caches: WeakSet[KVCache] = WeakSet()
        self._closed = threading.Event()
        if weights.memory.streams:
            name, args = "localrt-memory", (ref(self), self._closed)
            threading.Thread(target=_give_way, name=name, args=args, daemon=True).start()

    def pass_on(self, thread: Executor) -> None:
        """Run all passes on ``thread``, which is shut down when the engine closes."""
        forward = self._forward
        assert forward is not None, "the engine is open"
        self._forward = lambda *args, **options: thread.submit(forward, *args, **options).result()
        self._thread = thread

    def session(self, capacity: int) -> NativeSession:
        return NativeSession(
            self,
            self.cache(capacity),
            self._ram,
            attention_key=self._attention_key,
            reserve=self._reserve,
        )

    def attach_vision(self, make: Callable[[Sequence[Ops], Take], VisionState]) -> None:
        """Accept pictures; ``make`` gets the ``Ops`` and what takes memory from the budgets."""
        budgeted = self.weights.memory.streams or self.ram is not None
        if budgeted:
            with self._turn:
                self._take_within(_VISION_NBYTES)

        def take(nbytes: int, on_gpu: bool) -> None:
            if on_gpu:
                self._take_gpu(nbytes)
            elif budgeted:
                self._take_within(nbytes)

        self._loaded()
        self.vision = make(self.weights.implementations, take)

    def _take_within(self, nbytes: int) -> None:
        """``take_ram``, for a caller that holds ``_turn``."""
        if self.weights.memory.streams:
            self.weights.memory.take(nbytes)
            self._taken += nbytes
        self._ram.take(nbytes)

    def _take_gpu(self, nbytes: int) -> None:
        """The same for GPU memory. If nothing streams, ``nbytes`` must fit in what is left."""
        if self.weights.memory.streams:
            self.weights.memory.take_gpu(nbytes)
            return
        if nbytes > 0 and (use := self.gpu_use) is not None and nbytes > use.limit - use.used:
            left = format_bytes(max(use.limit - use.used, 0))
            raise MemoryBudgetError(f"the GPU has {left} left")

    def give_way(self) -> None:
        """Give other programs the memory that they need, unless a pass runs, which does so too."""
        if self._turn.acquire(blocking=False):
            try:
                with suppress(LocalrtError):  # the next pass reports it
                    self._take_within(0)
            finally:
                self._turn.release()

    def close(self) -> None:
        """Free the weights once the pass in flight has ended."""
        self._closed.set()
        with self._turn:
            if self.vision is not None:
                self.vision.close()
            self.vision = None
            self.weights.close()
            self.weights = WeightStore()  # an empty store
            self._decoder = self._forward = self._forecaster = None
        if self._thread is not None:
            self._thread.shutdown()

    def forecast(self) -> Speeds | None:
        counts = self.counts()
        if self._forecaster is None or counts is None:
            return None
        return self._forecaster(self._rates.now(counts))

    @property
    def is_mixture(self) -> bool:
        """Whether the model is a mixture of experts."""
        return any(self._loaded().config.mixtures)

    # -- trees and drafts (``localrt.engine.speculation``) -----------------------------------------

    @property
    def exact_rows(self) -> int:
        self._loaded()
        return self.weights.exact_rows

    @property
    def hidden_size(self) -> int:
        """Columns of the features."""
        return self._loaded().config.hidden_size

    @property
    def decoder(self) -> Decoder:
        """The model, for a draft head that shares parts of it."""
        return self._loaded()

    def hidden_states(
        self, texts: Sequence[Sequence[int]], *, check: Check | None = None
    ) -> Generator[tuple[int, Logits], None, None]:
        """See ``Engine``. Texts share passes; long ones span several."""
        left = deque((index, ids, 0) for index, ids in enumerate(texts))
        cache: KVCache | None = None  # of the first text that is left
        while left:
            parts: list[tuple[int, KVCache, Sequence[int]]] = []
            with self.background() as others:
                room = self._rows_beside(others)
                while left and room:
                    index, ids, done = left.popleft()
                    if cache is None or not done:
                        cache = self.cache(len(ids))
                    piece = ids[done : done + room]
                    parts.append((index, cache, piece))
                    done, room = done + len(piece), room - len(piece)
                    if done < len(ids):
                        left.appendleft((index, ids, done))
                states = self._normed_states(parts, check)
            yield from states

    def _rows_beside(self, others: int) -> int:
        """The rows of a background pass: few while ``others`` have work to do."""
        few = others and not self.info.streamed  # reading weights takes as long for few rows
        return min(_ROWS_BESIDE, self.pass_rows) if few else self.pass_rows

    def _normed_states(
        self, parts: Sequence[tuple[int, KVCache, Sequence[int]]], check: Check | None
    ) -> list[tuple[int, Logits]]:
        """Run a pass; return each part's index and its rows after the final norm."""
        rows = np.empty((sum(len(piece) for *_, piece in parts), self.hidden_size), np.float32)
        batch = Batch.extend([(cache, piece) for _, cache, piece in parts])
        self.run(batch, rows=[], check=check, features=Features((AFTER_LAST,), rows))
        ends = np.cumsum([len(piece) for *_, piece in parts])[:-1]
        normed = np.split(FinalNorm(self._loaded())(rows), ends)
        return [(index, own) for (index, *_), own in zip(parts, normed, strict=True)]

    @contextmanager
    def alone(self) -> Iterator[Ops]:
        """The ``Ops``, for a caller that computes with it; no pass runs meanwhile."""
        with self._turn:
            yield self._loaded().ops

    def cache(self, capacity: int) -> KVCache:
        """Return an empty KV cache, for a caller that runs its own passes."""
        cache = self._ram.holds(self._loaded().cache(capacity))
        self._caches.add(cache)
        return cache

    # -- adapters --------------------------------------------------------------------------------

    def add_adapter(self, adapter: Adapter[LowRank]) -> int:
        packed, ram, gpu = [], 0, 0
        for ops, table in self._adapting():
            with ops.scope():
                part = table.packed(adapter)
            packed.append((table, part))
            on_gpu = ops.device.startswith("cuda")
            ram, gpu = ram + part.nbytes * (not on_gpu), gpu + part.nbytes * on_gpu
        self.take_ram(ram)
        with self._turn:
            try:
                self.weights.memory.take_gpu(gpu)
            except MemoryBudgetError:
                self._take_within(-ram)
                raise
            for table, part in packed:
                table.add(part)
            self._adapters_in_ram[adapter.key] = ram
        return ram + gpu

    def remove_adapter(self, key: str) -> None:
        with self._turn:
            for _, table in self._adapting():
                table.remove(key)
        self.take_ram(-self._adapters_in_ram.pop(key, 0))

    def uses_adapter(self, key: str) -> bool:
        return any(cache.length and key in dict(cache.mix) for cache in list(self._caches))

    def _adapting(self) -> list[tuple[Ops, AdapterTable[Any]]]:
        """Return each ``Ops`` in use with its table of adapters."""
        self._loaded()
        found = []
        for ops in self.weights.implementations:
            if ops.adapters is None:
                raise UnsupportedModelError(
                    f"{ops.name} computes no adapters: use {option('engine', 'native')}"
                )
            found.append((ops, ops.adapters))
        return found

    @cached_property
    def _attention_key(self) -> str:
        """A key of windows, rotary frequencies and so on: some depend on the context's length."""
        specs = repr(self._loaded().config.memories)
        return hashlib.sha256(specs.encode()).hexdigest()[:12]

    def _reserve(self, cache: KVCache, length: int) -> None:
        """Make room in ``cache`` for ``length`` tokens that do not come from a pass."""
        with self._turn:
            self.weights.reserve(cache, length)

    def run(
        self,
        batch: Batch,
        *,
        rows: Sequence[int] | None = None,
        check: Check | None = None,
        features: Features | None = None,
    ) -> Logits:
        """Run a pass; return a copy of the logits (rows, vocab) of the chosen rows.

        ``features``: see ``Decoder.forward``.
        """
        with self._turn:
            self._loaded()
            assert self._forward is not None, "there is one as long as there is a decoder"
            vision = self.vision
            if vision is not None and (pictures := vision.picture_rows(batch.tokens, check)):
                tokens = np.where(batch.tokens < 0, vision.token, batch.tokens)
                batch = replace(batch, tokens=tokens, pictures=pictures)
            logits: Logits = self._forward(batch, rows=rows, check=check, features=features)
            self._ram.passed(len(batch.tokens), len(logits))
            return logits

    # -- many sequences in one pass (``localrt.engine.batch``) -------------------------------------

    def kv_nbytes(self, length: int) -> int:
        decoder = self._loaded()
        return decoder.ops.kv_nbytes(decoder.config.memory, length)

    def free_memory(self) -> int | None:
        return self._loaded().ops.free_memory()

    def idle_sessions(self, capacity: int) -> int:
        if self.info.streamed:
            return 1
        most = super().idle_sessions(capacity)
        return 1 + self._ram.idle_caches(self.kv_nbytes(capacity), most - 1)

    def ram_forecast(self) -> int | None:
        return self._ram.forecast()

    def set_budget(
        self,
        *,
        ram: int | None = None,
        gpu_memory: int | None = None,
        free: Callable[[], None] = lambda: None,
    ) -> None:
        if self.plan is None:
            super().set_budget(ram=ram, gpu_memory=gpu_memory, free=free)
            if ram is not None:
                with self._turn:
                    self._loaded()
                    self._ram.set_budget(ram_budget(ram))  # limits the next passes
            return
        with self._turn:
            self._loaded()
            if ram is not None:
                self._set_ram(ram_budget(ram), self.plan)
                self.ram = ram
            if gpu_memory is not None:
                self._set_gpu_memory(gpu_memory)
                self.gpu_memory = gpu_memory
        return_free_memory()

    def _set_ram(self, nbytes: int, plan: Forecast) -> None:
        elsewhere = plan.request.budgets.ram - plan.for_weights_and_caches() + self._taken
        note = f"the budget is {format_bytes(nbytes)} of RAM now"
        try:
            self.weights.memory.set_budget(nbytes - elsewhere, note)
        except MemoryBudgetError as error:
            raise MemoryBudgetError(
                f"{format_bytes(nbytes)} of RAM is too little for the model as it was loaded: "
                "what cannot be streamed and the conversations take more"
            ) from error

    def _set_gpu_memory(self, nbytes: int) -> None:
        if self.info.device == "cpu":
            raise OptionError("the model runs on the CPU alone: it has no GPU memory")
        note = f"the budget is {format_bytes(nbytes)} of GPU memory now"
        self.weights.memory.set_gpu_budget(nbytes, note)

    @property
    def gpu_use(self) -> GpuUse | None:
        free, memory = self._loaded().ops.free_memory(), self.weights.memory
        if memory.streams or free is None:
            return memory.gpu_use
        used = self.info.weight_bytes + sum(cache.nbytes for cache in list(self._caches))
        most = used + free if self.gpu_memory is None else self.gpu_memory
        return GpuUse(used, min(most, used + free))

    def take_ram(self, nbytes: int) -> None:
        with self._turn:
            self._loaded()
            self._take_within(nbytes)

    def extend_batch(
        self,
        parts: Sequence[tuple[EngineSession, Sequence[int]]],
        *,
        wanted: Sequence[int],
        check: Check | None = None,
    ) -> Logits:
        return self._extend((), parts, wanted, check)

    def extend_trees(
        self,
        parts: Sequence[tuple[EngineSession, int, TokenTree]],
        beside: Sequence[tuple[EngineSession, Sequence[int]]] = (),
        *,
        wanted: Sequence[int] = (),
        check: Check | None = None,
    ) -> list[Logits]:
        logits = self._extend(parts, beside, wanted, check)
        ends = list(accumulate((1 + len(tree) for _, _, tree in parts), initial=0))
        trees = [logits[start:end] for start, end in pairwise(ends)]
        return [*trees, *logits[ends[-1] :]]

    def _extend(
        self,
        parts: Sequence[tuple[EngineSession, int, TokenTree]],
        beside: Sequence[tuple[EngineSession, Sequence[int]]],
        wanted: Sequence[int],
        check: Check | None,
    ) -> Logits:
        """Run a pass; return logits of all tree rows, and of the last rows of ``wanted`` parts."""
        sessions = _own([*(part[0] for part in parts), *(part[0] for part in beside)])
        tokens = [np.concatenate([[token], tree.tokens]) for _, token, tree in parts]
        tokens += [np.asarray(ids, np.int64) for _, ids in beside]
        batch, shifts = rows_of_pass(sessions, tokens, [tree for *_, tree in parts], self.vision)
        readers = [*sessions[: len(parts)], *(sessions[len(parts) + part] for part in wanted)]
        if all(session.best_only for session in readers):
            batch = replace(batch, best_only=True)
        ends = list(accumulate(map(len, tokens)))
        features = self._features(sessions, ends[-1])
        trees = ends[len(parts) - 1] if parts else 0
        rows = [*range(trees), *(ends[len(parts) + part] - 1 for part in wanted)]
        logits = self.run(batch, rows=rows, check=check, features=features)
        for at, (session, ids, end) in enumerate(zip(sessions, tokens, ends, strict=True)):
            session.shift = shifts[at]
            done = session.opened if at < len(parts) else session.appended
            done(ids.tolist(), features, end - len(ids))
        return logits

    def _features(self, sessions: Sequence[NativeSession], rows: int) -> Features | None:
        """Return room for the features of a pass if one of its sessions records any."""
        layers = tuple(sorted({each for own in sessions for each in own.recorded_layers}))
        if not layers:
            return None
        return Features(layers, np.empty((rows, len(layers) * self.hidden_size), np.float32))

    def logits(
        self, tokens: Sequence[int], *, first: int = 0, mix: Mix = (), check: Check | None = None
    ) -> Iterator[Logits]:
        """See ``Engine``. Computed in pieces, since all rows at once would be large."""
        cache = self.cache(len(tokens))
        cache.mix = mix
        start = 0
        while start < first:
            with self.background() as others:
                chunk = tokens[start : min(start + self._rows_beside(others), first)]
                self.run(Batch.extend([(cache, chunk)]), rows=[], check=check)
            start += len(chunk)
        rows = min(_LOGIT_ROWS, self.pass_rows)
        for start in range(first, len(tokens), rows):
            with self.background():
                found = self.run(Batch.extend([(cache, tokens[start : start + rows])]), check=check)
            yield found

    def _loaded(self) -> Decoder:
        if self._decoder is None:
            raise LocalrtError("the model is closed: load it again")
        return self._decoder


def _own(sessions: Iterable[EngineSession]) -> list[NativeSession]:
    found = []
    for session in sessions:
        assert isinstance(session, NativeSession), "sessions belong to one engine"
        found.append(session)
    return found


def _give_way(engine: ReferenceType[NativeEngine], closed: threading.Event) -> None:
    """Look once a second whether other programs need memory, as long as there is the engine."""
    while not closed.wait(_LOOK_S) and (found := engine()) is not None:
        found.give_way()
        del found
