"""The small steps, each against its plain definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from localrt.quant.cuda.products import empty_records, quantize
from localrt.quant.cuda.steps import (
    gate,
    norm,
    norm_gate,
    norm_records,
    rotate_blocks,
)
from localrt.quant.methods.rotation import block_hadamard
from tests.ops.cuda import target

# bf16 results: 8 bits.
CLOSE = {"rtol": 1e-2, "atol": 1e-2}


def random(*shape: int, seed: int = 0) -> Tensor:
    return target.random(*shape, seed=seed).to(target.DEVICE)


@pytest.mark.parametrize("width", [64, 96, 5000])
def test_norm_keeps_the_sum(width: int) -> None:
    x, y, weight = random(3, width), random(3, width, seed=1), random(width)
    total = x + y
    got = norm(x, weight, 1e-6, pending=y, out=torch.bfloat16)
    assert torch.equal(x, total)
    torch.testing.assert_close(got.float(), F.rms_norm(total, (width,), weight, 1e-6), **CLOSE)
    exact = norm(x, weight, 1e-6, out=torch.float32)
    torch.testing.assert_close(exact, F.rms_norm(total, (width,), weight, 1e-6))
    records = norm_records(x, weight, 1e-6)
    assert torch.equal(records.data[:, :3], quantize(exact).data[:, :3])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gate(activation: str) -> None:
    both = random(3, 2 * 1100).bfloat16()
    g, up = both.float().chunk(2, -1)
    plain = F.silu(g) if activation == "silu" else F.gelu(g, approximate="tanh")
    torch.testing.assert_close(gate(both, activation).float(), plain * up, **CLOSE)


@pytest.mark.parametrize("size", [2, 16, 64, 128])
def test_hadamard_is_the_quantizers(size: int) -> None:
    x = random(3, 384).bfloat16()
    wanted = block_hadamard(x.float().cpu().numpy(), size)
    got = rotate_blocks(x, size).float().cpu().numpy()
    assert np.abs(got - wanted).max() < 2**-7 * np.abs(wanted).max()


def test_hadamard_of_an_odd_size_is_refused() -> None:
    with pytest.raises(ValueError, match="in blocks of 48"):
        rotate_blocks(random(1, 96).bfloat16(), 48)


@pytest.mark.parametrize("width", [40, 640])
def test_rows_are_gated(width: int) -> None:
    x, gates = random(5, width).bfloat16(), random(5, 2 * width, seed=1).bfloat16()[:, width:]
    wanted = x.float() * gates.float().sigmoid()
    torch.testing.assert_close(norm_gate(x, gates).float(), wanted, **CLOSE)
    if width % 64 == 0:
        records = empty_records(1, 5, width, x.device)
        norm_gate(x, torch.zeros_like(x), records=records)  # whose sigmoids are exact
        assert torch.equal(records.data[0, :5], quantize(x.float() / 2).data[0, :5])
