"""Routing on a GPU is that of ``route``: the same experts, in the same order, for any number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from localrt.quant.cuda.routing import CudaRouting, choose, put_rows
from localrt.quant.ops.experts import RouterSpec, Routing
from localrt.quant.reference.experts import route
from tests.ops.cuda.emulator import Emulator
from tests.ops.cuda.target import back, there

SPECS: list[dict[str, Any]] = [
    {},
    {"normalize": False, "scale": 2.5},
    {"scoring": "softmax-chosen"},
    {"scoring": "sigmoid", "scale": 1.5},
    {"scoring": "sigmoid", "softcap": 3.0},
    {"groups": 5, "used_groups": 2, "scoring": "sigmoid", "group_top": 2},
    {"groups": 4, "used_groups": 3, "normalize": False},
    {"groups": 20, "used_groups": 6, "group_top": 3, "scoring": "softmax-chosen"},
    {"used": 40},
    {"count": 1024, "used": 10},
    {"count": 1, "used": 1},
]


def spec_of(options: dict[str, Any]) -> RouterSpec:
    return RouterSpec(**{"count": 40, "used": 4, "eps": 1e-6, **options})


def chosen_by_gpu(
    logits: torch.Tensor,
    spec: RouterSpec,
    gate_bias: torch.Tensor | None = None,
    choice_bias: torch.Tensor | None = None,
) -> Routing:
    gates, choices = (None if bias is None else there(bias) for bias in (gate_bias, choice_bias))
    results = choose(there(logits), gates, choices, spec)
    return CudaRouting(results, len(logits), spec.ranked, spec.used)


def assert_same(ours: Routing, wanted: Routing) -> None:
    np.testing.assert_array_equal(ours.experts, wanted.experts)
    np.testing.assert_allclose(ours.scores, wanted.scores, rtol=3e-6)
    np.testing.assert_allclose(ours.weights, wanted.weights, rtol=3e-6)


@pytest.mark.parametrize("options", SPECS, ids=str)
def test_a_gpus_choice_is_the_oracles(emulator: Emulator, options: dict[str, Any]) -> None:
    spec = spec_of(options)
    generator = torch.Generator().manual_seed(0)
    # Steps of 1 / 8: rounding changes no order, and many are equal.
    logits = torch.randint(-40, 40, (7, spec.count), generator=generator) / 8
    logits[5, ::3] -= 300  # scores that vanish are equal
    biases = torch.randint(-8, 8, (2, spec.count), generator=generator) / 4
    assert_same(chosen_by_gpu(logits, spec), route(logits, None, spec))
    if spec.scoring != "softmax":  # whose scores are no eighths: a sum's rounding may decide
        ours = chosen_by_gpu(logits, spec, biases[0], biases[1])
        assert_same(ours, route(logits + biases[0], biases[1], spec))


def test_batch_invariance(emulator: Emulator) -> None:
    spec = spec_of({"groups": 5, "used_groups": 3, "group_top": 2})
    logits = torch.randn(64, 40, generator=torch.Generator().manual_seed(1))
    whole = chosen_by_gpu(logits, spec)
    for first, stop in ((0, 1), (3, 7), (40, 64)):
        emulator.seed += 1
        part = chosen_by_gpu(logits[first:stop], spec)
        for name in ("experts", "scores", "weights"):
            assert np.array_equal(getattr(part, name), getattr(whole, name)[first:stop])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax-chosen"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_nan_logits(emulator: Emulator, scoring: Any, number: float) -> None:
    spec = replace(spec_of({}), scoring=scoring)
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(2))
    logits[1, 7] = number
    ours = chosen_by_gpu(logits, spec)
    assert np.isfinite(ours.weights[0]).all()
    assert np.isnan(ours.weights[1]).all()
    for row in ours.experts:  # nobody computes with what is no expert
        assert len(set(row.tolist())) == spec.ranked
        assert 0 <= min(row) <= max(row) < 40


def test_lazy_routing(emulator: Emulator) -> None:
    routing = chosen_by_gpu(torch.randn(3, 40), spec_of({}))
    assert routing.away
    assert (routing.rows, routing.used) == (3, 4)
    assert routing.away
    assert routing.loads(40).sum() == 12
    assert not routing.away


def test_rows_are_put_where_they_belong(emulator: Emulator) -> None:
    rows, put = torch.randn(1000, 3), there(torch.zeros(1100, 3))
    places = np.random.default_rng(0).permutation(1100)[:1000]  # more than one launch has room for
    put_rows(there(rows), places, put)
    out = back(put)
    assert torch.equal(out[places], rows)
    assert torch.count_nonzero(out.any(1)) == 1000
