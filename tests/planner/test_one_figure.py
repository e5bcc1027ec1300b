"""One figure for one thing: tables, pages, notes and details say the same."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import localrt
from localrt.common.settings import Settings
from localrt.offload.account import Budgets
from localrt.planning import measure as pc
from localrt.planning import recommend as preview_module
from localrt.planning.forecast import PlanRequest, meanings, speed
from localrt.planning.machine import KernelRate, MachineProfile
from localrt.planning.measure import Hardware
from localrt.planning.recommend import WhatRuns, what_runs
from localrt.planning.search import estimate, make_forecast
from tests.planner.models import machine, planned, shape

# PCs and models: whole in GPU memory, in RAM, copied, a mixture in both, one that the SSD feeds.
NAMES = {
    "RTX 4060, 32GB": ("qwen2.5:14b", "llama3.1:8b", "gemma4:e4b", "qwen3:30b"),
    "RTX 4060 Laptop, 16GB DDR5, NVMe": ("qwen3-coder:30b", "qwen3-coder-next:80b"),
    "RTX 2080, 16GB": ("gpt-oss:20b",),
    "GTX 1650, 16GB": ("llama3.1:8b", "mistral-small3.2:24b"),
    "16GB DDR4": ("llama3.1:8b", "qwen3.6:35b"),
    "8GB, SATA SSD": ("qwen2.5:14b",),
}
MB = 1_000_000


@pytest.mark.usefixtures("quiet_machine")
@pytest.mark.parametrize(("pc", "names"), NAMES.items(), ids=NAMES)
def test_table_page_note_and_details(pc: str, names: tuple[str, ...]) -> None:
    found = what_runs(Hardware(pc=pc), Settings.from_environment())
    for name in names:
        check_row(found, pc, name)


def check_row(found: WhatRuns, pc: str, name: str) -> None:
    row = next(each for each in found.models if each.model.name == name)
    plan = localrt.plan(name, pc=pc)
    assert row.expected is not None
    assert replace(plan.prediction, full_context_tok_s=None) == row.expected
    assert plan.tok_s == pytest.approx(row.expected.tok_s)
    assert (plan.read_bytes, plan.copied_bytes) == (row.expected.read, row.expected.copied)
    assert plan.quantization == row.quantization
    assert plan.verdict.level == row.level
    figure, first = speed(plan.tok_s), plan.report.splitlines()[0]
    assert figure in first
    assert f"{figure} predicted" in plan.details
    reads = "partly on the SSD" in row.expected.place
    assert reads == ("read from the SSD for every token" in first)
    assert reads == ("on the SSD, read for each token" in plan.details)
    placed = ((unit, plan.placement.where[unit.name]) for unit in plan.request.shape.units)
    assert reads == any(where.read for unit, where in placed if unit.macs)
    for chosen in (note for note in plan.notes if "planned for its file" in note):
        assert figure in chosen
        assert reads == ("the SSD for every token" in chosen)
    (page,) = set(re.findall(r"A?a? ?page of text \(500 tokens\) is read in ([^.,]*)", plan.report))
    assert f"a page of text (500 tokens) is read in {page}" in plan.details
    assert (row.expected.place == "GPU memory") == ("all of it in GPU memory" in first)
    if row in found.best:
        cells = next(line for line in found.report().splitlines() if line.startswith(f"{name} "))
        assert figure.removesuffix(" tok/s") in cells.split()
        assert row.expected.place in cells


@st.composite
def measured(draw: st.DrawFn) -> MachineProfile:
    """A machine whose kernels were measured at another time than its memory."""
    here = machine(gpu=draw(st.booleans()), ssd=draw(st.sampled_from([0.2e9, 3e9])))
    times = draw(st.floats(0.1, 4))
    kernels = {
        name: KernelRate(rate.rows, tuple(times * each for each in rate.seconds))
        for name, rate in here.kernels.items()
    }
    gpu = here.gpu and replace(here.gpu, kernels=draw(st.sampled_from([{}, kernels])))
    ram = draw(st.sampled_from([8e9, 30e9, 90e9]))
    return replace(here, kernels=kernels, gpu=gpu, ram_bytes_s=ram)


@given(
    here=measured(),
    experts=st.sampled_from([0, 0, 16]),
    layers=st.integers(1, 6),
    mlp=st.integers(500, 20_000),
    ram=st.sampled_from([200, 400, 2_000]),
    vram=st.sampled_from([0, 100, 400]),
)
@example(  # nothing is left to the CPU, but not all of it stays in GPU memory
    here=machine(gpu=True), experts=0, layers=5, mlp=2448, ram=200, vram=100
)
def test_forecast_within_rates(
    here: MachineProfile, experts: int, layers: int, mlp: int, ram: int, vram: int
) -> None:
    model = shape(layers=layers, mlp=4096 * mlp, experts=experts)
    budgets = Budgets(ram=ram * MB, vram=vram * MB, process=20 * MB, cuda_context=0)
    request = PlanRequest(shape=model, machine=here, budgets=budgets, ctx=256)
    found = estimate(request)
    try:
        plan = make_forecast(request)
    except localrt.MemoryBudgetError:
        assert found is None
        return
    assert found is not None
    for expected in (found, plan.prediction):
        least = max(expected.read / here.ssd_bytes_s, expected.by_cpu / here.ram_bytes_s)
        if here.gpu is not None and here.link_bytes_s is not None:
            by_gpu = expected.needed - expected.by_cpu - expected.read
            least = max(least, by_gpu / here.gpu.bytes_s, expected.copied / here.link_bytes_s)
        # CPU and GPU share a mixture's experts, which are drawn: only what is read is known.
        if experts:
            least = expected.read / here.ssd_bytes_s
        assert expected.tok_s * least <= 1.001
    assert plan.tok_s <= 1.001 * plan.ceiling_tok_s
    assert max(map(plan.busy_share, plan.prediction.busy)) <= 1 + 1e-9
    assert sum(plan.prediction.waits.values()) <= plan.prediction.pass_s * (1 + 1e-9)


@pytest.mark.usefixtures("quiet_machine")
def test_units_explained() -> None:
    pc = "RTX 4060, 32GB"
    plan = localrt.plan("qwen2.5:14b", pc=pc)
    table = what_runs(Hardware(pc=pc), Settings.from_environment()).report()
    for text in (plan.report, plan.details, table):
        assert text.count("tok/s: tokens per second. A token is about three quarters of") == 1
        assert not re.search(r"\b[KMG]iB\b", text)
    assert "Q4: about 4" in table
    for line in (
        "Keys and values: what the model remembers",
        "Link: between RAM and GPU",
        "Busy: ",
    ):
        assert line in plan.details
    # The same words are explained alike, wherever they stand.
    lines = [set(text.splitlines()) for text in (plan.report, plan.details, table)]
    assert set(meanings("tok/s")) <= lines[0] & lines[1] & lines[2]
    assert set(meanings(plan.details)) <= lines[1]
    streamed = localrt.plan("qwen3-coder-next:80b", pc="16GB DDR4")
    assert "read from the SSD" in streamed.report
    assert (
        "Partly on the SSD: every token waits"
        in what_runs(Hardware(pc="16GB DDR4"), Settings.from_environment()).report()
    )


@pytest.mark.usefixtures("quiet_machine")
@pytest.mark.parametrize(
    ("pc", "place"), [("RTX 4060, 32GB", "RAM (not the GPU)"), ("32GB", "RAM")]
)
def test_unusable_gpu(pc: str, place: str) -> None:
    found = what_runs(Hardware(pc=pc), Settings.from_environment())
    row = next(each for each in found.models if each.model.name == "command-r7b:7b")
    assert row.expected is not None
    assert row.expected.place == place
    said = (
        "the GPU is not used: this model needs localrt's own kernels, and they do not compute "
        "attention and an MLP in parallel"
    )
    assert (said in localrt.plan("command-r7b:7b", pc=pc, advise=False).notes) == ("GPU" in place)


@pytest.mark.usefixtures("quiet_machine")
def test_preview_and_page(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = localrt.plan(tiny_folder, advise=False)
    monkeypatch.setattr(pc, "known_machine", lambda *_: plan.request.machine)
    found = localrt.preview(tiny_folder)
    assert found.tok_s == pytest.approx(plan.tok_s, rel=0.001)
    assert found.verdict == str(plan.verdict) == plan.report.splitlines()[0]
    assert (found.fits, found.read_bytes, found.copied_bytes, found.weight_bytes) == (
        plan.fits,
        plan.read_bytes,
        plan.copied_bytes,
        plan.weight_bytes,
    )
    assert (found.place == "GPU") == plan.placement.uses_gpu


@pytest.mark.parametrize("streamed", [False, True])
def test_outlook_ceiling(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    for module in (pc, preview_module):
        monkeypatch.setattr(module, "known_machine", lambda *_: machine())
    forecast = localrt.preview(tiny_folder, device="cpu", ctx=256).tok_s
    plan = planned(shape(layers=4), machine(), Budgets(ram=200 * MB, process=20 * MB), ctx=256)
    found = preview_module.planned_outlook(plan)
    if not streamed:
        found = preview_module.resident_outlook(
            tiny_folder, ctx=256, format="int8-g32", device="cpu", ram=None, gpu_memory=None
        )
    assert found.ceiling_tok_s is not None
    assert forecast is not None
    assert found.ceiling_tok_s >= (plan.tok_s if streamed else forecast)
