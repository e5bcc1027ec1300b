"""Budgets in bytes, and what is gone from them before the first weight is placed.

The parts are accounted one by one, so that a plan can print them and a check can compare them with
what was measured. Estimates err to the large side: a budget is a hard limit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from localrt.errors import OptionError
from localrt.offload.planner.shapes import ModelShape
from localrt.quant.ops.latent import LATENT_SCRATCH_NBYTES

__all__ = [
    "KV_BUFFER_BYTES",
    "Budgets",
    "activation_nbytes",
    "fitting_prefill_rows",
    "process_nbytes",
]

# Interpreter, numpy, libraries, the kernels' threads.
_PROCESS_BYTES = 58 << 20
# A vocabulary in its compact form: token bytes, merges, hash tables.
_VOCABULARY_BYTES = 100
KV_BUFFER_BYTES = 8 << 20
"""What keys and values on the SSD are read through."""

_CUDA_CONTEXT_BYTES = 400 << 20
# A pass wants rows enough for the arithmetic to pay for the reading, in a small part of the budget.
_ROW_CHOICES = (1024, 512, 256, 128, 64, 32)
_ACTIVATION_SHARE = 0.02
_FEWEST_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes that may be used: ``ram`` by the whole process, ``vram`` of the GPU.

    ``process`` is what the process takes without weights, slots, keys and values and activations
    (None: an estimate); ``cuda_context`` what the driver takes of ``vram`` (None: an estimate; a
    virtual card has none); ``scratch`` what kernels allocate for themselves.
    """

    ram: int
    vram: int = 0
    process: int | None = None
    cuda_context: int | None = None
    scratch: int = 5 << 20

    def __post_init__(self) -> None:
        for name in ("ram", "vram", "scratch"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} must not be negative, is {getattr(self, name)}")

    def less(self, nbytes: int) -> Budgets:
        """With ``nbytes`` of the RAM taken."""
        return replace(self, ram=max(0, self.ram - nbytes))

    def process_bytes(self, shape: ModelShape) -> int:
        """What the process takes beside the model."""
        return process_nbytes(shape) if self.process is None else self.process

    def context_bytes(self) -> int:
        """What the GPU's driver takes."""
        if self.vram == 0:
            return 0
        return _CUDA_CONTEXT_BYTES if self.cuda_context is None else self.cuda_context


def process_nbytes(shape: ModelShape) -> int:
    """An estimate: interpreter, libraries, tokenizer."""
    return _PROCESS_BYTES + _VOCABULARY_BYTES * shape.vocab


def activation_nbytes(shape: ModelShape, rows: int) -> int:
    """Hidden states, queries, codes and the widest MLP of ``rows`` rows; logits of one.

    Codes are int8 beside their float32 values.
    """
    queries = max((2 * 4 * shape.hidden, *(layer.row_nbytes for layer in shape.kv)))
    per_row = 2 * 4 * shape.hidden + queries + 5 * (shape.inner + shape.hidden)
    if shape.experts is not None:  # every row's slots, and the codes of what goes into them
        largest = max(unit.macs for unit in shape.units if unit.kind == "expert")
        inner = largest // (3 * shape.hidden)
        per_row += shape.experts.used * (9 * shape.hidden + 5 * inner)
    latents = LATENT_SCRATCH_NBYTES if any(layer.latent for layer in shape.kv) else 0
    return rows * per_row + 8 * shape.vocab + latents


def fitting_prefill_rows(shape: ModelShape, budget: int, most: int) -> int:
    """The most rows of a pass, up to ``most``, whose activations are a small part of ``budget``."""
    for rows in (most, *(choice for choice in _ROW_CHOICES if choice < most)):
        if activation_nbytes(shape, rows) - 8 * shape.vocab <= _ACTIVATION_SHARE * budget:
            return rows
    return min(most, _FEWEST_ROWS)
