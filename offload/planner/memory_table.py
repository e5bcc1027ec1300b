"""What a placement takes of each budget, part by part, in bytes.

The same numbers that the search kept within the budgets: a plan prints them, tests add them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from localrt.offload.placement import Placement, Where
from localrt.offload.planner.budgets import KV_BUFFER_BYTES, Budgets, activation_nbytes
from localrt.offload.planner.shapes import ModelShape

__all__ = ["MemoryPart", "memory_table", "total_of"]

Tier = Literal["ram", "vram", "ssd"]


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """``nbytes`` of ``tier`` for ``what``."""

    tier: Tier
    what: str
    nbytes: int


def memory_table(
    shape: ModelShape,
    budgets: Budgets,
    placement: Placement,
    *,
    kv: Sequence[int],
    rows: int,
) -> tuple[MemoryPart, ...]:
    """All parts that are not empty; ``kv`` are bytes per layer, ``rows`` the most of a pass."""
    weights = dict.fromkeys(Where, 0)
    for unit in shape.units:
        weights[placement.where[unit.name]] += unit.nbytes
    caches = {"ram": 0, "vram": 0, "ssd": 0}
    for place, size in zip(placement.kv, kv, strict=True):
        caches[place] += size
    activations = activation_nbytes(shape, rows)
    parts = [
        MemoryPart("ram", "process", budgets.process_bytes(shape)),
        MemoryPart("ram", "kernels' scratch", budgets.scratch),
        MemoryPart("ram", "activations", activations),
        MemoryPart("ram", "weights", weights[Where.RAM] + weights[Where.LINK]),
        MemoryPart("ram", "keys and values", caches["ram"]),
        MemoryPart("ram", "ring for reads", placement.ram_ring),
        MemoryPart("ram", "buffer for keys and values", KV_BUFFER_BYTES if caches["ssd"] else 0),
        MemoryPart("ssd", "weights", weights[Where.SSD] + weights[Where.SSD_LINK]),
        MemoryPart("ssd", "keys and values", caches["ssd"]),
    ]
    if any(where.on_gpu for where in placement.where.values()):
        parts += [
            MemoryPart("vram", "driver's context", budgets.context_bytes()),
            MemoryPart("vram", "activations", activations),
            MemoryPart("vram", "weights", weights[Where.VRAM]),
            MemoryPart("vram", "keys and values", caches["vram"]),
            MemoryPart("vram", "ring for copies", placement.vram_ring),
        ]
    return tuple(part for part in parts if part.nbytes)


def total_of(parts: Sequence[MemoryPart], tier: Tier) -> int:
    """Bytes of one tier."""
    return sum(part.nbytes for part in parts if part.tier == tier)
