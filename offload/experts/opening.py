"""Makes a mixture's expert memory of what a placement gives its experts, and fills it.

The bytes of all experts that are placed in RAM, and of the ring that would otherwise read the
others, are one pool of equal slots: which experts are in them is the cache's, not the placement's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.decoder import DecoderConfig
from localrt.offload.accelerator import Accelerator
from localrt.offload.experts.cache import ExpertCache, Key, slots_within
from localrt.offload.experts.card import CardSlots
from localrt.offload.experts.memory import ExpertMemory, Verify
from localrt.offload.experts.reader import DemandReader
from localrt.offload.fetching import Source
from localrt.offload.files import ReadMode
from localrt.offload.placement import Where
from localrt.offload.unit_parts import PartBuilder
from localrt.quant.ops.experts import ExpertWeights

__all__ = [
    "expert_units",
    "fill_order",
    "open_card_slots",
    "open_experts",
    "sparse_layers",
]


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
) -> ExpertMemory:
    """Slots for as many experts as ``where`` places in RAM, and for ``ring`` bytes more.

    Raises:
        MemoryBudgetError: that is not even one expert.
    """
    layers = list(sparse_layers(config))
    kept = _placed(units, where, Where.RAM, Where.LINK)
    cache = _cache(config, units, kept, ring)

    def build(key: Key, unit: StoredUnit, data: Any) -> ExpertWeights:
        return builder.expert(layers[key[0]], key[1], unit, data)

    return ExpertMemory(
        units,
        [builder.table(layer) for layer in layers],
        cache,
        DemandReader(source, threads=mode.threads, block=mode.block, stall_s=stall_s),
        build=build,
        verify=verify,
        alloc=alloc,
    )


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
    largest = max(unit.nbytes for unit in units.values())
    slots = min(slots_within(kept + ring, largest), len(units))
    if kept >= sum(unit.nbytes for unit in units.values()):
        slots = len(units)  # though they are not equally large
    count = max(spec.router.count for spec in specs)
    used = max(spec.router.used for spec in specs)
    return ExpertCache(len(specs), count, used, slots)
