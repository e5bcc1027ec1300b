"""The step of recurrent layers on a card: our kernels between our products."""

from __future__ import annotations

import torch
from torch import Tensor

from localrt.quant.ops.cuda.kernels.products import Records, empty_records
from localrt.quant.ops.cuda.kernels.recurrent import Sequences, fits_records, mix_rows
from localrt.quant.ops.cuda.kernels.steps import norm
from localrt.quant.ops.cuda.products import linear, normed_for, reads_records
from localrt.quant.ops.cuda.sequences import SequenceTable
from localrt.quant.ops.cuda.stream import CudaPass, Stream
from localrt.quant.ops.cuda.weight import CudaWeight
from localrt.quant.ops.hybrid_cache import begin_states, states_of
from localrt.quant.ops.recurrent import RecurrentSpec, RecurrentWeights
from localrt.quant.ops.torch.recurrent import widen


class RecurrentSteps:
    """A part of ``CudaOps``."""

    def norm_recurrent(
        self,
        x: Stream,
        weights: RecurrentWeights,
        spec: RecurrentSpec,
        step: CudaPass,
        layer: int,
    ) -> Tensor:
        """(R, D), float32."""
        h = normed_for(x, weights.norm, spec.eps, weights.mix)
        y = mix_and_project(h, weights, spec, step, layer)
        if weights.post_norm is None:
            return y
        return norm(y, weights.post_norm, spec.eps, out=torch.float32)


def mix_and_project(
    h: Tensor | Records,
    weights: RecurrentWeights,
    spec: RecurrentSpec,
    step: CudaPass,
    layer: int,
) -> Tensor:
    """(R, D), float32, of normed rows; the caches have the states."""
    mixed = linear(h, weights.mix, weights.mix_bias, dtype=torch.float32)
    if weights.mix_scale is not None:
        mixed *= weights.mix_scale
    mixed = widen(mixed, weights, spec, _wide_linear)
    out, rows = weights.out, len(mixed)
    # Where the product that follows reads records, they are written at once.
    direct = fits_records(spec) and reads_records(out, rows)
    records = None
    if direct:
        records = empty_records(1, rows, spec.inner, mixed.device, fine=out.fine)
    layout = states_of(step.spans[0].cache).layout
    places = layout.states[layer], layout.rows[layer]
    seen = mix_rows(mixed, weights, spec, _sequences(step, mixed.device), layer, places, records)
    step.layer_done(layer)
    return linear(records or seen, out, weights.out_bias, dtype=torch.float32)


def _sequences(step: CudaPass, device: torch.device) -> Sequences:
    """Those of a pass, whose states begin with the first layer."""
    if step.sequences is None:
        passes = begin_states(step.spans)
        table = SequenceTable.of(step.spans)
        table.fill(step.spans, passes)
        step.sequences = table.split(table.upload(device))
    return step.sequences


def _wide_linear(x: Tensor, weight: CudaWeight) -> Tensor:
    """(R, rows), float32, of some columns of float32 rows."""
    return linear(x.bfloat16().contiguous(), weight, dtype=torch.float32)
