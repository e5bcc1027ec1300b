"""Torch's routers, and streams of torch and the kernels, against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats import FORMATS, PackedTensor
from localrt.quant.ops.experts import RouterSpec
from localrt.quant.ops.streams import ConnectionWeights
from localrt.quant.reference.experts import route
from localrt.quant.reference.ops import TorchOps
from tests.conftest import needs_kernels
from tests.ops.test_native_matmul import ISAS
from tests.ops.test_native_routing import SPECS, assert_same, choose


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


IMPLEMENTATIONS = [
    pytest.param(lambda: TorchOps(compute_format="f32"), id="torch"),
    *(
        pytest.param(lambda isa=isa: NativeOps(threads=2, isa=isa), id=isa, marks=needs_kernels)
        for isa in ISAS
    ),
]
ROWS, EPS = 7, 1e-6


def theirs(hidden: int, count: int, rank: int, *, shares: bool) -> torch.nn.Module:
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    torch.manual_seed(hidden)
    config = modeling.Qwen4ExpTextConfig(
        hidden_size=hidden, hc_count=count, hc_lowrank=rank, rms_norm_eps=EPS, eos_token_id=0
    )
    module = modeling.Qwen4ExpTextGatedResidual(config, use_combine=shares)
    for each in module.parameters():
        torch.nn.init.normal_(each, std=0.3)
    return module


def weights_of(ops: Any, module: torch.nn.Module, count: int) -> ConnectionWeights:
    def matrix(linear: torch.nn.Linear | None) -> Any:
        if linear is None:
            return None
        values = linear.weight.detach().numpy()
        packed = PackedTensor("w", FORMATS["f32"], values.shape, values.view(np.uint8))
        return ops.weight(values.shape, [packed])

    return ConnectionWeights(
        count=count,
        norm=ops.vector(1 + module.hc_norm.weight.detach().numpy()),
        down=matrix(module.input_mix_weight_down),
        up=matrix(module.input_mix_weight_up),
        share=matrix(module.block_inject_weight),
        eps=EPS,
    )


def as_array(ops: Any, values: np.ndarray) -> Any:
    return torch.from_numpy(values.copy()) if isinstance(ops, TorchOps) else values.copy()


@pytest.mark.parametrize(("hidden", "count", "rank"), [(24, 4, 5), (40, 3, 17), (16, 2, 1)])
@pytest.mark.parametrize("make", IMPLEMENTATIONS)
def test_a_layer_reads_and_feeds_all_streams(make: Any, hidden: int, count: int, rank: int) -> None:
    ops, module = make(), theirs(hidden, count, rank, shares=True)
    random = np.random.default_rng(0)
    streams = random.standard_normal((ROWS, count * hidden), np.float32)
    given = random.standard_normal((ROWS, hidden), np.float32)
    with torch.no_grad():
        expected, _, shares = module(torch.from_numpy(streams)[None])
    weights = weights_of(ops, module, count)
    ours = as_array(ops, streams)
    x, own = ops.read_streams(ours, weights)
    np.testing.assert_allclose(x, expected[0], atol=2e-5)
    np.testing.assert_allclose(own, shares[0], atol=2e-5)
    behind = ops.share_out(ours, as_array(ops, given), own)
    wanted = streams.reshape(ROWS, count, hidden) + given[:, None] * shares[0].numpy()[:, :, None]
    np.testing.assert_allclose(behind, wanted.reshape(ROWS, -1), atol=5e-5)


@pytest.mark.parametrize("make", IMPLEMENTATIONS)
def test_last_layer(make: Any) -> None:
    ops, module = make(), theirs(24, 3, 5, shares=False)
    x = np.random.default_rng(1).standard_normal((ROWS, 24), np.float32)
    streams = ops.repeat_stream(as_array(ops, x), 3)
    with torch.no_grad():
        expected = module(torch.from_numpy(np.tile(x, (1, 3)))[None])
    out, shares = ops.read_streams(streams, weights_of(ops, module, 3))
    np.testing.assert_allclose(out, expected[0], atol=2e-5)
    assert shares is None


@needs_kernels
@pytest.mark.parametrize("isa", ISAS)
def test_batch_invariance(isa: str) -> None:
    ops, module = NativeOps(threads=2, isa=isa), theirs(40, 4, 9, shares=True)
    weights = weights_of(ops, module, 4)
    streams = np.random.default_rng(2).standard_normal((19, 160), np.float32)
    x, shares = ops.read_streams(streams, weights)
    for row in range(19):
        one, share = ops.read_streams(streams[row : row + 1].copy(), weights)
        assert np.array_equal(one[0], x[row])
        assert np.array_equal(share[0], shares[row])
