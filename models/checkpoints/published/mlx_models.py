"""What mlx-lm changes in some models' numbers when it converts them, changed back.

Convolutions whose taps lie on the second axis show that a model was converted: published they are
on the last. Qwen3.5's and Qwen3-Next's norms have 1 added then; taking it off is exact in float32.
Falcon-H1's factors are multiplied into its weights, which cannot be undone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from localrt.errors import UnsupportedModelError
from localrt.models.checkpoints.stored_tensor import Bytes, RowSource
from localrt.quant.formats import F32, unpack

__all__ = ["unconverted"]

_NORMS_FROM_ZERO = ("Qwen3_5", "Qwen3Next")
_NORMS = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    "model.norm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
)
_FACTORS = "FalconH1"


def unconverted(
    architecture: str, tensors: Mapping[str, RowSource], path: Path
) -> dict[str, RowSource]:
    """``tensors`` of a model at ``path`` as its publisher has them.

    Raises:
        UnsupportedModelError: they cannot be had.
    """
    found = dict(tensors)
    if not any(name.endswith("conv1d.weight") and _is_moved(t) for name, t in found.items()):
        return found
    if architecture.startswith(_FACTORS):
        raise UnsupportedModelError(
            f"{path}: MLX's form of {architecture} has other weights than its publisher's, which "
            "localrt cannot read; use the original model, or a GGUF file of it"
        )
    if architecture.startswith(_NORMS_FROM_ZERO):
        for name, tensor in tensors.items():
            if name.endswith(_NORMS) and len(tensor.info.shape) == 1:
                size = tensor.info.shape[0]
                info = replace(tensor.info, format=F32, nbytes=4 * size)
                found[name] = _LessOne(info, tensor)
    return found


def _is_moved(tensor: RowSource) -> bool:
    """Whether a convolution's taps are on the second axis of three."""
    shape = tensor.info.shape
    return len(shape) == 3 and shape[2] == 1 and shape[1] > 1


@dataclass(frozen=True, slots=True)
class _LessOne(RowSource):
    """A vector less 1."""

    source: RowSource

    def _read(self, start: int, stop: int) -> Bytes:
        values = unpack(self.source.read(start, stop)) - np.float32(1)
        return np.ascontiguousarray(values, "<f4").view(np.uint8)
