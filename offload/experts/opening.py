"""Makes a mixture's expert memory of what a placement gives its experts, and fills it.

The bytes of all experts that are placed in RAM, and of the ring that would otherwise read the
others, are slots: which experts are in them is the cache's, not the placement's. Slots are equal,
but where layers differ in size: see ``pools.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.decoder import DecoderConfig
from localrt.offload.cards.accelerator import Accelerator
from localrt.offload.experts.cache import ExpertCache, Key, slots_within
from localrt.offload.experts.card import CardSlots
from localrt.offload.experts.memory import ExpertMemory, Verify
from localrt.offload.experts.pools import ExpertPools, size_classes
from localrt.offload.experts.reader import DemandReader
from localrt.offload.placement import Where
from localrt.offload.reading.fetching import Source
from localrt.offload.reading.files import ReadMode
from localrt.offload.unit_parts import PartBuilder
from localrt.quant.ops.experts import ExpertWeights

__all__ = [
    "expert_units",
    "fill_order",
    "open_card_slots",
    "open_experts",
    "sparse_layers",
]

_LEAST_SLOTS = 4  # of a pool, for each expert of a row


def sparse_layers(config: DecoderConfig) -> dict[int, int]:
    """The layers with experts, each with its number among them."""
    layers = [layer for layer in range(config.layers) if config.mixture(layer) is not None]
    return {layer: place for place, layer in enumerate(layers)}


def expert_units(config: DecoderConfig, units: Mapping[str, StoredUnit]) -> dict[Key, StoredUnit]:
    """Every expert's unit by (sparse layer's number, expert)."""
    found: dict[Key, StoredUnit] = {}
    for layer, place in sparse_layers(config).items():
        spec = config.mixture(layer)
        assert spec is not None, "see sparse_layers"
        for number in range(spec.router.count):
            found[place, number] = units[f"layers.{layer}.expert.{number}"]
    return found


def fill_order(keys: Mapping[Key, StoredUnit]) -> list[Key]:
    """What to read first where nothing is known of the text: a little of every layer."""
    return sorted(keys, key=lambda key: (key[1], key[0]))


def open_experts(
    config: DecoderConfig,
    units: Mapping[Key, StoredUnit],
    where: Mapping[str, Where],
    builder: PartBuilder,
    source: Source,
    *,
    ring: int,
    mode: ReadMode,
    verify: Verify,
    stall_s: float,
    alloc: Callable[[int], Any],
    room: int = 0,
) -> ExpertMemory | ExpertPools:
    """Slots for as many experts as ``where`` places in RAM, and for ``ring`` bytes more.

    Of ``room``, the RAM for them, those placed in VRAM take what is left: what makes room on the
    card is then copied again, not read.

    Raises:
        MemoryBudgetError: that is not even one expert.
    """
    layers = list(sparse_layers(config))
    kept = _placed(units, where, Where.RAM, Where.LINK)
    kept += min(_placed(units, where, Where.VRAM), max(0, room - kept))
    reader = DemandReader(source, threads=mode.threads, block=mode.block, stall_s=stall_s)

    def pool(members: Sequence[int], nbytes: int, ring: int) -> ExpertMemory:
        """Of the layers at these places."""
        numbers = {place: number for number, place in enumerate(members)}
        ours = {(numbers[p], e): unit for (p, e), unit in units.items() if p in numbers}

        def build(key: Key, unit: StoredUnit, data: Any) -> ExpertWeights:
            return builder.expert(layers[members[key[0]]], key[1], unit, data)

        return ExpertMemory(
            ours,
            [builder.table(layers[place]) for place in members],
            _cache(config, ours, nbytes, ring),
            reader,
            build=build,
            verify=verify,
            alloc=alloc,
        )

    try:
        classes = size_classes(units)
        shares = _shares(classes, units, kept + ring, config)
        if shares is None:
            return pool(range(len(layers)), kept, ring)
        if kept >= sum(unit.nbytes for unit in units.values()):  # each pool holds all of its own
            shares = [sum(u.nbytes for (p, _), u in units.items() if p in c) for c in classes]
        pools = [pool(each, nbytes, 0) for each, nbytes in zip(classes, shares, strict=True)]
        return ExpertPools(pools, classes, reader)
    except BaseException:
        reader.close()
        raise


def _shares(
    classes: Sequence[Sequence[int]],
    units: Mapping[Key, StoredUnit],
    nbytes: int,
    config: DecoderConfig,
) -> list[int] | None:
    """Bytes for the pool of each class; None where one pool is better.

    Each gets its experts' share. With few slots one pool uses them better than several.
    """
    if len(classes) == 1:
        return None
    used = max(spec.router.used for spec in config.mixtures if spec is not None)
    whole = sum(unit.nbytes for unit in units.values())
    shares = []
    for members in classes:
        sizes = [unit.nbytes for (place, _), unit in units.items() if place in members]
        share = nbytes * sum(sizes) // whole
        if share // max(sizes) < _LEAST_SLOTS * used:
            return None
        shares.append(share)
    return shares


def open_card_slots(
    config: DecoderConfig,
    units: Mapping[Key, StoredUnit],
    where: Mapping[str, Where],
    builder: PartBuilder,
    card: Accelerator,
    *,
    ring: int,
) -> CardSlots:
    """Slots for as many experts as ``where`` places in VRAM, and for ``ring`` bytes more.

    There is one at least: what the CPU does not compute has to be somewhere.

    Raises:
        MemoryBudgetError: the card has no room for them.
    """
    layers = list(sparse_layers(config))
    largest = max(unit.nbytes for unit in units.values())
    kept = max(_placed(units, where, Where.VRAM), largest)
    cache = _cache(config, units, kept, ring)

    def build(key: Key, unit: StoredUnit, data: Any, in_ram: Any) -> ExpertWeights:
        if any(len(tensor.shape) == 1 for tensor in unit.tensors):
            builder.remember_vectors(unit, in_ram)
        return builder.expert(layers[key[0]], key[1], unit, data)

    tables = [builder.table(layer) for layer in layers]
    return CardSlots(card, units, tables, cache, build=build)


def _placed(units: Mapping[Key, StoredUnit], where: Mapping[str, Where], *places: Where) -> int:
    """Bytes of the experts at ``places``."""
    return sum(unit.nbytes for unit in units.values() if where.get(unit.name) in places)


def _cache(
    config: DecoderConfig, units: Mapping[Key, StoredUnit], kept: int, ring: int
) -> ExpertCache:
    """Of as many slots as ``kept`` + ``ring`` bytes hold."""
    specs = [spec for spec in config.mixtures if spec is not None]
    layers = len({place for place, _ in units})
    largest = max(unit.nbytes for unit in units.values())
    slots = min(slots_within(kept + ring, largest), len(units))
    if kept >= sum(unit.nbytes for unit in units.values()):
        slots = len(units)  # though they are not equally large
    count = max(spec.router.count for spec in specs)
    used = max(spec.router.used for spec in specs)
    return ExpertCache(layers, count, used, slots)
