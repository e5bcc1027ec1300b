"""Shared preparation of pictures: checked settings, resizing, normalization, patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.models.vision.picture import Picture, Pixels
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.vision import VisionActivation

LANCZOS, BILINEAR, BICUBIC = 1, 2, 3
"""Pillow's numbers of resampling filters."""

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

_ACTIVATIONS: Mapping[str, VisionActivation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
}
_FILTERS = 5
_LEAST_STD, _MOST_MEAN = 1e-6, 1e6
_LARGEST = 1 << 20


def integer(settings: Mapping[str, object], key: str, default: int | None = None) -> int:
    """A positive integer of a vision config or an image processor.

    Raises:
        ValueError: the value is not one, or too large for any real model.
    """
    value = settings.get(key)
    value = default if value is None else value
    if type(value) is not int or not 0 < value <= _LARGEST:
        raise ValueError(f"{key} must be an integer from 1 to {_LARGEST}, is {value!r:.60}")
    return value


def number(settings: Mapping[str, Any], key: str, default: float) -> float:
    """A finite positive number of a vision config or an image processor.

    Raises:
        ValueError: the value is not one.
    """
    value = settings.get(key)
    value = default if value is None else value
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise ValueError(f"{key} must be a positive number, is {value!r:.60}")
    return float(value)


def activation(settings: Mapping[str, object], key: str, default: str = "gelu") -> VisionActivation:
    """The activation that a config names.

    Raises:
        ValueError: the activation is not supported.
    """
    name = settings.get(key, default)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ValueError(f"{key} {name!r:.60} is not supported (known: {known})")
    return _ACTIVATIONS[name]


def resampling(processor: Mapping[str, object], default: int) -> int:
    """The number of Pillow's filter that resizes pictures.

    Raises:
        ValueError: no filter has this number.
    """
    value = integer(processor, "resample", default)
    if value > _FILTERS:
        raise ValueError(f"resample must be a number from 1 to {_FILTERS}, is {value}")
    return value


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """Pixel normalization: ``byte * factor + offset`` for each channel."""

    factor: Floats
    offset: Floats

    @classmethod
    def read(
        cls,
        processor: Mapping[str, object],
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
    ) -> Scaling:
        """Read an image processor's settings; ``mean`` and ``std`` are the publisher's defaults.

        Raises:
            ValueError: a value makes no sense.
        """
        scale = 1.0
        if processor.get("do_rescale", True):
            scale = number(processor, "rescale_factor", 1 / 255)
        if not processor.get("do_normalize", True):
            return cls(np.full(3, scale, np.float32), np.zeros(3, np.float32))
        means, deviations = (
            np.asarray(own if (own := processor.get(key)) is not None else default, np.float64)
            for key, default in (("image_mean", mean), ("image_std", std))
        )
        valid = means.shape == deviations.shape == (3,) and (deviations > _LEAST_STD).all()
        if not valid or not (np.abs(means) < _MOST_MEAN).all():
            raise ValueError("image_mean and image_std must be three numbers each")
        factor, offset = scale / deviations, -means / deviations
        return cls(factor.astype(np.float32), offset.astype(np.float32))

    def __call__(self, pixels: Pixels, *, by_colour: bool = True) -> Patches:
        """Patches (N, P) for an encoder: channel by channel as from ``cut``, or pixel by pixel."""
        spread = np.repeat if by_colour else np.tile
        factor, offset = (spread(each, pixels.shape[1] // 3) for each in (self.factor, self.offset))
        return Patches(pixels, factor, offset)


@dataclass(frozen=True, slots=True, eq=False)
class Patches:
    """Patches (N, P) as bytes; indexing rows converts them to float32: ``byte * factor + offset``,
    both of shape (P,).
    """

    pixels: Pixels
    factor: Floats
    offset: Floats

    @classmethod
    def none(cls) -> Patches:
        """Empty patches, for a picture that is already encoded."""
        empty = np.empty(0, np.float32)
        return cls(np.empty((0, 0), np.uint8), empty, empty)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, rows: slice | npt.NDArray[np.intp]) -> Floats:
        out: Floats = self.pixels[rows] * self.factor
        out += self.offset
        return out

    @property
    def nbytes(self) -> int:
        """Size in bytes, before conversion to float32."""
        return self.pixels.nbytes


def resize(picture: Picture, height: int, width: int, resample: int) -> Pixels:
    """The picture's pixels (height, width, 3) by one of Pillow's ``Resampling`` filters."""
    if (picture.height, picture.width) == (height, width):
        return picture.pixels
    return np.asarray(picture.image().resize((width, height), resample))


def cut(pixels: Pixels, size: int) -> Pixels:
    """Patches in rows from the top left, (N, 3 * size * size), each channel by channel.

    Incomplete patches at the right and the bottom are left out, as by a convolution.
    """
    lines, columns, channels = pixels.shape[0] // size, pixels.shape[1] // size, pixels.shape[2]
    whole = pixels[: lines * size, : columns * size]
    patches = whole.reshape(lines, size, columns, size, channels)
    return patches.transpose(0, 2, 4, 1, 3).reshape(-1, channels * size * size)
