"""Attention as mixtures have it: sinks, and latents that are keys and values.

Each against float64, for a tree; a row's bits alone and among others; and how fast one row is over
a long cache beside a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.timing import (
    Result,
    copies_beyond_cache,
    copy_bandwidth,
    guarded,
    launch_seconds,
)
from localrt.quant.ops.triton.attention import attend
from localrt.quant.ops.triton.latent import attend_latent_rows

__all__ = ["check_mixture_attention"]

BOUND = 0.02
ROPE, LATENT = 64, 512  # DeepSeek's
Attend = Callable[[torch.Tensor, int, torch.Tensor | None], torch.Tensor]


def check_mixture_attention(device: str) -> list[Result]:
    """gpt-oss's heads, with sinks and its window; DeepSeek's, over latents."""
    kinds = {"attention with sinks": sinks, "latent attention": latents}
    results: list[Result] = []
    with torch.inference_mode():
        for name, kind in kinds.items():
            results += guarded(name, lambda n=name, k=kind: [k(n, device)])
        if device.startswith("cuda"):
            results += guarded("latent attention, one row", lambda: latent_speed(device))
    return results


def tree_of(n: int) -> torch.Tensor:
    """Row i follows row (i - 1) // 2."""
    tree = torch.eye(n, dtype=torch.bool)
    for node in range(1, n):
        tree[node] |= tree[(node - 1) // 2]
    return tree


def sinks(name: str, device: str) -> Result:
    n, heads, groups, size, held, window = 7, 16, 2, 64, 300, 128
    k, v = (torch.randn(groups, 512, size, device=device).bfloat16() for _ in range(2))
    logits = torch.linspace(-3, 6, heads, device=device)

    def run(q: torch.Tensor, at: int, mask: torch.Tensor | None) -> torch.Tensor:
        place = torch.full((len(q),), at, device=device)
        place += torch.arange(len(q), device=device) if mask is None else mask.sum(1) - 1
        return attend(
            q, k, v, torch.tensor([at], device=device), place,
            scale=0.125, window=window, softcap=None, mask=mask, longest=512, sinks=logits,
        )  # fmt: skip

    def exact(q: torch.Tensor, tree: torch.Tensor) -> torch.Tensor:
        keys, values = (
            t[:, : held + n].double().repeat_interleave(heads // groups, 0) for t in (k, v)
        )
        scores = torch.einsum("nhe,hle->nhl", q.double(), keys) * 0.125
        places = held + tree.sum(1) - 1
        at = torch.cat([torch.arange(held), places])
        seen = places[:, None] - at < window
        seen[:, held:] &= tree
        scores.masked_fill_(~seen[:, None].to(device), float("-inf"))
        own = logits.double()[None, :, None].expand(n, heads, 1)
        shares = torch.cat([scores, own], -1).softmax(-1)[..., :-1]
        return torch.einsum("nhl,hle->nhe", shares, values).flatten(1)

    q = torch.randn(n, heads, size, device=device).bfloat16()
    return compared(name, device, q, held, run, exact)


def latents(name: str, device: str) -> Result:
    n, heads, held = 7, 16, 300
    cache = torch.randn(512, ROPE + LATENT, device=device).bfloat16()
    scale = (ROPE + LATENT) ** -0.5

    def run(q: torch.Tensor, at: int, mask: torch.Tensor | None) -> torch.Tensor:
        here = torch.tensor([at], device=device)
        return attend_latent_rows(
            q, cache, here, rope=ROPE, scale=scale, mask=mask, longest=512
        ).flatten(1)

    def exact(q: torch.Tensor, tree: torch.Tensor) -> torch.Tensor:
        rows = cache[: held + n].double()
        scores = torch.einsum("nhe,le->nhl", q.double(), rows) * scale
        seen = torch.cat([torch.ones(n, held, dtype=torch.bool), tree], 1)
        scores.masked_fill_(~seen[:, None].to(device), float("-inf"))
        return torch.einsum("nhl,le->nhe", scores.softmax(-1), rows[:, ROPE:]).flatten(1)

    q = torch.randn(n, heads, ROPE + LATENT, device=device).bfloat16()
    return compared(name, device, q, held, run, exact)


def compared(
    name: str, device: str, q: torch.Tensor, held: int, run: Attend, exact: Callable[..., Any]
) -> Result:
    """A tree against float64; and each row of a chain, alone and among the others."""
    tree = tree_of(len(q))
    got, wanted = run(q, held, tree.to(torch.int8).to(device)), exact(q, tree)
    error = float((got.double() - wanted).abs().max() / wanted.abs().max())
    values: dict[str, Any] = {"relative_error": error, "bound": BOUND}
    ok = error < BOUND
    if device.startswith("cuda"):
        chain = run(q, held, None)
        alone = torch.cat([run(q[i : i + 1], held + i, None) for i in range(len(q))])
        values["rows_bitwise_equal"] = same = torch.equal(alone, chain)
        ok &= same
    return Result(name, bool(ok), values=values)


def latent_speed(device: str) -> list[Result]:
    """Bytes of the cache per second, for 16 heads (V2 Lite) and 128 (V3)."""
    ceiling = copy_bandwidth(device)
    results = []
    for heads in (16, 128):
        values: dict[str, Any] = {}
        for length in (1024, 8192, 32768):
            q = torch.randn(1, heads, ROPE + LATENT, device=device).bfloat16()
            nbytes = 2 * length * (ROPE + LATENT)
            caches = [
                torch.randn(length, ROPE + LATENT, device=device).bfloat16()
                for _ in range(copies_beyond_cache(nbytes, device))
            ]
            held = torch.tensor([length - 1], device=device)
            seconds = launch_seconds(
                [
                    lambda c=c, q=q, held=held, n=length: attend_latent_rows(
                        q, c, held, rope=ROPE, scale=0.04, mask=None, longest=n
                    )
                    for c in caches
                ],
                device,
            )
            values[f"us_{length}"] = seconds * 1e6
            values[f"share_of_copy_{length}"] = nbytes / seconds / ceiling
        results.append(Result(f"latent attention of {heads} heads", True, values=values))
    return results
