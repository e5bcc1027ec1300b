"""KV cache offloading: some layers are on an SSD, loaded before their attention, saved after it.

Full blocks of 256 tokens are in the file, the partial last block in RAM: no write for each token.
While a layer computes, the next one's blocks are loaded into one of a few fixed buffers that all
caches share; the buffer that is needed last is filled first, since layers are used cyclically.
Attention sees the same bytes in the same places as with a cache in RAM. Rows that a pass has
written count from ``advance`` on; a failed pass leaves the held tokens as they were.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakSet

from localrt.common.errors import MemoryBudgetError, OptionError, StorageError
from localrt.common.files import PAGE
from localrt.common.forks import finalize
from localrt.offload.kv.file import IoTask, IoThread, KvFile
from localrt.offload.placement import KvPlace
from localrt.quant.cpu.kv import NativeKVCache, cache_format, map_zeros, move_rows, token_nbytes
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.attention import AttentionSpec
from localrt.quant.ops.kv import grown_capacity
from localrt.quant.ops.kv_formats import BLOCK_TOKENS, CacheFormat, block_nbytes


class KvBuffer:
    """One buffer. It holds blocks [``first``, ``stop``) of ``layer`` of the cache ``owner``."""

    __slots__ = ("address", "busy", "data", "first", "layer", "load", "owner", "stop", "task")

    def __init__(self, data: Bytes) -> None:
        self.data = data
        self.address: int = data.ctypes.data
        self.task: IoTask | None = None  # the last task that reads or writes the buffer
        self.free()

    def free(self) -> None:
        """Mark the buffer as empty."""
        self.owner: object = None
        self.layer = -1
        self.first = self.stop = 0
        self.load: IoTask | None = None
        self.busy = False  # whether a pass computes on it


class SlotPool:
    """``count`` buffers of ``nbytes`` each. One pass at a time; ``forget`` from anywhere."""

    def __init__(self, count: int, nbytes: int) -> None:
        size = -(-nbytes // PAGE) * PAGE
        memory = map_zeros(count * size)
        self.nbytes = count * size
        self._slots = [KvBuffer(memory[i * size : (i + 1) * size]) for i in range(count)]
        self._active: deque[object] = deque(maxlen=count)  # owners in the present pass
        self._lock = threading.RLock()  # reentrant: a finalizer may call ``forget`` at any time

    def begin(self, owner: object) -> None:
        """Begin a pass with ``owner``: none of its buffers is in use until its layers compute."""
        with self._lock:
            self._active.append(owner)
            for slot in self._slots:
                slot.busy = False

    def find(self, owner: object, layer: int) -> KvBuffer | None:
        """The buffer that holds ``layer`` of ``owner``, or is being filled with it."""
        with self._lock:
            for slot in self._slots:
                if slot.owner is owner and slot.layer == layer:
                    return slot
        return None

    def take(
        self, owner: object, layer: int, distance: Callable[[int], int], *, ahead: bool
    ) -> KvBuffer | None:
        """An empty buffer for ``layer``. ``distance`` says how many layers later one is needed.

        With ``ahead``, no buffer is taken that is needed sooner or by another cache of the same
        pass; None if there is no other.

        Raises:
            MemoryBudgetError: a pass is computing on every buffer.
        """
        with self._lock:
            best, best_rank = None, -1
            for slot in self._slots:
                rank = self._rank(slot, owner, distance)
                if not slot.busy and rank > best_rank:
                    best, best_rank = slot, rank
            if best is None and not ahead:
                raise MemoryBudgetError(
                    f"keys and values on the SSD have buffers for {len(self._slots)} sequences at "
                    "once: run fewer together"
                )
            if best is None or (ahead and best_rank <= distance(layer)):
                return None
            best.free()
            best.owner, best.layer = owner, layer
            return best

    def forget(self, owner: object) -> None:
        """Free the buffers of ``owner``, which is closed."""
        with self._lock:
            for slot in self._slots:
                if slot.owner is owner:
                    slot.free()

    def _rank(self, slot: KvBuffer, owner: object, distance: Callable[[int], int]) -> int:
        """How late the buffer's content is needed: larger is later."""
        if slot.owner is None:
            return 1 << 30
        if slot.owner is owner:
            return distance(slot.layer)
        return 0 if any(slot.owner is other for other in self._active) else 1 << 29


