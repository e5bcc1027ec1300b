"""Memory of a card for several units: few allocations, which can be given back one by one.

An allocator rounds every allocation up, torch's to 2 MB and the small ones to more; one allocation
for all could not be given back in part. It knows bytes, not what lies in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localrt.offload.cards.accelerator import Accelerator

__all__ = ["SLABS", "Slab", "share_slabs"]

SLABS = 64
"""Slabs of one kind, about. So much less than was asked for is given back too much, and of an 8 GB
card about 64 MB are lost to rounding.
"""


class Slab:
    """``nbytes`` of ``card`` for ``parts`` that are taken one behind the other.

    Raises:
        MemoryBudgetError: the card has no room for it.
    """

    def __init__(self, card: Accelerator, nbytes: int, parts: int) -> None:
        self.nbytes = nbytes
        self._card = card
        self._memory: Any = card.alloc(nbytes)
        self._next, self._left = 0, parts

    def take(self, nbytes: int) -> Any:
        """The next part."""
        self._next += nbytes
        assert self._next <= self.nbytes, "it was made for its parts"
        return self._memory[self._next - nbytes : self._next]

    def give_back(self) -> int:
        """One part is no longer used; returns the bytes freed: all of them with the last."""
        self._left -= 1
        return self.free() if self._left == 0 else 0

    def free(self) -> int:
        """Whoever uses it; the bytes, 0 if it was free already."""
        memory, self._memory = self._memory, None
        if memory is None:
            return 0
        self._card.free(memory)
        return self.nbytes


def share_slabs(sizes: Mapping[str, int], most: int = SLABS) -> list[list[str]]:
    """Which units lie together, of ``sizes`` in the order of a pass: at most ``most`` groups of
    about the same bytes.

    Those of a group are spread over the pass: given back together, they are copied beside computing
    that lies between them.
    """
    target = -(-sum(sizes.values()) // most)
    alone = [[name] for name, size in sizes.items() if size >= target]
    small = [name for name, size in sizes.items() if size < target]
    count = -(-sum(sizes[name] for name in small) // target) if small else 0
    groups: list[list[str]] = [small[first::count] for first in range(count)]
    return [*alone, *groups]
