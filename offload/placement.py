"""Where each unit of a model is stored and computed: the planner's result, the pipeline's input.

It has only names and bytes: the planner finds a placement, the pipeline carries it out. A machine
without a GPU uses ``RAM`` and ``SSD`` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

LEAST_GPU_ROWS = 65
"""Rows from which on a pass may have another placement: more than decoding and verifying have, so
that what was measured never changes which processor computes an answer.
"""


def link_piece(name: str) -> str:
    """The name of a split unit's piece that is copied to the GPU in each pass."""
    return f"{name}.link"


def host_piece(name: str) -> str:
    """The name of a split unit's piece that the CPU computes."""
    return f"{name}.host"


UnitKind = Literal["embedding", "attention", "mlp", "expert", "norm", "head"]
KvPlace = Literal["vram", "ram", "ssd"]


class Where(StrEnum):
    """The place of a unit's weights between passes, and their path in a pass.

    In every pass a ``read`` unit is read from the SSD, a ``copied`` one is copied over the link,
    and one ``on_gpu`` is computed by the GPU.
    """

    VRAM = "vram"  # resident in GPU memory, computed there
    LINK = "ram-to-gpu"  # resident in RAM, copied over the link in each pass, computed on the GPU
    SSD_LINK = "ssd-to-gpu"  # read and copied in each pass, computed on the GPU
    RAM = "ram"  # resident in RAM, computed by the CPU
    SSD = "ssd"  # read from the SSD in each pass, computed by the CPU

    read: bool
    copied: bool
    on_gpu: bool

    def __init__(self, value: str) -> None:
        # Attributes, not properties: a replay reads them a million times.
        self.read = value in ("ssd", "ssd-to-gpu")
        self.copied = value in ("ram-to-gpu", "ssd-to-gpu")
        self.on_gpu = value in ("vram", "ram-to-gpu", "ssd-to-gpu")

    @property
    def crossed(self) -> Where:
        """The place in a pass in which the unit crosses: copied over the link to the GPU."""
        return _CROSSED.get(self, self)


_CROSSED = {Where.RAM: Where.LINK, Where.SSD: Where.SSD_LINK}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedUnit:
    """The facts about a unit that a planner needs.

    ``nbytes`` are packed bytes, ``macs`` multiply-accumulates per row of a pass, ``format`` is the
    format of most bytes. ``use`` is the share of one-row passes that touch it: an expert's top-k
    over experts, 0 for an embedding, whose rows are read one by one. ``unpacked`` are the bytes of
    bf16 that an expert takes on a GPU besides, if no kernel there reads its format. A piece of a
    unit that is split has ``only`` one place.
    """

    name: str
    kind: UnitKind
    nbytes: int
    macs: int
    format: str
    layer: int | None = None
    use: float = 1.0
    unpacked: int = 0
    only: Where | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A place for every unit, by name, and for every layer's keys and values.

    ``ram_ring`` and ``vram_ring`` are the bytes that units read or copied in a pass go through:
    first in, first out, at least as large as the largest of them. ``prefill_rows`` is the most rows
    of one pass.

    In passes of ``gpu_rows`` rows or more (0: in none) the units of ``crossing``, which the CPU
    computes otherwise, are copied over the link and computed by the GPU, and so are the experts of
    a mixture that it does not hold. Attention never crosses: its keys and values do not move.

    Of the MLPs in ``split``, GPU and CPU compute the rows at once. They have pieces of about these
    shares: one in VRAM, under the unit's own name; the ``link_piece`` in RAM, copied in each pass,
    which may be 0; and the rest for the CPU, the ``host_piece``, which crosses like others.
    """

    where: Mapping[str, Where]
    kv: tuple[KvPlace, ...]
    ram_ring: int = 0
    vram_ring: int = 0
    prefill_rows: int = 512
    gpu_rows: int = 0
    crossing: frozenset[str] = frozenset()
    split: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("ram_ring", "vram_ring"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, is {getattr(self, name)}")
        if self.prefill_rows < 1:
            raise ValueError(f"prefill_rows must be at least 1, is {self.prefill_rows}")
        for name, (gpu, link) in self.split.items():
            if not (gpu > 0 and link >= 0 and gpu + link < 1):
                raise ValueError(f"{name}: {gpu} and {link} are no shares of GPU and link")
        if self.gpu_rows and self.gpu_rows < LEAST_GPU_ROWS:
            raise ValueError(f"gpu_rows must be 0 or at least {LEAST_GPU_ROWS}, is {self.gpu_rows}")

    @property
    def uses_gpu(self) -> bool:
        """Whether a GPU computes any unit in every pass, short ones included."""
        return any(where.on_gpu for where in self.where.values())

    def crosses(self, rows: int) -> bool:
        """Whether in a pass of ``rows`` rows the GPU computes units of the CPU."""
        return 0 < self.gpu_rows <= rows

    def on(self, rows: int) -> Mapping[str, Where]:
        """The places in a pass of ``rows`` rows."""
        if not self.crossing or not self.crosses(rows):
            return self.where
        where = self.where
        return {**where, **{name: where[name].crossed for name in self.crossing}}
