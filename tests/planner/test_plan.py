"""Plans: within every budget, as fast as the slowest stage allows, or refused with what fits. The
replay of a pass, against bounds.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import MemoryBudgetError
from localrt.offload.account import Budgets
from localrt.offload.placement import LEAST_GPU_ROWS, PlacedUnit, Placement, Where
from localrt.offload.shapes import ModelShape
from localrt.planning.costs import Costs, PassTime
from localrt.planning.forecast import Forecast, PlanRequest, placed_shape
from localrt.planning.plan import explain, one_line
from localrt.planning.search import fits, helpful_changes, least_ram
from localrt.planning.simulate import RingModel, RingSlot, simulate
from localrt.planning.solve import UnitClass, arrange
from tests.planner.models import MB, machine, planned, published, shape

CODER = published("qwen2.5-coder-1.5b")


def assert_within(plan: Forecast) -> None:
    """Accounts within budgets, rings large enough, every unit placed."""
    budgets, placement, shape_ = plan.request.budgets, plan.placement, placed_shape(plan)
    assert plan.memory.total("ram") <= budgets.ram
    assert plan.memory.total("vram") <= budgets.vram
    assert list(placement.where) == [unit.name for unit in shape_.units]
    assert len(placement.kv) == shape_.layers
    for unit in shape_.units:
        where = placement.where[unit.name]
        if unit.use and where.read:
            assert unit.nbytes <= placement.ram_ring
        if where.copied:
            assert unit.nbytes <= placement.vram_ring
        if unit.kind == "attention" and unit.layer is not None:
            assert (placement.kv[unit.layer] == "vram") == where.on_gpu
        if unit.name in placement.crossing:
            assert where in (Where.RAM, Where.SSD)
            assert unit.nbytes <= placement.vram_ring
    assert placement.gpu_rows == 0 or placement.gpu_rows <= placement.prefill_rows
    assert placement.ram_ring % 4096 == placement.vram_ring % 4096 == 0


@given(
    ram=st.integers(20, 90),
    vram=st.integers(0, 60),
    ctx=st.sampled_from((128, 2048)),
    experts=st.sampled_from((0, 6)),
    link=st.sampled_from((1e8, 1e10)),
)
def test_budgets(ram: int, vram: int, ctx: int, experts: int, link: float) -> None:
    model = shape(layers=3, experts=experts)
    budgets = Budgets(ram=ram * MB, vram=vram * MB, process=8 * MB, cuda_context=0, scratch=0)
    profile = machine(gpu=vram > 0, link=link)
    try:
        plan = planned(model, profile, budgets, ctx=ctx)
    except MemoryBudgetError:
        return
    assert_within(plan)
    prediction = plan.prediction
    assert 0 < prediction.tok_s <= prediction.ceiling_tok_s * (1 + 1e-9)
    shares = {name: plan.busy_share(name) for name in prediction.busy}
    assert 0 < max(shares.values()) == shares[plan.bottleneck] <= 1 + 1e-9
    assert prediction.efficiency == pytest.approx(shares[plan.bottleneck])


def test_deficit() -> None:
    budgets = Budgets(ram=600 * MB, process=100 * MB)
    plan = planned(CODER, machine(ssd=1e9), budgets, ctx=2048)
    assert_within(plan)
    taken = plan.memory.total() - plan.memory.nbytes("weights")
    deficit = CODER.pass_nbytes - (budgets.ram - taken)
    assert deficit <= plan.prediction.nbytes["ssd"] <= 1.01 * deficit + 8 * MB
    assert plan.prediction.bottleneck == "ssd"
    assert plan.prediction.efficiency > 0.97
    assert plan.prediction.tok_s == pytest.approx(1e9 / deficit, rel=0.06)


def test_large_mixture() -> None:
    model = published("gpt-oss-120b")
    budgets = Budgets(ram=32_000 * MB, vram=8_000 * MB)
    plan = planned(model, machine(gpu=True, ssd=3.5e9), budgets, ctx=4096)
    assert_within(plan)
    assert plan.prediction.bottleneck == "ssd"
    # What is used by every token is not on the SSD.
    read = {unit.kind for unit in model.units if plan.placement.where[unit.name].read}
    assert read <= {"expert", "embedding"}
    assert sum(plan.to_dict()["placement"]["experts"].values()) == len(
        [unit for unit in model.units if unit.kind == "expert"]
    )


def test_refusal() -> None:
    budgets = Budgets(ram=320 * MB, process=100 * MB)
    with pytest.raises(MemoryBudgetError) as caught:
        planned(CODER, machine(), budgets, ctx=32_768)
    message = str(caught.value)
    assert "\n" not in message
    assert message.count(";") == 2
    assert "320 MB" in message
    request = PlanRequest(shape=CODER, machine=machine(), budgets=budgets, ctx=32_768)
    (ctx,) = re.findall(r"ctx=(\d+)", message)
    assert fits(replace(request, ctx=int(ctx)))
    assert not fits(replace(request, ctx=2 * int(ctx)))
    (ram,) = re.findall(r'\(ram="(\d+)MB"\)', message)
    assert int(ram) * MB == least_ram(request)
    assert fits(replace(request, budgets=replace(budgets, ram=int(ram) * MB)))
    assert not fits(replace(request, budgets=replace(budgets, ram=(int(ram) - 2) * MB)))


def test_refusal_names_own_context() -> None:
    budgets = Budgets(ram=4_000 * MB, process=100 * MB)
    with pytest.raises(MemoryBudgetError) as caught:
        planned(CODER, machine(), budgets, ctx=10_000_000)
    assert "its own context is 32768 tokens; all of it fits (ctx=32768)" in str(caught.value)
    assert str(caught.value).count("ctx=") == 1


def test_kv_on_ssd() -> None:
    budgets = Budgets(ram=500 * MB, process=100 * MB)
    with pytest.raises(MemoryBudgetError, match="SSD fit"):
        planned(CODER, machine(), budgets, ctx=32_768, kv_format="int8")
    plan = planned(
        CODER, machine(), budgets, ctx=32_768, kv_format="int8", kv_on_ssd=True, held=16_000
    )
    assert 0 < plan.placement.kv.count("ssd") < CODER.layers
    assert 0 < plan.prediction.full_context_tok_s < plan.prediction.tok_s
    assert plan.memory.total("ram") <= budgets.ram


def test_helpful_changes() -> None:
    budgets = Budgets(ram=600 * MB)
    changes = helpful_changes(planned(CODER, machine(), budgets, ctx=512))
    gains = [change.gain for change in changes]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) > 1
    (more, most) = (
        float(re.findall(r"([\d.]+) (?:MB|GB) more RAM", change.what)[0])
        for change in changes
        if "more RAM" in change.what
    )
    assert most < more
    bigger = replace(budgets, ram=budgets.ram + int(more * MB))
    again = planned(CODER, machine(), bigger, ctx=512)
    named = next(change for change in changes if f"{more:g} MB more RAM" in change.what)
    assert named.tok_s == pytest.approx(again.prediction.tok_s, rel=0.1)
    options = {change.option for change in changes}
    assert None in options  # memory and disks are bought, not typed
    assert options <= {None, ("kv_format", "int8"), ("format", "int4-g128")}


def test_json_and_text() -> None:
    plan = planned(CODER, machine(), Budgets(ram=600 * MB), ctx=512)
    plan = replace(plan, changes=helpful_changes(plan))
    values = json.loads(json.dumps(plan.to_dict()))
    assert values["prediction"]["bottleneck"] == "ssd"
    assert values["placement"]["units"]["layers.0.attention"] in set(Where)
    text = explain(plan)
    for word in ("RAM: ", "Prediction", "What would help most", "read for each token", "disk"):
        assert word in text
    assert one_line(plan) in text
    # Units are the planner's own matter: people read of layers, and of shares.
    assert re.search(r"\(.*MLPs of \d+ of 28 layers", text)
    assert not re.search(r"\d+ (head|mlp|attention|expert|embedding)\b", text)


@pytest.mark.parametrize("vram", [430, 470])
def test_shared_caches(vram: int) -> None:
    """Layers 4 and 5 read layer 3's keys and values."""
    plain = shape(layers=6)
    kv = (*plain.kv[:4], *(replace(layer, reads=3) for layer in plain.kv[4:]))
    model = replace(plain, kv=kv)
    assert sum(model.kv_nbytes("bf16", 512)) == sum(plain.kv_nbytes("bf16", 512)) * 4 // 6
    budgets = Budgets(ram=200 * MB, vram=vram * MB)
    plan = planned(model, machine(gpu=True), budgets, ctx=512)
    where = plan.placement.where
    sides = {w.on_gpu for name, w in where.items() if name.endswith(".attention")}
    assert len(sides) == 1


