"""Passes of many rows: which units cross the link for them, and from how many rows on that pays.

A processor that is quick enough for a token is slow for a prompt, and the link, which is too slow
for every token, is quick beside a card that computes two thousand rows. The rows from which on the
card computes follow from rates alone; decoding and verifying have fewer, whatever was measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from localrt.offload.placement import LEAST_CARD_ROWS, PlacedUnit, Placement, Where
from localrt.offload.planner.costs import Costs

_ROWS = (LEAST_CARD_ROWS, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048)


def with_long_passes(costs: Costs, placement: Placement) -> Placement:
    """``placement`` with a second one for the passes that are worth it, if any.

    MLPs of the CPU that the card's ring can hold cross, and a mixture's experts. Attention stays
    where its keys and values are; of a prompt's rows one passes the head.
    """
    shape, where = costs.shape, placement.where
    if costs.machine.gpu is None or not placement.uses_gpu:
        return placement
    if shape.experts is not None:
        routers = (where[unit.name] for unit in shape.units if unit.kind == "mlp")
        if not all(place.on_gpu for place in routers):  # the CPU's layers are the CPU's
            return placement
        crossing = frozenset[str]()
    else:
        crossing = frozenset(
            unit.name
            for unit in shape.units
            if unit.kind == "mlp"
            and not where[unit.name].on_gpu
            and unit.nbytes <= placement.vram_ring
        )
        if not crossing:
            return placement
    rows = _card_rows(costs, where, crossing)
    if not LEAST_CARD_ROWS <= rows <= placement.prefill_rows:
        return placement
    return replace(placement, card_rows=rows, crossing=crossing)


def costs_of_rows(costs: Costs, rows: int) -> Costs:
    """Those of a pass of ``rows`` rows of one sequence, at a prompt's beginning."""
    return Costs(shape=costs.shape, machine=costs.machine, rows=rows, kv_format=costs.kv_format)


def _card_rows(costs: Costs, where: Mapping[str, Where], crossing: frozenset[str]) -> int:
    """The fewest rows with which copying hides behind computing, or ends sooner than the CPU.

    0 where none do. Copies and the card's work go on at the same time; the CPU's and the card's
    follow each other. A faster link never gives more rows.
    """
    alike: Counter[tuple[PlacedUnit, Where, bool]] = Counter()
    first: dict[tuple[object, ...], PlacedUnit] = {}
    for unit in costs.shape.units:
        place = where[unit.name]
        if not unit.macs:
            continue
        layer = unit.layer if unit.kind == "attention" else None
        key = (unit.kind, unit.nbytes, unit.macs, unit.format, unit.use, layer)
        crosses = unit.name in crossing or (unit.kind == "expert" and not place.on_gpu)
        alike[first.setdefault(key, unit), place, crosses] += 1
    for rows in _ROWS:
        seconds = costs_of_rows(costs, rows)
        copying = stays = by_cpu = by_card = 0.0
        for (unit, place, crosses), count in alike.items():
            share, each = 1.0, rows
            if unit.kind == "expert":
                share, each = seconds.touched(unit.use)
            used = count * share
            if crosses:
                by_cpu += used * seconds.cpu(unit, each)
                by_card += used * seconds.gpu(unit, each)
            else:
                stays += used * seconds.compute(unit, on_gpu=place.on_gpu, rows=each)
            if crosses or place.copied:
                copying += used * seconds.copy(unit.nbytes)
        if max(copying, stays + by_card) <= stays + by_cpu:
            return rows
    return 0
