"""The replay of a pass, and the counts of units in each place, against bounds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.offload.placement import PlacedUnit, Placement, Where
from localrt.offload.shapes import ModelShape
from localrt.planning.costs import Costs, PassTime
from localrt.planning.simulate import RingModel, RingSlot, simulate
from localrt.planning.solve import (
    UnitClass,
    arrange,
)
from tests.planner.models import machine, shape

CPU_PLACES = (Where.RAM, Where.SSD)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Costs, Placement]:
    """Any small model, placed anyhow on a machine with or without a GPU."""
    model = shape(
        layers=draw(st.integers(1, 4)),
        attention=4096 * draw(st.integers(1, 900)),
        mlp=8192 * draw(st.integers(1, 900)),
        head=draw(st.integers(1, 3)),
        experts=draw(st.sampled_from((0, 0, 4))),
    )
    gpu = draw(st.booleans())
    places = tuple(Where) if gpu else CPU_PLACES
    where = {
        unit.name: draw(st.sampled_from(places if unit.kind != "embedding" else CPU_PLACES))
        for unit in model.units
    }
    largest = max(unit.nbytes for unit in model.units)
    rings = [largest * draw(st.integers(4, 12)) // 4 // 4096 * 4096 for _ in range(2)]
    costs = Costs(
        shape=model,
        machine=machine(gpu=gpu, ssd=draw(st.sampled_from((2e8, 2e9, 2e10)))),
        rows=draw(st.sampled_from((1, 8))),
        held=draw(st.integers(0, 2000)),
    )
    placement = Placement(
        where=where,
        kv=("ram",) * model.layers,
        ram_ring=max(largest, rings[0]),
        vram_ring=max(largest, rings[1]),
    )
    return costs, placement


def serial(found: PassTime) -> float:
    """One thing after another."""
    return found.busy["ssd"] + found.busy["link"] + found.chain


@given(cases())
def test_bounds(
    case: tuple[Costs, Placement],
) -> None:
    costs, placement = case
    passes = 4
    found = simulate(costs, placement, passes=passes, warm_up=0)
    assert found.total_seconds >= passes * found.bound * (1 - 1e-9)
    # The disk may have begun the next token's units before this one ended, never the reverse.
    waking = 1.5e-4 * len(costs.shape.units)  # of a pass that waits for each of its units
    assert found.total_seconds <= passes * (serial(found) * 1.15 + waking)
    assert 0 < found.efficiency <= 1 + 1e-9


@given(
    st.lists(
        st.tuples(st.integers(1, 10), st.floats(0.1, 5), st.floats(0, 10)), min_size=1, max_size=40
    ),
    st.integers(10, 24),
    st.integers(1, 12),
)
def test_ring(units: list[tuple[int, float, float]], size: int, chunk: int) -> None:
    """Bytes are written only once every older unit that lies there was given back."""
    ring, free = RingModel(size, chunk), 0.0
    held: list[tuple[RingSlot, float]] = []
    released = 0.0
    for nbytes, rate, delay in units:
        slot, end = ring.load(nbytes, free, rate)
        assert 0 <= slot.offset <= size - nbytes
        assert end >= free + nbytes / rate - 1e-9
        for other, _ in held:
            if other.overlaps(slot.offset, slot.offset + nbytes) and other.release > free:
                # Overlapping is fine as long as those bytes come after the other's release.
                assert end >= other.release
        ring.release(slot, max(end + delay, released))
        released = slot.release
        held.append((slot, end))
        free = end
    for (one, _), (two, _) in itertools.pairwise(held):
        assert two.release >= one.release


def streaming(model: ModelShape, names: set[str], ring: int) -> Placement:
    where = {u.name: Where.SSD if u.name in names else Where.RAM for u in model.units}
    return Placement(where=where, kv=("ram",) * model.layers, ram_ring=ring)


def test_disk_bound() -> None:
    model = shape()
    names = {unit.name for unit in model.units if unit.kind == "mlp"}
    costs = Costs(shape=model, machine=machine(ssd=1e8))
    found = simulate(costs, streaming(model, names, 4096 * 5000))
    read = sum(unit.nbytes for unit in model.units if unit.name in names)
    assert found.seconds == pytest.approx(read / 1e8, rel=1e-3)
    assert found.nbytes["ssd"] == read
    assert found.efficiency > 0.99
    assert found.waits["ssd"] > 0.5 * found.seconds


def test_all_in_ram() -> None:
    model = shape()
    costs = Costs(shape=model, machine=machine())
    found = simulate(costs, streaming(model, set(), 0))
    total = costs.per_pass() + sum(costs.cpu(unit) for unit in model.units)
    assert found.seconds == pytest.approx(total)
    assert found.efficiency == pytest.approx(1.0)


def test_experts() -> None:
    model = shape(experts=8, used=2)
    names = {unit.name for unit in model.units if unit.kind == "expert"}
    costs = Costs(shape=model, machine=machine())
    found = simulate(costs, streaming(model, names, 4096 * 9000), passes=6)
    one = next(unit.nbytes for unit in model.units if unit.kind == "expert")
    assert found.nbytes["ssd"] == pytest.approx(model.layers * 2 * one)
    # None is read before its router has chosen.
    routing = sum(costs.cpu(unit) for unit in model.units if unit.kind != "expert")
    assert found.seconds >= routing + found.nbytes["ssd"] / costs.machine.ssd_bytes_s
    many = simulate(replace(costs, rows=64), streaming(model, names, 4096 * 9000))
    assert many.nbytes["ssd"] == pytest.approx(model.layers * 8 * one)


def test_streaming_takes_the_host_time() -> None:
    """For each layer that comes over the link; an ideal GPU costs nothing."""
    model = shape(layers=3)

    def seconds(shared_s: float, call_s: float, place: Where) -> float:
        here = machine(gpu=True)
        assert here.gpu is not None
        here = replace(here, shared_s=shared_s, gpu=replace(here.gpu, call_s=call_s))
        where = {u.name: place if u.layer is not None else Where.VRAM for u in model.units}
        placement = Placement(where=where, kv=("vram",) * 3, vram_ring=4096 * 6000)
        return simulate(Costs(shape=model, machine=here), placement).seconds

    assert seconds(2.0, 1e-5, Where.LINK) - seconds(1.0, 1e-5, Where.LINK) == pytest.approx(3)
    assert seconds(1.0, 0.0, Where.LINK) == seconds(0.0, 0.0, Where.LINK)
    assert seconds(1.0, 1e-5, Where.VRAM) == seconds(0.0, 1e-5, Where.VRAM)


@pytest.mark.parametrize(
    ("layers", "visits"),
    [("....", 0), (".CC.", 1), (".C.C", 2), ("mmmm", 4)],
)
def test_host_beside_a_gpu(layers: str, visits: int) -> None:
    """A millisecond a token, and 0.6 for each visit from the GPU, of an MLP (m) or of layers."""
    model = shape(layers=len(layers))
    on_cpu = {"C": ("attention", "mlp"), "m": ("mlp",), ".": ()}
    where = {
        unit.name: Where.RAM
        if unit.layer is not None and unit.kind in on_cpu[layers[unit.layer]]
        else Where.VRAM
        for unit in model.units
    }
    ideal = machine(gpu=True)
    assert ideal.gpu is not None
    real = replace(ideal, gpu=replace(ideal.gpu, call_s=1e-9))
    placement = Placement(where=where, kv=("vram",) * len(layers))
    one, other = (simulate(Costs(shape=model, machine=m), placement) for m in (real, ideal))
    assert one.seconds - other.seconds == pytest.approx(1e-3 + visits * 6e-4, abs=1e-6)


def test_kv_on_ssd() -> None:
    model = shape(layers=2)
    where = dict.fromkeys((unit.name for unit in model.units), Where.RAM)
    placement = Placement(where=where, kv=("ssd", "ram"), ram_ring=1 << 20)
    costs = Costs(shape=model, machine=machine(), held=8192)
    found = simulate(costs, placement)
    assert found.nbytes["ssd"] == pytest.approx(costs.kv_held(0), rel=0.01)
    every = streaming(model, {unit.name for unit in model.units}, 4096 * 3000)
    both = simulate(costs, replace(every, kv=("ssd", "ssd")))
    weights = sum(unit.nbytes for unit in model.units if unit.kind != "embedding")
    assert both.nbytes["ssd"] == pytest.approx(weights + 2 * costs.kv_held(0), rel=0.01)
    assert both.bound <= both.seconds < float("inf")


PAGE = 4096


def test_arrange_spreads() -> None:
    units = [
        PlacedUnit(name=str(n), kind="mlp", nbytes=PAGE, macs=1, format="f", layer=n)
        for n in range(20)
    ]
    group = UnitClass(
        names=tuple(unit.name for unit in units), kind="mlp", nbytes=PAGE, use=1.0, cpu_s=1.0
    )
    placed = arrange(units, [group], [{Where.SSD: 10, Where.RAM: 10}])
    read = [n for n in range(20) if placed[str(n)] is Where.SSD]
    assert all(b - a == 2 for a, b in itertools.pairwise(read))
