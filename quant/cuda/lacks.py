"""What our CUDA kernels lack, known without a GPU, its driver and their compiler.

Heads and latents of sizes that they do not take are known where they are launched: ``takes_heads``
in ``attention.py``, ``takes_latents`` in ``latent.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from localrt.quant.ops.attention import LatentSpec, Needed
from localrt.quant.ops.protocol import LayerSpec
from localrt.quant.ops.recurrent import RecurrentSpec

_PROTOCOLS: Mapping[Needed, str] = {
    "IndexOps": "they do not choose the tokens that attention sees",
    "ParallelOps": "they do not compute attention and an MLP in parallel",
    "StreamOps": "they do not keep several residual streams",
}
"""Those that ``CudaOps`` does not have."""


def lacking(spec: LayerSpec) -> str:
    """What they lack for a layer, for "they" are our kernels; empty if nothing."""
    if spec.needs:
        return _PROTOCOLS[spec.needs]
    if isinstance(spec, RecurrentSpec) and spec.decay_floor:
        return "they do not compute decays that have a floor"
    if isinstance(spec, LatentSpec) and spec.head_gates:
        return "they do not gate the heads of latent attention"
    return ""