def block_stride(spec: AttentionSpec, kv_format: CacheFormat) -> int:
    """Bytes from one block of a layer to the next, in its buffer and in the file: whole pages."""
    kv_format = cache_format([spec], kv_format)
    return -(-block_nbytes(spec.cached_heads, spec.head_dim, kv_format) // PAGE) * PAGE


@dataclass(slots=True)
class _Stored:
    """One layer on the SSD."""

    offset: int  # offset of its blocks in the file
    stride: int
    window: int | None
    shape: tuple[int, int]  # kv heads, head size
    tail: Bytes  # the block with the first token that is not in the file
    next_tail: Bytes  # the tail after ``advance``
    saved: int = 0  # tokens in the file
    next_saved: int | None = None
    saves: list[IoTask] = field(default_factory=list)


class SsdKVCache(NativeKVCache):
    """See ``NativeKVCache``. ``places`` says for each layer whether it is on the SSD.

    Raises:
        StorageError: the disk fails or is full; raised on creation, in ``reserve`` or in a pass.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        capacity: int,
        kv_format: CacheFormat,
        *,
        places: Sequence[KvPlace],
        folder: Path,
        slots: SlotPool,
        io: IoThread,
    ) -> None:
        ssd = [layer for layer, place in enumerate(places) if place == "ssd"]
        in_ram = [layer for layer, place in enumerate(places) if place != "ssd"]
        super().__init__(
            [(specs[n].cached_heads, specs[n].head_dim) for n in in_ram], capacity, kv_format
        )
        # After it come only layers that read an earlier one's cache, in RAM.
        self._last_layer = max(n for n, spec in enumerate(specs) if spec.reads is None)
        self._ram_index = {layer: index for index, layer in enumerate(in_ram)}
        self._order = ssd
        self._turn = {layer: index for index, layer in enumerate(ssd)}
        self._slots, self._io = slots, io
        self._key = object()
        strides = [block_stride(specs[layer], kv_format) for layer in ssd]
        self._tails = map_zeros(2 * sum(strides))
        self._stored: dict[int, _Stored] = {}
        blocks, offset, at = grown_capacity(capacity) // BLOCK_TOKENS, 0, 0
        for layer, stride in zip(ssd, strides, strict=True):
            first, second = (self._tails[at + n * stride :][:stride] for n in range(2))
            spec = specs[layer]
            shape = (spec.cached_heads, spec.head_dim)
            self._stored[layer] = _Stored(offset, stride, spec.window, shape, first, second)
            offset, at = offset + blocks * stride, at + 2 * stride
        self._file = KvFile(folder)
        finalize(self, _release, io, slots, self._file, self._key)

    @property
    def nbytes(self) -> int:
        """Bytes of RAM, without the shared buffers."""
        return super().nbytes + self._tails.nbytes

    @property
    def kv_layout(self) -> str:
        """Empty: blocks on the SSD are not saved elsewhere."""
        return ""

    def part(self, layer: int) -> tuple[NativeKVCache | None, int]:
        """The cache with a layer's keys and values in RAM, if any, and its place in it."""
        return self if layer in self._ram_index else None, layer

    @property
    def read_bytes(self) -> int:
        """Bytes read from the file."""
        return self._file.read_bytes

    def reserve(self, length: int) -> None:
        """Begin a pass: make room, on the disk too, and start the first load."""
        self._abandon()
        self._slots.begin(self._key)
        before = self.allocated
        super().reserve(length)
        try:
            for stored in self._stored.values():
                at, count = before // BLOCK_TOKENS, (self.allocated - before) // BLOCK_TOKENS
                self._file.reserve(stored.offset + at * stored.stride, count * stored.stride)
        except StorageError:
            self.allocated = before
            raise
        if self._order:
            self._load_ahead(self._order[0], self._order[-1])

    def layer_ready(self, layer: int) -> tuple[int, int]:
        """Wait for the layer's blocks, and start the next layer's."""
        stored = self._stored.get(layer)
        if stored is None:
            return super().layer_ready(self._ram_index[layer])
        slot = self._slots.find(self._key, layer)
        if slot is None:
            slot = self._take(layer, layer, ahead=False)
            assert slot is not None, "a buffer, or an error"
        try:
            self._complete(slot, stored)
        except StorageError:
            slot.free()
            raise
        slot.busy = True
        self._load_ahead(self._order[(self._turn[layer] + 1) % len(self._order)], layer)
        return slot.address, stored.stride

    def layer_done(self, layer: int, rows: int) -> None:
        """Save the blocks that are full now and keep the rest; the last layer waits for all saves.

        Raises:
            StorageError: a save failed; ``advance`` must not be called.
        """
        stored = self._stored.get(layer)
        if stored is not None:
            slot = self._slots.find(self._key, layer)
            assert slot is not None, "a layer is ready before it is done"
            self._save(slot, stored, self._length + rows)
            slot.busy = False
        if layer == self._last_layer:
            tasks = [task for stored in self._stored.values() for task in stored.saves]
            wait(tasks)
            for task in tasks:
                task.result()

    def advance(self, count: int) -> None:
        super().advance(count)
        for stored in self._stored.values():
            if stored.next_saved is not None:
                stored.saved, stored.next_saved = min(stored.next_saved, self._length), None
                stored.tail, stored.next_tail = stored.next_tail, stored.tail
                stored.saves.clear()

    def trim(self, length: int) -> int:
        """Forget tokens from ``length`` on."""
        self._abandon()
        super().trim(length)
        for stored in self._stored.values():
            stored.saved = min(stored.saved, length)
        return length

    def _move(self, first: int, rows: Sequence[int]) -> None:
        super()._move(first, rows)
        for layer, stored in self._stored.items():
            slot = self._slots.find(self._key, layer)
            if slot is not None and slot.task is not None:
                wait([slot.task])
            self._move_stored(stored, first, rows)
            if slot is not None:
                slot.stop = min(slot.stop, first // BLOCK_TOKENS)

    def _move_stored(self, stored: _Stored, first: int, rows: Sequence[int]) -> None:
        """Replace token ``first + i`` by token ``first + rows[i]``; tokens after them are lost.

        The few blocks concerned are gathered in RAM, changed there, and the full ones written.

        Raises:
            StorageError: the disk fails. Tokens from ``first`` on are lost.
        """
        begin, stop = first // BLOCK_TOKENS, (first + rows[-1]) // BLOCK_TOKENS + 1
        stride, at = stored.stride, stored.offset + begin * stored.stride
        blocks = map_zeros((stop - begin) * stride)
        in_file = max(0, min(stop, -(-stored.saved // BLOCK_TOKENS)) - begin)
        if in_file:
            self._io.start(lambda: self._file.read_into(at, blocks[: in_file * stride])).result()
        if begin + in_file < stop:
            blocks[in_file * stride : (in_file + 1) * stride] = stored.tail
        size = block_nbytes(*stored.shape, self.kv_format)
        view = blocks.reshape(stop - begin, 1, stride)[:, :, :size]
        move_rows(view, *stored.shape, self.kv_format, first - begin * BLOCK_TOKENS, rows)
        end = first + len(rows)
        full = end // BLOCK_TOKENS - begin
        if full > 0:
            self._io.start(lambda: self._file.write(at, blocks[: full * stride])).result()
        if end % BLOCK_TOKENS:
            stored.tail[:] = blocks[full * stride : (full + 1) * stride]
        stored.saved = end // BLOCK_TOKENS * BLOCK_TOKENS

    # -- one layer -------------------------------------------------------------------------------

    def _abandon(self) -> None:
        """Clean up after an abandoned pass: wait for its saves and do not count them."""
        for stored in self._stored.values():
            wait(stored.saves)
            stored.saves.clear()
            stored.next_saved = None

    def _wanted(self, stored: _Stored) -> tuple[int, int]:
        """The blocks of a layer that are in the file and may be seen."""
        first = 0 if stored.window is None else max(0, self._length - stored.window) // BLOCK_TOKENS
        stop = -(-stored.saved // BLOCK_TOKENS)
        return min(first, stop), stop

    def _take(self, layer: int, after: int, *, ahead: bool) -> KvBuffer | None:
        """An empty buffer. ``after`` is the layer that computes now."""
        here = self._turn[after]

        def distance(other: int) -> int:
            return (self._turn[other] - here - ahead) % len(self._order)

        return self._slots.take(self._key, layer, distance, ahead=ahead)

    def _load_ahead(self, layer: int, now: int) -> None:
        """Start to load ``layer`` unless it is loaded, or there is no buffer for it."""
        if self._slots.find(self._key, layer) is not None:
            return
        slot = self._take(layer, now, ahead=True)
        if slot is None:
            return
        stored = self._stored[layer]
        first, stop = self._wanted(stored)
        slot.first, slot.stop = first, stop
        if stop > first:
            slot.load = slot.task = self._io.start(lambda: self._read(slot, stored, first, stop))

    def _complete(self, slot: KvBuffer, stored: _Stored) -> None:
        """Load the rest of a layer's tokens into its buffer."""
        first, stop = self._wanted(stored)
        if slot.task is not None:
            wait([slot.task])
        if slot.load is not None:
            slot.load.result()
        slot.load = slot.task = None
        if slot.stop <= slot.first or first < slot.first:
            slot.first = slot.stop = first
        if stop > slot.stop:
            begin, slot.stop = slot.stop, stop
            self._io.start(lambda: self._read(slot, stored, begin, stop)).result()
        if self._length > stored.saved:
            at = stored.saved // BLOCK_TOKENS * stored.stride
            slot.data[at : at + stored.stride] = stored.tail

    def _read(self, slot: KvBuffer, stored: _Stored, first: int, stop: int) -> None:
        blocks = slot.data[first * stored.stride : stop * stored.stride]
        self._file.read_into(stored.offset + first * stored.stride, blocks)

    def _save(self, slot: KvBuffer, stored: _Stored, end: int) -> None:
        """Save the full blocks of a layer whose buffer has rows up to ``end``."""
        first, full, stride = stored.saved // BLOCK_TOKENS, end // BLOCK_TOKENS, stored.stride
        if stored.saved % BLOCK_TOKENS:  # trimmed into the file: the block's held tokens go to RAM
            stored.tail[:] = slot.data[first * stride : (first + 1) * stride]
            stored.saved = first * BLOCK_TOKENS
        slot.stop = max(slot.stop, -(-end // BLOCK_TOKENS))
        if full == first:
            stored.tail[:] = slot.data[first * stride : (first + 1) * stride]
            return
        blocks = slot.data[first * stride : full * stride]
        offset = stored.offset + first * stride
        slot.task = self._io.start(lambda: self._file.write(offset, blocks))
        stored.saves.append(slot.task)
        if end > full * BLOCK_TOKENS:
            stored.next_tail[:] = slot.data[full * stride : (full + 1) * stride]
        stored.next_saved = full * BLOCK_TOKENS


def _release(io: IoThread, slots: SlotPool, file: KvFile, key: object) -> None:
    """Release the buffers after the tasks that still use them."""

    def release() -> None:
        slots.forget(key)
        file.close()

    task = io.start(release)
    if task.done() and task.exception() is not None:  # the thread has ended
        release()


class KvTier:
    """Makes caches of at most ``capacity`` tokens, with layers on the SSD in files in ``folder``.

    Raises:
        OptionError: a layer would be on a GPU, or there is no buffer.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        places: Sequence[KvPlace],
        folder: Path,
        *,
        capacity: int,
        kv_format: CacheFormat,
        slots: int = 2,
    ) -> None:
        if len(places) != len(specs) or any(place not in ("ram", "ssd") for place in places):
            raise OptionError("keys and values of every layer must be in RAM or on the SSD here")
        read = {spec.reads for spec in specs if spec.reads is not None}
        if any(
            place == "ssd" and (spec.reads is not None or layer in read)
            for layer, (spec, place) in enumerate(zip(specs, places, strict=True))
        ):
            raise OptionError("keys and values that several layers attend to must be in RAM")
        if slots < 1:
            raise OptionError(f"keys and values on the SSD need a buffer at least, not {slots}")
        self.specs, self._places, self._folder = list(specs), tuple(places), folder
        self.capacity = capacity
        largest = max(
            (
                block_stride(spec, kv_format)
                for spec, place in zip(specs, places, strict=True)
                if place == "ssd"
            ),
            default=0,
        )
        self._slots = SlotPool(
            slots if largest else 0, grown_capacity(capacity) // BLOCK_TOKENS * largest
        )
        self._io = IoThread()
        self._caches: WeakSet[SsdKVCache] = WeakSet()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers in RAM, which all caches share."""
        return self._slots.nbytes

    @property
    def read_bytes(self) -> int:
        """Bytes read by the current caches."""
        return sum(cache.read_bytes for cache in self._caches)

    def cache(
        self, layers: Sequence[AttentionSpec], capacity: int, kv_format: CacheFormat
    ) -> NativeKVCache:
        """An empty cache for one sequence.

        Raises:
            StorageError: no file can be made in the folder.
        """
        assert capacity <= self.capacity, "the buffers are made for so many tokens"
        cache = SsdKVCache(
            layers,
            capacity,
            kv_format,
            places=self._places,
            folder=self._folder,
            slots=self._slots,
            io=self._io,
        )
        self._caches.add(cache)
        return cache

    def cache_nbytes(
        self, layers: Sequence[AttentionSpec], length: int, kv_format: CacheFormat
    ) -> int:
        """Bytes of RAM of one cache that has grown to ``length`` tokens, without the buffers."""
        in_ram, tails = [], 0
        for spec, place in zip(layers, self._places, strict=True):
            if place == "ssd":
                tails += 2 * block_stride(spec, kv_format)
            else:
                in_ram.append((spec.cached_heads, spec.head_dim))
        return token_nbytes(in_ram, kv_format) * grown_capacity(length) + tails

    def close(self) -> None:
        """End the thread after its tasks. Caches cannot be used afterwards."""
        self._io.close()
