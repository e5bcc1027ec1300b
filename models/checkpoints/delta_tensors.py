"""Qwen3-Next's projections of DeltaNet layers, apart as Qwen3.5 publishes them.

Published are two matrices, in which the rows of each key head lie together: a query, a key, values
and their gates in the one, strengths and decays in the other. Whole packed rows are moved, which
changes no value. It knows config keys and tensors, no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from localrt.errors import CheckpointError
from localrt.models.checkpoints.base import TensorInfo
from localrt.models.checkpoints.stored_tensor import Bytes, RowSource

__all__ = ["delta_tensors"]

_BOTH: Mapping[str, tuple[tuple[str, str], ...]] = {
    # the published matrix, and what it holds in its order: "v" stands for the values' rows
    "linear_attn.in_proj_qkvz.weight": (("in_proj_qkv", "qkv"), ("in_proj_z", "z")),
    "linear_attn.in_proj_ba.weight": (("in_proj_b", "b"), ("in_proj_a", "a")),
}


def delta_tensors(
    stored: Mapping[str, RowSource], config: Mapping[str, Any]
) -> dict[str, RowSource]:
    """``stored`` with Qwen3.5's matrices in the place of Qwen3-Next's.

    Other architectures' tensors are as they were.

    Raises:
        CheckpointError: a matrix is not what the config says.
    """
    found: dict[str, RowSource] = {}
    for name, tensor in stored.items():
        published = next((stem for stem in _BOTH if name.endswith(stem)), None)
        if published is None:
            found[name] = tensor
        else:
            prefix = name.removesuffix(published)
            found |= _split(tensor, f"{prefix}linear_attn.", _BOTH[published], config)
    return found


def _split(
    tensor: RowSource,
    prefix: str,
    contents: tuple[tuple[str, str], ...],
    config: Mapping[str, Any],
) -> dict[str, RowSource]:
    def size(key: str) -> int:
        number = config.get(key)
        if type(number) is not int or number < 1:
            raise CheckpointError(f"config {key} must be a positive integer, is {number!r:.60}")
        return number

    groups, heads = size("linear_num_key_heads"), size("linear_num_value_heads")
    key, each = size("linear_key_head_dim"), heads // groups
    value = each * size("linear_value_head_dim")
    sizes = {"q": key, "k": key, "v": value, "z": value, "b": each, "a": each}
    whole = sum(sizes[part] for _, parts in contents for part in parts)
    info = tensor.info
    if len(info.shape) != 2 or info.shape[0] != groups * whole or heads % groups:
        raise CheckpointError(
            f"wrong shape: {info.name} {info.shape}; the config asks for {groups} key heads of "
            f"{whole} rows"
        )
    found: dict[str, RowSource] = {}
    begin = 0
    for stem, parts in contents:
        runs = []
        for part in parts:
            runs.append((begin, sizes[part]))
            begin += sizes[part]
        rows = groups * sum(count for _, count in runs)
        name = f"{prefix}{stem}.weight"
        own = TensorInfo(name, (rows, info.shape[1]), info.format, rows * tensor.row_bytes)
        found[name] = _PartsOfGroups(own, tensor, groups, tuple(runs))
    return found


@dataclass(frozen=True, slots=True)
class _PartsOfGroups(RowSource):
    """Some rows of each of the equal ``groups`` of ``whole``: ``runs`` are (first row, count).

    All groups' rows of the first run come first.
    """

    whole: RowSource
    groups: int
    runs: tuple[tuple[int, int], ...]

    @property
    def scale(self) -> float:
        """See ``RowSource``."""
        return self.whole.scale

    def _read(self, start: int, stop: int) -> Bytes:
        pieces = [self.whole.read(*rows).data for rows in self._places(start, stop)]
        return np.concatenate([piece.reshape(-1, self.row_bytes) for piece in pieces])

    def _places(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where rows ``start`` to ``stop`` lie in the published matrix."""
        size, at = self.whole.rows // self.groups, 0
        for begin, count in self.runs:
            for group in range(self.groups):
                first, last = max(start, at), min(stop, at + count)
                if first < last:
                    there = group * size + begin - at
                    yield first + there, last + there
                at += count
