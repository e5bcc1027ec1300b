"""Experts on packed weights: every format and way, the same in any batch, beside a GPU's too."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache

import numpy as np
import pytest

from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats import FORMATS, PackedTensor
from localrt.quant.formats.tiled import tile_tensor
from localrt.quant.methods.rotation import block_hadamard
from localrt.quant.ops.experts import ExpertSpec, ExpertTable, ExpertWeights, Routing
from tests.conftest import needs_kernels
from tests.ops.oracles import gated
from tests.ops.packed import random_tensor
from tests.ops.test_native_matmul import CASES, ISAS, PACKED, computed, quantized

pytestmark = needs_kernels

HIDDEN, INNER, COUNT, USED = 256, 512, 8, 3
SPEC = ExpertSpec()


class Expert:
    """One expert's tensors, in the formats of gate, up and down; ``rotations`` of both inputs."""

    def __init__(
        self,
        names: tuple[str, ...],
        seed: int,
        *,
        shape: tuple[int, int] = (HIDDEN, INNER),
        rotations: tuple[int, int] = (0, 0),
        fused: bool = False,
        biased: bool = False,
    ) -> None:
        hidden, inner = shape
        self.rotations, self.fused = rotations, fused
        if fused:
            both = random_tensor(names[0], 2 * inner, hidden, 3 * seed)
            self.gate_up = [both]
        else:
            self.gate_up = [
                replace(random_tensor(names[i], inner, hidden, 3 * seed + i), name="gu"[i])
                for i in range(len(names) - 1)
            ]
        self.down = random_tensor(names[-1], hidden, inner, 3 * seed + 2)
        rng, wide = np.random.default_rng(seed), sum(t.shape[0] for t in self.gate_up)
        self.biases = (
            [rng.standard_normal(n).astype(np.float32) for n in (wide, hidden)]
            if biased
            else [None, None]
        )

    def load(self, ops: NativeOps) -> ExpertWeights:
        rows = sum(t.shape[0] for t in self.gate_up)
        first = [tile_tensor(t, hadamard=self.rotations[0]) for t in self.gate_up]
        last = tile_tensor(self.down, hadamard=self.rotations[1])
        vectors = [None if b is None else ops.vector(b) for b in self.biases]
        return ExpertWeights(
            gate_up=ops.weight((rows, self.gate_up[0].shape[1]), first),
            down=ops.weight(self.down.shape, [last]),
            gate_up_bias=vectors[0],
            down_bias=vectors[1],
        )

    def reference(self, x: np.ndarray, spec: ExpertSpec) -> np.ndarray:
        """In float64, on the activations that the kernels quantize to."""
        wide = np.concatenate([product(x, t, self.rotations[0]) for t in self.gate_up], axis=1)
        if self.biases[0] is not None:
            wide = wide + self.biases[0]
        gate, up = np.split(wide, 2, axis=1) if spec.gated else (wide, wide)
        out = product(gated(gate, up, spec).astype(np.float32), self.down, self.rotations[1])
        return out if self.biases[1] is None else out + self.biases[1]


def product(x: np.ndarray, tensor: PackedTensor, rotation: int) -> np.ndarray:
    if rotation:
        x = block_hadamard(x, rotation)
    seen = quantized(x) if tensor.format.name in PACKED else x.astype(np.float64)
    return seen @ values(tensor.format.name, tensor.shape, tensor.data.tobytes(), tensor.scale)


@lru_cache(maxsize=256)
def values(name: str, shape: tuple[int, int], data: bytes, scale: float) -> np.ndarray:
    rows = np.frombuffer(data, np.uint8).reshape(shape[0], -1)
    return computed(PackedTensor(name, FORMATS[name], shape, rows, scale)).T


def inputs(rows: int, hidden: int = HIDDEN, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, hidden)).astype(np.float32)


def routing(rows: int, *, count: int = COUNT, used: int = USED, seed: int = 0) -> Routing:
    """Random choices, where expert 0 is chosen often and the last one hardly ever."""
    rng = np.random.default_rng(seed)
    odds = np.geomspace(1, 0.05, count)
    ranked = min(2 * used, count)
    experts = [rng.choice(count, ranked, replace=False, p=odds / odds.sum()) for _ in range(rows)]
    scores = rng.random((rows, ranked)).astype(np.float32)
    return Routing(np.array(experts, np.int32), scores, scores[:, :used].copy())


def fill(ops: NativeOps, experts: list[Expert]) -> ExpertTable:
    table = ops.expert_table(len(experts))
    weights = {expert: expert.load(ops) for expert in experts}  # one may be there several times
    for number, expert in enumerate(experts):
        table.put(number, weights[expert])
    return table


def run(
    ops: NativeOps,
    table: ExpertTable,
    x: np.ndarray,
    choice: Routing,
    spec: ExpertSpec = SPEC,
    experts: list[int] | None = None,
) -> np.ndarray:
    slots = ops.expert_slots(x, choice)
    slots[:] = np.nan
    ops.run_experts(x, choice, table, spec, slots, experts)
    return slots


def expected(experts: list[Expert], x: np.ndarray, choice: Routing, spec: ExpertSpec = SPEC):
    slots = np.empty((choice.weights.size, x.shape[1]))
    rows = np.repeat(np.arange(len(x)), choice.used)
    for number, expert in enumerate(experts):
        mine = np.flatnonzero(choice.chosen.reshape(-1) == number)
        if len(mine):
            slots[mine] = expert.reference(x[rows[mine]], spec)
    return slots


