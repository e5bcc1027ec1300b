"""DeepSeek's tensors in the one form that the model takes, whatever form they were published in.

A head's matrices from latents to keys and to values are published as one (``kv_b_proj``) or, in
newer GGUF files, apart and per head: ``k_b_proj`` transposed, so that it turns a query into one
against latents, and ``v_b_proj``. The model takes the latter two as matrices of stacked heads.
Values are rows of the published matrix, in its bytes. Transposed keys cannot be: what was not
quantized keeps its format, the rest becomes f16, which rounds less than it was rounded. Layers of
multi-token prediction behind the last are left out. It knows config keys and tensors, no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from localrt.errors import CheckpointError
from localrt.models.checkpoints.stored_tensor import RowSource, StoredTensor
from localrt.quant.formats import BF16, F16, F32, PackedTensor, pack, unpack

__all__ = ["latent_tensors"]

_BOTH, _KEYS, _VALUES = "kv_b_proj.weight", "k_b_proj.weight", "v_b_proj.weight"

_Source = TypeVar("_Source", bound=RowSource)


def latent_tensors(
    stored: Mapping[str, _Source], config: Mapping[str, Any]
) -> dict[str, _Source | StoredTensor]:
    """``stored`` with the model's matrices in the place of the published ones.

    Other architectures' tensors are as they were.

    Raises:
        CheckpointError: a matrix is not what the config says.
    """
    if not isinstance(config.get("kv_lora_rank"), int):
        return dict(stored)
    found: dict[str, _Source | StoredTensor] = {}
    skipped = _prediction_layers(config)
    for name, tensor in stored.items():
        if name.startswith(skipped):
            continue
        if not isinstance(tensor, StoredTensor):
            found[name] = tensor
        elif name.endswith(f".self_attn.{_BOTH}"):
            stem = name.removesuffix(_BOTH)
            for half in _split(tensor, config):
                kind = _KEYS if isinstance(half, _TransposedKeys) else _VALUES
                found[f"{stem}{kind}"] = replace(half, info=replace(half.info, name=stem + kind))
        elif name.endswith((f".self_attn.{_KEYS}", f".self_attn.{_VALUES}")):
            found[name] = _joined(tensor)
        else:
            found[name] = tensor
    return found


def _prediction_layers(config: Mapping[str, Any]) -> tuple[str, ...]:
    layers, extra = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    if not isinstance(layers, int) or not isinstance(extra, int) or not 0 < extra <= 64:
        return ()
    return tuple(f"model.layers.{layer}." for layer in range(layers, layers + extra))


def _joined(tensor: StoredTensor) -> StoredTensor:
    """Matrices of all heads as one: their rows follow one another already."""
    info = tensor.info
    if len(info.shape) != 3:
        return tensor
    heads, rows, columns = info.shape
    return replace(tensor, info=replace(info, shape=(heads * rows, columns)))


def _split(tensor: StoredTensor, config: Mapping[str, Any]) -> tuple[StoredTensor, ...]:
    def size(key: str) -> int:
        number = config.get(key)
        if type(number) is not int or number < 1:
            raise CheckpointError(
                f"{tensor.file.path}: config {key} must be a positive integer, is {number!r}"
            )
        return number

    heads, nope, value = size("num_attention_heads"), size("qk_nope_head_dim"), size("v_head_dim")
    info = tensor.info
    if len(info.shape) != 2 or info.shape[0] != heads * (nope + value):
        raise CheckpointError(
            f"{tensor.file.path}: wrong shape: {info.name} {info.shape}; the config asks for "
            f"{heads} heads of {nope} + {value} rows"
        )
    latent = info.shape[1]
    format_ = info.format if info.format in (F32, F16, BF16) else F16
    key_bytes = heads * latent * format_.row_bytes(nope)
    keys = replace(info, shape=(heads * latent, nope), format=format_, nbytes=key_bytes)
    value_bytes = heads * value * info.format.row_bytes(latent)
    values = replace(info, shape=(heads * value, latent), nbytes=value_bytes)
    return (
        _TransposedKeys(keys, tensor.file, tensor.offset, tensor, nope + value),
        _ValueRows(values, tensor.file, tensor.offset, tensor, nope + value),
    )


@dataclass(frozen=True, slots=True)
class _OfHeads(StoredTensor):
    """A matrix made of the ``both`` one's heads, each of ``span`` rows there."""

    both: StoredTensor
    span: int

    @property
    def heads(self) -> int:
        return self.both.rows // self.span

    @property
    def head_rows(self) -> int:
        """Rows of a head here."""
        return self.rows // self.heads

    def row_ranges(self, max_bytes: int, multiple: int = 1) -> Iterator[tuple[int, int]]:
        """Whole heads at a time, so that none is read twice."""
        return StoredTensor.row_ranges(self, max_bytes, self.head_rows)

    def _covering(self, start: int, stop: int) -> tuple[PackedTensor, int]:
        """The published rows of all heads that hold rows ``start`` to ``stop``, and the first."""
        if not 0 <= start <= stop <= self.rows:
            raise ValueError(
                f"{self.info.name!r} has {self.rows} rows: {start} to {stop} cannot be read"
            )
        first, last = start // self.head_rows, -(-stop // self.head_rows)
        return self.both.read(first * self.span, last * self.span), first


class _ValueRows(_OfHeads):
    """A head's last rows, in their bytes."""

    __slots__ = ()

    def read(self, start: int = 0, stop: int | None = None) -> PackedTensor:
        """See ``StoredTensor``."""
        stop = self.rows if stop is None else stop
        rows, first = self._covering(start, stop)
        wanted = np.arange(start, stop)
        head, row = wanted // self.head_rows - first, wanted % self.head_rows
        index = head * self.span + (self.span - self.head_rows) + row
        return replace(rows.take_rows(index), name=self.info.name)


class _TransposedKeys(_OfHeads):
    """A head's first rows, transposed."""

    __slots__ = ()

    def read(self, start: int = 0, stop: int | None = None) -> PackedTensor:
        """See ``StoredTensor``."""
        stop = self.rows if stop is None else stop
        rows, first = self._covering(start, stop)
        nope, latent = self.info.shape[1], self.head_rows
        if start == stop:
            none = np.empty((0, self.row_bytes), np.uint8)
            return PackedTensor(self.info.name, self.info.format, (0, nope), none)
        heads = unpack(rows).reshape(-1, self.span, latent)[:, :nope]
        whole = heads.swapaxes(1, 2).reshape(-1, nope)
        taken = np.ascontiguousarray(whole[start - first * latent : stop - first * latent])
        return pack(taken, self.info.format, name=self.info.name)
