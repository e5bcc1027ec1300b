"""Decodes pictures: checks their size first, then makes upright RGB pixels.

Pillow decodes and resizes. Transparent pixels become white; an animation is its first frame.
"""

from __future__ import annotations

import base64
import hashlib
import io
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from localrt.common.errors import OptionError
from localrt.common.files import read_bytes
from localrt.common.formatting import format_bytes

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
