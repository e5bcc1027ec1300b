"""What weights and caches may take of RAM together."""

from __future__ import annotations

from dataclasses import dataclass

from localrt.errors import MemoryBudgetError
from localrt.formatting import format_bytes

__all__ = ["RamBudget"]


@dataclass(frozen=True, slots=True)
class RamBudget:
    """``nbytes`` for resident units and caches."""

    nbytes: int

    def missing(self, resident: int, caches: int) -> int:
        """Bytes of weights to give back so that both fit."""
        return max(0, resident + caches - self.nbytes)

    def error(self, caches: int) -> MemoryBudgetError:
        """The caches alone are too large."""
        return MemoryBudgetError(
            f"the context has grown to {format_bytes(caches)} of keys and values and "
            f"{format_bytes(self.nbytes)} is left for them and for what cannot be streamed: use a "
            "shorter --ctx, --kv-format int8, or more --ram"
        )
