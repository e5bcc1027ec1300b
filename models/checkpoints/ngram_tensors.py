"""The table of hashed n-grams as one matrix, which is published in hundreds of parts.

Beside it lie the numbers that hashing takes, which follow from the config, and in files whose table
is in FP8 what its values are times. It knows names and rows, no files.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from localrt.errors import CheckpointError
from localrt.models.checkpoints.stored_tensor import Bytes, RowSource
from localrt.quant.formats import unpack

__all__ = ["is_hash_constant", "ngram_tensors"]

_TABLE = "model.ngram_embedding.weight"
_PART = re.compile(
    r"model\.layers\.\d{1,9}\.ple\.ple_embedding\.ngram_embedding\.(?:shard_(\d{1,9})\.)?weight"
)
_SCALE = re.compile(rf"({_PART.pattern})_scale(?:_inv)?")
_CONSTANTS = (
    ".ple_embedding.layer_multipliers",
    ".ple_embedding.ngram_heads_vocab_sizes",
    ".ple_embedding.ngram_heads_offsets",
)


def is_hash_constant(name: str) -> bool:
    """Whether a tensor has integers that the config says too."""
    return name.endswith(_CONSTANTS)


def ngram_tensors(stored: Mapping[str, RowSource]) -> dict[str, RowSource]:
    """``stored`` with one table in the place of its parts; others are as they were.

    Raises:
        CheckpointError: a part is missing, or of another shape or format.
    """
    parts: dict[int, RowSource] = {}
    found: dict[str, RowSource] = {}
    scales: set[float] = set()
    for name, tensor in stored.items():
        match = _PART.fullmatch(name)
        if _SCALE.fullmatch(name):
            scales.update(_scale_of(tensor))
        elif match is None:
            found[name] = tensor
        elif (number := int(match[1] or 0)) in parts:
            raise CheckpointError(f"tensor {name} appears twice: one table of n-grams is read")
        else:
            parts[number] = tensor
    if len(scales) > 1:
        raise CheckpointError("the parts of the table of n-grams are times different numbers")
    if parts:
        ordered = [parts[number] for number in sorted(parts)]
        found[_TABLE] = _joined(ordered, max(parts), scales.pop() if scales else 1.0)
    return found


def _scale_of(tensor: RowSource) -> list[float]:
    if math.prod(tensor.info.shape) != 1:
        raise CheckpointError(
            f"tensor {tensor.info.name} {tensor.info.shape}: a table of n-grams has one scale here"
        )
    return unpack(tensor.read()).reshape(-1).tolist()


def _joined(parts: list[RowSource], last: int, scale: float) -> RowSource:
    first = parts[0].info
    if len(parts) != last + 1:
        raise CheckpointError(
            f"{first.name}: {len(parts)} of {last + 1} parts are there; download the model again"
        )
    for part in parts:
        info = part.info
        if len(info.shape) != 2 or (info.shape[1], info.format) != (first.shape[-1], first.format):
            raise CheckpointError(
                f"tensor {info.name} {info.shape} in {info.format.name} is no part of a table with "
                f"rows of {first.shape[-1]} in {first.format.name}"
            )
    ends = np.cumsum([part.rows for part in parts]).tolist()
    nbytes = sum(part.info.nbytes for part in parts)
    info = replace(first, name=_TABLE, shape=(ends[-1], first.shape[1]), nbytes=nbytes)
    return _Parts(info, tuple(parts), tuple(ends), scale)


@dataclass(frozen=True, slots=True)
class _Parts(RowSource):
    """Rows of ``parts`` one after the other; ``ends`` are where they end, values are times
    ``factor``.
    """

    parts: tuple[RowSource, ...]
    ends: tuple[int, ...]
    factor: float

    @property
    def scale(self) -> float:
        """See ``RowSource``."""
        return self.factor

    def _read(self, start: int, stop: int) -> Bytes:
        pieces = []
        while start < stop:
            number = bisect_right(self.ends, start)
            begin = self.ends[number] - self.parts[number].rows
            last = min(stop, self.ends[number])
            pieces.append(self.parts[number].read(start - begin, last - begin).data)
            start = last
        return np.concatenate(pieces)
