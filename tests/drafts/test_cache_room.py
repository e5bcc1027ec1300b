"""A draft's caches stay within the memory that was set aside for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from localrt.drafts.model_draft import CacheRoom, EngineDrafter
from localrt.quant.ops.protocol import Batch
from localrt.speculative.source import DraftFailedError, Rows

VOCAB = 4000


class Cache:
    """As much of a cache as passes need."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0

    def trim(self, length: int) -> int:
        self.length = length
        return length

    def select(self, first: int, rows: Sequence[int]) -> None:
        self.length = first + len(rows)

    @property
    def nbytes(self) -> int:
        return 10 * self.length


class Engine:
    """Computes nothing."""

    def cache(self, capacity: int) -> Any:
        return Cache(capacity)

    def run(
        self, batch: Batch, *, rows: Sequence[int] | None = None, check: Any = None
    ) -> np.ndarray:
        for span in batch.spans:
            span.cache.length += span.rows  # type: ignore[attr-defined]
        wanted = len(batch.tokens) if rows is None else len(rows)
        return np.zeros((wanted, VOCAB), np.float32)


def drafter_within(room: CacheRoom) -> EngineDrafter:
    engine: Any = Engine()
    return EngineDrafter(engine, VOCAB, room=room)


def extend(drafter: EngineDrafter, cache: Any, count: int, *, last: bool = True) -> np.ndarray:
    rows = Rows([1] * count, np.arange(cache.length, cache.length + count), int(last))
    logits: np.ndarray = drafter.compute(cache, rows, check=None)
    return logits


def test_caches_stay_within_their_room() -> None:
    drafter = drafter_within(CacheRoom(lambda length: 10 * length, 100))
    one = drafter.cache(100)
    extend(drafter, one, 6)
    other = drafter.cache(100)
    extend(drafter, other, 4)
    with pytest.raises(DraftFailedError, match="110 B of the GPU's memory, and 100 B were set"):
        extend(drafter, one, 1)
    del other
    extend(drafter, one, 4)
    with pytest.raises(DraftFailedError):
        extend(drafter, one, 1)


def test_token_that_only_the_target_has() -> None:
    drafter = drafter_within(CacheRoom(lambda length: 0, 1000))
    rows = Rows([1, VOCAB], np.arange(2), 1)
    with pytest.raises(DraftFailedError, match=f"vocabulary has no token {VOCAB}"):
        drafter.compute(drafter.cache(8), rows, check=None)
