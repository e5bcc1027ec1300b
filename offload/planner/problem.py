"""The placement as a small problem: how many units of each class go where.

Units that cost the same form a class, so that fifteen thousand experts are one line. A pass cannot
be shorter than its disk reads, its copies, or the computing that follows one another: the longest
of the three is what the rules make small (FlexGen's cost model with the CPU's computing in it).
Beside a card a mixture's experts cost what the scheduler makes of a layer of them. Which unit of a
class goes where is ``arrange.py``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from localrt.offload.placement import PlacedUnit, UnitKind, Where
from localrt.offload.planner.costs import Costs, expert_costs, layer_seconds

AttentionPlace = Literal["card", "card first", "anywhere", "host"]

Counts = Sequence[Mapping[Where, int]]
"""Per class, how many of its units go to each place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitClass:
    """Equal units, in the order of a pass: seconds of one on CPU and GPU.

    ``kv`` are the bytes of a layer's keys and values, which lie where its attention is computed.
    Those of ``shared`` units are computed by both at once: seconds are an equal part of what a
    layer takes with none of them on the card, or all.
    """

    names: tuple[str, ...]
    kind: UnitKind
    nbytes: int
    use: float
    cpu_s: float
    gpu_s: float = 0.0
    reading_s: float = 0.0  # what reading it takes from the CPU
    kv: int = 0
    shared: bool = False

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Room for weights, keys and values in bytes, rates in bytes per second.

    ``ram_slot`` and ``vram_slot`` bound the units that may be read and copied: rings must hold
    them. Without a GPU ``link_bytes_s`` is 0. ``attention``, and a mixture's routers, may have to
    be on the card, or are put there first: prompts need them there, and keys and values cannot
    change sides. It may have to be the CPU's, all of it: layers that share keys and values.
    """

    classes: tuple[UnitClass, ...]
    ram: int
    vram: int
    ram_slot: int
    vram_slot: int
    ssd_bytes_s: float
    link_bytes_s: float = 0.0
    crossing_s: float = 0.0
    fixed_s: float = 0.0
    attention: AttentionPlace = "anywhere"

    def attends(self, group: UnitClass) -> bool:
        """Whether a class is attention, or routers."""
        mixture = any(other.kind == "expert" for other in self.classes)
        return group.kind == "attention" or (mixture and group.kind == "mlp")

    def places(self, group: UnitClass) -> tuple[Where, ...]:
        """Where a class may go, the fastest first."""
        readable = group.nbytes <= self.ram_slot or group.use == 0
        if group.kind == "embedding" or not self.link_bytes_s:
            return (Where.RAM, Where.SSD) if readable else (Where.RAM,)
        places = [Where.VRAM, Where.RAM]
        if group.shared:  # what is copied of them, and when, is the scheduler's choice
            return (*places, Where.SSD) if readable else tuple(places)
        if group.nbytes <= self.vram_slot:
            places.append(Where.LINK)
            if readable:
                places.append(Where.SSD_LINK)
        if readable:
            places.append(Where.SSD)
        if self.attention == "card" and self.attends(group):
            return tuple(place for place in places if place.on_gpu)
        if self.attention == "host" and group.kind == "attention":
            return tuple(place for place in places if not place.on_gpu)
        return tuple(places)


def classes_of(costs: Costs, kv: Sequence[int]) -> tuple[UnitClass, ...]:
    """The classes of a model's units; ``kv`` are bytes per layer at the full context.

    Units without arithmetic that are not read by row (norms) are left out: they are kilobytes.
    """
    groups: dict[tuple[object, ...], list[PlacedUnit]] = {}
    for unit in costs.shape.units:
        if unit.macs == 0 and unit.kind != "embedding":
            continue
        layer_kv = kv[unit.layer] if unit.kind == "attention" and unit.layer is not None else 0
        groups.setdefault(
            (unit.kind, unit.nbytes, unit.macs, unit.format, unit.use, layer_kv), []
        ).append(unit)
    return tuple(_class(costs, units, kv) for units in groups.values())


def _class(costs: Costs, units: Sequence[PlacedUnit], kv: Sequence[int]) -> UnitClass:
    first = units[0]
    use, rows, hybrid = first.use, costs.rows, None
    if first.kind == "expert":
        use, rows = costs.touched(use)
        hybrid = expert_costs(costs)
    if hybrid is not None:
        cpu_s, gpu_s = layer_seconds(costs, hybrid, first.use)
    else:
        cpu_s = costs.cpu(first, rows)
        gpu_s = costs.gpu(first, rows) if costs.machine.gpu else 0.0
    attends = first.kind == "attention" and first.layer is not None
    return UnitClass(
        names=tuple(unit.name for unit in units),
        kind=first.kind,
        nbytes=first.nbytes,
        use=use,
        cpu_s=cpu_s,
        gpu_s=gpu_s,
        reading_s=costs.reading_load(first.nbytes),
        kv=kv[first.layer or 0] if attends else 0,
        shared=hybrid is not None,
    )


def bound(problem: Problem, counts: Counts) -> float:
    """Seconds of a pass: the longest of reading, copying, and computing one unit after another."""
    read = copied = 0.0
    chain = problem.fixed_s
    for group, places in zip(problem.classes, counts, strict=True):
        for where, count in places.items():
            used = count * group.use
            if where.read:
                read += used * group.nbytes
            if where.copied:
                copied += used * group.nbytes
            chain += used * compute_seconds(problem, group, where)
    link = copied / problem.link_bytes_s if copied else 0.0
    return max(read / problem.ssd_bytes_s, link, chain)


def compute_seconds(problem: Problem, group: UnitClass, where: Where) -> float:
    """A unit's computing at a place, with the crossings that a unit on the CPU costs."""
    if where.on_gpu:
        return group.gpu_s
    crossing = problem.crossing_s if problem.link_bytes_s and not group.shared else 0.0
    return group.cpu_s + crossing + (group.reading_s if where is Where.SSD else 0.0)


def held_bytes(group: UnitClass, where: Where) -> tuple[int, int]:
    """Bytes of (RAM, VRAM) that one unit keeps at a place."""
    ram = group.nbytes if where in (Where.RAM, Where.LINK) else 0
    vram = group.nbytes if where is Where.VRAM else 0
    return (ram, vram + group.kv) if where.on_gpu else (ram + group.kv, vram)


def is_feasible(problem: Problem, counts: Counts) -> bool:
    """Whether every unit has a place that it may have, and all fit."""
    ram = vram = 0
    for group, places in zip(problem.classes, counts, strict=True):
        if sum(places.values()) != group.count or min(places.values(), default=0) < 0:
            return False
        allowed = problem.places(group)
        for where, count in places.items():
            if count and where not in allowed:
                return False
            here, there = held_bytes(group, where)
            ram, vram = ram + count * here, vram + count * there
    return ram <= problem.ram and vram <= problem.vram
