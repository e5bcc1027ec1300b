"""A GGUF model as a checkpoint: Hugging Face's tensor names, row order and config, experts by one.

llama.cpp rotates neighbouring pairs of a head's values, Hugging Face its two halves; the converter
reorders query and key rows accordingly for some architectures. Reading puts them back, which moves
whole packed rows and so changes no value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localrt.errors import CheckpointError
from localrt.models.checkpoints.expert_stacks import split_ranges
from localrt.models.checkpoints.gguf_config import count_layers, generation_config, model_config
from localrt.models.checkpoints.gguf_file import open_gguf_parts
from localrt.models.checkpoints.gguf_metadata import GgufMetadata
from localrt.models.checkpoints.gguf_names import (
    INTERLEAVED_ROTARY,
    expert_stack,
    hf_tensor_name,
)
from localrt.models.checkpoints.latent_tensors import latent_tensors
from localrt.models.checkpoints.stored_tensor import (
    Bytes,
    RowSource,
    SourcedCheckpoint,
    StoredTensor,
)
from localrt.models.checkpoints.text_model import (
    gguf_block,
    is_beside_decoder,
    prediction_blocks,
)

__all__ = ["GgufCheckpoint"]

_ONE_ROW = ".shared_expert_gate.weight"
"""A matrix of one row that llama.cpp's converter stores as a vector."""


class GgufCheckpoint(SourcedCheckpoint):
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
            predicting = self._prediction_blocks()
            stored = self._rename(predicting)
            if not stored:
                raise CheckpointError(f"{path} holds no tensors, only a vocabulary")
            self.config: Mapping[str, Any] = model_config(
                self.architecture, self.metadata, stored, predicting
            )
            self.generation_config: Mapping[str, Any] = generation_config(self.metadata)
            sources = latent_tensors(stored, self.config)
            if self.architecture in INTERLEAVED_ROTARY:
                sources |= self._reordered(stored)
            super().__init__(sources)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the files."""
        for part in self._parts:
            part.close()

    def _prediction_blocks(self) -> frozenset[int]:
        """The blocks that are no layers."""
        names = [name for part in self._parts for name in part.tensors]
        return prediction_blocks(*count_layers(self.architecture, self.metadata), names)

    def _rename(self, predicting: frozenset[int]) -> dict[str, StoredTensor]:
        """The decoder's tensors by their Hugging Face names, and every expert by itself."""
        experts = self.metadata.integer(f"{self.architecture}.expert_count")
        stored: dict[str, StoredTensor] = {}
        for part in self._parts:
            for name, tensor in part.tensors.items():
                if gguf_block(name) in predicting or is_beside_decoder(name):
                    continue
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

    def _reordered(self, stored: Mapping[str, StoredTensor]) -> dict[str, RowSource]:
        """Every tensor whose rows are stored in rotary pairs, in Hugging Face's order."""
        queries = self.config.get("num_attention_heads")
        keys = self.config.get("num_key_value_heads", queries)
        found: dict[str, RowSource] = {}
        for name, tensor in stored.items():
            info, stem = tensor.info, name.rpartition(".")[0]
            if not stem.endswith(("self_attn.q_proj", "self_attn.k_proj")):
                continue
            heads = queries if stem.endswith("q_proj") else keys
            if type(heads) is not int or heads < 1 or info.shape[0] % (2 * heads):
                raise CheckpointError(
                    f"{self.path}: {info.shape[0]} rows of {name!r} are not {heads!r:.60} heads "
                    "of an even size"
                )
            if len(info.shape) == 1 and info.format.block != 1:
                raise CheckpointError(f"{self.path}: {name!r} is a vector in {info.format.name}")
            found[name] = _RotaryRows(info, tensor, heads)
        return found


@dataclass(frozen=True, slots=True)
class _RotaryRows(RowSource):
    """The rows of ``stored``, a matrix or a vector of ``heads``, halves in the place of pairs."""

    stored: StoredTensor
    heads: int

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
