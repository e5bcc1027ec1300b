"""Routers on the native kernels and torch: scores, choices and weights against numpy in float64."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats import unpack
from localrt.quant.ops.experts import RouterSpec, RouterWeights, Routing
from localrt.quant.reference.experts import route
from tests.conftest import needs_kernels
from tests.ops.packed import random_tensor
from tests.ops.test_native_matmul import ISAS

HIDDEN = 256


def normed_rows(x: np.ndarray, norm: np.ndarray, eps: float) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(1, keepdims=True) + eps) * norm


def choose(logits: np.ndarray, spec: RouterSpec, choice_bias: np.ndarray | None) -> Routing:
    """``RouterSpec``'s words in numpy, for float64 logits (R, E)."""
    if spec.softcap is not None:
        logits = spec.softcap * np.tanh(logits / spec.softcap)
    exps = np.exp(logits - logits.max(1, keepdims=True))
    scores = exps / exps.sum(1, keepdims=True)
    if spec.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    if spec.scoring == "sqrt-softplus":
        scores = np.sqrt(np.log1p(np.exp(logits)))
    keys = logits if spec.scoring == "softmax-chosen" else scores
    keys = keys + (0 if choice_bias is None else choice_bias)
    rows, size = len(logits), spec.count // spec.groups
    grouped = keys.reshape(rows, spec.groups, size)
    best = np.sort(grouped, axis=2)[..., -spec.group_top :].sum(2)
    open_ = np.argsort(-best, axis=1, kind="stable")[:, : spec.used_groups]
    closed = np.ones((rows, spec.groups), bool)
    np.put_along_axis(closed, open_, False, axis=1)
    # Experts that cannot be chosen come behind all others.
    order = np.lexsort((-keys, np.repeat(closed, size, axis=1)), axis=1)[:, : spec.ranked]
    chosen = order[:, : spec.used]
    weights = np.take_along_axis(scores, chosen, 1)
    if spec.scoring == "softmax-chosen":
        weights = np.take_along_axis(exps, chosen, 1)
    if spec.normalize or spec.scoring == "softmax-chosen":
        weights = weights / weights.sum(1, keepdims=True)
    return Routing(order, np.take_along_axis(scores, order, 1), weights * spec.scale)


def assert_same(found: Routing, wanted: Routing) -> None:
    assert found.experts.dtype == np.int32
    assert found.scores.dtype == found.weights.dtype == np.float32
    assert np.array_equal(found.experts, wanted.experts)
    np.testing.assert_allclose(found.scores, wanted.scores, rtol=3e-5, atol=1e-7)
    np.testing.assert_allclose(found.weights, wanted.weights, rtol=3e-5, atol=1e-7)


