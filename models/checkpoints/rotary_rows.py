"""Rows of queries and keys whose rotary pairs lie side by side, as the two halves of a head.

llama.cpp rotates neighbouring pairs of a head's values, Hugging Face its two halves; some files
have one order, some the other. Whole packed rows are moved, which changes no value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localrt.errors import CheckpointError
from localrt.models.checkpoints.stored_tensor import Bytes, RowSource

__all__ = ["rotary_rows"]

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
        """See ``RowSource``."""
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
