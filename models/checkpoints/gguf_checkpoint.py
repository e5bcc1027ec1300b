"""A GGUF model as a checkpoint: Hugging Face's tensor names, row order and config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from localrt.errors import CheckpointError
from localrt.models.checkpoints.delta_tensors import delta_tensors
from localrt.models.checkpoints.expert_stacks import split_ranges
from localrt.models.checkpoints.gemma_tensors import gemma_tensors
from localrt.models.checkpoints.gguf_config import count_layers, generation_config, model_config
from localrt.models.checkpoints.gguf_file import open_gguf_parts
from localrt.models.checkpoints.gguf_metadata import GgufMetadata
from localrt.models.checkpoints.gguf_names import (
    INTERLEAVED_ROTARY,
    expert_stack,
    hf_tensor_name,
)
from localrt.models.checkpoints.latent_tensors import latent_tensors
from localrt.models.checkpoints.regrouped_rows import regrouped
from localrt.models.checkpoints.rotary_rows import rotary_rows
from localrt.models.checkpoints.stored_tensor import (
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
            sources: dict[str, RowSource] = dict(stored)
            for in_models_form in (latent_tensors, gemma_tensors, delta_tensors):
                sources = in_models_form(sources, self.config)
            if self.architecture in INTERLEAVED_ROTARY:
                sources |= rotary_rows(stored, self.config, self.path)
            super().__init__({name: regrouped(source) for name, source in sources.items()})
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
        if (stacked := expert_stack(self.architecture, name)) is not None:
            prefix, stack = stacked
            return list(split_ranges(tensor, stack, prefix, experts))
        info = replace(tensor.info, name=hf_tensor_name(self.architecture, name))
        if info.name.endswith(_ONE_ROW) and len(info.shape) == 1:
            info = replace(info, shape=(1, *info.shape))
        return [replace(tensor, info=info)]
