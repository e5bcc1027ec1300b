"""Routing on torch against its definition in plain numpy, and what slots are filled with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from localrt.quant.ops.experts import ExpertSpec, ExpertWeights, RouterSpec, RouterWeights, Routing
from localrt.quant.ops.protocol import MlpSpec, MlpWeights
from localrt.quant.reference.experts import route
from localrt.quant.reference.ops import TorchOps


def spec(count: int = 8, used: int = 2, **options: Any) -> RouterSpec:
    return RouterSpec(count=count, used=used, eps=1e-6, **options)


def chosen(logits: list[float], router: RouterSpec, bias: list[float] | None = None) -> Routing:
    vector = None if bias is None else torch.tensor(bias)
    return route(torch.tensor([logits], dtype=torch.float32), vector, router)


def test_ties_go_to_the_lower_expert() -> None:
    routing = chosen([1, 3, 2, 3, 3, 2, 0, 3], spec(used=3))
    assert routing.experts.tolist() == [[1, 3, 4, 7, 2, 5]]
    assert routing.chosen.tolist() == [[1, 3, 4]]
    np.testing.assert_allclose(routing.weights, 1 / 3, rtol=1e-6)
    assert (routing.experts.dtype, routing.scores.dtype) == (np.int32, np.float32)


def test_weights_are_shares_of_all_unless_they_are_to_sum_to_one() -> None:
    logits = [0.5, -1.0, 2.0, 1.0]
    share = np.exp(logits) / np.exp(logits).sum()
    plain = chosen(logits, spec(4, normalize=False, scale=2.5))
    np.testing.assert_allclose(plain.weights[0], 2.5 * share[[2, 3]], rtol=1e-5)
    np.testing.assert_allclose(plain.scores[0], share[[2, 3, 0, 1]], rtol=1e-5)
    whole = chosen(logits, spec(4))
    np.testing.assert_allclose(whole.weights[0], share[[2, 3]] / share[[2, 3]].sum(), rtol=1e-5)
    alone = chosen(logits, spec(4, scoring="softmax-chosen"))
    np.testing.assert_allclose(alone.weights, whole.weights, rtol=1e-5)
    np.testing.assert_allclose(alone.scores, whole.scores, rtol=1e-5)


def test_a_bias_ranks_but_does_not_weigh() -> None:
    logits, bias = [0.0, 1.0, 2.0, 3.0], [5.0, 0.0, 0.0, 0.0]
    routing = chosen(logits, spec(4, scoring="sigmoid"), bias)
    score = 1 / (1 + np.exp(-np.array(logits)))
    assert routing.chosen.tolist() == [[0, 3]]
    np.testing.assert_allclose(routing.scores[0], score[[0, 3, 2, 1]], rtol=1e-5)
    np.testing.assert_allclose(routing.weights[0], score[[0, 3]] / score[[0, 3]].sum(), rtol=1e-5)


def test_experts_come_from_the_best_groups_alone() -> None:
    logits = [9.0, -9.0, -9.0, 3.0, 2.0, 2.0, 1.0, 0.0]  # four groups of two
    options: dict[str, Any] = {"scoring": "sigmoid", "groups": 4, "used_groups": 2}
    best_two = chosen(logits, spec(used=3, group_top=2, **options))
    assert best_two.chosen.tolist() == [[4, 5, 6]]
    best_one = chosen(logits, spec(used=3, group_top=1, **options))
    assert best_one.chosen.tolist() == [[0, 3, 2]] or best_one.chosen.tolist() == [[0, 3, 1]]


@given(st.integers(0, 2**32 - 1), st.sampled_from(["softmax", "sigmoid", "softmax-chosen"]))
def test_any_row_is_routed_alone(seed: int, scoring: Any) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.integers(-3, 4, (5, 12)).astype(np.float32))
    router = spec(12, 3, scoring=scoring)
    whole = route(logits, None, router)
    assert whole.experts.shape == whole.scores.shape == (5, 6)
    np.testing.assert_allclose(whole.weights.sum(1), 1, rtol=1e-5)
    assert (np.diff(whole.scores, axis=1) <= 0).all()
    for row in range(5):
        order = np.lexsort((np.arange(12), -logits[row].numpy()))[:6]
        np.testing.assert_array_equal(whole.experts[row], order)
        alone = route(logits[row : row + 1], None, router)
        np.testing.assert_array_equal(alone.weights[0], whole.weights[row])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_show_in_the_weights(value: float) -> None:
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
    gate, up = (weights.gate_up @ x + weights.gate_up_bias).chunk(2)
    if kind.activation == "relu2":
        wide = weights.gate_up @ x + weights.gate_up_bias
        inner = torch.where(wide > 0, wide * wide, 0)
    elif kind.activation == "swiglu_oai":
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
        inner = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    elif kind.activation == "silu":
        inner = gate / (1 + torch.exp(-gate)) * up
    else:
        inner = torch.nn.functional.gelu(gate, approximate="tanh") * up
    return weights.down @ inner + weights.down_bias


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai", "relu2"])
def test_slots_hold_what_experts_give_whoever_fills_them(ops: TorchOps, activation: Any) -> None:
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


def test_a_table_holds_what_was_put_and_not_dropped(ops: TorchOps) -> None:
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
