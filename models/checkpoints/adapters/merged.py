"""A checkpoint with an adapter merged into its matrices, in float32: what a task's copy is made of.

Tensors that the adapter does not change are read as they are. Where embedding and head are one
table and the adapter changes one of them, they become two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from localrt.models.checkpoints.base import Checkpoint, TensorInfo, WeightBlock
from localrt.models.config import EMBEDDING, HEAD
from localrt.quant.formats import F32, PackedTensor
from localrt.quant.methods.rotation import restored_rows
from localrt.quant.ops.adapters import Adapter, LowRank


class MergedCheckpoint:
    """Follows the ``Checkpoint`` protocol; ``base`` stays the caller's to close."""

    def __init__(self, base: Checkpoint, adapter: Adapter[LowRank]) -> None:
        self._base = base
        self._changes: dict[str, LowRank] = dict(adapter.matrices)
        self._source = {name: name for name in base.tensors}
        self.config: Mapping[str, Any] = base.config
        if HEAD not in base.tensors and (adapter.embedding or adapter.head):
            self._source[HEAD] = EMBEDDING
            self.config = {**base.config, "tie_word_embeddings": False}
        if (tokens := adapter.embedding) is not None:
            a = np.ascontiguousarray(tokens.a.T)  # (tokens, rank): a row of the table
            self._changes[EMBEDDING] = LowRank(np.ascontiguousarray(tokens.b.T), a)
        if adapter.head is not None:
            self._changes[HEAD] = adapter.head
        self.tensors: Mapping[str, TensorInfo] = {
            name: self._info(name, base.tensors[source]) for name, source in self._source.items()
        }

    @property
    def kind(self) -> str:
        """See ``Checkpoint``; what the base's files say of text and sampling holds too."""
        return self._base.kind

    @property
    def path(self) -> Path:
        return self._base.path

    @property
    def architecture(self) -> str:
        return self._base.architecture

    @property
    def notes(self) -> tuple[str, ...]:
        return self._base.notes

    @property
    def generation_config(self) -> Mapping[str, Any]:
        return self._base.generation_config

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._base.metadata

    def close(self) -> None:
        """Nothing of its own."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        block = self._base.read(self._source.get(name, name), start, stop)
        return self._merged(name, block, start) if name in self._changes else block

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[WeightBlock]:
        at = 0
        for block in self._base.blocks(self._source.get(name, name), max_bytes):
            yield self._merged(name, block, at) if name in self._changes else block
            at += block.shape[0]

    def _info(self, name: str, info: TensorInfo) -> TensorInfo:
        if name not in self._changes:
            return replace(info, name=name)
        rows, columns = info.shape
        return TensorInfo(name, info.shape, F32, rows * F32.row_bytes(columns))

    def _merged(self, name: str, block: WeightBlock, first: int) -> PackedTensor:
        change = self._changes[name]
        values = np.concatenate(list(restored_rows(block)))
        stop = first + len(values)
        if change.factors is not None:
            values *= change.factors[first:stop, None]
        values += change.b[first:stop] @ change.a
        return PackedTensor(name, F32, values.shape, values.view(np.uint8))
