"""The small steps and attention, each against its plain definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from localrt.quant.methods.hadamard import block_hadamard
from tests.ops.triton_target import DEVICE

from localrt.quant.ops.triton.attention import attend  # isort: skip
from localrt.quant.ops.cuda.products import quantize  # isort: skip
from localrt.quant.ops.cuda.steps import gate, norm, norm_records, rotate_blocks  # isort: skip
from localrt.quant.ops.triton.steps import rope_append  # isort: skip

# bf16 results: 8 bits, and the interpreter cuts off where a GPU rounds.
CLOSE = {"rtol": 1e-2, "atol": 1e-2}


def random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE)


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


@pytest.mark.parametrize(
    ("size", "half", "norms", "joint"),
    [
        (32, 16, False, False),
        (80, 20, True, False),
        (64, 0, True, False),
        (80, 20, True, True),
        (64, 0, True, True),
    ],
)
def test_rope_and_append(size: int, half: int, norms: bool, joint: bool) -> None:
    n, heads, groups, held = 3, 4, 2, 5
    qkv = random(n, (heads + 2 * groups) * size).bfloat16()
    k_cache = torch.zeros(groups, 16, size, dtype=torch.bfloat16, device=DEVICE)
    v_cache = torch.zeros_like(k_cache)
    q = torch.empty(n, heads, size, dtype=torch.bfloat16, device=DEVICE)
    angles = random(n, half) if half else None
    wide = (heads * size, groups * size) if joint else (size, size)
    weights = (random(wide[0]), random(wide[1], seed=1)) if norms else (None, None)
    rope_append(
        qkv,
        q,
        k_cache,
        v_cache,
        torch.tensor([held], device=DEVICE),
        cos=None if angles is None else angles.cos(),
        sin=None if angles is None else angles.sin(),
        q_norm=weights[0],
        k_norm=weights[1],
        eps=1e-6,
        joint=joint,
    )
    split = torch.split(qkv.float().view(n, -1, size), [heads, groups, groups], 1)
    wanted = []
    for part, weight in zip(split[:2], weights, strict=True):
        turned = part
        if joint:
            turned = F.rms_norm(part.flatten(1), weight.shape, weight, 1e-6).view(part.shape)
        elif weight is not None:
            turned = F.rms_norm(part, (size,), weight, 1e-6)
        if angles is not None:
            c, s = angles.cos()[:, None], angles.sin()[:, None]
            a, b, rest = torch.split(turned, [half, half, size - 2 * half], -1)
            turned = torch.cat([a * c - b * s, b * c + a * s, rest], -1)
        wanted.append(turned)
    torch.testing.assert_close(q.float(), wanted[0], **CLOSE)
    new = slice(held, held + n)
    torch.testing.assert_close(k_cache[:, new].transpose(0, 1).float(), wanted[1], **CLOSE)
    assert torch.equal(v_cache[:, new].transpose(0, 1).float(), split[2])
    for cache in (k_cache, v_cache):
        assert not cache[:, :held].any()
        assert not cache[:, held + n :].any()


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


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held: int,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    n, heads, _ = q.shape
    total = held + n
    per = heads // k.shape[0]
    keys = k[:, :total].double().repeat_interleave(per, 0)
    values = v[:, :total].double().repeat_interleave(per, 0)
    scores = torch.einsum("nhe,hle->nhl", q.double(), keys) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    seen = torch.ones(n, total, dtype=torch.bool, device=q.device)
    new = torch.ones(n, n, device=q.device).tril() if mask is None else mask
    seen[:, held:] = new.bool()
    if window is not None:
        at = torch.cat([torch.arange(held, device=q.device), positions])
        seen &= positions[:, None] - at < window
    scores.masked_fill_(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[None, :, None].expand(n, heads, 1)], -1)
    shares = scores.softmax(-1)[..., :total]
    return torch.einsum("nhl,hle->nhe", shares, values).reshape(n, -1)


@pytest.mark.parametrize(
    ("n", "held", "heads", "groups", "size", "options"),
    [
        (1, 0, 4, 2, 64, {}),
        (1, 300, 12, 2, 32, {}),  # several runs
        (5, 126, 2, 2, 80, {}),  # new rows in two runs
        (3, 290, 4, 1, 64, {"window": 20}),
        (2, 40, 2, 2, 32, {"softcap": 2.0}),
        (6, 130, 4, 2, 64, {"tree": True}),
        (6, 130, 2, 1, 64, {"tree": True, "window": 3}),
        (1, 300, 4, 2, 64, {"sinks": True}),
        (6, 130, 4, 2, 64, {"tree": True, "sinks": True}),
        (3, 290, 4, 1, 64, {"window": 20, "sinks": True}),
    ],
)
def test_attention(n: int, held: int, heads: int, groups: int, size: int, options: dict) -> None:
    q = random(n, heads, size).bfloat16()
    k = random(groups, 512, size).bfloat16()
    v = random(groups, 512, size, seed=1).bfloat16()
    positions = torch.arange(held, held + n, device=DEVICE)
    mask = None
    if options.pop("tree", False):
        parents = [-1, 0, 0, 1, 2, 2][:n]
        tree = torch.eye(n, dtype=torch.bool)
        for node, parent in enumerate(parents):
            if parent >= 0:
                tree[node] |= tree[parent]
        mask = tree.to(torch.int8).to(DEVICE)
        positions = (held + tree.sum(1) - 1).to(DEVICE)
    if options.pop("sinks", False):  # below, beside and far above the scores
        options["sinks"] = torch.linspace(-4, 40, heads, device=DEVICE)
    common = {"scale": size**-0.5, "window": None, "softcap": None, "mask": mask, **options}
    device_held = torch.tensor([held], device=DEVICE)
    got = attend(q, k, v, device_held, positions, longest=512, **common)
    wanted = plain_attention(q, k, v, held, positions, **common)
    torch.testing.assert_close(got.double(), wanted, rtol=2e-2, atol=2e-2)
    shorter = attend(q, k, v, device_held, positions, longest=held + n, **common)
    assert torch.equal(got, shorter)


def test_a_rows_attention_does_not_depend_on_the_others() -> None:
    held, n = 254, 4  # new rows in two runs
    q = random(n, 6, 32).bfloat16()
    k, v = random(2, 512, 32).bfloat16(), random(2, 512, 32, seed=1).bfloat16()
    options = {"scale": 0.2, "window": None, "softcap": None, "mask": None, "longest": 512}

    def rows(first: int, stop: int) -> Tensor:
        positions = torch.arange(held + first, held + stop, device=DEVICE)
        at = torch.tensor([held + first], device=DEVICE)
        return attend(q[first:stop], k, v, at, positions, **options)

    whole = rows(0, n)
    alone = torch.cat([rows(i, i + 1) for i in range(n)])
    if DEVICE == "cuda":
        assert torch.equal(alone, whole)
    torch.testing.assert_close(alone, whole, rtol=1e-2, atol=1e-3)
