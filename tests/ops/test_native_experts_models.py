"""Mixtures on the native kernels: torch's choices and sums, and whole tiny models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from localrt.common.errors import OptionError
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.experts import ExpertSpec, ExpertWeights, RouterSpec, RouterWeights
from localrt.quant.ops.kv_formats import CacheFormat
from localrt.quant.ops.protocol import Batch, MlpSpec, MlpWeights
from localrt.quant.reference.ops import TorchOps
from tests.conftest import needs_kernels
from tests.models.tiny import MIXTURES, oracle, relative_error, tokens
from tests.models.tiny_configs import DEEPSEEK_V4, GLM5_NEXT
from tests.ops.packed import random_tensor
from tests.ops.test_native_routing import SPECS
from tests.ops.test_native_steps import LENGTH, TOLERANCE, load

pytestmark = needs_kernels

HIDDEN, INNER = 64, 96


def mixture(ops: Any, spec: RouterSpec, expert: ExpertSpec, x: np.ndarray, convert: Any) -> Any:
    """Routing and result of a layer whose weights are float32."""

    def matrix(rows: int, columns: int, seed: int) -> Any:
        tensor = random_tensor("f32", rows, columns, seed)
        tensor.data.view(np.float32)[:] *= columns**-0.5
        return ops.weight((rows, columns), [tensor])

    def vector(size: int, seed: int) -> Any:
        return ops.vector(np.random.default_rng(seed).uniform(0.1, 1, size).astype(np.float32))

    table, wide = ops.expert_table(spec.count), (2 if expert.gated else 1) * INNER
    for number in range(spec.count):
        weights = ExpertWeights(
            gate_up=matrix(wide, HIDDEN, 2 * number),
            down=matrix(HIDDEN, INNER, 2 * number + 1),
            gate_up_bias=vector(wide, number),
            down_bias=vector(HIDDEN, number),
        )
        table.put(number, weights)
    router = RouterWeights(
        norm=vector(HIDDEN, 1000),
        gate=matrix(spec.count, HIDDEN, 1001),
        gate_bias=vector(spec.count, 1002),
        choice_bias=vector(spec.count, 1003),
    )
    normed, routing = ops.norm_route(convert(x), router, spec)
    slots = ops.expert_slots(normed, routing)
    ops.run_experts(normed, routing, table, expert, slots)
    shared = MlpWeights(
        norm=None, gate_up=matrix(2 * INNER, HIDDEN, 2000), down=matrix(HIDDEN, INNER, 2001)
    )
    mlp = MlpSpec(activation="silu", eps=spec.eps)
    extra = ops.shared_mlp(normed, shared, mlp, matrix(1, HIDDEN, 2002))
    return routing, np.asarray(ops.combine_experts(slots, routing, extra))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "swiglu_oai", "relu2", "swiglu"])
@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.count < 100])
def test_a_layer_is_torchs(spec: RouterSpec, activation: Any) -> None:
    import torch

    x = np.random.default_rng(0).standard_normal((17, HIDDEN)).astype(np.float32)
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


@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize("name", sorted(MIXTURES))
def test_every_mixture(name: str, kv: CacheFormat, tiny: Any) -> None:
    folder, theirs = tiny(name)
    ours = load(folder, kv=kv)
    if name in DEEPSEEK_V4 | GLM5_NEXT and kv != "bf16":
        with pytest.raises(OptionError, match="int8 is not for chosen or compressed tokens"):
            ours.cache(LENGTH)
        return
    # A rounded key may change a choice, which changes that row, and those that see it a little.
    errors = []
    for seed in range(9):
        ids = tokens(LENGTH, seed)
        expected = oracle(theirs, ids)
        whole = ours.forward(Batch.extend([(ours.cache(LENGTH), ids)]))
        rows = np.abs(whole - expected).max(1) / np.abs(expected).max()
        errors.append(np.quantile(rows, 0.8))
    assert np.median(errors) < TOLERANCE
    cache = ours.cache(LENGTH)
    steps = np.concatenate([ours.forward(Batch.extend([(cache, [t])])) for t in ids])
    assert np.array_equal(steps, whole)
