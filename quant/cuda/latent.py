"""The steps of latent attention (DeepSeek) on a card."""

from __future__ import annotations

import torch
from torch import Tensor

from localrt.quant.cuda.attention import Rotations, ranges
from localrt.quant.cuda.kernels.latent import attend_latent_rows, latent_append
from localrt.quant.cuda.kernels.products import MOST_ROWS
from localrt.quant.cuda.kernels.steps import norm
from localrt.quant.cuda.linear import linear, multiply_heads, normed_for
from localrt.quant.cuda.stream import CudaPass, Stream
from localrt.quant.ops.attention import LatentSpec, LatentWeights
from localrt.quant.ops.protocol import Span
from localrt.quant.reference.attention import attend_latents, visible_keys
from localrt.quant.reference.kv import kv_of


class LatentSteps:
    """A part of ``CudaOps``."""

    _rotations: Rotations

    def norm_latent_append(
        self, x: Stream, weights: LatentWeights, spec: LatentSpec, step: CudaPass, layer: int
    ) -> Tensor:
        """(R, H, P + L); the latents are written to the caches."""
        kind = torch.bfloat16 if weights.query_up is None else torch.float32
        h = normed_for(x, weights.norm, spec.eps, weights.down)
        wide = linear(h, weights.down, dtype=kind)
        q, latents = wide[:, : -spec.head_dim], wide[:, -spec.head_dim :]
        if weights.query_up is not None:
            ranked = norm(q, weights.query_norm, spec.latent_eps, out=torch.bfloat16)
            q = linear(ranked, weights.query_up)
        q = q.view(len(q), spec.heads, -1)  # (R, H, N + P)
        shape = (len(q), spec.heads, spec.head_dim)
        queries = torch.empty(shape, dtype=torch.bfloat16, device=q.device)
        absorbed = queries[..., spec.rope_dim :].transpose(0, 1)
        multiply_heads(q[..., : spec.nope].transpose(0, 1), weights.key_up, absorbed)
        cos, sin = self._rotations.of(spec.rope, step)
        assert cos is not None, "latent attention rotates a part of its keys"
        assert sin is not None, "as cos"
        for index, (first, stop, span) in enumerate(ranges(step.spans)):
            rows = slice(first, stop)
            latent_append(
                q[rows],
                latents[rows],
                queries[rows],
                kv_of(span).view(layer, span.rows)[0][0],
                step.held[index:],
                cos=cos[rows],
                sin=sin[rows],
                norm=weights.latent_norm,
                eps=spec.latent_eps,
                interleaved=spec.interleaved,
            )
        return queries

    def latent_output(
        self, q: Tensor, weights: LatentWeights, spec: LatentSpec, step: CudaPass, layer: int
    ) -> Tensor:
        """(R, D), float32."""
        parts = []
        for index, (first, stop, span) in enumerate(ranges(step.spans)):
            rows = q[first:stop]
            if span.rows > MOST_ROWS:
                mask = _mask(index, span, step)
                parts.append(attend_latents(rows, kv_of(span), layer, mask, spec))
                continue
            parts.append(
                attend_latent_rows(
                    rows,
                    kv_of(span).view(layer, span.rows)[0][0],
                    step.held[index:],
                    step.positions[first:stop],
                    rope=spec.rope_dim,
                    scale=spec.scale,
                    mask=step.trees[index],
                    longest=step.longest[index],
                )
            )
        seen = parts[0] if len(parts) == 1 else torch.cat(parts)  # (R, H, L)
        shape = (len(seen), spec.heads, spec.value)
        values = torch.empty(shape, dtype=torch.bfloat16, device=q.device)
        multiply_heads(seen.transpose(0, 1), weights.value_up, values.transpose(0, 1))
        return linear(values.flatten(1), weights.out, dtype=torch.float32)


def _mask(index: int, span: Span, step: CudaPass) -> Tensor | None:
    if index not in step.masks:
        held = span.cache.length
        step.masks[index] = visible_keys(held, span, None, step.positions, index, step.spans)
    return step.masks[index]