SPECS = [
    RouterSpec(count=8, used=2, eps=1e-6),
    RouterSpec(count=128, used=8, eps=1e-6),
    RouterSpec(count=60, used=4, eps=1e-5, normalize=False),
    RouterSpec(count=32, used=4, eps=1e-5, scoring="softmax-chosen"),
    RouterSpec(count=64, used=6, eps=1e-6, scale=2.5, groups=8, used_groups=3, normalize=False),
    RouterSpec(
        count=96,
        used=8,
        eps=1e-6,
        scoring="sigmoid",
        scale=2.5,
        groups=6,
        used_groups=2,
        group_top=2,
    ),
    RouterSpec(count=24, used=3, eps=1e-6, groups=8, used_groups=1, group_top=9),
    RouterSpec(count=5, used=5, eps=1e-6, scoring="sigmoid", normalize=False),
    RouterSpec(count=40, used=4, eps=1e-6, scoring="sigmoid", softcap=2.0),
    RouterSpec(count=1, used=1, eps=1e-6),
    RouterSpec(count=48, used=5, eps=1e-6, scoring="sqrt-softplus", scale=1.5),
]


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("spec", "biased"), product(SPECS, (False, True)))
def test_choices_are_as_written(spec: RouterSpec, biased: bool, isa: str) -> None:
    rng = np.random.default_rng(spec.count)
    gate = random_tensor("f32", spec.count, HIDDEN, seed=spec.count)
    gate.data.view(np.float32)[:] *= 0.1
    norm = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
    gate_bias, choice_bias = rng.standard_normal((2, spec.count)).astype(np.float32)
    choice_bias *= 0.1
    x = rng.standard_normal((40, HIDDEN)).astype(np.float32)
    expected_rows = normed_rows(x, norm, spec.eps)
    logits = expected_rows @ unpack(gate).astype(np.float64).T + (gate_bias if biased else 0)
    two, one = NativeOps(threads=2, isa=isa), NativeOps(threads=1, isa=isa)
    found = []
    for ops, rows in ((two, 40), (one, 40), (one, 1), (two, 3), (one, 7)):
        weights = RouterWeights(
            norm=ops.vector(norm),
            gate=ops.weight((spec.count, HIDDEN), [gate]),
            gate_bias=ops.vector(gate_bias) if biased else None,
            choice_bias=ops.vector(choice_bias) if biased else None,
        )
        normed, routing = ops.norm_route(x[:rows], weights, spec)
        np.testing.assert_allclose(normed, expected_rows[:rows], rtol=1e-5, atol=1e-6)
        found.append((normed, routing))
    assert_same(found[0][1], choose(logits, spec, choice_bias if biased else None))
    for normed, routing in found[1:]:
        rows = len(normed)
        assert np.array_equal(normed, found[0][0][:rows])
        for field in ("experts", "scores", "weights"):
            assert np.array_equal(getattr(routing, field), getattr(found[0][1], field)[:rows])


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
def test_ties_go_to_the_lower_number(isa: str) -> None:
    gate = random_tensor("f32", 1, HIDDEN, seed=2)
    rows = np.repeat(0.01 * unpack(gate), 40, axis=0)
    rows[[7, 23]] += 0.002 * np.sign(rows[0])
    rows[30] -= 0.002 * np.sign(rows[0])
    ops = NativeOps(threads=2, isa=isa)
    tensor = random_tensor("f32", 40, HIDDEN)
    tensor.data.view(np.float32)[:] = rows
    weights = RouterWeights(
        norm=ops.vector(np.ones(HIDDEN, np.float32)), gate=ops.weight((40, HIDDEN), [tensor])
    )
    x = np.sign(rows[:1])
    for spec in (
        RouterSpec(count=40, used=5, eps=1e-6),
        RouterSpec(count=40, used=5, eps=1e-6, scoring="sigmoid"),
        RouterSpec(count=40, used=5, eps=1e-6, scoring="softmax-chosen"),
    ):
        _, found = ops.norm_route(x, weights, spec)
        assert found.experts[0].tolist() == [7, 23, 0, 1, 2, 3, 4, 5, 6, 8]
    grouped = RouterSpec(count=40, used=5, eps=1e-6, groups=8, used_groups=3)
    _, found = ops.norm_route(x, weights, grouped)
    # The groups of 7 and 23, and the first of the others.
    assert found.experts[0].tolist() == [7, 23, 0, 1, 2, 3, 4, 5, 6, 8]


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax-chosen"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_weights(bad, scoring, isa: str) -> None:
    spec = RouterSpec(count=20, used=3, eps=1e-6, scoring=scoring, groups=4, used_groups=2)
    ops = NativeOps(threads=2, isa=isa)
    bias = np.zeros(20, np.float32)
    gate = ops.weight((20, HIDDEN), [random_tensor("f32", 20, HIDDEN)])
    norm = ops.vector(np.ones(HIDDEN, np.float32))
    x = np.random.default_rng(3).standard_normal((5, HIDDEN)).astype(np.float32)
    x[2, 9] = bad
    weights = RouterWeights(norm=norm, gate=gate)
    _, found = ops.norm_route(x, weights, spec)
    finite = np.isfinite(found.weights).all(1)
    assert finite.tolist() == [True, True, False, True, True]
    assert ((found.experts >= 0) & (found.experts < 20)).all()
    bias[4] = bad
    for biased in (
        RouterWeights(norm=norm, gate=gate, gate_bias=ops.vector(bias)),
        RouterWeights(norm=norm, gate=gate, choice_bias=ops.vector(bias)),
    ):
        _, found = ops.norm_route(x, biased, spec)
        assert not np.isfinite(found.weights).any()
        assert ((found.experts >= 0) & (found.experts < 20)).all()


@pytest.mark.parametrize("router", SPECS)
@pytest.mark.parametrize("biased", [False, True])
def test_routes(router: RouterSpec, biased: bool) -> None:
    """Of logits that are often equal: ties go to the lower number."""
    rng = np.random.default_rng(router.count)
    logits = rng.integers(-16, 16, (9, router.count)).astype(np.float32) / 4
    bias = rng.standard_normal(router.count).astype(np.float32) if biased else None
    found = route(
        torch.from_numpy(logits), None if bias is None else torch.from_numpy(bias), router
    )
    assert_same(found, choose(logits.astype(np.float64), router, bias))
