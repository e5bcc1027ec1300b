"""A picture, decoded: bounds before anything is decoded, then RGB pixels the right way up.

Pillow decodes and resizes. Transparent pixels lie on white, of an animation the first frame counts.
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
"""The largest file of a picture."""

MOST_PIXELS = 64_000_000
"""The most pixels of a picture: more would be a decompression bomb."""

_KINDS = ("PNG", "JPEG", "WEBP", "GIF")


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
        """32 bytes that name its contents."""
        found = hashlib.sha256(repr(self.pixels.shape).encode())
        found.update(np.ascontiguousarray(self.pixels).data)
        return found.digest()

    def image(self) -> Image.Image:
        """As Pillow takes it."""
        from PIL import Image

        return Image.fromarray(self.pixels)


def open_picture(given: Any, name: str = "the picture") -> Picture:
    """The picture in a file (a path), in bytes, in a ``data:`` URI, or that Pillow has opened.

    Raises:
        OptionError: there is no such file, or it is no picture, damaged or too large.
    """
    if isinstance(given, Picture):
        return given
    from PIL import Image

    if isinstance(given, Image.Image):
        return Picture(_upright(given, name))
    if isinstance(given, str | Path):
        given, name = read_picture(given), _named(given)
    return Picture(_upright(_opened(given, name), name))


def _opened(data: Any, name: str) -> Image.Image:
    """The picture, not decoded yet."""
    from PIL import Image

    if not isinstance(data, bytes | bytearray | memoryview):
        raise OptionError(f"{name} must be a path, bytes or a PIL image, is {type(data).__name__}")
    if len(data) > MOST_BYTES:
        raise OptionError(
            f"{name} has {format_bytes(len(data))}: the most is {format_bytes(MOST_BYTES)}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about bombs, of which ours is the bound
        try:
            opened = Image.open(io.BytesIO(data), formats=_KINDS)
        except Image.DecompressionBombError as error:
            raise OptionError(
                f"{name} has too many pixels: the most is {MOST_PIXELS // 1_000_000} million"
            ) from error
        except Exception as error:
            raise OptionError(
                f"{name} cannot be read: it is not a PNG, JPEG, WebP or GIF picture"
            ) from error
    width, height = opened.size
    if width * height > MOST_PIXELS:
        raise OptionError(
            f"{name} has {width} x {height} pixels: the most is {MOST_PIXELS // 1_000_000} million"
        )
    return opened


def _named(given: str | Path) -> str:
    return "the picture" if str(given).startswith("data:") else str(given)


def picture_bytes(given: Any) -> bytes:
    """What ``open_picture`` takes as the bytes of a file; what is opened already as PNG.

    Raises:
        OptionError: it cannot be read, or is nothing of this kind.
    """
    if isinstance(given, str | Path):
        data, name = read_picture(given), _named(given)
    elif isinstance(given, bytes | bytearray | memoryview):
        data, name = bytes(given), "the picture"
    else:
        return _png(open_picture(given))
    _opened(data, name)
    return data


def _png(picture: Picture) -> bytes:
    file = io.BytesIO()
    picture.image().save(file, "PNG")
    return file.getvalue()


def data_uri(data: bytes) -> str:
    """The bytes of a picture's file as text."""
    return f"data:application/octet-stream;base64,{base64.b64encode(data).decode()}"


def read_picture(given: str | Path) -> bytes:
    """The bytes of a picture's file, or those in a ``data:`` URI.

    Raises:
        OptionError: it cannot be read.
    """
    if isinstance(given, str) and given.startswith("data:"):
        _, comma, text = given.partition(";base64,")
        try:
            return base64.b64decode(text if comma else "-", validate=True)
        except ValueError as error:
            raise OptionError(f"{given[:60]!r}... is not a picture in base64") from error
    return read_bytes(given, MOST_BYTES)


def _upright(image: Image.Image, name: str) -> Pixels:
    """RGB pixels of the first frame, turned as its EXIF data say, on white."""
    from PIL import Image, ImageOps

    try:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bits
            image = image.convert("I").point(lambda value: value / 257).convert("L")
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            ground = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(ground, image)
        return np.asarray(image.convert("RGB"))
    except Exception as error:  # Pillow's decoders raise anything
        raise OptionError(f"{name} is damaged: {error}") from error
