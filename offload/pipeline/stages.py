"""A model's units in the order of a pass, each with its place and what it does there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.offload.placement import Where

__all__ = ["Stage", "list_stages"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One unit in a pass. ``layer`` counts blocks; ``first_row`` is a head slice's."""

    unit: StoredUnit
    kind: Literal["attention", "mlp", "head"]
    where: Where
    layer: int = 0
    first_row: int = 0

    @property
    def name(self) -> str:
        """The unit's."""
        return self.unit.name

    @property
    def macs(self) -> int:
        """Multiply-accumulates of its matrices with one row."""
        return sum(t.shape[0] * t.shape[1] for t in self.unit.tensors if len(t.shape) == 2)

    @property
    def rows(self) -> int:
        """Rows of a head slice."""
        return self.unit.tensors[0].shape[0]


def list_stages(units: tuple[StoredUnit, ...], where: Mapping[str, Where]) -> tuple[Stage, ...]:
    """The stages of a store's ``units``, in order: layers, then the head's slices.

    Units that ``where`` does not name are resident in RAM. Experts are no stages of their own: they
    belong to their layer's MLP.
    """
    stages: list[Stage] = []
    for unit in units:
        place = where.get(unit.name, Where.RAM)
        kind, _, rest = unit.name.partition(".")
        if kind == "layers":
            number, _, part = rest.partition(".")
            if part.startswith("expert."):
                continue
            assert part in ("attention", "mlp"), "a layer has two units beside its experts"
            stages.append(Stage(unit, part, place, layer=int(number)))  # type: ignore[arg-type]
        elif kind == "head":
            stages.append(Stage(unit, "head", place, first_row=unit.tensors[0].row))
    order = {"attention": 0, "mlp": 1}
    return tuple(
        sorted(
            stages,
            key=lambda stage: (
                stage.kind == "head",
                stage.layer,
                order.get(stage.kind, 0),
                stage.first_row,
            ),
        )
    )
