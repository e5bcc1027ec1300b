"""A unit's bytes in memory, made into the part of the model that computes with them.

Nothing is copied: the part's weights point into the bytes, which must stay as they are for as long
as the part is used. It knows a store's units and the architectures' parts, not where bytes come
from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.errors import CheckpointError
from localrt.models.checkpoints.base import TensorInfo, WeightBlock
from localrt.models.checkpoints.store_checkpoint import StoreCheckpoint
from localrt.models.checkpoints.store_manifest import StoredUnit, UnitTensor
from localrt.models.decoder import (
    Attention,
    DecoderConfig,
    GatedMlp,
    LayerNames,
    load_attention,
    sparse_mlp,
)
from localrt.models.latent import LatentAttention
from localrt.models.moe import SparseMlp, load_expert
from localrt.models.weights import WeightLoader
from localrt.quant.formats import PackedTensor
from localrt.quant.formats.tiled import TiledTensor
from localrt.quant.ops.experts import ExpertTable, ExpertWeights
from localrt.quant.ops.protocol import Ops, Vector, Weight

__all__ = ["PartBuilder", "UnitMemory", "verify_unit"]

Bytes = npt.NDArray[np.uint8]


class UnitMemory:
    """A unit's tensors in ``data``, its whole range. See ``TensorSource``.

    ``vectors`` are those of a unit whose ``data`` lies where the CPU cannot read it.
    """

    def __init__(
        self,
        path: Path,
        architecture: str,
        unit: StoredUnit,
        data: Any,
        vectors: Mapping[str, PackedTensor] | None = None,
    ) -> None:
        self.path, self.architecture = path, architecture
        self._tensors = {tensor.name: tensor for tensor in unit.tensors}
        self._data = data
        self._vectors = vectors or {}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The unit's tensors; a slice of a matrix has the slice's rows."""
        return {
            tensor.name: TensorInfo(tensor.name, tensor.shape, tensor.format, tensor.nbytes)
            for tensor in self._tensors.values()
        }

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        """A whole vector."""
        tensor = self._tensors[name]
        if len(tensor.shape) != 1 or start or stop not in (None, 1):
            raise ValueError(f"{name!r} is no vector: its rows are in tiles")
        if name in self._vectors:
            return self._vectors[name]
        return PackedTensor(name, tensor.format, tensor.shape, self._bytes(tensor).reshape(1, -1))

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[WeightBlock]:
        """A matrix as it lies."""
        tensor = self._tensors[name]
        if len(tensor.shape) == 1:
            yield self.read(name)
            return
        shape = (tensor.shape[0], tensor.shape[1])
        data = self._bytes(tensor)
        yield TiledTensor(name, tensor.format, shape, data, tensor.scale, tensor.hadamard)

    def vectors(self) -> dict[str, PackedTensor]:
        """Copies of all vectors."""
        return {
            name: replace(packed, data=packed.data.copy())
            for name, tensor in self._tensors.items()
            if len(tensor.shape) == 1
            for packed in (self.read(name),)
        }

    def _bytes(self, tensor: UnitTensor) -> Any:
        return self._data[tensor.offset : tensor.offset + tensor.nbytes]


class PartBuilder:
    """Makes parts of the model in ``store`` for ``ops``.

    ``layers`` are the layers whose keys and values ``ops`` keeps, in order, where it is not all.
    """

    def __init__(
        self,
        store: StoreCheckpoint,
        config: DecoderConfig,
        names: LayerNames,
        ops: Ops,
        layers: Sequence[int] | None = None,
    ) -> None:
        self._store = store
        self._config = config
        self._names = names
        self._ops = ops
        self._place = None if layers is None else {layer: n for n, layer in enumerate(layers)}
        self._vectors: dict[str, dict[str, PackedTensor]] = {}
        self._tables: dict[int, ExpertTable] = {}

    def remember_vectors(self, unit: StoredUnit, data: Bytes) -> None:
        """Keep a unit's norms and biases: its bytes will lie where the CPU cannot read them."""
        memory = UnitMemory(self._store.path, self._store.architecture, unit, data)
        self._vectors[unit.name] = memory.vectors()

    def attention(self, layer: int, unit: StoredUnit, data: Any) -> Attention | LatentAttention:
        """A layer's attention."""
        weights, prefix = self._loader(unit, data), f"model.layers.{layer}."
        part = load_attention(self._config, layer, self._names, prefix, weights)
        if self._place is not None:
            part.layer = self._place[layer]
        return part

    def mlp(self, layer: int, unit: StoredUnit, data: Any) -> GatedMlp | SparseMlp:
        """A layer's MLP; a sparse one computes with the layer's ``table``."""
        config, names = self._config, self._names
        weights, prefix = self._loader(unit, data), f"model.layers.{layer}."
        spec = config.mixture(layer)
        if spec is None:
            return GatedMlp(config, names, prefix, weights)
        return sparse_mlp(config, spec, names, prefix, weights, self.table(layer))

    def table(self, layer: int) -> ExpertTable:
        """The experts of a sparse layer that are in memory: the same one at every call."""
        if layer not in self._tables:
            spec = self._config.mixture(layer)
            assert spec is not None, "a dense layer has no experts"
            self._tables[layer] = self._ops.expert_table(spec.router.count)
        return self._tables[layer]

    def expert(self, layer: int, number: int, unit: StoredUnit, data: Any) -> ExpertWeights:
        """One expert of a sparse layer."""
        spec = self._config.mixture(layer)
        assert spec is not None, "a dense layer has no experts"
        weights, prefix = self._loader(unit, data), f"model.layers.{layer}."
        hidden, names = self._config.hidden_size, self._names.mixture
        return load_expert(spec, hidden, number, names, prefix, weights)

    def matrix(self, unit: StoredUnit, data: Any) -> Weight:
        """The one matrix, or slice of a matrix, of a unit."""
        (tensor,) = unit.tensors
        shape = (tensor.shape[0], tensor.shape[1])
        return self._loader(unit, data).matrix(shape, tensor.name)

    def joined(self, slices: Sequence[tuple[StoredUnit, Any]]) -> Weight:
        """Consecutive slices of one matrix as one, where each of them lies."""
        tensors = [unit.tensors[0] for unit, _ in slices]
        shape = (sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1])
        blocks = (
            block
            for unit, data in slices
            for block in self._memory(unit, data).blocks(unit.tensors[0].name)
        )
        return self._ops.weight(shape, blocks)

    def final_norm(self, unit: StoredUnit, data: Bytes) -> Vector:
        """The norm before the head."""
        config = self._config
        weights = self._loader(unit, data)
        return weights.vector(
            config.hidden_size,
            "model.norm.weight",
            offset=config.norm_offset,
            scale=config.logit_scale,
        )

    def _loader(self, unit: StoredUnit, data: Any) -> WeightLoader:
        return WeightLoader(self._memory(unit, data), self._ops)

    def _memory(self, unit: StoredUnit, data: Any) -> UnitMemory:
        store, vectors = self._store, self._vectors.get(unit.name)
        return UnitMemory(store.path, store.architecture, unit, data, vectors)


def verify_unit(path: Path, unit: StoredUnit, data: Bytes) -> None:
    """Compare the SHA-256 of a unit's bytes with the manifest's.

    Raises:
        CheckpointError: they differ.
    """
    if hashlib.sha256(data.data).hexdigest() != unit.sha256:
        raise CheckpointError(
            f"{path}: unit {unit.name} in {unit.file} is damaged (its SHA-256 is not that of the "
            "manifest): copy or quantize the model again"
        )
