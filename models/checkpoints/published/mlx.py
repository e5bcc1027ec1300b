"""MLX's affine groups: columns packed into the words of ``weight``, ``scales`` and ``biases``.

A value is scale * code + bias. A config's ``quantization`` has bits and group size for all weights,
and for some by their module's name. Codes of 2 to 6 bits that ours have no groups for take 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from localrt.models.checkpoints.published.bits import codes_in_rows
from localrt.models.checkpoints.published.coded_rows import (
    FLOATS,
    CodedRows,
    Floats,
    Grid,
    group_of,
    minimum_codec,
    weight_info,
)
from localrt.models.checkpoints.published.keys import Keys
from localrt.models.checkpoints.published.weights import Parts, require_shape, wrong
from localrt.models.checkpoints.safetensors_header import UINT32
from localrt.models.checkpoints.stored_tensor import Bytes, RowSource, StoredTensor

__all__ = ["Mlx"]

_WEIGHT, _SCALES, _MINIMA = ".weight", ".scales", ".biases"
_ENDINGS = dict.fromkeys((_WEIGHT, _SCALES, _MINIMA), _WEIGHT)
_BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, slots=True)
class Mlx:
    """See ``Scheme``. Bits and group size, and those of single modules."""

    bits: int
    group: int
    modules: Mapping[str, tuple[int, int]]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, keys: Keys) -> Mlx:
        """Of a config's ``quantization``.

        Raises:
            UnsupportedModelError: other bits, or another mode than affine.
            CheckpointError: a key is malformed.
        """
        bits, group = _width(keys)
        modules: dict[str, tuple[int, int]] = {}
        for name, value in keys.values.items():
            if isinstance(value, Mapping) and (own := keys.inner(name)) is not None:
                modules[name] = _width(own)
        return cls(bits, group, modules)

    @property
    def typical(self) -> str:
        """See ``Scheme``."""
        group = group_of(self.group)
        return f"int{4 if self.bits <= 4 else 8}-g{group}b" if group else "f32"

    @property
    def endings(self) -> Mapping[str, str]:
        """See ``Scheme``."""
        return _ENDINGS

    def source(self, parts: Parts) -> RowSource | None:
        """See ``Scheme``."""
        weight = parts.find(_WEIGHT)
        if len(parts.tensors) == 1 and weight is not None and weight.info.format != UINT32:
            return None
        weight, scales, minima = (parts.need(part) for part in (_WEIGHT, _SCALES, _MINIMA))
        names = (parts.stem, f"language_model.{parts.stem}")
        own = next((self.modules[name] for name in names if name in self.modules), None)
        bits, group = own or (self.bits, self.group)
        require_shape(weight, UINT32, None, None)
        rows, words = weight.info.shape
        columns = words * 32 // bits
        if words * 32 % bits or columns % group:
            raise wrong(weight, f"does not hold rows of whole groups of {group} in {bits} bits")
        if scales.info.format not in FLOATS:
            raise wrong(scales, "should be F16, BF16 or F32")
        require_shape(
            scales, None, rows, columns // group, why=f"for groups of {group} (group_size)"
        )
        require_shape(minima, scales.info.format, rows, columns // group)
        codec = minimum_codec(4 if bits <= 4 else 8, group_of(group), scales.info.format)
        info = weight_info(parts.name, rows, columns, codec.format)
        grids = Grid(scales, 1, group), Grid(minima, 1, group)
        return _MlxRows(info, codec, weight, *grids, bits)


def _width(keys: Keys) -> tuple[int, int]:
    """Bits and group size."""
    keys.one_of("mode", ("affine",), "affine")
    group = keys.number("group_size", 64)
    if group < 1:
        raise keys.wrong("group_size", "should be a number of columns")
    return keys.one_of("bits", _BITS, 4), group


@dataclass(frozen=True, slots=True)
class _MlxRows(CodedRows):
    codes: StoredTensor
    grid: Grid
    minima: Grid
    bits: int

    def _codes(self, start: int, stop: int) -> Bytes:
        return codes_in_rows(self.codes.read(start, stop).data, self.bits)

    def _scales(self, start: int, stop: int) -> Floats:
        columns, block = self.info.shape[1], self.codec.format.block
        both = [grid.of_rows(start, stop, columns, block) for grid in (self.grid, self.minima)]
        return np.stack(both, axis=-1)
