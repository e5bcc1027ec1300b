"""The config of a draft head of any kind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localrt.common.errors import UnsupportedModelError
from localrt.models.config import DecoderConfig
from localrt.models.tensor_source import HEAD
from localrt.quant.ops.arrays import AFTER_LAST

Ints = npt.NDArray[np.int64]
FUSION = "model.fc.weight"
"""The matrix that projects features to a head's input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head: its decoder, and its inputs from the target.

    Its features are the target's residual stream before each of ``layers`` (``AFTER_LAST``: the
    last one's output), after the target's final norm if ``normed``. For draft tokens, features are
    the head's own output, after its own final norm if ``own_normed``. ``tokens`` (V,) are the
    target's ids of the head's vocabulary; None means the target's vocabulary. ``output`` names its
    output matrix.

    Gemma 4's assistants read the target's keys and values in the ``places`` of its cache. All their
    rows have the position of the last known token and attend to the tokens before it.

    DFlash drafts a ``block`` of tokens at once: its input is the last known token, and ``mask`` for
    each token to draft, whose first row is ``first``. Rows attend to each other, if ``causal`` to
    earlier ones, and to the keys and values that ``ContextKeys`` computes. ``pairs`` are the names
    and shapes of ``Transitions``, which score the likeliest ``choices`` (0: all tokens). DFlash 2's
    ``kernel`` has a number of rows, and of channels in a group.
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
    first: int = 1
    causal: bool = False
    pairs: tuple[tuple[str, tuple[int, int]], ...] = ()
    choices: int = 0
    kernel: tuple[int, int] = (0, 0)


def input_layers(listed: object, first: int, layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs a head reads; those ``listed`` count from ``first``."""
    if not isinstance(listed, list) or {type(number) for number in listed} != {int}:
        raise UnsupportedModelError(f"the layers that it reads are {listed!r}")
    inputs = [number + first for number in listed]
    if not all(0 <= number <= layers for number in inputs):
        raise UnsupportedModelError(f"it reads layers {listed}, and the model has {layers}")
    return tuple(AFTER_LAST if number == layers else number for number in inputs)
