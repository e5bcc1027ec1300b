"""Experts and routing on a GPU: many experts in a launch against float64, choices of routers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.routing import CudaRouting, choose
from localrt.quant.cuda.stream import Stream
from localrt.quant.cuda.tensor import Tensor, upload
from localrt.quant.cuda.weight import CudaWeight
from localrt.quant.formats import PackedTensor, unpack
from localrt.quant.formats.tiled import tile_tensor
from localrt.quant.methods.rotation import block_hadamard
from localrt.quant.ops.experts import ExpertSpec, ExpertWeights, RouterSpec, RouterWeights, Routing
from localrt.quant.reference.experts import route
from tests.ops.cuda.emulator import Emulator
from tests.ops.cuda.target import DEVICE, back, there
from tests.ops.oracles import gated
from tests.ops.packed import random_tensor

COUNT, USED = 3, 2
# Rows are multiplied in 8 bits.
CLOSE = 0.03


class Expert:
    """One expert's weights as the GPU has them, and its numbers."""

    def __init__(
        self,
        ops: CudaOps,
        names: tuple[str, str],
        hidden: int,
        inner: int,
        *,
        seed: int,
        biased: bool = False,
        apart: bool = False,
        rotated: int = 0,
        gated: bool = True,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.gate, self.up = (random_tensor(names[0], inner, hidden, seed + i) for i in (0, 50))
        self.down = random_tensor(names[1], hidden, inner, seed + 100)
        biases = [rng.standard_normal(n).astype(np.float32) for n in (2 * inner, hidden)]
        self.biases = biases if biased else [np.zeros_like(b) for b in biases]
        self.rotated = rotated
        blocks = [self.gate, self.up] if gated else [self.up]
        first = biases[0] if gated else biases[0][inner:]
        self.weights = ExpertWeights(
            gate_up=self._weight(ops, blocks, apart, rotated),
            down=self._weight(ops, [self.down], apart, rotated),
            gate_up_bias=ops.vector(first) if biased else None,
            down_bias=ops.vector(biases[1]) if biased else None,
        )

    @staticmethod
    def _weight(ops: CudaOps, blocks: list[PackedTensor], apart: bool, rotated: int) -> CudaWeight:
        shape = (sum(block.shape[0] for block in blocks), blocks[0].shape[1])
        if not apart and not rotated:
            return ops.weight(shape, blocks)
        tiled = [tile_tensor(block, hadamard=rotated) for block in blocks]
        if apart:  # on the device already, each in memory of its own, as in a pool
            placed: list[Any] = [upload(each.data, DEVICE) for each in tiled]
            tiled = [replace(each, data=data) for each, data in zip(tiled, placed, strict=True)]
        return ops.weight(shape, tiled)

    def expected(self, x: np.ndarray, spec: ExpertSpec) -> np.ndarray:
        """(n, hidden) in float64."""

        def turned(values: np.ndarray) -> np.ndarray:
            if not self.rotated:
                return values
            return block_hadamard(values.astype(np.float32), self.rotated).astype(np.float64)

        gate, up, down = (unpack(t).astype(np.float64) for t in (self.gate, self.up, self.down))
        first, second = np.split(self.biases[0].astype(np.float64), 2)
        x = turned(x)
        g, u = x @ gate.T + first, x @ up.T + second
        return turned(gated(g, u, spec)) @ down.T + self.biases[1]


def routed(rows: int, *, seed: int = 0, count: int = COUNT, used: int = USED) -> Routing:
    rng = np.random.default_rng(seed)
    scores = rng.random((rows, count), np.float32)
    experts = np.argsort(-scores, axis=1).astype(np.int32)
    return Routing(experts, np.take_along_axis(scores, experts, 1), scores[:, :used])


def inputs(rows: int, hidden: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, hidden, generator=generator) * 0.05).bfloat16()


def table_of(ops: CudaOps, experts: list[Expert]) -> Any:
    table = ops.expert_table(len(experts))
    for number, expert in enumerate(experts):
        table.put(number, expert.weights)
    return table


def filled(
    ops: CudaOps,
    experts: list[Expert],
    x: torch.Tensor,
    routing: Routing,
    spec: ExpertSpec,
    only: Any = None,
) -> torch.Tensor:
    rows = there(x)
    slots = nan_slots(ops, rows, routing)
    ops.run_experts(rows, routing, table_of(ops, experts), spec, slots, only)
    return back(slots)


def nan_slots(ops: CudaOps, rows: Tensor, routing: Routing) -> Tensor:
    slots = ops.expert_slots(rows, routing)
    return slots.put(np.full(slots.shape, np.nan, np.float32))


