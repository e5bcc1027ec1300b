"""Makes the KV caches of a placement, with some layers in RAM and some on the SSD.

As ``NativeOps.kv_maker`` it replaces caches that are entirely in RAM. Its buffers are made once and
never grow: two, for the computing layer and the next one's load. So two sequences share a pass at
most, and their layers then wait for their loads; the schedule postpones others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from weakref import WeakSet

from localrt.common.errors import OptionError
from localrt.offload.kv.cache import SlotPool, SsdKVCache, block_stride
from localrt.offload.kv.file import IoThread
from localrt.offload.placement import KvPlace
from localrt.quant.cpu.kv import NativeKVCache, token_nbytes
from localrt.quant.ops.attention import AttentionSpec
from localrt.quant.ops.kv import grown_capacity
from localrt.quant.ops.kv_formats import BLOCK_TOKENS, CacheFormat


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
