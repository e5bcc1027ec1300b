"""A GGUF model as a checkpoint, with Hugging Face's tensor names, row order and config."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.family_tensors import family_tensors
from localrt.models.checkpoints.gguf.config import count_layers, generation_config, model_config
from localrt.models.checkpoints.gguf.file import open_gguf_parts
from localrt.models.checkpoints.gguf.metadata import GgufMetadata
from localrt.models.checkpoints.gguf.names import expert_stack, hf_tensor_name
from localrt.models.checkpoints.text_model import (
    HEADS,
    DraftHeadError,
    as_first_block,
    gguf_block,
    gguf_prediction_tensor,
    is_beside_decoder,
    prediction_blocks,
    prediction_config,
    require_model,
)
from localrt.models.registry import find_family
from localrt.models.row_order import regrouped, rotary_rows, split_ranges
from localrt.models.tensor_source import SourcedCheckpoint, StoredTensor
from localrt.models.weight_files import model_stamp
from localrt.quant.formats import F32

_ONE_ROW = ".shared_expert_gate.weight"
"""Matrices of one row that llama.cpp's converter stores as vectors."""
_NORM = "model.norm.weight"
"""Tensors of the model that a prediction block shares if it has none of its own."""
_IN_LAYER = re.compile(r"model\.layers\.")
_OWN_SCALE = ("gemma4", ".ffn_down_exps.scale")
"""Architectures whose experts have factors under the name of NVFP4's scales."""


class GgufCheckpoint(SourcedCheckpoint):
    """A GGUF file, or a split one opened from any of its parts. See ``Checkpoint``.

    With ``predicts`` it is the draft head in the file: the first MTP block, as a model of one
    layer, or the whole file if that is one of ``HEADS``.

    Raises:
        CheckpointError: not a GGUF file, truncated or malformed, a part is missing, or there is no
        MTP block.
        UnsupportedModelError: an unsupported version or tensor type, or no language model.
    """

    kind = "gguf"
    notes: tuple[str, ...] = ()

    def __init__(self, path: Path, *, predicts: bool = False) -> None:
        self.stamp = model_stamp(path)  # before opening, in case a file is replaced
        self._parts = open_gguf_parts(path)
        try:
            self.path = self._parts[0].path
            self.metadata: GgufMetadata = self._parts[0].metadata
            self.architecture = self.metadata.text("general.architecture") or ""
            require_model(path, self.metadata.text("general.type"), self.architecture)
            if not self.architecture:
                raise CheckpointError(f"{path} does not name its architecture")
            self.family = find_family(self.architecture)
            head = self.architecture in HEADS
            predicting = self._prediction_blocks()
            stored = self._rename(predicting)
            if not stored:
                raise CheckpointError(f"{path} holds no tensors, only a vocabulary")
            self.config: Mapping[str, object] = model_config(
                self.architecture, self.metadata, stored, predicting
            )
            self.only_predicts = head or (
                bool(predicting) and not any(map(_IN_LAYER.match, stored))
            )
            if predicts and not head:
                if not (predicting and self.family.predicts):
                    raise CheckpointError(f"{path} has no MTP block")
                norm = {name: own for name, own in stored.items() if name == _NORM}
                stored = norm | self._rename(predicting, of_block=min(predicting))
                self.config = prediction_config(self.config)
            elif self.only_predicts and not predicts:
                raise DraftHeadError(path, self.architecture)
            self.generation_config: Mapping[str, object] = generation_config(self.metadata)
            sources = family_tensors(stored, self.config)
            halves = f"{self.architecture}.rope.dimension_sections" in self.metadata  # M-RoPE's
            if self.family.gguf_in_pairs and not halves:
                sources |= rotary_rows(stored, self.config, self.path)
            sources = self.family.convert(sources, self.config)
            super().__init__({name: regrouped(source) for name, source in sources.items()})
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _prediction_blocks(self) -> frozenset[int]:
        """The numbers of prediction blocks, which are not layers."""
        counted = count_layers(self.architecture, self.metadata)
        return prediction_blocks(*counted, self._names())

    def _names(self) -> Iterator[str]:
        return (name for part in self._parts for name in part.tensors)

    def _rename(
        self, predicting: frozenset[int], *, of_block: int | None = None
    ) -> dict[str, StoredTensor]:
        """The decoder's tensors by their Hugging Face names, each expert separate; or those of the
        prediction block ``of_block``.
        """
        experts = self.metadata.integer(f"{self.architecture}.expert_count")
        stored: dict[str, StoredTensor] = {}
        factors = self._factors()
        for part in self._parts:
            for name, tensor in part.tensors.items():
                block = gguf_block(name)
                others = block in predicting if of_block is None else block != of_block
                if others or is_beside_decoder(name) or name in factors:
                    continue
                here = name if of_block is None else as_first_block(name)
                for own in self._scaled(self._plain(here, tensor, experts), factors, name):
                    if own.info.name in stored:
                        raise CheckpointError(f"{part.path}: tensor {name!r:.80} appears twice")
                    stored[own.info.name] = own
        return stored

    def _factors(self) -> dict[str, list[float]]:
        """Scales of NVFP4 tensors (one, or one per expert) by tensor name; scales of quantized
        inputs are ignored.
        """
        tensors = {name: each for part in self._parts for name, each in part.tensors.items()}
        packed = [name for name, each in tensors.items() if each.info.format.name == "nvfp4"]
        found: dict[str, list[float]] = {}
        for weight in packed:
            stem = weight.removesuffix(".weight")
            for name in (f"{stem}.scale", f"{weight}.scale"):
                own = tensors.get(name)
                if own is None or (self.architecture == _OWN_SCALE[0] and _OWN_SCALE[1] in name):
                    continue
                if own.info.format != F32:
                    raise CheckpointError(f"tensor {name!r:.80} is {own.info.format.name}, not f32")
                found[name] = own.read().data.view("<f4").reshape(-1).tolist()
                if not all(isfinite(factor) for factor in found[name]):
                    raise CheckpointError(f"tensor {name!r:.80} holds no finite numbers")
            for name in (f"{stem}.input_scale", f"{weight}.input_scale"):
                if name in tensors:
                    found[name] = []
        return found

    def _scaled(
        self, plain: list[StoredTensor], factors: Mapping[str, list[float]], name: str
    ) -> list[StoredTensor]:
        """The parts of the tensor ``name`` with their scales."""
        own = f"{name.removesuffix('.weight')}.scale"
        own = own if own in factors else f"{name}.scale"
        if own not in factors:
            return plain
        each = len(factors[own])
        if each not in (1, len(plain)) and (not each or len(plain) % each):
            raise CheckpointError(
                f"tensor {own!r:.80} has {each} scales, {name!r:.80} {len(plain)} parts"
            )
        return [
            replace(part, factor=factors[own][number * each // len(plain)])
            for number, part in enumerate(plain)
        ]

    def _plain(self, name: str, tensor: StoredTensor, experts: int | None) -> list[StoredTensor]:
        """The decoder's tensors for one tensor of the file."""
        if (stacked := expert_stack(self.family, name)) is not None:
            prefix, stack = stacked
            return list(split_ranges(tensor, stack, prefix, experts))
        beside = gguf_prediction_tensor(name)
        info = replace(tensor.info, name=beside or hf_tensor_name(self.family, name))
        if info.name.endswith(_ONE_ROW) and len(info.shape) == 1:
            info = replace(info, shape=(1, *info.shape))
        return [replace(tensor, info=info)]
