"""A GGUF model as a checkpoint: Hugging Face's tensor names, row order and config, experts by one.

llama.cpp rotates neighbouring pairs of a head's values, Hugging Face its two halves; the converter
reorders query and key rows accordingly for some architectures. ``read`` puts them back, which moves
whole packed rows and so changes no value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.errors import CheckpointError
from localrt.models.checkpoints.base import TensorInfo
from localrt.models.checkpoints.expert_stacks import split_ranges
from localrt.models.checkpoints.gguf_config import generation_config, model_config
from localrt.models.checkpoints.gguf_file import open_gguf_parts
from localrt.models.checkpoints.gguf_metadata import GgufMetadata
from localrt.models.checkpoints.gguf_names import (
    INTERLEAVED_ROTARY,
    expert_stack,
    hf_tensor_name,
)
from localrt.models.checkpoints.latent_tensors import latent_tensors
from localrt.models.checkpoints.stored_tensor import StoredTensor
from localrt.quant.formats import PackedTensor

__all__ = ["GgufCheckpoint"]

_ONE_ROW = ".shared_expert_gate.weight"
"""A matrix of one row that llama.cpp's converter stores as a vector."""


class GgufCheckpoint:
    """A GGUF file, or a split one opened from any of its parts. See ``Checkpoint``.

    Raises:
        CheckpointError: not a GGUF file, truncated or malformed, or a part is missing.
        UnsupportedModelError: a version or tensor type that is not read here.
    """

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self._parts = open_gguf_parts(path)
        try:
            self.path = self._parts[0].path
            self.metadata: GgufMetadata = self._parts[0].metadata
            self.architecture = self.metadata.text("general.architecture") or ""
            if not self.architecture:
                raise CheckpointError(f"{path} does not name its architecture")
            self._stored = self._rename()
            if not self._stored:
                raise CheckpointError(f"{path} holds no tensors, only a vocabulary")
            self.config: Mapping[str, Any] = model_config(
                self.architecture, self.metadata, self._stored
            )
            self._stored = latent_tensors(self._stored, self.config)
            self.tensors: Mapping[str, TensorInfo] = {
                name: stored.info for name, stored in self._stored.items()
            }
            self.generation_config: Mapping[str, Any] = generation_config(self.metadata)
            self._rotary_heads = self._find_rotary_heads()
        except BaseException:
            self.close()
            raise

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        """Rows ``start`` to ``stop`` of a tensor in Hugging Face's order.

        Raises:
            CheckpointError: no such tensor, or the file is closed.
            ValueError: the tensor has no such rows.
        """
        stored = self._find(name)
        heads = self._rotary_heads.get(name)
        if heads is None:
            return stored.read(start, stop)
        if len(stored.info.shape) == 1:
            return _reorder_vector(stored.read(start, stop), heads)
        return _read_reordered(stored, heads, start, stored.rows if stop is None else stop)

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[PackedTensor]:
        """A tensor's rows in order, in pieces of at most ``max_bytes`` (and at least one row)."""
        stored = self._find(name)
        # whole heads at a time, where rows are put back in order: then none is read twice
        multiple = max(1, stored.rows // self._rotary_heads.get(name, stored.rows))
        for start, stop in stored.row_ranges(max_bytes, multiple):
            yield self.read(name, start, stop)

    def close(self) -> None:
        """Close the files."""
        for part in self._parts:
            part.close()

    def _find(self, name: str) -> StoredTensor:
        if name not in self._stored:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        return self._stored[name]

    def _rename(self) -> dict[str, StoredTensor]:
        """Every tensor by its Hugging Face name, and every expert by itself."""
        experts = self.metadata.integer(f"{self.architecture}.expert_count")
        stored: dict[str, StoredTensor] = {}
        for part in self._parts:
            for name, tensor in part.tensors.items():
                for own in self._plain(name, tensor, experts):
                    if own.info.name in stored:
                        raise CheckpointError(f"{part.path}: tensor {name!r} appears twice")
                    stored[own.info.name] = own
        return stored

    def _plain(self, name: str, tensor: StoredTensor, experts: int | None) -> list[StoredTensor]:
        """What one tensor of the file is."""
        if (stacked := expert_stack(name)) is not None:
            prefix, stack = stacked
            return list(split_ranges(tensor, stack, prefix, experts))
        info = replace(tensor.info, name=hf_tensor_name(self.architecture, name))
        if info.name.endswith(_ONE_ROW) and len(info.shape) == 1:
            info = replace(info, shape=(1, *info.shape))
        return [replace(tensor, info=info)]

    def _find_rotary_heads(self) -> dict[str, int]:
        """Number of heads of every tensor whose rows are stored in rotary pairs."""
        if self.architecture not in INTERLEAVED_ROTARY:
            return {}
        queries = self.config.get("num_attention_heads")
        keys = self.config.get("num_key_value_heads", queries)
        found: dict[str, int] = {}
        for name, info in self.tensors.items():
            stem = name.rpartition(".")[0]
            if not stem.endswith(("self_attn.q_proj", "self_attn.k_proj")):
                continue
            heads = queries if stem.endswith("q_proj") else keys
            if type(heads) is not int or heads < 1 or info.shape[0] % (2 * heads):
                raise CheckpointError(
                    f"{self.path}: {info.shape[0]} rows of {name!r} are not {heads} heads "
                    "of an even size"
                )
            if len(info.shape) == 1 and info.format.block != 1:
                raise CheckpointError(f"{self.path}: {name!r} is a vector in {info.format.name}")
            found[name] = heads
        return found


def _pair_order(rows: int, head_rows: int) -> npt.NDArray[np.intp]:
    """Where row i of halves lies among rows of pairs, for whole heads."""
    index = np.arange(rows).reshape(-1, head_rows // 2, 2)  # (heads, pairs, 2)
    return index.swapaxes(1, 2).reshape(rows)


def _read_reordered(stored: StoredTensor, heads: int, start: int, stop: int) -> PackedTensor:
    """Rows of whole heads that cover the wanted ones, then those, in order."""
    if not 0 <= start <= stop <= stored.rows:
        return stored.read(start, stop)  # raises
    head_rows = stored.rows // heads
    first = start // head_rows * head_rows
    last = -(-stop // head_rows) * head_rows
    order = _pair_order(last - first, head_rows)
    return stored.read(first, last).take_rows(order[start - first : stop - first])


def _reorder_vector(vector: PackedTensor, heads: int) -> PackedTensor:
    if not vector.data.size:
        return vector
    values = vector.data.reshape(vector.shape[0], vector.format.block_bytes)
    order = _pair_order(len(values), len(values) // heads)
    return replace(vector, data=values[order].reshape(vector.data.shape))
