"""Measured figures of GPUs in the cache folder: ``cards.json`` has an entry for each GPU.

Figures are saved with a key of everything they depend on; if the key changes, they are measured
again. ``GpuRates`` are a GPU's compute and copy rates, measured by ``measuring.py``. This module
imports nothing heavy: planning for a GPU does not load the code that computes on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from localrt.common.files import read_cached, write_cached

_NAME = "cards.json"


def entry_of(folder: Path, name: str) -> dict[str, Any]:
    """The entry of the GPU ``name`` in ``folder``: its ``key``, current or not, and its sections by
    name. Empty if the file is damaged.
    """
    values = read_cached(folder / _NAME).get(name)
    return values if isinstance(values, dict) else {}


def damage(folder: Path) -> str:
    """A line for the user if the file in ``folder`` cannot be read; else empty."""
    path = folder / _NAME
    if not path.exists() or read_cached(path):
        return ""
    return f"{path} is damaged and is ignored: the GPU is measured again"


@dataclass(frozen=True, slots=True)
class GpuCache:
    """The sections of the GPU ``name`` in ``folder`` that were measured with ``key``."""

    folder: Path
    name: str
    key: Sequence[str]

    def read(self, part: str) -> dict[str, Any]:
        """A section; empty if it is missing or was measured with another key."""
        kept = entry_of(self.folder, self.name)
        values = kept.get(part) if kept.get("key") == list(self.key) else None
        return values if isinstance(values, dict) else {}

    def write(self, part: str, values: Mapping[str, object]) -> None:
        """Replace a section. If it cannot be written, the next process measures it again."""
        path = self.folder / _NAME
        gpus, kept = read_cached(path), entry_of(self.folder, self.name)
        if kept.get("key") != list(self.key):
            kept = {"key": list(self.key)}
        gpus[self.name] = {**kept, part: dict(values)}
        write_cached(path, gpus)


RATES, FINE_RATES = "rates", "rates of 15 bits"
"""The sections with ``GpuRates``: for 8-bit and for 15-bit activations."""
ROWS = (1, 8, 64, 128, 512, 2048)
"""Batch sizes of the timed products. Above 64 rows, data-center GPUs unpack weights first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRates:
    """Measured rates of one GPU.

    ``products`` are seconds per weight for each batch size of ``ROWS``, by format; weights are read
    from GPU memory. ``memory_bytes_s`` counts both the reads and the writes of a device copy.
    ``to_gpu_bytes_s`` is the rate of copies from pinned RAM. While CPU and copies both read RAM,
    copies reach the fraction ``busy_link`` of their rate, and the CPU ``busy_cpu`` of its own.
    ``crossing_s`` is the time to move a row of activations between CPU and GPU, waits included.
    ``replay_s`` is the time of a small kernel in a graph.
    """

    products: Mapping[str, tuple[float, ...]]
    memory_bytes_s: float
    to_gpu_bytes_s: float
    busy_link: float
    busy_cpu: float
    crossing_s: float
    replay_s: float

    def __post_init__(self) -> None:
        for name, values in self.products.items():
            if len(values) != len(ROWS):
                raise ValueError(f"products of {name}: {len(values)} rates, {len(ROWS)} rows")
        rates = [getattr(self, each.name) for each in fields(self)[1:]]
        for value in (*rates, *(s for values in self.products.values() for s in values)):
            if not (isinstance(value, float) and math.isfinite(value) and value > 0):
                raise ValueError(f"rates must be above zero, one is {value!r}")

    @property
    def flops(self) -> float:
        """Operations per second of the fastest large product."""
        return 2 * ROWS[-1] / min(values[-1] for values in self.products.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GpuRates | None:
        """The inverse of ``to_dict``; None for anything else."""
        try:
            products = {name: tuple(rates) for name, rates in values["products"].items()}
            return cls(**{**values, "products": products}) if products else None
        except (AttributeError, KeyError, TypeError, ValueError):
            return None


def known_rates(cache: Path, name: str) -> GpuRates | None:
    """The rates that ``cache`` has for the GPU ``name`` (its driver's name), under any key.

    Nothing is measured: for callers that must not load the GPU.
    """
    return GpuRates.from_dict(entry_of(cache, name).get(RATES, {}))