def some_rows(choice: Routing, rows: slice) -> Routing:
    return Routing(choice.experts[rows], choice.scores[rows], choice.weights[rows])


# The last digit of a product may move an activation to the next code.
def assert_close(found: np.ndarray, wanted: np.ndarray, bound: float = 5e-3) -> None:
    assert np.abs(found - wanted).max() < bound * np.abs(wanted).max()


@pytest.mark.parametrize(("isa", "name"), CASES)
def test_every_format(name: str, isa: str) -> None:
    experts = [Expert((name, name, name), seed, shape=(256, 256)) for seed in range(3)]
    ops = NativeOps(threads=2, isa=isa)
    table, x, choice = fill(ops, experts), inputs(9), routing(9, count=3)
    assert_close(run(ops, table, x, choice), expected(experts, x, choice))
    alone = run(ops, table, x[:1], some_rows(choice, slice(1)))
    assert_close(alone, expected(experts, x[:1], some_rows(choice, slice(1))))


WAYS = {
    "side by side": Expert(("q4_k", "q4_k", "q6_k"), 1),
    "one matrix": Expert(("int4-g32m", "", "q8_0"), 2, fused=True),
    "rotated": Expert(("int4-g64", "int4-g64", "int8-g32"), 3, rotations=(128, 32)),
    "rotated far": Expert(("nvfp4", "nvfp4", "mxfp4"), 4, rotations=(16, 128)),
    "layouts differ": Expert(("q4_k", "q5_k", "q4_k"), 5),
    "down takes floats": Expert(("q4_0", "q4_0", "bf16"), 6, rotations=(32, 64)),
    "plain": Expert(("f16", "f16", "f16"), 7, rotations=(64, 0)),
    "half plain": Expert(("f32", "nf4", "nf4"), 8, biased=True),
}


@cache
def expected_of_way(way: str) -> np.ndarray:
    return expected([WAYS[way]] * COUNT, inputs(64), routing(64))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("way", WAYS)
def test_batch_invariance(way: str, isa: str) -> None:
    two, one = NativeOps(threads=2, isa=isa), NativeOps(threads=1, isa=isa)
    experts = [WAYS[way]] * COUNT
    count = 64 if isa == ISAS[0] else 40
    x, choice = inputs(64)[:count], some_rows(routing(64), slice(count))
    whole = run(two, fill(two, experts), x, choice)
    assert_close(whole, expected_of_way(way)[: count * USED])
    table = fill(one, experts)
    for rows in (1, 2, 3, 4, 5, 7, 13, 31, count):
        part = run(one, table, x[:rows], some_rows(choice, slice(rows)))
        assert np.array_equal(part, whole[: rows * USED])


@pytest.mark.parametrize(("rows", "isa"), [(1, ""), (3, ""), *((40, isa) for isa in ISAS)])
def test_several_calls_equal_one(rows: int, isa: str) -> None:
    """Of experts that differ; and of each row alone."""
    experts = list(WAYS.values())
    ops = NativeOps(threads=2, isa=isa)
    table, x, choice = fill(ops, experts), inputs(rows), routing(rows)
    whole = run(ops, table, x, choice)
    assert_close(whole, expected(experts, x, choice))
    each = (slice(row, row + 1) for row in range(rows))
    alone = [run(ops, table, x[row], some_rows(choice, row)) for row in each]
    assert np.array_equal(np.concatenate(alone), whole)
    slots = np.full_like(whole, np.nan)
    for some in ([], [5], [1, 0, 7], np.array([2, 3, 4, 6], np.int32)):
        before = slots.copy()
        ops.run_experts(x, choice, table, SPEC, slots, some)
        untouched = ~np.isin(choice.chosen.reshape(-1), some)
        assert np.array_equal(slots[untouched], before[untouched], equal_nan=True)
    assert np.array_equal(slots, whole)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai", "relu2"])
@pytest.mark.parametrize("names", [("mxfp4",) * 3, ("f32",) * 3])
def test_activations_and_biases(names: tuple[str, ...], activation, isa: str) -> None:
    """Widths as gpt-oss has them: whole groups, not whole tiles of anything larger."""
    shape, spec = (160, 96), ExpertSpec(activation=activation, limit=1.5)
    names = names if spec.gated else names[1:]
    experts = [Expert(names, seed, shape=shape, biased=True) for seed in range(COUNT)]
    ops = NativeOps(threads=2, isa=isa)
    table, x, choice = fill(ops, experts), inputs(30, 160), routing(30)
    whole = run(ops, table, x, choice, spec)
    assert_close(whole, expected(experts, x, choice, spec))
    assert np.array_equal(run(ops, table, x[:1], some_rows(choice, slice(1)), spec), whole[:USED])


def test_missing_expert() -> None:
    expert = Expert(("q4_0", "q4_0", "q4_0"), 0)
    ops = NativeOps(threads=2)
    table, x, choice = fill(ops, [expert] * COUNT), inputs(12), routing(12)
    whole = run(ops, table, x, choice)
    table.drop(2)
    slots = np.full_like(whole, np.nan)
    for asked in (None, [0, 2], [0, COUNT], [-1]):
        with pytest.raises(ValueError, match="not in the table"):
            ops.run_experts(x, choice, table, SPEC, slots, asked)
    assert np.isnan(slots).all()
    ops.run_experts(x, choice, table, SPEC, slots, [0, 1, 3, 4, 5, 6, 7])
    table.put(2, expert.load(ops))
    ops.run_experts(x, choice, table, SPEC, slots, [2])
    assert np.array_equal(slots, whole)
