"""Speeds that users published, beside forecasts for their PCs."""

from __future__ import annotations

import pytest

import localrt
from benchmarks.published import forecast
from localrt.common.settings import Settings
from localrt.hub.known_models import find_known
from localrt.offload.planner.cards import CARDS
from localrt.offload.planner.config_shapes import shape_from_config
from localrt.planning.published import PUBLISHED, published_of
from tests.planner.models import published

pytestmark = pytest.mark.usefixtures("quiet_machine")


def test_the_table_names_models_and_cards_that_are_known() -> None:
    for each in PUBLISHED:
        assert find_known(each.model) is not None
        assert not each.card or each.card in CARDS
        assert str(each).startswith(f"{each.tok_s:g}".rstrip("0"))
    assert str(PUBLISHED[0]) == (
        "57.6 tok/s: 35B-A3B IQ3_K_R4, RTX 4060 Ti 8GB, ik_llama.cpp, "
        "16,384 tokens with keys and values in q4_0"
    )


def test_figures_of_a_model_by_its_shape() -> None:
    known = find_known("qwen3:14b")
    assert known is not None
    shape = shape_from_config(known.config(), name="some-file.gguf")
    assert [each.called for each in published_of(shape)] == ["14B"]
    assert not published_of(shape, "RTX 4060 8GB")  # whose card was not named
    assert not published_of(published("phi-3-mini"))


def test_a_forecast_is_of_that_pc() -> None:
    each = next(each for each in PUBLISHED if each.called == "27B")
    plan = forecast(each, Settings.from_environment())
    assert plan.request.machine.gpu is not None
    assert plan.request.machine.gpu.name == each.card == "RTX 5060 Laptop 8GB"
    assert plan.weight_bytes == pytest.approx(26.9e9 * 4.3 / 8, rel=0.01)
    assert plan.tok_s > 0


def test_a_plan_shows_them() -> None:
    found = localrt.plan("qwen3.5:27b", pc="RTX 5060 Laptop, 32GB", advise=False)
    line = "4.20 tok/s: 27B IQ4_XS, RTX 5060 Laptop 8GB, engine not named"
    assert line in found.report
    assert line in found.details
    other = localrt.plan("qwen3.5:27b", pc="RTX 4060, 32GB", advise=False)
    assert line not in other.report
    assert line in other.details
