"""The inputs for opening a pipeline: a store, a placement, devices, and how to read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from localrt.common.errors import CheckpointError
from localrt.models.checkpoints.store.checkpoint import Mend, StoreCheckpoint
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.config import DecoderConfig
from localrt.models.tensor_source import EMBEDDING, HEAD
from localrt.offload.device.gpu import Clock, Gpu
from localrt.offload.experts.cache import ExpertCosts
from localrt.offload.kv.cache import KvTier
from localrt.offload.placement import Placement, Where
from localrt.offload.reading.files import ReadMode, StoreFiles
from localrt.quant.ops.protocol import Ops


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model, its placement and devices.

    ``ops`` computes on the CPU, ``gpu`` computes units placed on it; ``clock`` times both.
    ``expert_costs`` are needed where a GPU computes a mixture. ``budget`` bounds the RAM of
    resident units and KV caches together, in bytes; before each pass ``shortage`` returns the bytes
    of RAM and of GPU memory that other programs lack (negative: that they have freed). ``kv_tier``
    has the cache layers that are on the SSD. ``mode`` says how to read the store, ``files``
    replaces the store's files, ``stall_s`` is how many seconds a disk may take to answer. With
    ``verify`` each unit's SHA-256 is checked once; see ``Verifier`` for ``mend``. ``on_bytes`` is
    called with the size of each piece read at loading, and may raise.
    """

    store: StoreCheckpoint
    config: DecoderConfig
    placement: Placement
    ops: Ops
    mode: ReadMode
    budget: int
    clock: Clock = field(default_factory=Clock)
    gpu: Gpu | None = None
    expert_costs: ExpertCosts | None = None
    shortage: Callable[[], tuple[int, int]] = lambda: (0, 0)
    kv_tier: KvTier | None = None
    files: StoreFiles | None = None
    verify: bool = True
    mend: Mend | None = None
    stall_s: float = 60.0
    on_bytes: Callable[[int], None] | None = None

    @cached_property
    def units(self) -> Mapping[str, StoredUnit]:
        """The store's units by name."""
        return {unit.name: unit for unit in self.store.manifest.units}

    def unit(self, name: str) -> StoredUnit:
        """The unit ``name``, which the model must have."""
        if name not in self.units:
            raise CheckpointError(f"{self.store.path}: unit {name} is missing: pack it again")
        return self.units[name]

    def where(self, unit: StoredUnit) -> Where:
        """Where a unit is; units that the placement does not name are resident in RAM."""
        return self.placement.where.get(unit.name, Where.RAM)

    def layers(self, kind: Literal["attention", "mlp"]) -> dict[int, StoredUnit]:
        """The units of a kind by layer, in order, for layers that have one."""
        memory, has_mlp = self.config.memory_of, self.config.has_mlp
        return {
            layer: self.unit(f"layers.{layer}.{kind}")
            for layer in range(self.config.layers)
            if (memory(layer) if kind == "attention" else has_mlp(layer))
        }

    def head(self) -> list[StoredUnit]:
        """The head's slices, in order."""
        matrix = EMBEDDING if self.config.tied_head else HEAD
        slices = [u for u in self.units.values() if u.tensors and u.tensors[0].name == matrix]
        return sorted(slices, key=lambda unit: unit.tensors[0].row)

    def dense(self) -> list[StoredUnit]:
        """The units of all stages: every unit but experts."""
        attention, mlp = self.layers("attention"), self.layers("mlp")
        return [*attention.values(), *mlp.values(), *self.head()]

    def attention_on_gpu(self) -> frozenset[int]:
        """The layers whose keys and values are on the GPU."""
        units = self.layers("attention").items()
        return frozenset(layer for layer, unit in units if self.where(unit).on_gpu)

    def rings(self) -> tuple[int, int]:
        """Bytes of the rings in RAM and on the GPU; 0 if nothing passes through.

        If only experts are streamed, their slots get the ring's bytes.
        """
        dense, sparse = [self.where(unit) for unit in self.dense()], self.config.sparse
        ram, vram = self.placement.ram_ring, self.placement.vram_ring
        return (
            0 if sparse and not any(where.read for where in dense) else ram,
            0 if sparse and not any(where.copied for where in dense) else vram,
        )
