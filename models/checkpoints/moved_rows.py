"""Rows of queries and keys whose rotary pairs lie side by side, as the two halves of a head.

llama.cpp rotates neighbouring pairs of a head's values, Hugging Face its two halves; some files
have one order, some the other. Whole packed rows are moved, which changes no value.

Packed rows that hold the same numbers in another of our formats: ggml's NVFP4 and TQ1_0.

NVFP4 keeps the scales of four groups before their nibbles, ours each before its own. TQ1_0 has five
digits of base three in a byte; with two bits for each they take a fifth more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.base import RowSource
from localrt.quant.formats import GGML_UNREAD, NVFP4, TQ2_0, Format
from localrt.quant.formats.packed import Bytes

_TURNED = ("self_attn.q_proj", "self_attn.k_proj")


def rotary_rows(
    stored: Mapping[str, RowSource], config: Mapping[str, Any], path: Path
) -> dict[str, RowSource]:
    """Every query and key tensor of a model at ``path``, with halves in the place of pairs.

    Raises:
        CheckpointError: a tensor's rows are not heads of an even size.
    """
    queries = config.get("num_attention_heads")
    keys = config.get("num_key_value_heads", queries)
    found: dict[str, RowSource] = {}
    for name, tensor in stored.items():
        info, stem = tensor.info, name.rpartition(".")[0]
        if not stem.endswith(_TURNED):
            continue
        heads = queries if stem.endswith(_TURNED[0]) else keys
        if type(heads) is not int or heads < 1 or info.shape[0] % (2 * heads):
            raise CheckpointError(
                f"{path}: {info.shape[0]} rows of {name!r} are not {heads!r:.60} heads "
                "of an even size"
            )
        if len(info.shape) == 1 and info.format.block != 1:
            raise CheckpointError(f"{path}: {name!r} is a vector in {info.format.name}")
        found[name] = _RotaryRows(info, tensor, heads)
    return found


@dataclass(frozen=True, slots=True)
class _RotaryRows(RowSource):
    """The rows of ``stored``, a matrix or a vector of ``heads``, halves in the place of pairs."""

    stored: RowSource
    heads: int

    @property
    def scale(self) -> float:
        return self.stored.scale

    @property
    def rows_together(self) -> int:
        """Rows of a head: whole ones at a time, so that none is read twice."""
        return max(1, self.rows // self.heads)

    def _read(self, start: int, stop: int) -> Bytes:
        size = self.info.shape[0] // self.heads
        if len(self.info.shape) == 1:
            data = self.stored.read(start, stop).data
            return data.reshape(-1, size // 2, 2, self.info.format.block_bytes).swapaxes(1, 2)
        first = start // size * size
        data = self.stored.read(first, -(-stop // size) * size).data
        halves = data.reshape(-1, size // 2, 2, self.row_bytes).swapaxes(1, 2)
        return halves.reshape(-1, self.row_bytes)[start - first : stop - first]


def regrouped(source: RowSource) -> RowSource:
    """``source``, or the same numbers in a format that localrt computes with."""
    found = _FORMATS.get(source.info.format)
    if found is None:
        return source
    format_, convert = found
    info = source.info
    blocks = info.nbytes // info.format.block_bytes * (info.format.block // format_.block)
    info = replace(info, format=format_, nbytes=blocks * format_.block_bytes)
    return _Regrouped(info, source, convert)


@dataclass(frozen=True, slots=True)
class _Regrouped(RowSource):
    """Rows of ``source``, converted block by block."""

    source: RowSource
    convert: Callable[[Bytes], Bytes]

    @property
    def scale(self) -> float:
        return self.source.scale

    @property
    def rows_together(self) -> int:
        return self.source.rows_together

    def _read(self, start: int, stop: int) -> Bytes:
        data = self.source.read(start, stop).data
        return self.convert(data.reshape(-1, self.source.info.format.block_bytes))


def _nvfp4(blocks: Bytes) -> Bytes:
    """(n, 36) to (4 n, 9). ggml's scales have no sign, and its largest code stands for 0."""
    scales = blocks[:, :4] & 127
    scales[scales == 127] = 0
    return np.concatenate([scales.reshape(-1, 1), blocks[:, 4:].reshape(-1, 8)], axis=1)


def _tq2_0(blocks: Bytes) -> Bytes:
    """(n, 54) to (n, 66)."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = [(blocks[:, :32], 5), (blocks[:, 32:48], 5), (blocks[:, 48:52], 4)]
    digits = [
        ((part[:, None] * powers[:count]).astype(np.uint16) * 3 >> 8).reshape(len(blocks), -1)
        for part, count in parts
    ]
    codes = np.concatenate(digits, axis=1).astype(np.uint8).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    pairs = np.bitwise_or.reduce(codes << shifts, axis=2).reshape(-1, 64)
    return np.concatenate([pairs, blocks[:, 52:]], axis=1)


_FORMATS: Mapping[Format, tuple[Format, Callable[[Bytes], Bytes]]] = MappingProxyType(
    {GGML_UNREAD[34]: (TQ2_0, _tq2_0), GGML_UNREAD[40]: (NVFP4, _nvfp4)}
)
