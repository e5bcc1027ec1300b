"""Preparation of pictures: decoding, resizing, normalization, patches.

Pillow decodes and resizes; a picture's size is checked before that. Pixels are upright RGB.
Transparent pixels become white; an animation is its first frame.
"""

from __future__ import annotations

import base64
import hashlib
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from localrt.common.errors import OptionError
from localrt.common.files import read_bytes
from localrt.common.formatting import format_bytes
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.vision import VisionActivation

if TYPE_CHECKING:
    from PIL import Image

Pixels = npt.NDArray[np.uint8]

MOST_BYTES = 64 << 20
"""The largest size of a picture's file."""

MOST_PIXELS = 64_000_000
"""The most pixels of a picture: more would be a decompression bomb."""

_MEDIA_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}


@dataclass(frozen=True, eq=False)
class Picture:
    """RGB ``pixels`` (height, width, 3)."""

    pixels: Pixels

    @property
    def width(self) -> int:
        """In pixels."""
        return int(self.pixels.shape[1])

    @property
    def height(self) -> int:
        """In pixels."""
        return int(self.pixels.shape[0])

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the shape and the pixels."""
        digest = hashlib.sha256(repr(self.pixels.shape).encode())
        digest.update(np.ascontiguousarray(self.pixels).data)
        return digest.digest()

    def image(self) -> Image.Image:
        """The picture as Pillow's type."""
        from PIL import Image

        return Image.fromarray(self.pixels)


def open_picture(source: Any, name: str = "the picture", *, side: int = 0) -> Picture:
    """Decode a picture: a file's path, bytes, a ``data:`` URI or a PIL image.

    ``side`` allows a smaller size with at least so many pixels to a side; it is faster for JPEG.

    Raises:
        OptionError: there is no such file, or it is no picture, damaged or too large.
    """
    if isinstance(source, Picture):
        return source
    from PIL import Image

    if isinstance(source, Image.Image):
        return Picture(_upright(source, name))
    if isinstance(source, str | Path):
        source, name = read_picture(source), _display_name(source)
    return Picture(_upright(open_header(source, name), name, side))


def open_header(data: object, name: str) -> Image.Image:
    """Read the header in a picture's file and check its size; Pillow decodes the pixels later.

    Raises:
        OptionError: it is no picture, or too large.
    """
    from PIL import Image

    if not isinstance(data, bytes | bytearray | memoryview):
        raise OptionError(f"{name} must be a path, bytes or a PIL image, is {type(data).__name__}")
    if len(data) > MOST_BYTES:
        raise OptionError(
            f"{name} has {format_bytes(len(data))}: the most is {format_bytes(MOST_BYTES)}"
        )
    with warnings.catch_warnings(action="ignore"):  # of bombs: our own bound is checked below
        try:
            image = Image.open(io.BytesIO(data), formats=tuple(_MEDIA_TYPES))
        except Image.DecompressionBombError as error:
            raise OptionError(
                f"{name} has too many pixels: the most is {MOST_PIXELS // 1_000_000} million"
            ) from error
        except Exception as error:
            raise OptionError(
                f"{name} cannot be read: it is not a PNG, JPEG, WebP or GIF picture"
            ) from error
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise OptionError(
            f"{name} has {width} x {height} pixels: the most is {MOST_PIXELS // 1_000_000} million"
        )
    return image


def media_type(image: Image.Image) -> str:
    """The media type of an opened picture's file."""
    # Pillow calls a camera's JPEG with further pictures in the file MPO.
    return _MEDIA_TYPES.get(str(image.format), "image/jpeg")


def _display_name(source: str | Path) -> str:
    return "the picture" if str(source).startswith("data:") else str(source)


def picture_bytes(source: object) -> bytes:
    """The bytes of a picture's file; ``source`` as for ``open_picture``. A PIL image becomes PNG.

    Raises:
        OptionError: ``source`` cannot be read, or is no picture.
    """
    if isinstance(source, str | Path):
        data, name = read_picture(source), _display_name(source)
    elif isinstance(source, bytes | bytearray | memoryview):
        data, name = bytes(source), "the picture"
    else:
        return _png(open_picture(source))
    open_header(data, name)
    return data


def _png(picture: Picture) -> bytes:
    file = io.BytesIO()
    picture.image().save(file, "PNG")
    return file.getvalue()


def data_uri(data: bytes) -> str:
    """A picture's file as a ``data:`` URI."""
    return f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"


def read_picture(source: str | Path) -> bytes:
    """The bytes of a picture's file, or those in a ``data:`` URI.

    Raises:
        OptionError: ``source`` is no file, or too large.
        StorageError: it cannot be read.
    """
    if isinstance(source, str) and source.startswith("data:"):
        _, comma, text = source.partition(";base64,")
        try:
            return base64.b64decode(text if comma else "-", validate=True)
        except ValueError as error:
            raise OptionError(f"{source[:60]!r}... is not a picture in base64") from error
    return read_bytes(source, MOST_BYTES)


def _upright(image: Image.Image, name: str, side: int = 0) -> Pixels:
    """RGB pixels of the first frame, rotated by its EXIF data, on white."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings(action="ignore"):  # of odd metadata
            if side:
                image.draft("RGB", (side, side))
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I"):  # 16 bits
                image = image.convert("I").point(lambda value: value / 257).convert("L")
            if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
                image = image.convert("RGBA")
                ground = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(ground, image)
            return np.asarray(image.convert("RGB"))
    except Exception as error:  # Pillow's decoders raise exceptions of any type
        raise OptionError(f"{name} is damaged: {error}") from error


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
