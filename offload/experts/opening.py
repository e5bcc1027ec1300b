"""Makes a mixture's expert memory of what a placement gives its experts, and fills it.

The bytes of all experts that are placed in RAM, and of the ring that would otherwise read the
others, are slots: which experts are in them is the cache's, not the placement's. Slots are equal,
but where layers differ in size: see ``pools.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.decoder import PartLoader
from localrt.offload.experts.cache import ExpertCache, Key, slots_within
from localrt.offload.experts.card import CardSlots
from localrt.offload.experts.memory import ExpertMemory, Verify
from localrt.offload.experts.pools import ExpertPools, size_classes
from localrt.offload.experts.reader import DemandReader
from localrt.offload.pipeline.lane import Lane
from localrt.offload.placement import Where
from localrt.offload.reading.fetching import Source
from localrt.offload.reading.loading import Reading
from localrt.quant.ops.experts import ExpertTable, ExpertWeights
from localrt.quant.ops.protocol import Ops

__all__ = ["Mixture", "open_card_slots", "open_experts"]

_LEAST_SLOTS = 4  # of a pool, for each expert of a row


class Mixture:
    """The experts of a model in a store, and where a placement wants them.

    ``units`` are by (sparse layer's number, expert).
    """

    def __init__(
        self, loader: PartLoader, units: Mapping[str, StoredUnit], where: Mapping[str, Where]
    ) -> None:
        config = loader.config
        self.layers = list(config.sparse_layers)
        self.specs = [spec for spec in config.mixtures if spec is not None]
        self.units: dict[Key, StoredUnit] = {
            (place, number): units[f"layers.{layer}.expert.{number}"]
            for place, (layer, spec) in enumerate(zip(self.layers, self.specs, strict=True))
            for number in range(spec.router.count)
        }
        self.nbytes = sum(unit.nbytes for unit in self.units.values())
        self._loader = loader
        self._where = where

    def placed(self, *places: Where) -> int:
        """Bytes of the experts at ``places``."""
        units = self.units.values()
        return sum(unit.nbytes for unit in units if self._where.get(unit.name) in places)

    def tables(self, ops: Ops) -> list[ExpertTable]:
        """An empty table for each sparse layer."""
        return [ops.expert_table(spec.router.count) for spec in self.specs]

    def build(self, lane: Lane, key: Key, data: Any) -> ExpertWeights:
        """An expert's weights for ``lane``, of the unit's bytes there."""
        place, number = key
        weights = lane.weights(self.units[key], data)
        return self._loader.expert(self.layers[place], number, weights)


def open_experts(
    mixture: Mixture,
    lane: Lane,
    source: Source,
    reading: Reading,
    verify: Verify,
    *,
    ring: int,
    alloc: Callable[[int], Any],
    room: int = 0,
) -> ExpertMemory | ExpertPools:
    """Slots for as many experts as are placed in RAM, and for ``ring`` bytes more.

    Of ``room``, the RAM for them, those placed in VRAM take what is left: what makes room on the
    card is then copied again, not read.

    Raises:
        MemoryBudgetError: that is not even one expert.
    """
    units, mode = mixture.units, reading.mode
    kept = mixture.placed(Where.RAM, Where.LINK)
    kept += min(mixture.placed(Where.VRAM), max(0, room - kept))
    tables = mixture.tables(lane.ops)
    reader = DemandReader(source, threads=mode.threads, block=mode.block, stall_s=reading.stall_s)

    def pool(members: Sequence[int], nbytes: int, ring: int) -> ExpertMemory:
        """Of the layers at these places."""
        numbers = {place: number for number, place in enumerate(members)}
        ours = {(numbers[p], e): unit for (p, e), unit in units.items() if p in numbers}

        def build(key: Key, unit: StoredUnit, data: Any) -> ExpertWeights:
            return mixture.build(lane, (members[key[0]], key[1]), data)

        return ExpertMemory(
            ours,
            [tables[place] for place in members],
            _cache(mixture, ours, nbytes, ring),
            reader,
            build=build,
            verify=verify,
            alloc=alloc,
        )

    try:
        classes = size_classes(units)
        shares = _shares(classes, mixture, kept + ring)
        if shares is None:
            return pool(range(len(mixture.layers)), kept, ring)
        if kept >= mixture.nbytes:  # each pool holds all of its own
            shares = [sum(u.nbytes for (p, _), u in units.items() if p in c) for c in classes]
        pools = [pool(each, nbytes, 0) for each, nbytes in zip(classes, shares, strict=True)]
        return ExpertPools(pools, classes, reader)
    except BaseException:
        reader.close()
        raise


def _shares(classes: Sequence[Sequence[int]], mixture: Mixture, nbytes: int) -> list[int] | None:
    """Bytes for the pool of each class; None where one pool is better.

    Each gets its experts' share. With few slots one pool uses them better than several.
    """
    if len(classes) == 1:
        return None
    used = max(spec.router.used for spec in mixture.specs)
    shares = []
    for members in classes:
        sizes = [unit.nbytes for (place, _), unit in mixture.units.items() if place in members]
        share = nbytes * sum(sizes) // mixture.nbytes
        if share // max(sizes) < _LEAST_SLOTS * used:
            return None
        shares.append(share)
    return shares


def open_card_slots(mixture: Mixture, lane: Lane, *, ring: int) -> CardSlots:
    """Slots for as many experts as are placed in VRAM, and for ``ring`` bytes more.

    There is one at least: what the CPU does not compute has to be somewhere.

    Raises:
        MemoryBudgetError: the card has no room for them.
    """
    card = lane.card
    assert card is not None, "they are on a card"
    largest = max(unit.nbytes for unit in mixture.units.values())
    kept = max(mixture.placed(Where.VRAM), largest)
    cache = _cache(mixture, mixture.units, kept, ring)

    def build(key: Key, unit: StoredUnit, data: Any, in_ram: Any) -> ExpertWeights:
        if any(len(tensor.shape) == 1 for tensor in unit.tensors):
            lane.remember_vectors(unit, in_ram)
        return mixture.build(lane, key, data)

    return CardSlots(card, mixture.units, mixture.tables(lane.ops), cache, build=build)


def _cache(mixture: Mixture, units: Mapping[Key, StoredUnit], kept: int, ring: int) -> ExpertCache:
    """Of as many slots as ``kept`` + ``ring`` bytes hold."""
    layers = len({place for place, _ in units})
    largest = max(unit.nbytes for unit in units.values())
    slots = min(slots_within(kept + ring, largest), len(units))
    if kept >= sum(unit.nbytes for unit in units.values()):
        slots = len(units)  # though they are not equally large
    count = max(spec.router.count for spec in mixture.specs)
    used = max(spec.router.used for spec in mixture.specs)
    return ExpertCache(layers, count, used, slots)
