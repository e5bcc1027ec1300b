"""The config of a draft head, whatever its kind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localrt.common.errors import UnsupportedModelError
from localrt.models.config import HEAD, DecoderConfig
from localrt.quant.ops.features import AFTER_LAST

Ints = npt.NDArray[np.int64]
FUSION = "model.fc.weight"
"""The matrix that projects features to a head's input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head. It reads the residual stream before ``layers`` of its target, the last one's output
    included, or, if ``normed``, what its target's final norm makes of it; and of its own output
    what, if ``own_normed``, its own final norm does. ``tokens`` (V,) are the target's ids of its
    vocabulary; None is all of them. ``output`` is its own output matrix, where it has one.

    An assistant's layers read the keys and values at ``places`` of its target's cache: its rows
    stand at the last known token and see all before it.

    DFlash drafts a ``block`` at once: the last known token, and ``mask`` in place of those that it
    drafts. Its rows see each other, and what ``ContextKeys`` made of the tokens before.
    """

    decoder: DecoderConfig
    layers: tuple[int, ...]
    normed: bool = False
    own_normed: bool = False
    tokens: Ints | None = None
    output: str = HEAD
    places: tuple[int, ...] = ()
    block: int = 0
    mask: int = 0


def input_layers(listed: object, first: int, layers: int) -> tuple[int, ...]:
    """The layers before which a head reads, of a list that counts inputs from ``first`` on."""
    if not isinstance(listed, list) or {type(number) for number in listed} != {int}:
        raise UnsupportedModelError(f"the layers that it reads are {listed!r}")
    inputs = [number + first for number in listed]
    if not all(0 <= number <= layers for number in inputs):
        raise UnsupportedModelError(f"it reads layers {listed}, and the model has {layers}")
    return tuple(AFTER_LAST if number == layers else number for number in inputs)
