"""Mixtures on torch against their definition in plain numpy, and the kernels against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.experts import ExpertSpec, ExpertWeights, RouterSpec, RouterWeights
from localrt.quant.ops.protocol import MlpSpec, MlpWeights
from localrt.quant.reference.experts import route
from localrt.quant.reference.ops import TorchOps
from tests.conftest import needs_kernels
from tests.models.tiny import relative_error
from tests.ops.oracles import gated
from tests.ops.packed import random_tensor
from tests.ops.test_native_experts_routing import SPECS, assert_same, choose


def spec(count: int = 8, used: int = 2, **options: Any) -> RouterSpec:
    return RouterSpec(count=count, used=used, eps=1e-6, **options)


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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_logits(value: float) -> None:
    logits = torch.zeros(2, 4)
    logits[1, 2] = value
    routing = route(logits, None, spec(4))
    assert np.isfinite(routing.weights[0]).all()
    assert not np.isfinite(routing.weights[1]).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"used": 9}, "cannot be chosen of 8"),
        ({"used": 0}, "cannot be chosen"),
        ({"groups": 3}, "not 3 equal groups"),
        ({"groups": 4, "used_groups": 5}, "5 of 4 expert groups"),
        ({"used": 3, "groups": 8, "used_groups": 2}, "fewer than the 3 experts"),
    ],
)
def test_impossible_routers(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spec(**options)


HIDDEN, INNER = 16, 24


@pytest.fixture
def ops() -> TorchOps:
    return TorchOps(compute_format="f32")


def experts(count: int, seed: int = 0, *, gated: bool = True) -> list[ExpertWeights]:
    torch.manual_seed(seed)
    wide = (2 if gated else 1) * INNER
    return [
        ExpertWeights(
            gate_up=torch.randn(wide, HIDDEN),
            down=torch.randn(HIDDEN, INNER),
            gate_up_bias=torch.randn(wide),
            down_bias=torch.randn(HIDDEN),
        )
        for _ in range(count)
    ]


def expected(x: torch.Tensor, weights: ExpertWeights, kind: ExpertSpec) -> torch.Tensor:
    wide = (weights.gate_up @ x + weights.gate_up_bias).numpy()
    gate, up = np.split(wide, 2) if kind.gated else (wide, wide)
    inner = torch.from_numpy(gated(gate, up, kind))
    return weights.down @ inner + weights.down_bias


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai", "relu2"])
def test_slots(ops: TorchOps, activation: Any) -> None:
    kind = ExpertSpec(activation=activation, limit=1.5)
    all_experts = experts(6, gated=kind.gated)
    x = torch.randn(9, HIDDEN)
    weights = RouterWeights(norm=torch.ones(HIDDEN), gate=torch.randn(6, HIDDEN))
    normed, routing = ops.norm_route(x, weights, spec(6, 3))
    tables = [ops.expert_table(6), ops.expert_table(6)]
    for number, own in enumerate(all_experts):
        tables[number % 2].put(number, own)
    slots = ops.expert_slots(normed, routing)
    ops.run_experts(normed, routing, tables[1], kind, slots, [5, 1, 3])
    ops.run_experts(normed, routing, tables[0], kind, slots, np.array([0, 2, 4], np.int32))
    for row in range(9):
        for k, expert in enumerate(routing.chosen[row].tolist()):
            own = expected(normed[row], all_experts[expert], kind)
            torch.testing.assert_close(slots[row * 3 + k], own, atol=1e-4, rtol=1e-4)
    shared = torch.randn(9, HIDDEN)
    total = (slots.view(9, 3, HIDDEN) * torch.from_numpy(routing.weights)[:, :, None]).sum(1)
    combined = ops.combine_experts(slots, routing, shared.clone())
    torch.testing.assert_close(combined, total + shared, atol=1e-4, rtol=1e-4)


def test_expert_table(ops: TorchOps) -> None:
    table = ops.expert_table(4)
    assert not table.holds(2)
    table.put(2, experts(1)[0])
    assert table.holds(2)
    table.drop(2)
    assert not table.holds(2)


def test_a_shared_mlp_and_its_gate(ops: TorchOps) -> None:
    x, gate = torch.randn(5, HIDDEN), torch.randn(1, HIDDEN)
    weights = MlpWeights(
        norm=None, gate_up=torch.randn(2 * INNER, HIDDEN), down=torch.randn(HIDDEN, INNER)
    )
    kind = MlpSpec(activation="silu", eps=1e-6)
    plain = ops.shared_mlp(x, weights, kind, None)
    first, second = (x @ weights.gate_up.T).chunk(2, -1)
    inner = first / (1 + torch.exp(-first)) * second
    torch.testing.assert_close(plain, inner @ weights.down.T, atol=1e-3, rtol=1e-4)
    gated = ops.shared_mlp(x, weights, kind, gate)
    share = 1 / (1 + torch.exp(-(x @ gate.T)))
    torch.testing.assert_close(gated, plain * share, atol=1e-3, rtol=1e-4)


def test_the_router_is_float32_in_a_bf16_model() -> None:
    ops = TorchOps(compute_format="bf16")
    x = torch.randn(7, HIDDEN).bfloat16()
    weights = RouterWeights(
        norm=torch.ones(HIDDEN).bfloat16(), gate=torch.randn(6, HIDDEN).bfloat16()
    )
    normed, routing = ops.norm_route(x, weights, spec(6, 3))
    logits = normed.float() @ weights.gate.float().T
    assert normed.dtype == torch.bfloat16
    best = logits.sort(dim=1, descending=True, stable=True).values[:, :3].softmax(1)
    np.testing.assert_allclose(routing.weights, best.numpy(), rtol=1e-5)


COLUMNS, ROWS = 64, 96  # whole blocks of the kernels


def mixture(ops: Any, spec: RouterSpec, expert: ExpertSpec, x: np.ndarray, convert: Any) -> Any:
    """Routing and result of a layer whose weights are float32."""

    def matrix(rows: int, columns: int, seed: int) -> Any:
        tensor = random_tensor("f32", rows, columns, seed)
        tensor.data.view(np.float32)[:] *= columns**-0.5
        return ops.weight((rows, columns), [tensor])

    def vector(size: int, seed: int) -> Any:
        return ops.vector(np.random.default_rng(seed).uniform(0.1, 1, size).astype(np.float32))

    table, wide = ops.expert_table(spec.count), (2 if expert.gated else 1) * ROWS
    for number in range(spec.count):
        weights = ExpertWeights(
            gate_up=matrix(wide, COLUMNS, 2 * number),
            down=matrix(COLUMNS, ROWS, 2 * number + 1),
            gate_up_bias=vector(wide, number),
            down_bias=vector(COLUMNS, number),
        )
        table.put(number, weights)
    router = RouterWeights(
        norm=vector(COLUMNS, 1000),
        gate=matrix(spec.count, COLUMNS, 1001),
        gate_bias=vector(spec.count, 1002),
        choice_bias=vector(spec.count, 1003),
    )
    normed, routing = ops.norm_route(convert(x), router, spec)
    slots = ops.expert_slots(normed, routing)
    ops.run_experts(normed, routing, table, expert, slots)
    shared = MlpWeights(
        norm=None, gate_up=matrix(2 * ROWS, COLUMNS, 2000), down=matrix(COLUMNS, ROWS, 2001)
    )
    mlp = MlpSpec(activation="silu", eps=spec.eps)
    extra = ops.shared_mlp(normed, shared, mlp, matrix(1, COLUMNS, 2002))
    return routing, np.asarray(ops.combine_experts(slots, routing, extra))


@needs_kernels
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai", "relu2", "swiglu"])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.count < 100])
def test_a_layer_is_that_of_the_kernels(spec: RouterSpec, activation: Any) -> None:
    x = np.random.default_rng(0).standard_normal((17, COLUMNS)).astype(np.float32)
    expert = ExpertSpec(activation=activation, limit=0.5)
    with torch.inference_mode():
        theirs, expected = mixture(
            TorchOps(compute_format="f32"), spec, expert, x, torch.from_numpy
        )
    ours, found = mixture(NativeOps(threads=2), spec, expert, x, np.copy)
    assert np.array_equal(ours.experts, theirs.experts)
    np.testing.assert_allclose(ours.scores, theirs.scores, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(ours.weights, theirs.weights, rtol=1e-4, atol=1e-6)
    assert relative_error(found, expected) < 1e-5
