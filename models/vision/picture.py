"""A picture, decoded: bounds before anything is decoded, then RGB pixels the right way up.

Pillow decodes and resizes. Transparent pixels lie on white, of an animation the first frame counts.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from localrt.common.errors import MissingExtraError, OptionError
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
    """The picture in a file (a path), in bytes, or that Pillow has opened.

    Raises:
        OptionError: there is no such file, or it is no picture, damaged or too large.
    """
    if isinstance(given, Picture):
        return given
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtraError("pictures need Pillow: pip install pillow") from error
    if isinstance(given, Image.Image):
        return Picture(_upright(given, name))
    if isinstance(given, str | Path):
        given, name = read_picture(given), str(given)
    if not isinstance(given, bytes | bytearray | memoryview):
        raise OptionError(f"{name} must be a path, bytes or a PIL image, is {type(given).__name__}")
    if len(given) > MOST_BYTES:
        raise OptionError(
            f"{name} has {format_bytes(len(given))}: the most is {format_bytes(MOST_BYTES)}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about bombs, of which ours is the bound
        try:
            opened = Image.open(io.BytesIO(given), formats=_KINDS)
        except Exception as error:
            raise OptionError(
                f"{name} cannot be read: it is not a PNG, JPEG, WebP or GIF picture"
            ) from error
        return Picture(_upright(opened, name))


def read_picture(given: str | Path) -> bytes:
    """The bytes of a picture's file, not more than one too many.

    Raises:
        OptionError: it cannot be read.
    """
    path = Path(given).expanduser()
    try:
        if not path.is_file():
            kind = "is not a regular file" if path.exists() else "does not exist"
            raise OptionError(f"{path} {kind}")
        with path.open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror or error}") from error


def _upright(image: Image.Image, name: str) -> Pixels:
    """RGB pixels of the first frame, turned as its EXIF data say, on white."""
    from PIL import Image, ImageOps

    width, height = image.size
    if width * height > MOST_PIXELS:
        raise OptionError(
            f"{name} has {width} x {height} pixels: the most is {MOST_PIXELS // 1_000_000} million"
        )
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
