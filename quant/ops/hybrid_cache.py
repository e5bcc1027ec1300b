"""The cache of a sequence for models with both attention and recurrent layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.adapters import Mix
from localrt.quant.ops.attention import AttentionSpec
from localrt.quant.ops.kv import BlockCache, GrowingCache, KVCache, ReadBlocks
from localrt.quant.ops.protocol import Span
from localrt.quant.ops.recurrent import RecurrentSpec
from localrt.quant.ops.states import SavedState, StateCache, StatePass

Kv = TypeVar("Kv", bound=GrowingCache)  # an implementation's


class HybridCache(Generic[Kv]):
    """See ``KVCache``. ``kv`` has the layers that attend, ``states`` the others."""

    def __init__(self, kv: Kv, states: StateCache) -> None:
        self.kv, self.states = kv, states
        self.grows_in_place = kv.grows_in_place
        self.mix: Mix = ()

    @property
    def length(self) -> int:
        return self.kv.length

    @property
    def capacity(self) -> int:
        return self.kv.capacity

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes + self.states.nbytes

    @property
    def kv_layout(self) -> str:
        layout = self._blocks.kv_layout
        return f"{layout} and {self.states.layout.name}" if layout else ""

    @property
    def block_bytes(self) -> int:
        """See ``BlockCache``: of keys and values."""
        return self._blocks.block_bytes

    def take_blocks(self, first: int, count: int) -> Bytes:
        return self._blocks.take_blocks(first, count)

    def fill_blocks(self, first: int, count: int, read: ReadBlocks) -> None:
        self._blocks.fill_blocks(first, count, read)

    def saved_states(self) -> list[SavedState]:
        return self.states.saved()

    def restore(self, length: int, states: Sequence[SavedState]) -> int:
        length = self.states.restore(states, length)
        return self._blocks.restore(length, ())

    @property
    def _blocks(self) -> BlockCache:
        cache: object = self.kv
        assert isinstance(cache, BlockCache), "every cache of keys and values is one"
        return cache

    def reserve(self, length: int) -> None:
        self.kv.reserve(length)
        self.states.reserve(length)

    def advance(self, count: int) -> None:
        self.kv.advance(count)
        self.states.advance(count)

    def trim(self, length: int) -> int:
        """Forget tokens from ``length`` on, and those after the nearest kept state."""
        return self.kv.trim(self.states.trim(length))

    def select(self, first: int, rows: Sequence[int]) -> None:
        self.kv.select(first, rows)
        self.states.select(first, rows)


def kv_of(span: Span, kind: type[Kv]) -> Kv:
    """A sequence's cache of keys and values, which is of the implementation's ``kind``."""
    cache: object = span.cache
    if isinstance(cache, HybridCache):
        cache = cache.kv
    assert isinstance(cache, kind), "caches and steps belong to one implementation"
    return cache


def split_layers(
    layers: Sequence[AttentionSpec | RecurrentSpec],
) -> tuple[list[AttentionSpec], list[RecurrentSpec]]:
    """Split layers into those that attend and those with a state."""
    return (
        [spec for spec in layers if isinstance(spec, AttentionSpec)],
        [spec for spec in layers if isinstance(spec, RecurrentSpec)],
    )


def begin_states(spans: Iterable[Span]) -> list[StatePass]:
    """Begin a pass over the states of its sequences."""
    return [states_of(span.cache).begin(span.rows, span.mask) for span in spans]


def states_of(cache: KVCache) -> StateCache:
    """The state cache of a sequence."""
    assert isinstance(cache, HybridCache), "caches are made for their layers"
    return cache.states