def error(
    got: torch.Tensor, experts: list[Expert], x: torch.Tensor, routing: Routing, spec: ExpertSpec
) -> float:
    rows = x.double().numpy()
    slots = got.double().numpy().reshape(len(rows), routing.used, -1)
    worst, largest = 0.0, 0.0
    for number, expert in enumerate(experts):
        row, k = np.nonzero(routing.chosen == number)
        if len(row):
            wanted = expert.expected(rows[row], spec)
            worst = max(worst, float(np.abs(slots[row, k] - wanted).max()))
            largest = max(largest, float(np.abs(wanted).max()))
    return worst / largest


@pytest.fixture
def ops() -> CudaOps:
    return CudaOps(device=str(DEVICE))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert computed apart from the others is an error."""

    def refuse(*_: Any) -> None:
        raise AssertionError("an expert was computed alone")

    monkeypatch.setattr(CudaOps, "expert_alone", refuse)


@pytest.mark.parametrize("rows", [5, pytest.param(66, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("activation", "biased", "apart", "rotated", "names"),
    [
        ("swiglu_oai", True, True, 0, ("mxfp4", "mxfp4")),
        ("gelu_tanh", False, True, 0, ("nvfp4", "nvfp4")),
        ("silu", True, False, 0, ("int4-g32", "q8_0")),
        ("silu", False, True, 32, ("mxfp4", "mxfp4")),
        ("relu2", False, False, 0, ("int4-g32", "q8_0")),
        ("relu2", True, True, 32, ("mxfp4", "mxfp4")),
    ],
)
def test_whatever_experts_are_like(
    ops: CudaOps, alone: None, activation: Any, biased: bool, apart: bool, rotated: int,
    names: tuple[str, str], rows: int,
) -> None:  # fmt: skip
    spec = ExpertSpec(activation=activation, limit=0.9)
    experts = [
        Expert(
            ops, names, 64, 32, seed=n, biased=biased, apart=apart, rotated=rotated,
            gated=spec.gated,
        )
        for n in range(COUNT)
    ]  # fmt: skip
    x, routing = inputs(rows, 64), routed(rows)
    got = filled(ops, experts, x, routing, spec)
    assert error(got, experts, x, routing, spec) < CLOSE
    for count in (1, 3):  # the same bits among fewer rows
        few = Routing(
            *(each[:count] for each in (routing.experts, routing.scores, routing.weights))
        )
        assert torch.equal(filled(ops, experts, x[:count], few, spec), got[: count * USED])


def test_experts_of_several_kinds(ops: CudaOps) -> None:
    """Of two formats, in slots and not, and one that has no kernel: bf16."""
    kinds: list[dict[str, Any]] = [
        {"names": ("q4_0", "q4_0")},
        {"names": ("bf16", "bf16")},
        {"names": ("int8-g32", "q4_0")},
        {"names": ("q4_0", "q4_0"), "apart": True},
        {"names": ("q4_0", "q4_0"), "biased": True},
        {"names": ("bf16", "q4_0")},
    ]
    experts = [Expert(ops, hidden=64, inner=32, seed=n, **kind) for n, kind in enumerate(kinds)]
    x, routing = inputs(7, 64), routed(7, count=len(experts), used=3)
    got = filled(ops, experts, x, routing, ExpertSpec())
    assert error(got, experts, x, routing, ExpertSpec()) < CLOSE
    rows, table = there(x), table_of(ops, experts)
    slots = nan_slots(ops, rows, routing)
    for group in ([5, 1, 3], [], np.array([0, 2, 4], np.int32)):
        ops.run_experts(rows, routing, table, ExpertSpec(), slots, group)
    assert torch.equal(back(slots), got)


@pytest.mark.parametrize("rows", [3, pytest.param(70, marks=pytest.mark.slow)])
@pytest.mark.parametrize("biased", [False, True])
def test_routing_is_that_of_float32(ops: CudaOps, rows: int, biased: bool) -> None:
    hidden, count = 300, 37  # no whole blocks
    x = inputs(rows, hidden).float()
    gate = inputs(count, hidden, seed=1)
    choice, bias = inputs(2, count, seed=2).float() if biased else (None, None)
    weights = RouterWeights(
        norm=there(torch.ones(hidden)),
        gate=CudaWeight((count, hidden), (there(gate[:20]), there(gate[20:]))),
        gate_bias=None if bias is None else there(bias),
        choice_bias=None if choice is None else there(choice),
    )
    spec = RouterSpec(count=count, used=4, eps=1e-6, scoring="sigmoid")
    normed, routing = ops.norm_route(Stream(there(x), there(torch.zeros_like(x))), weights, spec)
    exact = torch.nn.functional.rms_norm(x, (hidden,), eps=1e-6)
    torch.testing.assert_close(back(normed).float(), exact, rtol=1e-2, atol=1e-2)
    logits = exact.double() @ gate.double().T + (0 if bias is None else bias.double())
    wanted = route(logits.float(), choice, spec)
    np.testing.assert_array_equal(routing.chosen, wanted.chosen)
    np.testing.assert_allclose(routing.weights, wanted.weights, rtol=1e-5)


# -- routing ---------------------------------------------------------------------------------------

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