def test_unpacked_experts() -> None:
    """On a GPU whose kernels do not read their format they take their bf16 numbers besides."""
    plain = shape(experts=16, layers=4)
    units = tuple(
        replace(unit, unpacked=2 * unit.macs) if unit.kind == "expert" else unit
        for unit in plain.units
    )
    budgets = Budgets(ram=2000 * MB, vram=600 * MB, cuda_context=0)
    counts = []
    for model in (plain, replace(plain, units=units)):
        plan = planned(model, machine(gpu=True), budgets, ctx=128)
        there = [unit for unit in model.units if plan.placement.where[unit.name] is Where.VRAM]
        counts.append(sum(unit.kind == "expert" for unit in there))
        taken = sum(unit.nbytes + unit.unpacked for unit in there)
        assert plan.memory.nbytes("weights", "vram") == taken
        assert plan.memory.total("vram") <= budgets.vram
    assert counts[0] > counts[1] > 0


def llama(link: float = 12e9) -> Forecast:
    """A 70B in 12 GB of GPU memory and 64 GB of RAM, with whole MLPs."""
    budgets = Budgets(ram=64_000 * MB, vram=12_000 * MB)
    here = machine(gpu=True, link=link)
    return planned(published("llama-3-70b"), here, budgets, ctx=2048, splits=False)


