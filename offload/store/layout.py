"""Where every byte of a store lies, known before the first is written.

One safetensors file for the embedding, each layer, and the head with the final norm. The format
forbids holes: units are aligned by spaces at the end of the header and by explicit ``_pad``
tensors. Tiles are one-dimensional ``U8`` tensors, vectors ``F32``. It knows sizes, not weights.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localrt.models.checkpoints.base import TensorInfo
from localrt.models.checkpoints.store.manifest import LAYOUT, UNIT_ALIGNMENT, UnitTensor
from localrt.models.config import EMBEDDING
from localrt.models.units import Unit
from localrt.quant.formats import F32

_TENSOR_ALIGNMENT = 64  # within a unit: a cache line, and the widest vector


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """A unit's place in its file, in bytes, and its tensors (with neither scales nor rotations)."""

    name: str
    offset: int
    nbytes: int
    tensors: tuple[UnitTensor, ...]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file: ``header`` is followed by the units, one after another."""

    name: str
    header: bytes
    units: tuple[UnitPlan, ...]
    layer: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(unit.nbytes for unit in self.units)


def plan_files(units: Sequence[Unit], tensors: Mapping[str, TensorInfo]) -> tuple[FilePlan, ...]:
    """The files of a store, layers first; ``tensors`` are as they will be stored.

    Layers come first because they take the time: what is left can be told from the first of them.
    """
    files: dict[str, list[Unit]] = {}
    for unit in sorted(units, key=lambda unit: unit.layer is None):
        files.setdefault(_file_name(unit), []).append(unit)
    return tuple(_plan_file(name, group, tensors) for name, group in files.items())


def _file_name(unit: Unit) -> str:
    if unit.layer is not None:
        return f"layer-{unit.layer:04d}.safetensors"
    embedding = unit.name == "embedding" or EMBEDDING in unit.tensors
    return "embedding.safetensors" if embedding else "head.safetensors"


def _plan_file(name: str, units: Sequence[Unit], tensors: Mapping[str, TensorInfo]) -> FilePlan:
    planned: list[UnitPlan] = []
    extents: dict[str, tuple[str, int, int]] = {}  # safetensors type, begin and end
    position = 0
    for unit in units:
        begin = position
        inside: list[UnitTensor] = []
        for tensor in unit.tensors:
            position = _pad(extents, position, _TENSOR_ALIGNMENT)
            placed = _place(tensors[tensor], unit, position - begin)
            inside.append(placed)
            # The slices of a head join into one tensor of the file.
            first = extents.get(tensor, ("", position, position))[1]
            kind = "F32" if len(placed.shape) == 1 else "U8"
            extents[tensor] = (kind, first, position + placed.nbytes)
            position += placed.nbytes
        position = _pad(extents, position, UNIT_ALIGNMENT)
        planned.append(UnitPlan(unit.name, begin, position - begin, tuple(inside)))
    header = _header(extents)
    shifted = (
        UnitPlan(unit.name, len(header) + unit.offset, unit.nbytes, unit.tensors)
        for unit in planned
    )
    return FilePlan(name, header, tuple(shifted), units[0].layer)


def _place(info: TensorInfo, unit: Unit, offset: int) -> UnitTensor:
    if len(info.shape) == 1:
        return UnitTensor(info.name, F32, info.shape, offset)
    start, stop = unit.rows or (0, info.shape[0])
    return UnitTensor(info.name, info.format, (stop - start, info.shape[1]), offset, row=start)


def _pad(extents: dict[str, tuple[str, int, int]], position: int, alignment: int) -> int:
    """The next multiple of ``alignment``, with a tensor for the bytes before it."""
    end = -(-position // alignment) * alignment
    if end > position:
        number = sum(name.startswith("_pad.") for name in extents)
        extents[f"_pad.{number}"] = ("U8", position, end)
    return end


def _header(extents: Mapping[str, tuple[str, int, int]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"localrt.layout": LAYOUT}}
    for name, (kind, begin, end) in extents.items():
        size = (end - begin) // (4 if kind == "F32" else 1)
        entries[name] = {"dtype": kind, "shape": [size], "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    total = -(-(8 + len(text)) // UNIT_ALIGNMENT) * UNIT_ALIGNMENT
    return (total - 8).to_bytes(8, "little") + text.ljust(total - 8)
