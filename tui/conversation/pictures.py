"""Pictures of messages as people see them: a caption, and a small image to draw.

Knows no widget and no terminal.
"""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

from localrt.common.errors import OptionError
from localrt.tui.text import clean

if TYPE_CHECKING:
    from PIL import Image

    from localrt import KeptPicture

_MOST_PIXELS = 64_000_000  # as a model sees them


def caption(picture: KeptPicture, tokens: int = 0) -> str:
    """``photo.png, 640 x 480, 256 tokens``; 0: it is not known how many."""
    size = f"{clean(picture.name)}, {picture.width:,} x {picture.height:,}"
    return f"{size}, {tokens:,} tokens" if tokens else size


def small_image(picture: KeptPicture, width: int, height: int) -> Image.Image:
    """The picture, upright and in RGB, in exactly this size.

    Raises:
        OptionError: it is damaged or has too many pixels.
        StorageError: the history cannot be read.
    """
    from PIL import Image, ImageOps

    data = picture.data
    if picture.width * picture.height > _MOST_PIXELS:
        raise OptionError(
            f"{picture.name} has {picture.width} x {picture.height} pixels: the most is "
            f"{_MOST_PIXELS // 1_000_000} million"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data)) as image:
                side = 2 * max(width, height)
                image.draft("RGB", (side, side))  # JPEG is decoded smaller, which is faster
                upright = ImageOps.exif_transpose(image).convert("RGBA")
                upright = upright.resize((width, height))
        except Exception as error:  # Pillow's decoders raise anything
            raise OptionError(f"{picture.name} is damaged: {error}") from error
    ground = Image.new("RGBA", upright.size, "white")
    return Image.alpha_composite(ground, upright).convert("RGB")
