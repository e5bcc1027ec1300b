"""A target and its draft: the placement keeps the budgets, and one rule chooses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.drafts.placement import Placement, find_place
from localrt.offload.account import Budgets, draft_nbytes
from localrt.offload.shapes import ModelShape
from localrt.planning.forecast import PlanRequest
from localrt.planning.search import find_forecast
from tests.planner.models import MB, machine, shape

TARGET = shape(layers=6)
DRAFT = replace(shape(layers=2, attention=4096 * 60, mlp=4096 * 200, head=1), name="test draft")
CTX = 256


def request(vram: int, ram: int) -> PlanRequest:
    budgets = Budgets(ram=ram, vram=vram, process=10 * MB, cuda_context=0)
    return PlanRequest(
        shape=TARGET, machine=machine(gpu=True), budgets=budgets, ctx=CTX, prefill_rows=32
    )


def find(
    *, vram: int = 40 * MB, ram: int = 200 * MB, draft: ModelShape = DRAFT
) -> Placement | None:
    nbytes = draft_nbytes(draft, CTX)
    return find_place(request(vram, ram), nbytes, nbytes)


def placed(**options: Any) -> Placement:
    found = find(**options)
    assert found is not None
    return found


@settings(max_examples=15)
@given(vram=st.integers(0, 120), ram=st.integers(30, 200))
def test_budgets(vram: int, ram: int) -> None:
    found = find(vram=vram * MB, ram=ram * MB)
    if found is None:
        return
    memory, place = found.forecast.memory, found.place
    assert memory.total("vram") + found.nbytes * (place == "draft on GPU") <= vram * MB
    assert memory.total("ram") + found.nbytes * (place == "draft on CPU") <= ram * MB
    assert (found.nbytes > 0) == (place != "no draft")


def test_both_fit_on_the_gpu() -> None:
    found = placed(vram=200 * MB)
    assert found.place == "draft on GPU"
    assert found.forecast.fits
    assert found.why == "both models fit on the GPU"


@pytest.mark.parametrize("vram", [4, 20, 40])
def test_in_ram_where_both_do_not_fit_on_the_gpu(vram: int) -> None:
    found = placed(vram=vram * MB)
    alone = find_forecast(request(vram * MB, 200 * MB))
    assert alone is not None
    assert found.place == "draft on CPU"
    assert found.forecast.tok_s >= 0.9 * alone.tok_s
    assert "takes no speed from the model" in found.why


def test_in_ram_beside_a_target_on_the_disk() -> None:
    found = placed(vram=0, ram=60 * MB)
    assert found.forecast.read_bytes
    assert found.place == "draft on CPU"
    assert "while they wait" in found.why


def test_draft_that_fits_nowhere() -> None:
    found = placed(draft=shape(layers=200))
    assert found.place == "no draft"
    assert "of RAM may be used" in found.why


def test_nothing_fits() -> None:
    assert find(ram=5 * MB) is None
