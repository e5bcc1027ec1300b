"""Files of pictures as people have them, and what each is to localrt."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

_GRADIENT = Image.fromarray(
    np.mgrid[0:30, 0:40, 0:3][:2].sum(axis=0).astype(np.uint8) * np.uint8(3)
)


def _file(kind: str, image: Image.Image = _GRADIENT, **options: Any) -> bytes:
    image.save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


def _animated(kind: str, size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    """With a second, black picture."""
    more = [Image.new("RGB", size)]
    return _file(kind, save_all=True, append_images=more, **options)


_TURNED = Image.Exif()
_TURNED[0x0112] = 6
_PALETTE = _GRADIENT.quantize(8)
_CAMERA = _animated("MPO", (8, 6))  # a small picture for the camera's display

READ: dict[str, tuple[bytes, str, tuple[int, int]]] = {
    "jpeg": (_file("JPEG"), "image/jpeg", (40, 30)),
    "camera": (_CAMERA, "image/jpeg", (40, 30)),
    "turned camera": (_animated("MPO", (8, 6), exif=_TURNED), "image/jpeg", (30, 40)),
    "camera without its second picture": (_CAMERA[:-200], "image/jpeg", (40, 30)),
    "CMYK": (_file("JPEG", _GRADIENT.convert("CMYK")), "image/jpeg", (40, 30)),
    "bad EXIF": (_file("JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff"), "image/jpeg", (40, 30)),
    "16 bits": (
        _file("PNG", Image.fromarray(np.full((30, 40), 65535 // 2, np.uint16))),
        "image/png",
        (40, 30),
    ),
    "transparent palette": (_file("PNG", _PALETTE, transparency=0), "image/png", (40, 30)),
    "animated PNG": (_animated("PNG"), "image/png", (40, 30)),
    "animated WebP": (_animated("WEBP"), "image/webp", (40, 30)),
    "animated GIF": (_animated("GIF"), "image/gif", (40, 30)),
}
"""Each file with its media type, and its upright size."""
