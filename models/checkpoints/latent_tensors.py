"""DeepSeek's tensors in the one form that the model takes, whatever form they were published in.

A head's matrices from latents to keys and to values are published as one (``kv_b_proj``) or, in
newer GGUF files, apart and per head: ``k_b_proj`` transposed, so that it turns a query into one
against latents, and ``v_b_proj``. The model takes the latter two as matrices of stacked heads.
Values are rows of the published matrix, in its bytes. Transposed keys cannot be: what was not
quantized keeps its format, GGUF's types become f16, which rounds less than they were rounded, and
other groups f32, which holds them. It knows config keys and tensors, no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from localrt.errors import CheckpointError
from localrt.models.checkpoints.base import TensorInfo
from localrt.models.checkpoints.expert_stacks import StackedRows
from localrt.models.checkpoints.stored_tensor import Bytes, RowSource, StoredTensor
from localrt.quant.formats import (
    BF16,
    F16,
    F32,
    GROUP_CODECS,
    Format,
    PackedTensor,
    pack,
    unpack,
)

__all__ = ["latent_tensors"]

_BOTH, _KEYS, _VALUES = "kv_b_proj.weight", "k_b_proj.weight", "v_b_proj.weight"


def latent_tensors(
    stored: Mapping[str, RowSource], config: Mapping[str, Any]
) -> dict[str, RowSource]:
    """``stored`` with the model's matrices in the place of the published ones.

    Other architectures' tensors are as they were.

    Raises:
        CheckpointError: a matrix is not what the config says.
    """
    if not isinstance(config.get("kv_lora_rank"), int):
        return dict(stored)
    found: dict[str, RowSource] = {}
    for name, tensor in stored.items():
        if name.endswith(f".self_attn.{_BOTH}"):
            stem = name.removesuffix(_BOTH)
            found[stem + _KEYS], found[stem + _VALUES] = _split(tensor, stem, config)
        elif name.endswith((f".self_attn.{_KEYS}", f".self_attn.{_VALUES}")):
            found[name] = _joined(tensor)
        else:
            found[name] = tensor
    return found


def _joined(tensor: RowSource) -> RowSource:
    """Matrices of all heads as one: their rows follow one another already."""
    info = tensor.info
    if isinstance(tensor, StackedRows):
        return replace(tensor.flat, info=replace(tensor.flat.info, name=info.name))
    if len(info.shape) != 3 or not isinstance(tensor, StoredTensor):
        return tensor
    heads, rows, columns = info.shape
    return replace(tensor, info=replace(info, shape=(heads * rows, columns)))


def _split(tensor: RowSource, stem: str, config: Mapping[str, Any]) -> tuple[RowSource, RowSource]:
    """Keys and values out of the published matrix; ``stem`` begins their names."""

    def size(key: str) -> int:
        number = config.get(key)
        if type(number) is not int or number < 1:
            raise CheckpointError(
                f"{tensor.info.name}: config {key} must be a positive integer, is {number!r}"
            )
        return number

    heads, nope, value = size("num_attention_heads"), size("qk_nope_head_dim"), size("v_head_dim")
    info = tensor.info
    if len(info.shape) != 2 or info.shape[0] != heads * (nope + value):
        raise CheckpointError(
            f"wrong shape: {info.name} {info.shape}; the config asks for {heads} heads of "
            f"{nope} + {value} rows"
        )
    latent = info.shape[1]
    format_ = _key_format(info.format)
    key_bytes = heads * latent * format_.row_bytes(nope)
    keys = TensorInfo(stem + _KEYS, (heads * latent, nope), format_, key_bytes)
    value_bytes = heads * value * info.format.row_bytes(latent)
    values = TensorInfo(stem + _VALUES, (heads * value, latent), info.format, value_bytes)
    return _TransposedKeys(keys, tensor, heads), _ValueRows(values, tensor, heads)


def _key_format(format_: Format) -> Format:
    """What transposed keys are in."""
    if format_ in (F32, F16, BF16):
        return format_
    return F32 if format_.name in GROUP_CODECS else F16


@dataclass(frozen=True, slots=True)
class _OfHeads(RowSource):
    """A matrix made of the heads of ``both``."""

    both: RowSource
    heads: int

    @property
    def rows_together(self) -> int:
        """Rows of a head: whole ones at a time, so that none is read twice."""
        return self.rows // self.heads

    def _covering(self, start: int, stop: int) -> tuple[PackedTensor, int, int]:
        """The published rows of the heads that rows ``start`` to ``stop`` are of.

        And where the latter begin among those heads' rows here, and the rows of a published head.
        """
        span = self.both.rows // self.heads
        first, last = start // self.rows_together, -(-stop // self.rows_together)
        whole = self.both.read(first * span, last * span)
        return whole, start - first * self.rows_together, span


class _ValueRows(_OfHeads):
    """A head's last rows, in their bytes."""

    __slots__ = ()

    @property
    def scale(self) -> float:
        """See ``RowSource``."""
        return self.both.scale

    def _read(self, start: int, stop: int) -> Bytes:
        rows, begin, span = self._covering(start, stop)
        heads = rows.data.reshape(-1, span, self.row_bytes)[:, span - self.rows_together :]
        return heads.reshape(-1, self.row_bytes)[begin : begin + stop - start]


class _TransposedKeys(_OfHeads):
    """A head's first rows, transposed."""

    __slots__ = ()

    def _read(self, start: int, stop: int) -> Bytes:
        rows, begin, span = self._covering(start, stop)
        nope = self.info.shape[1]
        heads = unpack(rows).reshape(-1, span, self.rows_together)[:, :nope]
        whole = heads.swapaxes(1, 2).reshape(-1, nope)
        taken = np.ascontiguousarray(whole[begin : begin + stop - start])
        return pack(taken, self.info.format, name=self.info.name).data