def test_mlps_cross() -> None:
    plan = llama()
    placement = plan.placement
    units = {unit.name: unit for unit in plan.request.shape.units}
    assert set(placement.kv) == {"vram"}
    assert all(placement.where[n].on_gpu for n, u in units.items() if u.kind == "attention")
    left = [n for n, u in units.items() if u.kind == "mlp" and not placement.where[n].on_gpu]
    assert left
    assert placement.crossing == frozenset(left)
    for rows, on_gpu in ((1, False), (64, False), (placement.gpu_rows, True), (2048, True)):
        assert all(placement.on(rows)[name].on_gpu is on_gpu for name in left)
    assert f"from {placement.gpu_rows} tokens a pass on, the CPU's MLPs (" in explain(plan)
    without = replace(placement, gpu_rows=0, crossing=frozenset())
    costs = plan.request.costs(rows=placement.prefill_rows)
    crossing, by_cpu = (simulate(costs, each).seconds for each in (placement, without))
    assert crossing < 0.2 * by_cpu
    assert plan.prefill_tok_s == pytest.approx(placement.prefill_rows / crossing, rel=0.1)


@pytest.mark.parametrize("link", [3e9, 12e9])
def test_experts_cross_where_copies_are_faster(link: float) -> None:
    """The replay agrees on the fewest rows, within the steps that are tried."""
    budgets = Budgets(ram=30_000 * MB, vram=7_000 * MB)
    plan = planned(published("qwen3-30b-a3b"), machine(gpu=True, link=link), budgets, ctx=2048)
    placement = plan.placement

    def seconds(rows: int, gpu_rows: int) -> float:
        return simulate(
            plan.request.costs(rows=rows), replace(placement, gpu_rows=gpu_rows)
        ).seconds

    rows = placement.gpu_rows
    assert LEAST_GPU_ROWS < rows <= placement.prefill_rows
    assert seconds(rows, rows) < 1.02 * seconds(rows, 0)
    fewer = 3 * rows // 4
    assert seconds(fewer, 0) < 1.02 * seconds(fewer, LEAST_GPU_ROWS)
    assert seconds(64, rows) == seconds(64, 0)


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
def test_bounds(case: tuple[Costs, Placement]) -> None:
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


def test_experts_are_read_once_chosen() -> None:
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


@pytest.mark.parametrize(("layers", "visits"), [("....", 0), (".CC.", 1), (".C.C", 2), ("mmmm", 4)])
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


def test_keys_and_values_are_read_from_the_ssd() -> None:
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
