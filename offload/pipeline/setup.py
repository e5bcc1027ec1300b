"""What a pipeline is opened from: devices, a store, a placement, and what all steps share."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from localrt.errors import CheckpointError
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.models.checkpoints.store.memory import Verifier
from localrt.models.config import EMBEDDING, HEAD, DecoderConfig
from localrt.offload.cards.accelerator import Accelerator
from localrt.offload.cards.clock import WallClock
from localrt.offload.experts.scheduler import ExpertCosts
from localrt.offload.pipeline.stage import Stage
from localrt.offload.placement import Placement, Where
from localrt.offload.reading.files import StoreFiles
from localrt.offload.reading.loading import Reading
from localrt.quant.ops.protocol import Ops

__all__ = ["Devices", "Setup"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """What computes: ``ops`` is the CPU's, ``card`` does what the placement puts on a GPU.

    ``clock`` times both. ``expert_costs`` are needed where a card computes a mixture.
    """

    ops: Ops
    clock: WallClock
    card: Accelerator | None = None
    expert_costs: ExpertCosts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all steps of opening share. ``held`` frees, in reverse, what they make.

    ``stages`` are filled once there are lanes, by name and in the order of a pass. ``rows`` reads
    single rows of the embedding.
    """

    held: ExitStack
    store: StoreCheckpoint
    config: DecoderConfig
    placement: Placement
    devices: Devices
    reading: Reading
    units: Mapping[str, StoredUnit]
    files: StoreFiles
    rows: StoreFiles
    verify: Verifier
    stages: dict[str, Stage]

    def unit(self, name: str) -> StoredUnit:
        """A unit that every such model has."""
        if name not in self.units:
            raise CheckpointError(f"{self.store.path}: unit {name} is missing: pack it again")
        return self.units[name]

    def where(self, unit: StoredUnit) -> Where:
        """Units that the placement does not name are resident in RAM."""
        return self.placement.where.get(unit.name, Where.RAM)

    def layers(self, kind: Literal["attention", "mlp"]) -> dict[int, StoredUnit]:
        """The layers' units of a kind, in order; of those layers that have one."""
        memory, has_mlp = self.config.memory_of, self.config.has_mlp
        return {
            layer: self.unit(f"layers.{layer}.{kind}")
            for layer in range(self.config.layers)
            if (memory(layer) if kind == "attention" else has_mlp(layer))
        }

    def head(self) -> list[StoredUnit]:
        """The head's slices, in order."""
        matrix = EMBEDDING if self.config.tied_head else HEAD
        found = [u for u in self.units.values() if u.tensors and u.tensors[0].name == matrix]
        return sorted(found, key=lambda unit: unit.tensors[0].row)

    def dense(self) -> list[StoredUnit]:
        """The units of all stages: what is not an expert."""
        attention, mlp = self.layers("attention"), self.layers("mlp")
        return [*attention.values(), *mlp.values(), *self.head()]

    def rings(self) -> tuple[int, int]:
        """Bytes of the rings of RAM and card, 0 where nothing passes through.

        Experts have slots of their own: where they alone are streamed, these have the ring's bytes.
        """
        dense, sparse = [self.where(unit) for unit in self.dense()], self.config.sparse
        ram, vram = self.placement.ram_ring, self.placement.vram_ring
        return (
            0 if sparse and not any(where.read for where in dense) else ram,
            0 if sparse and not any(where.copied for where in dense) else vram,
        )
